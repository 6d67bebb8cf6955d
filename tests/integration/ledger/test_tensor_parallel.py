"""``commprof verify`` of models that ``parallelize_module`` partitions.

The ledger must close, and each planted collective must be named. The models are small, and the expected
messages of some of them are computed by hand.
"""

from __future__ import annotations

import functools
import tempfile
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

import commprof
from commprof.cli import execute
from commprof.ledger.verification import verify
from support.recording import record

pytestmark = pytest.mark.ranks
WIDTH, TOKENS, BATCH, SEQUENCE, STEPS = 8, 20, 2, 4, 4
ACTIVATION = BATCH * SEQUENCE * WIDTH * 4  # bytes, in float32


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.out = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x, scale=None):
        x = self.out(torch.relu(self.query(x) * self.key(x)))
        return x if scale is None else x * scale


class Block(nn.Module):
    """An embedding, a norm over sequences, attention and a head."""

    def __init__(self):
        super().__init__()
        self.embedding, self.norm = nn.Embedding(TOKENS, WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.head = Attention(), nn.Linear(WIDTH, TOKENS)

    def forward(self, x):
        h = self.embedding(x)
        return self.head(h + self.attention(self.norm(h)))


def perceptron():
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH)
    )


def two_layers():
    return {"1": ColwiseParallel(), "3": RowwiseParallel()}


def sequences():
    """Return the plan of a transformer that keeps sequences sharded between its blocks."""
    return {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "attention": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "attention.query": ColwiseParallel(),
        "attention.key": ColwiseParallel(),
        "attention.out": RowwiseParallel(output_layouts=Shard(1)),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }


def prepared():
    """Return a plan that only changes the layouts of the input and output of a module."""
    return {
        "0": PrepareModuleInputOutput(
            input_layouts=Shard(0),
            desired_input_layouts=Replicate(),
            use_local_input=True,
            output_layouts=Replicate(),
            desired_output_layouts=Shard(-1),
        ),
        "1": PrepareModuleInput(
            input_kwarg_layouts={"input": Shard(-1)},
            desired_input_kwarg_layouts={"input": Replicate()},
            use_local_output=True,
        ),
        "2": PrepareModuleOutput(output_layouts=Shard(0), desired_output_layouts=Replicate()),
    }


def uneven():
    """Widths and batches that are not divisible by three ranks."""
    return {
        "1": ColwiseParallel(output_layouts=Replicate()),
        "3": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0)),
    }


class Named(nn.Module):
    """A model that passes the input of the second of three layers by name."""

    def __init__(self):
        super().__init__()
        for number in range(3):
            self.add_module(str(number), nn.Linear(WIDTH, WIDTH))

    def forward(self, x):
        layers = dict(self.named_children())
        return layers["2"](layers["1"](input=layers["0"](x)))


def tokens(step):
    return torch.arange(BATCH * SEQUENCE).reshape(BATCH, SEQUENCE) % TOKENS


def dense(step):
    return torch.randn(BATCH, SEQUENCE, WIDTH, generator=torch.Generator().manual_seed(step))


def longer(step):
    """Return sequences whose length differs in each step."""
    return torch.ones(BATCH, SEQUENCE + step, WIDTH)


def train(
    rank,
    world,
    plan=two_layers,
    model=perceptron,
    inputs=dense,
    accumulation=1,
    evaluates=False,
    between=None,
    prepare=None,
    precision=None,
    optimizer=torch.optim.SGD,
    **arguments,
):
    torch.manual_seed(0)
    trained = model()
    parallelize_module(trained, init_device_mesh("cpu", (world,)), plan(), **arguments)
    if prepare:
        prepare(trained)
    optimizer = optimizer(trained.parameters(), lr=0.01)
    for step in range(STEPS):
        for _ in range(accumulation):
            with torch.autocast("cpu", precision or torch.bfloat16, enabled=precision is not None):
                found = trained(inputs(step))
            found.float().sum().backward()
        if between:
            between(step)
        optimizer.step()
        optimizer.zero_grad()
        if evaluates and step % 2:
            trained.eval()
            with torch.no_grad():
                trained(inputs(step))
            trained.train()


def checkpointed(model):
    plain = model[1].forward
    model[1].forward = lambda x: checkpoint(plain, x, use_reentrant=False)


def checkpointed_whole(model):
    """Recompute the partitioned layers, including the functions of their styles, in the backward pass."""
    inner = nn.Sequential(*model[1:])
    model.forward = lambda x: checkpoint(inner, model[0](x), use_reentrant=False)


def frozen(model):
    model[0].requires_grad_(False)
    model[1].requires_grad_(False)


def sharded(rank, world):
    """Train with tensor parallelism in pairs of ranks and with fully_shard across two pairs."""
    from torch.distributed.fsdp import fully_shard

    warnings.filterwarnings("ignore", "FSDP2-wrapped module", UserWarning)
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("data", "tensors"))
    model = perceptron()
    parallelize_module(model, mesh["tensors"], two_layers())
    for layer in model:
        if not isinstance(layer, nn.ReLU):
            fully_shard(layer, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(STEPS):
        model(dense(step)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def sharded_sequences(rank, world, precision=None, accumulation=1):
    """Train like :func:`sharded`, with partial gradients of norms.

    fully_shard sums these gradients before it reduces them.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    warnings.filterwarnings("ignore", "FSDP2-wrapped module", UserWarning)
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("data", "tensors"))
    model = Block()
    parallelize_module(model, mesh["tensors"], sequences())
    policy = MixedPrecisionPolicy(param_dtype=precision, reduce_dtype=torch.float32 if precision else None)
    fully_shard(model, mesh=mesh["data"], mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True)
    for step in range(STEPS):
        for micro in range(accumulation):
            model.set_requires_gradient_sync(micro == accumulation - 1)
            model(tokens(step)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def in_pairs(rank, world):
    """Train a separate model in each pair of ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensors"))["tensors"]
    model = perceptron()
    parallelize_module(model, mesh, two_layers())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(STEPS):
        model(dense(step)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def embedding(layout):
    return lambda: {"0": layout}


def words(columns):
    return lambda: nn.Sequential(nn.Embedding(TOKENS, WIDTH), nn.Linear(columns, 3))


PROGRAMS = {
    "two layers": (2, train),
    "accumulated": (2, functools.partial(train, accumulation=3)),
    "evaluated": (2, functools.partial(train, evaluates=True)),
    "other lengths": (2, functools.partial(train, inputs=longer)),
    "checkpointed": (2, functools.partial(train, prepare=checkpointed)),
    "all checkpointed": (2, functools.partial(train, prepare=checkpointed_whole)),
    "frozen": (2, functools.partial(train, prepare=frozen)),
    "autocast": (2, functools.partial(train, precision=torch.bfloat16)),
    "each its own data": (2, functools.partial(train, src_data_rank=None)),
    "sequences": (2, functools.partial(train, plan=sequences, model=Block, inputs=tokens)),
    "uneven shards": (3, functools.partial(train, plan=uneven)),
    "sequences, adam": (
        2,
        functools.partial(train, plan=sequences, model=Block, inputs=tokens, optimizer=torch.optim.AdamW),
    ),
    "sequences, accumulated": (
        2,
        functools.partial(train, plan=sequences, model=Block, inputs=tokens, accumulation=2, evaluates=True),
    ),
    "from one dimension to another": (
        2,
        functools.partial(
            train,
            plan=lambda: {"1": ColwiseParallel(input_layouts=Shard(0), output_layouts=Shard(1))},
            model=lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 6)),
        ),
    ),
    "prepared": (2, functools.partial(train, plan=prepared, model=Named)),
    "words in columns": (
        2,
        functools.partial(
            train,
            plan=embedding(ColwiseParallel(output_layouts=Replicate())),
            model=words(WIDTH),
            inputs=tokens,
        ),
    ),
    "words in rows": (
        2,
        functools.partial(
            train,
            plan=embedding(RowwiseParallel(input_layouts=Replicate())),
            model=words(WIDTH),
            inputs=tokens,
        ),
    ),
    "in pairs": (4, in_pairs),
    "sharded too": (4, sharded),
    "sharded sequences": (4, sharded_sequences),
    "sharded sequences, bfloat16": (4, functools.partial(sharded_sequences, precision=torch.bfloat16)),
    "sharded sequences, accumulated": (
        4,
        functools.partial(sharded_sequences, precision=torch.bfloat16, accumulation=2),
    ),
}


@functools.cache
def recorded(name):
    world, body = PROGRAMS[name]
    return record(Path(tempfile.mkdtemp()) / "run", world, body)[0]


@pytest.mark.sampled("sharded sequences")
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_byte_is_explained(name):
    run = recorded(name)
    verdict = verify(run)
    assert run.health.notes == ()
    assert (str(verdict.state), verdict.unexplained, verdict.unsure) == ("closed", (), ()), verdict.sentences
    assert verdict.issued_bytes == verdict.explained_bytes > 0
    assert verdict.exit_code == 0


def rows(verdict, purpose, when="steps"):
    return {
        row.expected_op: (row.expected_count, row.expected_payload_bytes)
        for row in verdict.rows
        if row.purpose == purpose and row.when == when
    }


def test_the_messages_of_two_layers_by_hand():
    """The messages of two layers equal the sizes computed by hand.

    The first layer scatters 16 x 8 + 16 elements. The second scatters 8 x 16 and broadcasts its bias of 8.
    The forward pass sums the outputs of the second layer. The backward pass sums the gradients of the input
    of the first.
    """
    verdict = verify(recorded("two layers"))
    assert rows(verdict, "activation") == {"all_reduce": (2 * STEPS, 2 * STEPS * ACTIVATION)}
    init = rows(verdict, "parameter_broadcast", "init")
    assert init == {"scatter": (3, (128 + 16 + 128) * 4), "broadcast": (1, 8 * 4)}


@pytest.mark.long
def test_the_messages_of_shared_sequences_by_hand():
    """The messages of sharded sequences equal the sizes computed by hand.

    Forward: the outputs of the embedding and of the attention are summed into shards. The output of the norm,
    and the input and output of the head, are gathered.

    Backward: the gradients of the outputs of the embedding and the attention are gathered. The gradients of
    the inputs of the attention and the head are summed into shards. The gradients of the norm's 8 weights and
    8 biases are sums over tokens.
    """
    verdict = verify(recorded("sequences"))
    logits = BATCH * SEQUENCE * TOKENS * 4
    assert rows(verdict, "activation") == {
        "reduce_scatter": (4 * STEPS, 4 * STEPS * ACTIVATION),
        "all_gather": (5 * STEPS, STEPS * (4 * ACTIVATION + logits)),
    }
    assert rows(verdict, "gradient_reduce") == {"all_reduce": (2 * STEPS, 2 * STEPS * WIDTH * 4)}
    with_adam = verify(recorded("sequences, adam"))
    assert rows(with_adam, "gradient_reduce") == {"all_reduce": (6 * STEPS, 6 * STEPS * WIDTH * 4)}


@pytest.mark.long
def test_the_messages_of_uneven_shards_by_hand():
    """The messages of uneven shards include padding.

    16 outputs on 3 ranks are padded to 18, and a batch of 2 is padded to 3.
    """
    verdict = verify(recorded("uneven shards"))
    wide, batch = ACTIVATION // 8 * 18, ACTIVATION // 2 * 3
    assert rows(verdict, "activation") == {
        "all_gather": (3 * STEPS, STEPS * (2 * wide + batch)),
        "reduce_scatter": (STEPS, STEPS * batch),
        "all_reduce": (STEPS, STEPS * ACTIVATION),
    }


@pytest.mark.long
def test_passes_that_ask_for_no_gradient_send_none_back():
    """Passes that need no gradient send none in the backward direction.

    Behind frozen layers no input needs a gradient. An evaluation runs one forward pass in every second step.
    """
    assert rows(verify(recorded("frozen")), "activation") == {"all_reduce": (STEPS, STEPS * ACTIVATION)}
    evaluated = verify(recorded("evaluated"))
    assert rows(evaluated, "activation") == {
        "all_reduce": (2 * STEPS + STEPS // 2, (2 * STEPS + STEPS // 2) * ACTIVATION)
    }


def planted(step, how):
    if step == 2:
        how()


def tagged(purpose, gathers=False):
    def send():
        with commprof.tag(purpose):
            if gathers:
                dist.all_gather([torch.ones(3) for _ in range(2)], torch.ones(3))
            else:
                dist.all_reduce(torch.ones(3))

    return send


PLANTED = {
    "untagged": lambda: dist.all_reduce(torch.ones(7)),
    "as large as an activation": lambda: dist.all_reduce(torch.ones(ACTIVATION // 4)),
    "an activation": tagged("activation"),
    "an activation of another operation": tagged("activation", gathers=True),
    "a gradient": tagged("gradient_reduce"),
    "a parameter": tagged("parameter_gather", gathers=True),
}


@pytest.mark.sampled
@pytest.mark.parametrize("how", PLANTED)
def test_a_planted_collective_is_a_mismatch(how, tmp_path, capsys):
    between = functools.partial(planted, how=PLANTED[how])
    run, _ = record(tmp_path / "run", 2, functools.partial(train, between=between))
    assert execute(["verify", str(run.path)]) == 1
    assert {item.steps for item in verify(run).unexplained} == {"2"}
    assert "mismatch" in capsys.readouterr().out


@pytest.mark.long
@pytest.mark.parametrize(
    ("how", "code"), [("untagged", 1), ("an activation of another operation", 1), ("an activation", 3)]
)
def test_a_planted_collective_beside_dtensors_that_leave_their_modules(how, code, tmp_path):
    """A step that sends more than similar steps is a mismatch.

    verify cannot judge an operation that occurs in no other step.
    """
    between = functools.partial(planted, how=PLANTED[how])
    body = functools.partial(train, plan=sequences, model=Block, inputs=tokens, between=between)
    verdict = verify(record(tmp_path / "run", 2, body)[0])
    assert verdict.exit_code == code, verdict.sentences
    assert {item.steps for item in verdict.unexplained} == ({"2"} if code == 1 else set())


class Doubled(ColwiseParallel):
    """A parallel style of the program, which sends more than the style that it extends."""

    @staticmethod
    def _prepare_input_fn(input_layouts, desired, module, inputs, mesh):
        dist.all_reduce(torch.ones(5))
        return ColwiseParallel._prepare_input_fn(input_layouts, desired, module, inputs, mesh)


@pytest.mark.long
def test_a_style_of_the_program_s_own_is_labelled(tmp_path):
    body = functools.partial(train, plan=lambda: {"1": Doubled(), "3": RowwiseParallel()})
    verdict = verify(record(tmp_path / "run", 2, body)[0])
    assert verdict.exit_code == 1  # the planted collective has no purpose
    assert {(item.op, item.payload_bytes) for item in verdict.unexplained} == {("all_reduce", STEPS * 20)}
    assert any("its style is not covered by the rules" in text for text in verdict.sentences), (
        verdict.sentences
    )


@pytest.mark.long
def test_other_optimizers_are_said_to_have_no_rules(tmp_path):
    body = functools.partial(train, plan=sequences, model=Block, inputs=tokens, optimizer=torch.optim.RMSprop)
    verdict = verify(record(tmp_path / "run", 2, body)[0])
    assert (verdict.exit_code, verdict.unexplained) == (3, ())
    assert any("optimizers other than SGD and Adam" in text for text in verdict.sentences)


@pytest.mark.long
def test_passes_beyond_the_limit_are_said_not_to_be_known(tmp_path, monkeypatch):
    monkeypatch.setattr("commprof.recorder.training.wrapped._MOST_ROWS", 3)
    verdict = verify(record(tmp_path / "run", 2, functools.partial(train, inputs=longer))[0])
    assert (verdict.exit_code, verdict.unexplained) == (3, ())
    assert "which passes a module of parallelize_module ran is not known" in str(verdict.request_reason)

"""``commprof verify`` of models trained with torch's own wrappers.

The ledger must close, and each planted collective must be named. The programs are small, and the expected
messages of some of them are computed by hand.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import tempfile
import warnings
from pathlib import Path

import pyarrow as pa
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commprof
from commprof.cli import execute
from commprof.ledger.verification import verify
from support.changed_runs import Changed
from support.recording import record

pytestmark = pytest.mark.ranks
WIDTH, STEPS = 8, 4
# torch 2.11 has only the older name.
_OF_DDP = inspect.signature(DistributedDataParallel).parameters
NO_BUFFERS = "forward_sync_buffers" if "forward_sync_buffers" in _OF_DDP else "broadcast_buffers"


class Net(nn.Module):
    """A model with many special cases.

    It has tied weights, a frozen bias, a batch norm with its three buffers, an unused layer, and a head of
    another type.
    """

    def __init__(self, unused: bool = False, half: bool = False):
        super().__init__()
        self.inner, self.norm, self.tied = (
            nn.Linear(WIDTH, WIDTH),
            nn.BatchNorm1d(WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )
        self.tied.weight = self.inner.weight
        self.tied.bias.requires_grad_(False)
        self.unused = nn.Linear(3, 3) if unused else None
        self.head = nn.Linear(WIDTH, 5, dtype=torch.bfloat16) if half else nn.Linear(WIDTH, 5)

    def forward(self, x):
        return self.head(self.tied(self.norm(self.inner(x))).to(self.head.weight.dtype)).float()


def batch(seed=0):
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))


def train(
    model,
    no_sync=None,
    accumulation=1,
    clip=None,
    before=None,
    between=None,
    after=None,
    forward=None,
    optimizers=(),
):
    """Train ``model``. ``no_sync`` returns the context for every micro-batch except the last."""
    optimizers = optimizers or (torch.optim.SGD(model.parameters(), lr=0.01),)
    forward = forward or model
    for step in range(STEPS):
        if before:
            before(step, model)
        for micro in range(accumulation):
            with contextlib.nullcontext() if micro == accumulation - 1 else no_sync():
                forward(batch(step)).float().sum().backward()
        if clip:
            clip(1.0)
        if between:
            between(step, model)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if after:
            after(step, model)


def split(given):
    """Split ``given`` into the arguments for :func:`train` and those for the wrapper."""
    names = ("accumulation", "before", "between", "after")
    return {name: given.pop(name) for name in names if name in given}, given


def ddp(rank, world, hook=None, unused=False, half=False, **given):
    training, arguments = split(given)
    model = DistributedDataParallel(Net(unused, half), **arguments)
    if callable(hook):
        model.register_comm_hook(None, hook)
    elif hook:
        model._register_builtin_comm_hook(getattr(dist.BuiltinCommHookType, hook))
    train(model, model.no_sync, **training)


def evaluated(step, model):
    if step % 2:
        model.eval()
        with torch.no_grad():
            model(batch())
            model(batch())
        model.train()


def gathered_ahead(step, model):
    """Issue the first gathers of a step before the forward pass, which tutorials call explicit prefetching."""
    model.unshard()


def keep_gathered(step, model):
    """Keep parameters gathered from the second step on.

    Clipping then sees no gradients of these parameters.
    """
    model.set_reshard_after_backward(step < 1, recurse=False)


def evaluated_and_read(step, model):
    """Evaluate and read the state_dict, which releases the parameters that an evaluation left gathered."""
    evaluated(step, model)
    model.state_dict()


def summoned(step, model):
    from torch.distributed.fsdp import FullyShardedDataParallel

    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        pass


def read_in_shards(step, model):
    from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

    evaluated(step, model)
    with warnings.catch_warnings():
        # torch itself uses functions that it has deprecated.
        warnings.simplefilter("ignore")
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            model.state_dict()


def read_whole(step, model):
    """Gather parameters one at a time, as for a moving average of the parameters."""
    if step == 1:
        for parameter in model.parameters():
            parameter.full_tensor()
        for tensor in model.state_dict().values():
            tensor.full_tensor()


def two_models(rank, world):
    """Train two models alternately, each in every second step."""
    makers = [DistributedDataParallel(nn.Linear(WIDTH, outputs)) for outputs in (3, 4)]
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.01) for each in makers]
    for step in range(STEPS):
        commprof.step(step)
        for model, optimizer in list(zip(makers, optimizers, strict=True))[: 1 + step % 2]:
            model(batch(step)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()


def halves(rank, world):
    """Train models of different shapes, each on two ranks."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = DistributedDataParallel(nn.Linear(WIDTH, 3 + rank // 2), process_group=groups[rank // 2])
    train(model)


def fp16(*given):
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    return fp16_compress_hook(*given)


def with_fp16(rank, world):
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    ddp(rank, world, hook=fp16_compress_hook, bucket_cap_mb=0.0001)


class Blocks(nn.Module):
    """Units whose rows are not divisible by the number of ranks.

    One unit is frozen, one has a layer that gets no gradient, and weights are tied.
    """

    def __init__(self):
        super().__init__()
        self.frozen, self.first, self.second = nn.Linear(WIDTH, 7), nn.Linear(7, 6), nn.Linear(6, 5)
        self.frozen.requires_grad_(False)
        self.second.unused = nn.Linear(3, 3)
        self.head = nn.Linear(5, 5, bias=False)
        self.tail = nn.Linear(5, 5)
        self.tail.weight = self.head.weight

    def forward(self, x):
        return self.tail(self.head(self.second(self.first(self.frozen(x)))))


def fsdp2(rank, world, mesh=None, clip=False, checkpoint=False, **given):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.utils.checkpoint import checkpoint as again

    training, arguments = split(given)
    model = Blocks()
    names = ("replicas", "shards")[-len(mesh or (1,)) :]
    arguments["mesh"] = init_device_mesh("cpu", mesh or (world,), mesh_dim_names=names)
    for unit in (model.frozen, model.first, model.second):
        fully_shard(unit, **arguments)
    fully_shard(
        model, **{name: value for name, value in arguments.items() if name != "reshard_after_forward"}
    )
    if checkpoint:
        plain = model.second.forward
        model.second.forward = lambda x: again(plain, x, use_reentrant=False)

    @contextlib.contextmanager
    def no_sync():
        model.set_requires_gradient_sync(False)
        yield
        model.set_requires_gradient_sync(True)

    def clips(norm):
        if callable(clip):
            clip(model, norm)
        else:
            torch.nn.utils.clip_grad_norm_(model.parameters(), norm)

    train(model, no_sync, clip=clips if clip else None, **training)


def with_policy(rank, world):
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fsdp2(rank, world, mp_policy=policy, checkpoint=True)


def norms(model, norm):
    """Clip gradients in two steps, for a part of the model, for one parameter, and by the largest gradient.

    Also compute a norm of weights.
    """
    total = torch.nn.utils.get_total_norm(each.grad for each in model.parameters() if each.grad is not None)
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), norm, total.full_tensor())
    torch.nn.utils.clip_grad_norm_(model.first.parameters(), norm)
    torch.nn.utils.clip_grad_norm_(model.head.weight, norm)
    torch.nn.utils.clip_grad_norm_(model.parameters(), norm, norm_type=float("inf"))
    torch.nn.utils.get_total_norm(list(model.parameters())[:3])


def fsdp1(rank, world, strategy="FULL_SHARD", mesh=None, clip=False, **given):

    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    training, arguments = split(given)
    warnings.filterwarnings("ignore", "The `NO_SHARD`", FutureWarning)
    model = FullyShardedDataParallel(
        Blocks() if arguments.get("use_orig_params") else nn.Sequential(nn.Linear(WIDTH, 7), nn.Linear(7, 6)),
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}) if not arguments.get("use_orig_params") else None,
        sharding_strategy=ShardingStrategy[strategy],
        device_mesh=init_device_mesh("cpu", mesh, mesh_dim_names=("replicas", "shards")) if mesh else None,
        device_id=torch.device("cpu"),
        **arguments,
    )
    train(model, model.no_sync, clip=model.clip_grad_norm_ if clip else None, **training)


def fsdp1_with_policy(rank, world):
    from torch.distributed.fsdp import MixedPrecision

    precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fsdp1(rank, world, mixed_precision=precision)


def optimized(rank, world, groups=1, frozen=False, between=None, **arguments):
    """Train DistributedDataParallel with sharded optimizer states.

    A param group is added after the first step.
    """
    from torch.distributed.optim import ZeroRedundancyOptimizer

    layers = nn.Sequential(nn.Linear(WIDTH, 5), nn.Linear(5, 3))
    layers[0].weight.requires_grad_(not frozen)
    model = DistributedDataParallel(layers)
    parameters = list(model.parameters())
    given = parameters if groups == 1 else [{"params": parameters[:1]}, {"params": parameters[1:3]}]
    optimizer = ZeroRedundancyOptimizer(given, optimizer_class=torch.optim.SGD, lr=0.01, **arguments)

    def after(step, model):
        if groups > 1 and step == 0:
            optimizer.add_param_group({"params": parameters[3:]})

    train(model, optimizers=[optimizer], after=after, between=between)


def tensors_too(rank, world, between=None):
    """Train with tensors sharded in two, DistributedDataParallel, and an optimizer with sharded states."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    cut = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH))
    parallelize_module(
        cut, init_device_mesh("cpu", (world,)), {"0": ColwiseParallel(), "2": RowwiseParallel()}
    )
    model = DistributedDataParallel(nn.Linear(WIDTH, 5))
    optimizers = [
        torch.optim.SGD(cut.parameters(), lr=0.01),
        ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.SGD, lr=0.01),
    ]
    train(model, forward=nn.Sequential(cut, model), optimizers=optimizers, between=between)


PROGRAMS = {
    "ddp": (2, ddp),
    "ddp, small buckets of two types": (3, functools.partial(ddp, bucket_cap_mb=0.0002, half=True)),
    "ddp, unused": (
        2,
        functools.partial(
            ddp, find_unused_parameters=True, unused=True, accumulation=3, bucket_cap_mb=0.0001
        ),
    ),
    "ddp, static": (2, functools.partial(ddp, static_graph=True, unused=True, gradient_as_bucket_view=True)),
    "ddp, evaluated": (2, functools.partial(ddp, between=evaluated, accumulation=2)),
    "ddp, evaluated after": (2, functools.partial(ddp, after=evaluated)),
    "ddp, without buffers": (2, functools.partial(ddp, hook="FP16_COMPRESS", **{NO_BUFFERS: False})),
    "ddp, hook": (2, with_fp16),
    "two of ddp": (2, two_models),
    "ddp of halves": (4, halves),
    "fully_shard": (2, functools.partial(fsdp2, clip=True)),
    "fully_shard, types": (3, with_policy),
    "fully_shard, norms": (2, functools.partial(fsdp2, clip=norms, accumulation=2)),
    "fully_shard, accumulated": (2, functools.partial(fsdp2, accumulation=3, reshard_after_forward=False)),
    "fully_shard, evaluated": (2, functools.partial(fsdp2, between=evaluated)),
    "fully_shard, evaluated after": (2, functools.partial(fsdp2, after=evaluated)),
    "fully_shard, gathered ahead": (2, functools.partial(fsdp2, before=gathered_ahead)),
    "fully_shard, gathered after": (2, functools.partial(fsdp2, clip=True, before=keep_gathered)),
    "fully_shard, evaluated and read": (
        2,
        functools.partial(fsdp2, after=evaluated_and_read, reshard_after_forward=False),
    ),
    "fully_shard, in pairs": (4, functools.partial(fsdp2, reshard_after_forward=2)),
    "fsdp": (2, functools.partial(fsdp1, clip=True, between=evaluated)),
    "fsdp, names": (3, functools.partial(fsdp1, use_orig_params=True)),
    "fsdp, types": (2, fsdp1_with_policy),
    "fsdp, summoned": (2, functools.partial(fsdp1, after=summoned)),
    "fsdp, summoned within": (2, functools.partial(fsdp1, between=summoned, strategy="SHARD_GRAD_OP")),
    "fsdp, whole in between": (2, functools.partial(fsdp1, strategy="SHARD_GRAD_OP", accumulation=3)),
    "fsdp, not sharded": (2, functools.partial(fsdp1, strategy="NO_SHARD", accumulation=2)),
    "fsdp, hybrid": (4, functools.partial(fsdp1, strategy="HYBRID_SHARD", mesh=(2, 2), clip=True)),
    "optimizer in shards": (2, optimized),
    "optimizer in shards, buckets": (3, functools.partial(optimized, parameters_as_bucket_view=True)),
    "optimizer in shards, groups": (2, functools.partial(optimized, groups=2)),
    "optimizer in shards, frozen": (
        3,
        functools.partial(optimized, frozen=True, parameters_as_bucket_view=True),
    ),
    "tensors too": (2, tensors_too),
    "hybrid": (4, functools.partial(fsdp2, mesh=(2, 2), clip=True, accumulation=2)),
}


@functools.cache
def recorded(name):
    world, body = PROGRAMS[name]
    return record(Path(tempfile.mkdtemp()) / "run", world, body)[0]


def rows(verdict, purpose, when="steps"):
    return [row for row in verdict.rows if row.purpose == purpose and row.when == when]


@pytest.mark.sampled("fully_shard, norms")
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_byte_is_explained(name):
    verdict = verify(recorded(name))
    assert (str(verdict.state), verdict.unexplained, verdict.unsure) == ("closed", (), ()), verdict.sentences
    assert verdict.issued_bytes == verdict.explained_bytes > 0
    assert verdict.exit_code == 0


@pytest.mark.parametrize(
    ("body", "after", "purpose"),
    [(fsdp1, read_in_shards, "checkpoint"), (fsdp2, read_whole, "parameter_access")],
)
def test_what_the_program_reads_between_steps_leaves_the_ledger_closed(tmp_path, body, after, purpose):
    run, _ = record(tmp_path / "run", 2, functools.partial(body, after=after))
    verdict = verify(run)
    assert (str(verdict.state), verdict.unexplained) == ("closed", ()), verdict.sentences
    read = [row for row in run.table("collectives").to_pylist() if row["purpose"] == purpose]
    labelled = sum(row["payload_bytes"] for row in read if row["rank"] == 0)
    assert 0 < labelled == verdict.issued_bytes - verdict.explained_bytes


def test_the_messages_of_a_model_by_hand():
    """The messages of a model equal the sizes computed by hand.

    Trained: 64 + 8 + 8 + 8 + 40 + 5 = 133 elements. The frozen bias has 8 elements. Buffers: 16 floats, and
    an int64.
    """
    verdict = verify(recorded("ddp"))
    (gradients,) = rows(verdict, "gradient_reduce")
    assert (gradients.expected_count, gradients.expected_payload_bytes) == (STEPS, STEPS * 133 * 4)
    (buffers,) = rows(verdict, "buffer_broadcast")
    assert (buffers.expected_count, buffers.expected_payload_bytes) == (2 * STEPS, STEPS * (16 * 4 + 8))
    (rebuilt,) = rows(verdict, "bucket_rebuild")
    assert (rebuilt.expected_count, rebuilt.expected_payload_bytes) == (2, (6 + 1) * 4 + 1 * 4)
    (states,) = rows(verdict, "parameter_broadcast", "init")
    assert (states.expected_count, states.expected_payload_bytes) == (2, (133 + 8 + 16) * 4 + 8)


@pytest.mark.long
def test_micro_batches_without_a_reduction_send_no_gradients_but_the_buffers_once():
    verdict = verify(recorded("ddp, unused"))
    (gradients,) = rows(verdict, "gradient_reduce")
    assert gradients.expected_payload_bytes == STEPS * (133 + 12) * 4
    (used,) = rows(verdict, "unused_parameters")
    assert (used.expected_count, used.expected_payload_bytes) == (STEPS, STEPS * 8 * 4)
    (buffers,) = rows(verdict, "buffer_broadcast")
    assert buffers.expected_count == 2 * STEPS


@pytest.mark.long
def test_a_hook_that_halves_gradients_halves_their_bytes():
    (gradients,) = rows(verify(recorded("ddp, hook")), "gradient_reduce")
    assert gradients.expected_payload_bytes == STEPS * 133 * 2


@pytest.mark.long
def test_the_messages_of_sharded_units_by_hand():
    """The messages of sharded units equal the sizes computed by hand.

    There are 4 ranks in 2 shards, and rows are padded to a multiple of 2. Elements: frozen: 8 x 8 + 8 = 72;
    first: 6 x 7 + 6 = 48; second: 6 x 6 + 6 = 42, and 4 x 3 + 4 = 16 unused; root: 6 x 5 of the tied weight,
    and 6.

    The root stays gathered until its backward pass. Other units are gathered again for the backward pass. The
    frozen unit is gathered again because the unit after it prefetches it.
    """
    verdict = verify(recorded("hybrid"))
    once, twice = 36, 72 + 48 + 58
    gathered = 2 * (once + 2 * twice) * 4 * 2 * STEPS  # two micro-batches, and two groups of shards
    (gathers,) = rows(verdict, "parameter_gather")
    assert gathers.expected_payload_bytes == gathered
    found = {row.expected_op: row.expected_payload_bytes for row in rows(verdict, "gradient_reduce")}
    reduced = (48 + 42 + 36) * 4 * 2 * STEPS
    assert found == {"reduce_scatter": reduced, "all_reduce": reduced // 2}


def test_the_messages_of_flat_parameters_by_hand():
    """The messages of flat parameters equal the sizes computed by hand.

    8 x 7 + 7 = 63 elements, padded to 64; 7 x 6 + 6 = 48. Each unit is gathered in both passes, and in two
    forward passes of the evaluation in every second step. There are two units, and the root has no parameters
    of its own.
    """
    verdict = verify(recorded("fsdp"))
    (gathers,) = rows(verdict, "parameter_gather")
    assert gathers.expected_payload_bytes == (2 * STEPS + 2 * STEPS // 2) * (64 + 48) * 4
    (gradients,) = rows(verdict, "gradient_reduce")
    assert gradients.expected_payload_bytes == STEPS * (64 + 48) * 4
    (norms,) = rows(verdict, "gradient_norm")
    assert (norms.expected_count, norms.expected_payload_bytes) == (STEPS, STEPS * 4)


@pytest.mark.long
def test_a_planted_gather_among_sharded_units_is_a_mismatch(tmp_path):
    between = functools.partial(planted, how=PLANTED["a gather of parameters"])
    verdict = verify(record(tmp_path / "run", 2, functools.partial(fsdp2, between=between))[0])
    assert verdict.exit_code == 1
    assert {item.steps for item in verdict.unexplained} == {"2"}


def planted(step, model, how):
    if step == 2:
        how()


PLANTED = {
    "untagged": lambda: dist.all_reduce(torch.ones(7)),
    "a gather of gradients": lambda: tagged("gradient_reduce"),
    "a gather of parameters": lambda: tagged("parameter_gather"),
    "buffers once more": lambda: tagged("buffer_broadcast"),
    "as large as a bucket": lambda: dist.all_reduce(torch.ones(133)),
}


def tagged(purpose):
    with commprof.tag(purpose):
        dist.all_gather([torch.ones(3) for _ in range(2)], torch.ones(3))


@pytest.mark.sampled
@pytest.mark.parametrize("how", PLANTED)
def test_a_planted_collective_is_a_mismatch(how, tmp_path, capsys):
    between = functools.partial(planted, how=PLANTED[how])
    run, _ = record(tmp_path / "run", 2, functools.partial(ddp, between=between))
    assert execute(["verify", str(run.path)]) == 1
    verdict = verify(run)
    assert {item.steps for item in verdict.unexplained} == {"2"}, verdict.unexplained
    assert "mismatch" in capsys.readouterr().out


@pytest.mark.long
def test_a_label_alone_explains_nothing(tmp_path):
    """A label explains bytes only if the program alone decides about them, as for a metric.

    An activation that no rule covers could be anything.
    """

    def metric(step, model):
        with commprof.tag("metric"):
            dist.all_reduce(torch.ones(7))

    def activation(step, model):
        with commprof.tag("activation"):
            dist.all_reduce(torch.ones(7))

    for between, code in ((metric, 0), (activation, 3)):
        path = tmp_path / between.__name__
        verdict = verify(record(path, 2, functools.partial(ddp, between=between))[0])
        assert (verdict.exit_code, verdict.labelled_bytes) == (code, STEPS * 28), verdict.sentences
        assert verdict.explained_bytes == verdict.issued_bytes - verdict.labelled_bytes
        assert "is labelled, not predicted: 112 bytes" in verdict.sentences[-1]


def test_a_hook_that_no_rule_knows_is_said(tmp_path):
    def hook(state, bucket):
        future = dist.all_reduce(bucket.buffer()[:3], async_op=True).get_future()
        return future.then(lambda done: bucket.buffer())

    verdict = verify(record(tmp_path / "run", 2, functools.partial(ddp, hook=hook))[0])
    assert (verdict.exit_code, verdict.unexplained) == (3, ())
    assert any("communication hook" in text and "hook decides" in text for text in verdict.sentences)


@pytest.mark.long
def test_the_parameters_that_a_sharded_optimizer_sends_by_hand():
    """The parameters that a sharded optimizer sends equal the sizes computed by hand.

    8 x 5, 5, 5 x 3 and 3 elements: rank 0 of 2 updates the 40, and rank 1 updates the other 23. Of three
    ranks the third has the 5 and the 3. There are four broadcasts if parameters are sent one at a time, and
    one broadcast per rank with buckets.
    """
    (single,) = rows(verify(recorded("optimizer in shards")), "parameter_broadcast")
    assert (single.expected_count, single.expected_payload_bytes) == (4 * STEPS, STEPS * 63 * 4)
    (buckets,) = rows(verify(recorded("optimizer in shards, buckets")), "parameter_broadcast")
    assert (buckets.expected_count, buckets.expected_payload_bytes) == (3 * STEPS, STEPS * 63 * 4)
    # In the first step the optimizer has three of the four parameters.
    (grown,) = rows(verify(recorded("optimizer in shards, groups")), "parameter_broadcast")
    assert (grown.expected_count, grown.expected_payload_bytes) == (4 * STEPS - 1, (STEPS * 63 - 3) * 4)


@pytest.mark.sampled
@pytest.mark.parametrize("body", [optimized, tensors_too])
def test_a_planted_broadcast_beside_a_sharded_optimizer_is_a_mismatch(body, tmp_path):
    def broadcast():
        with commprof.tag("parameter_broadcast"):
            dist.broadcast(torch.ones(3), src=0)

    between = functools.partial(planted, how=broadcast)
    verdict = verify(record(tmp_path / "run", 2, functools.partial(body, between=between))[0])
    assert verdict.exit_code == 1
    assert [(item.op, item.payload_bytes, item.steps) for item in verdict.unexplained] == [
        ("broadcast", 12, "2")
    ]


@pytest.mark.parametrize(
    ("column", "text"),
    [
        ("arguments", "[]"),
        ("arguments", '{"bucket_cap_mb": "x"}'),
        ("parameters", "{"),
        ("parameters", '[["w", [-1], "float32", true]]'),
        ("parameters", '[["w", [4], "float31", true]]'),
        ("group_ranks", ""),
        ("wrapper", "another"),
    ],
)
def test_a_damaged_wrapper_is_told_in_a_sentence(column, text):
    damaged = Changed(recorded("ddp"), lambda row: [row])
    table = damaged.table("wrappers")
    texts = pa.array([text] * len(table), table.schema.field(column).type)
    other = table.set_column(table.schema.get_field_index(column), table.schema.field(column), texts)
    tables = damaged.table
    damaged.table = lambda name: other if name == "wrappers" else tables(name)
    verdict = verify(damaged)
    assert verdict.exit_code in (1, 3) and verdict.sentences, verdict

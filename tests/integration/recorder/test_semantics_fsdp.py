"""FSDP 1 and 2 with the recorder: the module of each collective, and the parameters that the collective sends.

The expectations are written by hand from the model: two blocks of two linear layers, and the layers around
them.
"""

from __future__ import annotations

import pytest
import torch

from support.recording import calls, record

pytestmark = [pytest.mark.ranks, pytest.mark.filterwarnings("ignore")]


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(6, 10)
        self.down = torch.nn.Linear(10, 6)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Linear(5, 6)
        self.blocks = torch.nn.ModuleList([Block(), Block()])
        self.head = torch.nn.Linear(6, 3, bias=False)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


# The number of elements, and the number that is sent if each parameter is sharded separately along its rows.
# The head has 3 rows, which count as 4.
BLOCK, AROUND, AROUND_PADDED = 60 + 10 + 60 + 6, 30 + 6 + 18, 30 + 6 + 24
PARTS = ("up.weight", "up.bias", "down.weight", "down.bias")
NAMES = {
    "(root)": "embed.weight,embed.bias,head.weight",
    **{f"blocks.{n}": ",".join(f"blocks.{n}.{part}" for part in PARTS) for n in (0, 1)},
}
SHAPES = {
    "embed.weight": "6x5",
    "blocks.1.up.weight": "10x6",
    "blocks.1.down.bias": "6",
    "head.weight": "3x6",
}


def gather(step, phase, module, bytes_):
    return (step, phase, "all_gather", "parameter_gather", None, None, module, NAMES[module], bytes_)


def reduce(step, bucket, module, bytes_):
    return (
        step,
        "backward",
        "reduce_scatter",
        "gradient_reduce",
        bucket,
        bytes_,
        module,
        NAMES[module],
        bytes_,
    )


SAID = ("step", "phase", "op", "purpose", "bucket", "bucket_bytes", "module", "parameters", "payload_bytes")


def train(model, steps, clip=None, micro_batches=1):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):
        for _ in range(micro_batches):
            model(torch.ones(3, 5)).sum().backward()
        if clip is not None:
            clip(1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        model(torch.ones(3, 5))


def fsdp2(rank, world, reshard):
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = Net()
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=reshard)
    fully_shard(model, reshard_after_forward=reshard)
    train(model, 2, lambda norm: torch.nn.utils.clip_grad_norm_(model.parameters(), norm))


AS_WRITTEN = [
    "embed.weight",
    "embed.bias",
    *NAMES["blocks.0"].split(","),
    *NAMES["blocks.1"].split(","),
    "head.weight",
]


def check_parameters(run, order=AS_WRITTEN):
    parameters = run.table("parameters").to_pylist()
    assert [row["name"] for row in parameters] == order
    found = {row["name"]: row["shape"] for row in parameters}
    assert {name: found[name] for name in SHAPES} == SHAPES
    assert {row["param_group"] for row in parameters} == {0}


@pytest.mark.sampled
@pytest.mark.parametrize("reshard", [True, False])
def test_fsdp2_names_the_module_of_each_collective(tmp_path, reshard):
    run, outcomes = record(tmp_path / "run", 2, fsdp2, reshard)
    around, block = 4 * AROUND_PADDED, 4 * BLOCK
    forward = [("(root)", around), ("blocks.0", block), ("blocks.1", block)]
    again = [("(root)", around), ("blocks.1", block), ("blocks.0", block)] if reshard else []
    backward = [("blocks.1", block), ("blocks.0", block), ("(root)", around)]
    expected = []
    for step in (0, 1):
        expected += [gather(step, "forward", *unit) for unit in forward]
        expected += [gather(step, "backward", *unit) for unit in again]
        expected += [reduce(step, number, *unit) for number, unit in enumerate(backward)]
        # One message has the norms of all 11 parameters.
        expected.append((step, "other", "all_reduce", "gradient_norm", None, None, None, None, 4 * 11))
    expected += [gather(-1, "evaluation", *unit) for unit in forward]  # outside the steps
    for rank in (0, 1):
        assert calls(run, rank, *SAID) == expected
    assert len(expected) == len(outcomes[0]["flights"]) and run.health.notes == ()
    check_parameters(run)
    buckets = [row for row in run.table("buckets").to_pylist() if row["rank"] == 0 and row["step"] == 0]
    assert [(b["numel"], b["bytes"], b["parameters"]) for b in buckets] == [
        (BLOCK, block, NAMES["blocks.1"]),
        (BLOCK, block, NAMES["blocks.0"]),
        (AROUND, around, NAMES["(root)"]),
    ]


def fsdp1(rank, world, original_parameters):
    from torch.distributed.fsdp import FullyShardedDataParallel

    torch.manual_seed(0)
    options = {"device_id": torch.device("cpu"), "use_orig_params": original_parameters}
    model = Net()
    for number, block in enumerate(model.blocks):
        model.blocks[number] = FullyShardedDataParallel(block, **options)
    model = FullyShardedDataParallel(model, **options)
    train(model, 1, model.clip_grad_norm_)


@pytest.mark.sampled
@pytest.mark.parametrize("original_parameters", [False, True])
def test_fsdp1_names_the_module_of_each_collective(tmp_path, original_parameters):
    run, _ = record(tmp_path / "run", 2, fsdp1, original_parameters)
    # A flat parameter is sharded as a whole, and its size is even. Original parameters that can be used
    # separately begin at multiples of 16 bytes. Within the unit, 30 and 6 elements take the space of 32 and
    # 8, and 10 elements take the space of 12.
    around, block = (4 * 58, 4 * 138) if original_parameters else (4 * AROUND, 4 * BLOCK)
    rows = [row for row in calls(run, 0, *SAID) if row[1] != "init"]
    forward = [("(root)", around), ("blocks.0", block), ("blocks.1", block)]
    expected = [
        *(gather(0, "forward", *unit) for unit in forward),
        *(gather(0, "backward", *unit) for unit in (forward[2], forward[1])),
        *(reduce(0, number, *unit) for number, unit in enumerate((forward[2], forward[1], forward[0]))),
        (0, "other", "all_reduce", "gradient_norm", None, None, None, None, 4),
        *(gather(-1, "evaluation", *unit) for unit in forward),  # outside the steps
    ]
    assert rows == expected
    units = [name for unit in NAMES.values() for name in unit.split(",")]
    check_parameters(run, AS_WRITTEN if original_parameters else units)


def hybrid(rank, world):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = torch.nn.Linear(4, 4, bias=False)
    fully_shard(model, mesh=mesh)
    model(torch.ones(1, 4)).sum().backward()


@pytest.mark.long
def test_the_second_half_of_a_hybrid_reduction_is_the_same_bucket(tmp_path):
    run, _ = record(tmp_path / "run", 4, hybrid)
    rows = [
        row
        for row in calls(run, 3, "op", "purpose", "bucket", "module", "parameters", "payload_bytes")
        if row[1] == "gradient_reduce"
    ]
    assert rows == [
        ("reduce_scatter", "gradient_reduce", 0, "(root)", "weight", 64),
        ("all_reduce", "gradient_reduce", 0, "(root)", "weight", 32),
    ]


def without_reduction(rank, world):
    """Run two micro-batches, the first of which does not reduce its gradients."""
    from torch.distributed.fsdp import fully_shard

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        for last in (False, True):
            model.set_requires_gradient_sync(last)
            model(torch.ones(1, 4)).sum().backward()
        optimizer.step()


def test_gradients_that_stay_are_no_buckets(tmp_path):
    run, _ = record(tmp_path / "run", 2, without_reduction)
    rows = [
        row for row in calls(run, 0, "step", "micro_step", "purpose", "bucket") if row[2] == "gradient_reduce"
    ]
    assert rows == [(step, 1, "gradient_reduce", bucket) for step in (0, 1) for bucket in (0, 1)]
    gathered = {
        row[:2] for row in calls(run, 0, "step", "micro_step", "purpose") if row[2] == "parameter_gather"
    }
    assert gathered == {(0, 0), (0, 1), (1, 0), (1, 1)}


def in_backward(rank, world):
    from torch.distributed.fsdp import fully_shard

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    fully_shard(model)
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda p: (optimizers[p].step(), optimizers[p].zero_grad())
        )
    for _ in range(3):
        model(torch.ones(1, 4)).sum().backward()


@pytest.mark.long
def test_optimizers_that_step_within_the_backward_pass_end_one_step_together(tmp_path):
    run, _ = record(tmp_path / "run", 2, in_backward)
    reduced = [row for row in calls(run, 0, "step", "phase", "purpose") if row[2] == "gradient_reduce"]
    assert reduced == [(step, "backward", "gradient_reduce") for step in range(3)]
    assert [row["step"] for row in run.table("steps").to_pylist()] == [0, 1, 2] * 2

"""DistributedDataParallel with the recorder.

Each collective has its purpose, its bucket and the parameters of the bucket. The expectations are written by
hand from the model: two linear layers, "0" (8x8 and 8) and "2" (1x8 and 1), with a batch norm "1" between
them if buffers are to be broadcast.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from support.recording import calls, record

pytestmark = [pytest.mark.ranks, pytest.mark.filterwarnings("ignore::FutureWarning")]

SAID = ("step", "micro_step", "phase", "op", "purpose", "bucket", "bucket_bytes", "parameters")
FORWARD_ORDER = "0.weight,0.bias,2.weight,2.bias"
# In MiB. This is 104 bytes, so that the parameter that exceeds 26 elements closes a bucket.
SMALL = 0.0001


def linear(batch_norm: bool = False) -> torch.nn.Module:
    torch.manual_seed(0)
    middle = torch.nn.BatchNorm1d(8) if batch_norm else torch.nn.ReLU()
    return torch.nn.Sequential(torch.nn.Linear(8, 8), middle, torch.nn.Linear(8, 1))


def train(rank, world, steps, micro_batches, options, after_forward):
    model = DistributedDataParallel(linear(options.pop("batch_norm", False)), **options)
    if after_forward == "compress":
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        for left in reversed(range(micro_batches)):
            x = torch.ones(2, 8)
            if left:
                with model.no_sync():
                    model(x).sum().backward()
            else:
                model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def said(tmp_path, steps=2, micro_batches=1, after_forward="", **options):
    run, outcomes = record(tmp_path / "run", 2, train, steps, micro_batches, options, after_forward)
    rows = calls(run, 0, *SAID)
    assert rows == calls(run, 1, *SAID)
    # The number of records equals torch's own count, and there are no notes.
    assert len(rows) == len(outcomes[0]["flights"]) and run.health.notes == ()
    begin = [row[4] for row in rows if row[0] == -1]
    assert begin[:2] == ["trace_check", "trace_check"] and set(begin[2:]) == {"parameter_broadcast"}
    return run, [row for row in rows if row[0] >= 0]


def test_the_buckets_of_the_first_step_and_those_that_are_built_anew(tmp_path):
    run, rows = said(tmp_path, steps=3, bucket_cap_mb=SMALL)
    whole = ("backward", "all_reduce", "gradient_reduce", 0, 4 * 81, FORWARD_ORDER)
    # The bucket is rebuilt in the order in which gradients arrived: 1 + 8 + 8 elements, and 64 more before 26
    # were reached.
    last = ("backward", "all_reduce", "gradient_reduce", 0, 4 * 81, "2.bias,2.weight,0.bias,0.weight")
    agreed = ("forward", "broadcast", "bucket_rebuild", None, None, None)
    assert rows == [(0, 0, *whole), (1, 0, *agreed), (1, 0, *agreed), (1, 0, *last), (2, 0, *last)]
    buckets = [row for row in run.table("buckets").to_pylist() if row["rank"] == 0]
    assert [(b["step"], b["bucket"], b["numel"], b["bytes"], b["capacity"]) for b in buckets] == [
        (0, 0, 81, 324, None),
        (1, 0, 81, 324, 26),
        (2, 0, 81, 324, 26),
    ]
    assert [
        (p["name"], p["shape"], p["numel"], p["param_group"]) for p in run.table("parameters").to_pylist()
    ] == [
        ("0.weight", "8x8", 64, 0),
        ("0.bias", "8", 8, 0),
        ("2.weight", "1x8", 8, 0),
        ("2.bias", "1", 1, 0),
    ]


@pytest.mark.long
def test_unused_parameters_are_agreed_on_after_the_buckets(tmp_path):
    _, rows = said(tmp_path, steps=2, bucket_cap_mb=SMALL, find_unused_parameters=True)
    # Buckets are filled in forward order (64, closed; 8 + 8 + 1), sent from the last to the first, and never
    # rebuilt.
    step = [
        ("backward", "all_reduce", "gradient_reduce", 0, 4 * 17, "0.bias,2.weight,2.bias"),
        ("backward", "all_reduce", "gradient_reduce", 1, 4 * 64, "0.weight"),
        ("backward", "all_reduce", "unused_parameters", None, None, None),
    ]
    assert rows == [(number, 0, *row) for number in (0, 1) for row in step]


@pytest.mark.long
def test_a_static_graph_sends_its_first_buckets_at_the_end(tmp_path):
    _, rows = said(tmp_path, steps=3, static_graph=True, gradient_as_bucket_view=True)
    reduced = [row for row in rows if row[4] == "gradient_reduce"]
    assert [row[:3] + row[5:7] for row in reduced] == [(n, 0, "backward", 0, 324) for n in range(3)]
    assert reduced[0][7] == FORWARD_ORDER and set(reduced[2][7].split(",")) == set(FORWARD_ORDER.split(","))


def test_accumulated_gradients_are_sent_with_the_last_micro_batch(tmp_path):
    run, rows = said(tmp_path, steps=2, micro_batches=3)
    reduced = [row for row in rows if row[4] == "gradient_reduce"]
    assert [row[:2] for row in reduced] == [(0, 2), (1, 2)]
    assert [row["micro_steps"] for row in run.table("steps").to_pylist()] == [3] * 4


@pytest.mark.long
def test_buffers_are_broadcast_in_every_forward_pass(tmp_path):
    _, rows = said(tmp_path, steps=1, batch_norm=True)
    # One message has running_mean and running_var, and another has num_batches_tracked.
    assert [row[2:5] for row in rows] == [("forward", "broadcast", "buffer_broadcast")] * 2 + [
        ("backward", "all_reduce", "gradient_reduce")
    ]


@pytest.mark.long
def test_what_a_comm_hook_issues_belongs_to_its_bucket(tmp_path):
    run, rows = said(tmp_path, steps=1, after_forward="compress")
    assert rows == [(0, 0, "backward", "all_reduce", "gradient_reduce", 0, 4 * 81, FORWARD_ORDER)]
    assert calls(run, 0, "dtype", "layer")[-1] == ("float16", "process_group")


def two_models(rank, world, shared_size):
    """Train a generator through a critic. Each has its own optimizer."""
    torch.manual_seed(0)
    generator = DistributedDataParallel(torch.nn.Linear(4, 4))
    critic = DistributedDataParallel(torch.nn.Linear(4, 4 if shared_size else 1))
    steps = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (critic, generator)]
    for _ in range(2):
        fake = generator(torch.ones(2, 4))
        critic(fake.detach()).sum().backward()
        steps[0].step()
        critic(fake).sum().backward()
        steps[1].step()


@pytest.mark.long
def test_the_buckets_of_two_models_are_told_apart(tmp_path):
    run, _ = record(tmp_path / "run", 2, two_models, False)
    reduced = [
        r
        for r in calls(run, 0, "step", "purpose", "bucket", "payload_bytes", "parameters")
        if r[1] == "gradient_reduce"
    ]
    generator, critic = (20 * 4, {"weight", "bias"}), (5 * 4, {"weight", "bias"})
    expected = [critic, critic, generator]
    assert [(row[3], set(row[4].split(","))) for row in reduced] == expected * 2
    # the optimizers of both models end a step together
    assert [row[0] for row in reduced] == [0, 0, 0, 1, 1, 1]
    names = {row["name"] for row in run.table("parameters").to_pylist()}
    assert names == {"Linear0.weight", "Linear0.bias", "Linear1.weight", "Linear1.bias"}


@pytest.mark.long
def test_where_two_models_could_have_sent_it_only_the_purpose_is_said(tmp_path):
    run, _ = record(tmp_path / "run", 2, two_models, True)
    reduced = [r for r in calls(run, 0, "purpose", "bucket", "parameters") if r[0] == "gradient_reduce"]
    assert len(reduced) == 6 and reduced[0] == ("gradient_reduce", None, None)


def uneven(rank, world):
    model = DistributedDataParallel(linear())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.join():
        for _ in range(2 + rank):
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()


@pytest.mark.long
def test_a_rank_without_data_reduces_for_those_that_have_some(tmp_path):
    run, _ = record(tmp_path / "run", 2, uneven)
    purposes = [[p for p in calls(run, rank, "purpose") if p == "gradient_reduce"] for rank in (0, 1)]
    assert len(purposes[0]) == len(purposes[1]) == 3
    assert None not in calls(run, 1, "purpose")


@pytest.mark.long
def test_nothing_stays_on_the_model_or_in_torch(tmp_path):
    def body(rank, world):
        import commprof

        before = {name: vars(DistributedDataParallel).get(name) for name in vars(DistributedDataParallel)}
        hooked = [name for name, value in before.items() if hasattr(value, "__wrapped__")]
        commprof.detach()
        left = [
            name
            for name, value in vars(DistributedDataParallel).items()
            if "commprof" in repr(getattr(value, "__code__", ""))
        ]
        from torch.nn.modules import module

        return (
            "_pre_forward" in hooked,
            left,
            len(module._global_forward_pre_hooks),
            "commprof" in repr(torch.autograd.backward.__code__),
        )

    _, outcomes = record(tmp_path / "run", 1, body)
    assert outcomes[0]["result"] == (True, [], 0, False)
    assert not dist.is_initialized()

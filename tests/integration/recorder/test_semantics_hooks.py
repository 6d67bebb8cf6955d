"""DDP's communication hooks with the recorder.

Everything that a hook issues, immediately or later, belongs to the bucket. The expectations are written by
hand from the model (two linear layers of 64 + 8 and 8 + 1 parameters in one bucket) and from the
documentation of each hook.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from support.recording import calls, record

pytestmark = [pytest.mark.ranks, pytest.mark.filterwarnings("ignore::FutureWarning")]

BUCKET = ("gradient_reduce", 0, 4 * 81)


def train(rank, world, hook, steps):
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1)))
    after_step = hook(model) or (lambda: None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        after_step()


def issued(tmp_path, hook, steps=1, **options):
    """Return the collectives of each training step: operation, elements, purpose, bucket, and bytes of the bucket."""
    run, outcomes = record(tmp_path / "run", 2, train, hook, steps, **options)
    columns = ("step", "op", "numel", "purpose", "bucket", "bucket_bytes", "parameters")
    rows = calls(run, 0, *columns)
    assert rows == calls(run, 1, *columns)
    assert len(rows) == len(outcomes[0]["flights"]) and run.health.notes == ()
    # In the second forward pass DDP itself issues collectives to agree on buckets. They do not belong to a
    # hook.
    rows = [row for row in rows if row[0] >= 0 and row[3] != "bucket_rebuild"]
    hooked = [row for row in rows if row[3] == "gradient_reduce"]
    assert all(len(row[6].split(",")) == 4 for row in hooked)
    return [[row[1:6] for row in rows if row[0] == step] for step in range(steps)]


def compress_fp16(model):
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    model.register_comm_hook(None, default_hooks.fp16_compress_hook)


def compress_bf16_around_all_reduce(model):
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    compressed = default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook)
    # torch accepts this hook by its own name with NCCL only.
    model.register_comm_hook(None, lambda state, bucket: compressed(state, bucket))


@pytest.mark.sampled
@pytest.mark.parametrize("hook", [compress_fp16, compress_bf16_around_all_reduce])
def test_a_compressed_bucket_is_one_collective(tmp_path, hook):
    assert issued(tmp_path, hook) == [[("all_reduce", 81, *BUCKET)]]


def power_sgd(model):
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


@pytest.mark.sampled
@pytest.mark.parametrize("complete", [False, True])
def test_the_later_rounds_of_power_sgd_belong_to_the_bucket_too(tmp_path, complete):
    whole = [("all_reduce", 81, *BUCKET)]
    # The biases and the 1x8 matrix are sent unchanged, followed by a column and a row for the 8x8 matrix.
    rounds = [("all_reduce", numel, *BUCKET) for numel in (8 + 8 + 1, 8, 8)]
    assert issued(tmp_path, power_sgd, steps=4, complete=complete) == [whole, whole, rounds, rounds]


def own_chain(model):
    """A hook whose third round starts in a callback of a future that another callback created."""

    def reduce(tensor):
        return dist.all_reduce(tensor, async_op=True).get_future()

    def hook(state, bucket):
        buffer = bucket.buffer()
        end = torch.futures.Future()

        def second(first):
            reduce(torch.ones(2)).add_done_callback(third)

        def third(second):
            with_own_reason(end, buffer)

        reduce(torch.ones(1)).then(second)
        return end

    def with_own_reason(end, buffer):
        import commprof

        with commprof.tag("metric"):
            reduce(torch.ones(3)).then(lambda _: reduce(torch.ones(4)).wait()).then(
                lambda _: end.set_result(buffer)
            )

    model.register_comm_hook(None, hook)


@pytest.mark.long
def test_callbacks_of_callbacks_keep_the_bucket_until_the_hook_says_more(tmp_path):
    said = ("metric", None, None)
    assert issued(tmp_path, own_chain) == [
        [
            ("all_reduce", 1, *BUCKET),
            ("all_reduce", 2, *BUCKET),
            ("all_reduce", 3, *said),
            ("all_reduce", 4, *said),
        ]
    ]


def local_sgd(model):
    from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
        PostLocalSGDState,
        post_localSGD_hook,
    )
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

    alone, _ = dist.new_subgroups(group_size=1)
    state = PostLocalSGDState(process_group=None, subgroup=alone, start_localSGD_iter=1)
    model.register_comm_hook(state, post_localSGD_hook)
    averager = PeriodicModelAverager(period=2, warmup_steps=1)
    return lambda: averager.average_parameters(model.parameters())


def test_local_sgd_reduces_gradients_and_then_averages_parameters(tmp_path):
    gradients = ("all_reduce", 81, *BUCKET)
    average = ("all_reduce", 81, "parameter_broadcast", None, None)
    # A step ends with its optimizer step. Collectives after the optimizer step belong to the next step, or
    # after the last step to none.
    assert issued(tmp_path, local_sgd, steps=4) == [
        [gradients],
        [gradients],
        [average, gradients],
        [gradients],
    ]


def future_methods(rank, world):
    import commprof

    kinds = (torch._C.Future, torch.futures.Future)
    now = ["commprof" in repr(getattr(vars(kind)["then"], "__code__", "")) for kind in kinds]
    commprof.detach()
    later = ["commprof" in repr(getattr(vars(kind)["then"], "__code__", "")) for kind in kinds]
    future = torch.futures.Future()
    chained = future.then(lambda done: done.value() + 1)
    future.set_result(1)
    return now, later, chained.wait()


def test_futures_are_torch_s_own_again_after_recording(tmp_path):
    _, outcomes = record(tmp_path / "run", 1, future_methods)
    assert outcomes[0]["result"] == ([True, False], [False, False], 2)

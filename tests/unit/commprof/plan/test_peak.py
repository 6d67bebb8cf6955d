"""Test the phases of a step and the memory that is alive in each of them against hand-computed values."""

from __future__ import annotations

import pytest

from commprof.plan.memory.peak import GATHER, PASSES, REDUCTION, STEP, Peak, peak_of
from commprof.plan.memory.spans import Activations, Span
from commprof.requested.memory.deepspeed import deepspeed_holdings
from commprof.requested.memory.states import holdings
from commprof.requested.parameters import Parameter

N = 1_000_000  # The number of elements of each of four parameters.
MODEL = [Parameter(f"{number}.weight", N) for number in range(4)]
# Each of four layers keeps one unit of activations. The gradient of the last layer comes first.
ORDER = ("3.weight", "2.weight", "1.weight", "0.weight", "")


def activations(unit):
    sizes = [unit * (4 - number) for number in range(5)]
    return Activations(tuple(Span(size, size, name) for size, name in zip(sizes, ORDER, strict=True)), "")


def peak(stage, unit, world=4, micro_batches=1, backend="nccl", framework="zero_runtime", **keys):
    zero = {"stage": stage, "reduce_bucket_size": N, **keys.pop("zero", {})}
    config = {"bf16": {"enabled": True}, "optimizer": {"type": "AdamW"}, "zero_optimization": zero, **keys}
    if framework == "deepspeed":
        memory = deepspeed_holdings(config, MODEL, world)
    else:
        memory = holdings(config, MODEL, world, backend)
    return peak_of(config, MODEL, memory, activations(unit), micro_batches, backend, framework)


@pytest.mark.parametrize(
    ("stage", "unit", "expected"),
    [
        # In millions of bytes, the parameters are 8, the masters 16 and the states 32. There are four units
        # of activations and no gradient yet.
        (0, 100 * N, Peak((8 + 16 + 32 + 400) * N, PASSES)),
        # The gradients of the masters in fp32 are alive together with the bf16 gradients.
        (0, N // 2, Peak((8 + 16 + 32 + 8 + 16) * N, STEP)),
        # A quarter of the masters, states and reduced gradients, and the complete gradients, which arrive as
        # activations are freed.
        (1, 100 * N, Peak((8 + 4 + 8 + 2 + 400) * N, PASSES)),
        (1, N // 2, Peak((8 + 4 + 8 + 2 + 8 + 2) * N, REDUCTION)),
        # The backward pass fills a bucket.
        (2, 100 * N, Peak((8 + 4 + 8 + 2 + 2 + 400) * N, PASSES)),
        (2, N // 4, Peak((8 + 4 + 8 + 2 + 4) * N, STEP)),
        # A quarter of the parameters, all of them gathered, and two buckets. No bucket has been sent yet.
        (3, 100 * N, Peak((2 + 4 + 8 + 2 + 8 + 4 + 400) * N, PASSES)),
        # All parameters arrive in one buffer, from which they are copied.
        (3, N // 4, Peak((2 + 4 + 8 + 2 + 8 + 8) * N, GATHER)),
    ],
)
def test_a_phase_decides(stage, unit, expected):
    assert peak(stage, unit) == expected


def test_gradients_of_earlier_micro_batches_are_there_from_the_beginning():
    assert peak(1, 100 * N, micro_batches=2).device - peak(1, 100 * N).device == 8 * N


def test_gathered_parameters_go_as_their_gradients_are_complete():
    """The first bucket is sent with the third gradient.

    At that time two units, half of the parameters and a copy of the bucket are alive.
    """
    alone = {"stage3_prefetch_bucket_size": 0}
    small = peak(3, N, zero={"overlap_comm": False, **alone})
    assert small == Peak((2 + 4 + 8 + 2 + 8 + 2 + 4) * N, PASSES)
    # With large buckets that are sent during the pass, the copy adds to the remaining memory.
    assert peak(3, N, zero=alone).device == (2 + 4 + 8 + 2 + 8 + 4 + 4) * N


def test_buffers_of_buckets_stay_on_cpus():
    freed, kept = (peak(2, N // 4, backend=backend) for backend in ("nccl", "gloo"))
    assert (freed.phase, kept.phase) == (STEP, STEP) and kept.device - freed.device == 2 * N


def test_states_that_are_offloaded_are_not_on_the_device():
    offloaded = peak(2, 100 * N, zero={"offload_optimizer": {"device": "cpu"}})
    assert offloaded == Peak((8 + 2 + 2 + 400) * N, PASSES)


def test_gradients_accumulated_in_fp32_need_no_copy():
    keys = {"data_types": {"grad_accum_dtype": "fp32"}}
    # The flat fp32 gradients of stage 1 are complete on every rank, and the bf16 gradients arrive in
    # addition.
    assert peak(1, 100 * N, **keys) == Peak((8 + 4 + 8 + 16 + 400) * N, PASSES)
    assert peak(2, N // 4, **keys).device == (8 + 4 + 8 + 4 + 2 + 1) * N


def test_deepspeed_allocates_buckets_and_reduced_gradients_in_the_pass():
    # The gradients do not exist yet when most activations are alive, but the gradients of earlier
    # micro-batches do.
    assert peak(2, 100 * N, framework="deepspeed") == Peak((8 + 4 + 8 + 400) * N, PASSES)
    accumulated = peak(2, 100 * N, micro_batches=2, framework="deepspeed")
    assert accumulated == Peak((8 + 4 + 8 + 2 + 2 + 400) * N, PASSES)
    # The step concatenates the reduced gradients before it copies them to fp32.
    assert peak(2, N // 4, framework="deepspeed") == Peak((8 + 4 + 8 + 2 + 2 + 4) * N, STEP)


def test_deepspeed_has_buffers_of_the_bucket_size_and_fp32_gradients_of_offloaded_states():
    keys = {"stage": 2, "reduce_bucket_size": 100 * N, "offload_optimizer": {"device": "cpu"}}
    config = {"bf16": {"enabled": True}, "optimizer": {"type": "AdamW"}, "zero_optimization": keys}
    held = {each.what: each[1:3] for each in deepspeed_holdings(config, MODEL, 4)}
    assert held["gradient buckets"] == (200 * N, 0)
    assert held["gradients"] == (0, 2 * N)
    assert held["offloaded gradients"] == (2 * N, 4 * N + 2 * N)
    assert held["masters"] == (0, 4 * N)
    fp32 = {
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": 3, "offload_param": {"device": "none"}},
    }
    assert {each.what: each.device for each in deepspeed_holdings(fp32, MODEL, 4)}["masters"] == 4 * N

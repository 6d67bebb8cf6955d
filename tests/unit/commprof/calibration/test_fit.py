"""Test the fit of latency and bandwidth.

The fit recovers the values from synthetic times, and bandwidths follow the definitions of nccl-tests.
"""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commprof import schema
from commprof.calibration.bandwidths import SEND_RECV, bus_factor, calibrated_op
from commprof.calibration.fit import fit
from commprof.schema import Op

SIZES = [1024 * 4**i for i in range(8)]
positive = st.floats(1.0, 1e9)


def made_up(alpha_ns: float, bytes_per_s: float, noise: float, seed: int, sizes=SIZES) -> list[float]:
    rng = random.Random(seed)
    return [(alpha_ns + size / bytes_per_s * 1e9) * math.exp(rng.gauss(0, noise)) for size in sizes]


@given(alpha=st.floats(100, 1e8), rate=st.floats(1e6, 1e12))
def test_exact_times_give_back_what_they_were_made_of(alpha, rate):
    found = fit(SIZES, made_up(alpha, rate, 0.0, 0))
    for size in SIZES:
        assert found.predict(size).time_ns == pytest.approx(alpha + size / rate * 1e9, rel=1e-6)
    assert found.residual < 1e-6


@pytest.mark.parametrize(("noise", "outliers"), [(0.05, 0), (0.2, 0), (0.05, 1)])
def test_intervals_hold_the_truth_about_19_times_in_20(noise, outliers):
    alpha, rate = 50_000.0, 1.5e9
    held = [0, 0, 0]
    trials = 300
    for seed in range(trials):
        times = made_up(alpha, rate, noise, seed)
        rng = random.Random(-1 - seed)
        for place in rng.sample(range(len(times)), outliers):
            times[place] *= 4  # In this case another program used the machine during the measurement.
        found = fit(SIZES, times)
        beta = found.beta_interval()
        held[0] += found.alpha_interval().low <= alpha <= found.alpha_interval().high
        held[1] += beta.low <= rate <= (math.inf if beta.high is None else beta.high)
        size = rng.choice(SIZES)
        again = (alpha + size / rate * 1e9) * math.exp(rng.gauss(0, noise))
        held[2] += found.predict(size).low_ns <= again <= found.predict(size).high_ns
    assert all(0.90 * trials <= count for count in held), held


def test_one_wild_size_moves_the_bandwidth_little():
    times = made_up(50_000, 1.5e9, 0.01, 7)
    for place in range(len(times)):
        wild = [time * (8 if i == place else 1) for i, time in enumerate(times)]
        assert fit(SIZES, wild).beta_bytes_per_s == pytest.approx(1.5e9, rel=0.12), place


def test_latency_is_never_negative():
    found = fit([1e6, 2e6, 4e6, 8e6], [0.9e6, 2e6, 4.2e6, 8.6e6])
    assert found.alpha_ns == 0 and found.alpha_interval().low == 0
    assert found.beta_bytes_per_s == pytest.approx(1e9, rel=0.05)


@pytest.mark.parametrize(
    ("sizes", "times"),
    [
        ([], []),
        ([1024, 4096], [1.0, 2.0]),
        ([1024, 1024, 1024], [1.0, 2.0, 3.0]),
        ([1024, 4096, 16384], [300.0, 200.0, 100.0]),
        ([0, 1024, 4096], [1.0, 2.0, 3.0]),
        ([1024, 4096, 16384], [0.0, 2.0, 3.0]),
    ],
)
def test_what_cannot_be_told_is_none(sizes, times):
    assert fit(sizes, times) is None


@given(
    points=st.lists(st.tuples(st.integers(1, 2**40), st.floats(1.0, 1e12)), min_size=3, max_size=12),
    scale=st.sampled_from([1 / 1024, 2.0, 1000.0]),
)
def test_any_times_give_finite_numbers_or_none(points, scale):
    sizes, times = zip(*points, strict=True)
    found = fit(sizes, times)
    if found is None:
        return
    predicted = found.predict(max(sizes))
    numbers = [found.alpha_ns, found.beta_bytes_per_s, found.residual, *predicted]
    assert all(math.isfinite(number) and number >= 0 for number in numbers)
    assert predicted.low_ns <= predicted.time_ns <= predicted.high_ns
    assert fit(sizes[::-1], times[::-1]).slope == pytest.approx(found.slope, rel=1e-6)


@pytest.mark.parametrize("size", [2, 3, 8, 1000])
def test_bus_factors_are_those_of_nccl_tests(size):
    assert bus_factor("all_reduce", size) == pytest.approx(2 * (size - 1) / size)
    for op in ("reduce_scatter", "all_gather", "all_to_all", "gather", "scatter"):
        assert bus_factor(op, size) == pytest.approx((size - 1) / size)
    for op in ("broadcast", "reduce", "send", "recv", SEND_RECV):
        assert bus_factor(op, size) == 1
    assert bus_factor("barrier", size) is None


@given(
    op=st.sampled_from(["all_reduce", "reduce_scatter", "all_gather", "all_to_all"]),
    size=st.integers(2, 4096),
)
def test_where_all_ranks_send_the_same_the_bus_carries_the_wire_bytes(op, size):
    assert bus_factor(op, size) * 10**9 == pytest.approx(schema.wire_bytes(op, 10**9, size))


def test_a_group_of_one_has_no_bandwidth():
    assert {bus_factor(op, 1) for op in Op} == {None}


def test_messages_are_held_to_send_recv():
    assert [calibrated_op(op) for op in ("send", "recv", "all_reduce")] == [
        SEND_RECV,
        SEND_RECV,
        "all_reduce",
    ]

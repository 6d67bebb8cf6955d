"""Test the conversion of times from several clocks to a reference clock.

The tests check the offsets that the measurements allow, and the bounds of their error.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commprof.align.ranks.reference_clock import (
    DRIFT_LIMIT,
    WANDER,
    OffsetCurve,
    ReferenceClock,
    observed_wander,
)

SECOND = 10**9


def curve(*points: tuple[int, int, int]) -> OffsetCurve:
    return OffsetCurve(*(np.array(column, np.int64) for column in zip(*points, strict=True)))


def at(offsets: OffsetCurve, *times: int) -> list[tuple[int, int]]:
    found = offsets.at(np.array(times, np.int64))
    return list(zip(found.offset_ns.tolist(), found.error_ns.tolist(), strict=True))


def test_between_two_measurements_the_offset_is_on_the_line():
    # The two measurements are 100 s apart.
    line = curve((0, 1000, 50), (10 * SECOND, 101_000, 150))
    assert at(line, 0, 10 * SECOND) == [(1000, 50), (101_000, 150)]
    (middle,) = at(line, 5 * SECOND)
    assert middle == (51_000, 100 + int(WANDER * 5 * SECOND))


def test_beyond_the_measurements_the_bound_grows():
    # The slope is 10 ppm, and the error is at most 2000 ns in 100 s.
    line = curve((0, 0, 1000), (100 * SECOND, 1_000_000, 1000))
    doubt = WANDER + 2000 / (100 * SECOND)
    assert at(line, 110 * SECOND) == [(1_100_000, 1000 + round(doubt * 10 * SECOND))]
    assert at(line, -10 * SECOND) == [(-100_000, 1000 + round(doubt * 10 * SECOND))]


def test_one_measurement_says_nothing_of_the_drift():
    assert at(curve((0, 77, 10)), 0, SECOND) == [(77, 10), (77, 10 + int(DRIFT_LIMIT * SECOND))]


def test_measurements_too_close_to_tell_the_drift_do_not_make_one_up():
    # The bounds are 1 ms and the measurements 1 s apart, so the slope between them could be 2000 ppm.
    assert at(curve((0, 0, 10**6), (SECOND, 10**6, 10**6)), 2 * SECOND) == [
        (10**6, 10**6 + int(DRIFT_LIMIT * SECOND))
    ]


def test_a_machine_that_was_suspended_leaves_no_line():
    jump = curve((0, 0, 10), (SECOND, 5 * SECOND, 10))
    ((offset, error),) = at(jump, SECOND // 4)
    assert offset - error <= 0 and offset + error >= 5 * SECOND
    assert at(jump, 2 * SECOND)[0][0] == 5 * SECOND


@given(
    st.floats(-50e-6, 50e-6),
    st.lists(st.floats(-WANDER, WANDER), min_size=20, max_size=20),
    st.lists(st.tuples(st.integers(0, 19), st.integers(0, 10_000)), min_size=1, max_size=8),
    st.randoms(use_true_random=False),
)
def test_the_true_offset_is_within_the_bound_between_measurements(drift, wander, measured, chance):
    """Rates that drift by up to the limit between measurements stay within the bound."""
    rates = np.array([drift + each / 2 for each in wander])
    truth = np.concatenate([[0.0], np.cumsum(rates * SECOND)])
    points = {}
    for second, error in measured:
        points[second * SECOND] = (round(truth[second]) + chance.randint(-error, error), error)
    line = curve(*((time, *points[time]) for time in sorted(points)))
    first, last = min(points) // SECOND, max(points) // SECOND
    for second in range(first, last + 1):
        ((offset, error),) = at(line, second * SECOND)
        assert abs(offset - truth[second]) <= error + 2


def rows(*given: tuple[int, int]) -> pa.Table:
    return pa.table(
        {
            "rank": pa.array([rank for rank, _ in given], pa.int32()),
            "attempt": pa.array([0] * len(given), pa.int32()),
            "pid": pa.array([rank for rank, _ in given], pa.int32()),
            "issue_ns": pa.array([time for _, time in given], pa.int64()),
        }
    )


def clock(rank: int, name: str | None, host: str = "h") -> dict:
    return {"rank": rank, "attempt": 0, "pid": rank, "host": host, "clock": name}


def offset(rank: int, offset_ns: int, error_ns: int, time_ns: int = 0) -> dict:
    return {
        "rank": rank,
        "attempt": 0,
        "pid": rank,
        "reference_rank": 0,
        "time_ns": time_ns,
        "offset_ns": offset_ns,
        "error_ns": error_ns,
    }


def test_ranks_that_read_one_clock_share_the_measurement_of_one_of_them():
    reference = ReferenceClock(
        [clock(0, "a"), clock(1, "a"), clock(2, "b"), clock(3, "b")],
        [offset(0, 0, 0), offset(3, -500, 20)],
        one_host=False,
    )
    found = reference.readings(rows((2, 0), (0, 9), (1, 10), (3, 0)))
    assert found.clock.tolist() == [0, 1, 1, 0]
    assert found.offset_ns.tolist() == [-500, 0, 0, -500]
    assert found.error_ns.tolist() == [20, 0, 0, 20]
    assert found.known.all()


def test_a_clock_that_was_never_compared_has_no_offset():
    reference = ReferenceClock([clock(0, "a"), clock(1, "b")], [offset(0, 0, 0)], one_host=False)
    assert reference.readings(rows((0, 1), (1, 1))).known.tolist() == [True, False]


@pytest.mark.parametrize(("one_host", "clocks"), [(True, 1), (False, 2)])
def test_processes_that_left_no_clock_share_one_only_on_one_host(one_host, clocks):
    found = ReferenceClock([], [], one_host).readings(rows((0, 1), (1, 1)))
    assert len(set(found.clock.tolist())) == clocks


def test_a_run_of_an_older_version_goes_by_the_names_of_its_hosts():
    clocks = [clock(0, None, "x"), clock(1, None, "y"), clock(2, None, "x")]
    found = ReferenceClock(clocks, [], one_host=False).readings(rows((0, 1), (1, 1), (2, 1)))
    assert found.clock.tolist() == [0, 1, 0]


def test_no_rows_stay_no_rows():
    assert len(ReferenceClock([], [], one_host=True).readings(rows()).clock) == 0


def test_measurements_that_are_on_no_line_widen_the_bound():
    # The rate is 30 ppm for a minute and then 0 ppm, because a clock daemon corrected the clock.
    times = np.array([0, 60, 120]) * SECOND
    offsets, errors = np.array([0, 1_800_000, 1_800_000]), np.array([1000, 1000, 1000])
    seen = observed_wander(times, offsets, errors)
    assert seen == pytest.approx((900_000 - 2000) / (60 * SECOND))
    assert observed_wander(times, np.array([0, 1_800_000, 3_600_000]), errors) <= 0
    reference = ReferenceClock(
        [clock(0, "a"), clock(1, "b")],
        [offset(0, 0, 0), *(offset(1, int(o), 1000, int(t)) for t, o in zip(times, offsets, strict=True))],
        one_host=False,
    )
    measured = reference.offset((1, 0, 1), np.array([30 * SECOND], np.int64))
    assert measured.error_ns[0] == pytest.approx(1000 + seen * 30 * SECOND, abs=2)

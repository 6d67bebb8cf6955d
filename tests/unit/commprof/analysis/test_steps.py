"""Test ``step_times()``, the intervals, the moved bytes, and human-readable units.

The expected numbers are computed by hand.
"""

import statistics
from math import comb

import pandas as pd
import pytest

from commprof.analysis.columns.units import format_bytes, format_ns
from commprof.analysis.time.exposure import answer
from commprof.analysis.time.intervals import Interval, order_statistic_rank, over_repeats, over_steps
from commprof.analysis.time.training_steps import durations_after_first, final_loss, step_times, step_totals
from commprof.analysis.traffic.moved_bytes import NO_READINGS, ONE_READING, moved
from commprof.analysis.traffic.operation_totals import operations
from commprof.quantiles import student_t
from support.runs import SyntheticRun


def times_of(run: SyntheticRun) -> pd.DataFrame:
    collectives = run.table("collectives")
    steps = run.table("steps")
    sums = operations(run.tables("collectives", "aggregates", "groups"))
    exposure = answer(collectives, steps, ("attempt", "step"), run.table("stalls"))
    return step_times(steps, exposure, sums)


def totals_of(run: SyntheticRun):
    return step_totals(
        run.table("steps"),
        operations(run.tables("collectives", "aggregates", "groups")),
        times_of(run),
        run.world_size,
    )


def test_a_step_lasts_as_long_as_on_its_slowest_rank():
    run = SyntheticRun(world_size=2)
    run.add_step(0, begin_ns=100, end_ns=500, ranks=(0,), loss=2.0, samples=4.0, cpu_ns=10, rss_bytes=70)
    run.add_step(0, begin_ns=90, end_ns=900, ranks=(1,), loss=4.0, samples=4.0, cpu_ns=20, rss_bytes=80)
    row = times_of(run).iloc[0]
    assert (row["ranks"], row["begin_ns"], row["end_ns"], row["duration_ns"]) == (2, 100, 500, 810)
    assert (row["loss"], row["samples"], row["cpu_ns"], row["rss_bytes"]) == (3.0, 8.0, 15, 80)


def test_a_step_that_one_rank_never_ended_has_no_duration():
    run = SyntheticRun(world_size=2, state="killed")
    run.add_step(0, begin_ns=0, end_ns=10)
    run.add_step(1, begin_ns=10, end_ns=20, ranks=(0,))
    run.add_step(1, begin_ns=10, end_ns=None, ranks=(1,))
    frame = times_of(run)
    assert frame["duration_ns"].tolist() == [10, pd.NA]
    assert frame["end_ns"].tolist() == [10, 20]


def test_what_a_step_sent_is_without_barriers_and_initialisation():
    run = SyntheticRun(world_size=2)
    run.add_collective("broadcast", payload_bytes=999, step=-1, phase="init", peer=0)
    run.add_step(0)
    run.add_collective("all_reduce", payload_bytes=100, exposed_ns=30)
    run.add_collective("barrier")
    row = times_of(run).iloc[0]
    assert len(times_of(run)) == 1
    assert (row["collectives"], row["payload_bytes"], row["wire_bytes"], row["exposed_ns"]) == (
        1,
        100,
        100.0,
        30,
    )


def test_the_steps_of_each_attempt_stand_apart():
    run = SyntheticRun(world_size=1)
    for attempt in (0, 1):
        run.add_step(3, begin_ns=0, end_ns=10 + attempt, attempt=attempt)
        run.add_step(4, begin_ns=10, end_ns=30 + attempt, attempt=attempt, loss=float(attempt))
    frame = times_of(run)
    assert frame[["attempt", "step"]].values.tolist() == [[0, 3], [0, 4], [1, 3], [1, 4]]
    assert durations_after_first(frame) == [20, 21]
    assert final_loss(frame) == 1.0


def test_a_run_without_steps_has_no_times():
    run = SyntheticRun()
    run.add_collective("all_reduce", payload_bytes=100, step=-1)
    frame = times_of(run)
    assert len(frame) == 0
    assert durations_after_first(frame) == []
    assert final_loss(frame) is None
    assert totals_of(run).steps == 0


def test_totals_leave_out_the_step_that_a_killed_run_was_in():
    run = SyntheticRun(world_size=2, state="killed")
    for step in range(3):
        run.add_step(step, end_ns=None if step == 2 else -1)
        run.add_collective("all_reduce", payload_bytes=100, step=step, purpose="gradient_reduce")
    steps, totals, _ = totals_of(run)
    assert steps == 2
    assert totals[["op", "collectives", "payload_bytes", "wire_bytes"]].values.tolist() == [
        ["all_reduce", 2, 200, 200.0]
    ]


@pytest.mark.parametrize(
    ("count", "rank"), [(1, None), (5, None), (6, 1), (8, 1), (9, 2), (20, 6), (100, 40)]
)
def test_ranks_of_the_order_statistics(count, rank):
    """For 20 and 100 values, the ranks are from tables of the sign test.

    The other ranks come from the binomial distribution, summed term by term here.
    """
    assert order_statistic_rank(count) == rank
    if rank:
        missed = sum(comb(count, below) for below in range(rank)) * 2 / 2**count
        missed_more = sum(comb(count, below) for below in range(rank + 1)) * 2 / 2**count
        assert missed <= 0.05 < missed_more


def test_the_interval_of_one_run_is_between_its_order_statistics():
    assert over_steps([7, 1, 5, 3, 9, 11]) == Interval(6, 1, 11, "steps")
    assert over_steps([4, 8]) == Interval(6, None, None, None)
    assert over_steps([]) == Interval(None, None, None, None)
    many = over_steps(list(range(10_001)))
    assert many.center == 5000
    assert many.low == pytest.approx(5000 - 98, abs=2)  # 1.96 x sqrt(10001) / 2
    assert many.high == pytest.approx(5000 + 98, abs=2)


def test_the_interval_of_repeats_is_students_over_their_medians():
    center, low, high, over = over_repeats([[10, 10, 10], [14, 14, 14, 14], [12]])
    assert over == "repeats"
    assert center == 12
    # s = 2, t(2) = 4.3027: 12 +- 4.3027 x 2 / sqrt(3) = 12 +- 4.97
    assert (low, high) == (7, 17)
    # The formula gives 200 +- 12.7 x 100, but a time is not negative.
    assert over_repeats([[100], [300]]).low == 0
    assert over_repeats([[5, 7], []]) == Interval(6, None, None, None)


@pytest.mark.parametrize(("degrees", "t"), [(1, 12.706), (5, 2.571), (21, 2.080), (30, 2.042), (120, 1.980)])
def test_students_t(degrees, t):
    assert student_t(degrees) == pytest.approx(t, abs=6e-4)
    assert student_t(10_000) == pytest.approx(statistics.NormalDist().inv_cdf(0.975), abs=1e-3)


def add_readings(run: SyntheticRun, host: str, device: str, readings: list[tuple[int, int, int]]):
    for time_ns, sent, received in readings:
        run.add(
            "wire",
            host=host,
            device=device,
            kind="interface",
            time_ns=time_ns,
            sent_bytes=sent,
            received_bytes=received,
        )


def test_what_moved_is_the_difference_of_the_counters_of_each_interface():
    run = SyntheticRun()
    add_readings(run, "a", "eth0", [(10**9, 500, 50), (2 * 10**9, 700, 60), (4 * 10**9, 1500, 90)])
    add_readings(run, "a", "lo", [(10**9, 5, 5), (4 * 10**9, 5, 5)])
    add_readings(run, "b", "eth0", [(7 * 10**9, 0, 9)])
    frame = moved(run.table("wire"), {})
    assert frame.drop(columns=["kind", "left_out"]).values.tolist() == [
        ["a", "eth0", 1000, 40, 3.0, 3],
        ["a", "lo", 0, 0, 3.0, 2],
        ["b", "eth0", 0, 0, 0.0, 1],
    ]
    assert frame["sent_bytes"].dtype == "int64"
    assert frame.attrs["reason"] is None


def test_a_counter_that_began_anew_loses_nothing_it_showed_since():
    run = SyntheticRun()
    add_readings(
        run,
        "a",
        "eth0",
        [(n * 10**9, *read) for n, read in enumerate(((1000, 10), (1100, 10), (30, 0), (50, 5)))],
    )
    assert moved(run.table("wire"), {})[["sent_bytes", "received_bytes"]].values.tolist() == [[150, 5]]


def test_without_counters_nothing_moved_is_claimed_and_the_reason_is_given():
    assert moved(SyntheticRun().table("wire"), {}).attrs["reason"] == NO_READINGS
    run = SyntheticRun()
    add_readings(run, "a", "eth0", [(1, 1000, 10)])
    assert moved(run.table("wire"), {}).attrs["reason"] == ONE_READING


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1572864, "1.50 MiB"),
        (2**20 - 1, "1.00 MiB"),
        (227008.0, "222 KiB"),
        (2**70, "1048576 PiB"),
        (333.3333, "333 B"),
    ],
)
def test_bytes_for_people(count, text):
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("duration", "text"),
    [
        (0, "0 ns"),
        (999, "999 ns"),
        (1_500, "1.50 us"),
        (999_999, "1.00 ms"),
        (12_300_000, "12.3 ms"),
        (59_940_000_000, "59.9 s"),
        (100_000_000_000, "1 min 40 s"),
        (7_260_000_000_000, "2 h 01 min"),
        (-1_500, "-1.50 us"),
    ],
)
def test_times_for_people(duration, text):
    assert format_ns(duration) == text

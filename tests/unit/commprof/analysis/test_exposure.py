"""Test exposed and overlapped time.

The values of known runs are computed by hand, and random runs are evaluated nanosecond by nanosecond.
"""

import itertools
from collections import defaultdict

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commprof.analysis import api
from commprof.analysis.columns.answers import EXPOSURE, EXPOSURE_BY
from commprof.errors import UsageError
from support.runs import SyntheticRun
from support.sample import examples


def waited(run: SyntheticRun, rank: int, issue: int, wait: int, end: int, **columns) -> None:
    """Add one asynchronous collective of one rank that waits from ``wait`` until ``end``."""
    run.add_collective(
        columns.pop("op", "all_reduce"),
        ranks=(rank,),
        issue_ns=issue,
        host_ns=1,
        exposed_ns=end - wait,
        wait_begin_ns=wait,
        wait_end_ns=end,
        is_async=True,
        **columns,
    )


def stood(run: SyntheticRun, rank: int, issue: int, end: int, **columns) -> None:
    """Add one synchronous collective of one rank."""
    run.add_collective(
        columns.pop("op", "all_reduce"),
        ranks=(rank,),
        issue_ns=issue,
        exposed_ns=end - issue,
        wait_end_ns=end,
        **columns,
    )


def times(run: SyntheticRun, *by: str) -> pd.DataFrame:
    return api.exposure(run.open(), by=by)


def values(frame: pd.DataFrame, *columns: str) -> list[tuple]:
    return [tuple(None if pd.isna(value) else value for value in row) for row in frame[list(columns)].values]


def test_two_threads_that_wait_at_the_same_time_count_once():
    run = SyntheticRun(world_size=1)
    run.add_step(0, begin_ns=1_000, end_ns=2_000)
    stood(run, 0, 1_100, 1_500, thread="a")
    stood(run, 0, 1_300, 1_800, thread="b")
    row = times(run, "step").iloc[0]
    assert (row["exposed_ns"], row["summed_ns"], row["overlapped_ns"]) == (700, 900, 0)
    assert (row["step_ns"], row["exposed_share"]) == (1_000, pytest.approx(0.7))
    assert values(times(run, "thread"), "thread", "exposed_ns") == [("a", 400), ("b", 500)]


def test_a_wait_counts_where_the_time_was_spent():
    """The collective is issued in step 0 and waited for in step 1.

    A parameter gather that overlaps with the next forward pass behaves like this.
    """
    run = SyntheticRun(world_size=1)
    run.add_step(0, begin_ns=1_000, end_ns=2_000)
    run.add_step(1, begin_ns=2_000, end_ns=3_000)
    waited(run, 0, 1_900, 2_300, 2_700, step=0)
    assert values(times(run, "step"), "step", "records", "exposed_ns", "overlapped_at_most_ns") == [
        (0, 1, 0, 100),
        (1, 0, 400, 300),
    ]
    across = SyntheticRun(world_size=1)
    across.add_step(0, begin_ns=1_000, end_ns=2_000)
    across.add_step(1, begin_ns=2_000, end_ns=3_000)
    stood(across, 0, 1_900, 2_300, step=0)
    assert values(times(across, "step"), "step", "exposed_ns") == [(0, 100), (1, 300)]


def test_what_lies_outside_of_steps_stands_apart_and_in_no_share():
    run = SyntheticRun(world_size=1)
    stood(run, 0, 100, 300, step=-1)
    run.add_step(0, begin_ns=1_000, end_ns=2_000)
    stood(run, 0, 1_000, 1_250, step=0)
    stood(run, 0, 5_000, 5_100, step=0)  # The collective belongs to a validation after the last step.
    frame = times(run, "step")
    assert values(frame, "step", "exposed_ns", "exposed_share") == [
        (-1, 200, None),
        (0, 250, 0.25),
        (None, 100, None),
    ]
    total = times(run).iloc[0]
    assert (total["exposed_ns"], total["step_ns"], total["exposed_share"]) == (550, 1_000, 0.25)


def test_a_checkpoint_within_a_step_is_in_neither_the_time_of_the_step_nor_its_waits():
    run = SyntheticRun(world_size=1)
    run.add_step(0, begin_ns=1_000, end_ns=6_000, outside_ns=3_500)
    for begin, end in ((2_000, 4_500), (5_000, 6_000)):
        run.add("outside_steps", rank=0, attempt=0, pid=run.pid(0), phase="checkpoint", after_step=0, begin_ns=begin,
                end_ns=end, passes=1)  # fmt: skip
        stood(run, 0, begin, end, step=-1, after_step=0, phase="checkpoint")
    stood(run, 0, 1_100, 1_400, step=0)
    # The collective is in progress for 100 in the step, then during the checkpoint, then for 200.
    waited(run, 0, 1_900, 4_600, 4_700, step=0)
    run.add_step(1, begin_ns=6_000, end_ns=7_000)
    stood(run, 0, 6_000, 6_200, step=1)
    shown = ("step", "exposed_ns", "overlapped_at_most_ns", "step_ns", "exposed_share")
    assert values(times(run, "step"), *shown) == [
        (-1, 0, 0, None, None),
        (0, 400, 200, 1_500, pytest.approx(4 / 15)),
        (1, 200, 0, 1_000, 0.2),
        (None, 3_500, None, None, None),
    ]
    steps = api.step_times(run.open())
    assert steps[["duration_ns", "exposed_ns"]].values.tolist() == [[1_500, 400], [1_000, 200]]


def test_a_sampled_end_says_how_long_it_really_ran():
    run = SyntheticRun(world_size=1)
    run.add_step(0, begin_ns=0, end_ns=10_000)
    waited(run, 0, 1_000, 6_000, 6_100, device_end_ns=3_000, purpose="metric")
    waited(run, 0, 1_000, 6_000, 6_100, purpose="activation")
    frame = times(run, "purpose")
    columns = ("purpose", "exposed_ns", "overlapped_ns", "overlapped_at_most_ns", "sampled", "records")
    assert values(frame, *columns) == [
        ("activation", 100, None, 5_000, 0, 1),
        ("metric", 100, 2_000, 2_000, 1, 1),
    ]
    together = times(run, "step")  # One end is not known, so 5,000 is a bound and not a value.
    assert values(together, "overlapped_ns", "overlapped_at_most_ns") == [(None, 5_000)]


def test_a_handle_that_nobody_waited_for_is_unknown_unless_its_end_is():
    run = SyntheticRun(world_size=1)
    run.add_step(0, begin_ns=0, end_ns=10_000)
    run.add_collective("all_reduce", issue_ns=100, is_async=True, bucket=0)
    run.add_collective("all_reduce", issue_ns=100, is_async=True, bucket=1, device_end_ns=400)
    frame = times(run, "bucket")
    assert values(
        frame, "bucket", "timed", "unwaited", "sampled", "exposed_ns", "overlapped_ns", "exposed_share"
    ) == [(0, 0, 1, 0, None, None, None), (1, 0, 1, 1, None, 300, None)]


def test_a_device_counts_by_its_own_times():
    """For a collective on a device, the waits of the host do not count.

    If the times of the device are not known, the answer is null.
    """
    run = SyntheticRun(world_size=1)
    run.add_step(0, begin_ns=0, end_ns=10_000)
    on_device = {"device": "cuda:0", "issue_ns": 100, "wait_begin_ns": 150, "wait_end_ns": 160}
    run.add_collective(
        "all_reduce", **on_device, is_async=True, device_begin_ns=1_000, device_end_ns=5_000, exposed_ns=1_500
    )
    run.add_collective("barrier", **on_device)
    assert values(times(run, "op"), "op", "timed", "exposed_ns", "overlapped_at_most_ns") == [
        ("all_reduce", 1, 1_500, 2_500),
        ("barrier", 0, None, None),
    ]


def test_means_are_over_the_ranks_that_have_part():
    run = SyntheticRun(world_size=4)
    run.add_step(0, begin_ns=0, end_ns=1_000)
    for rank in range(4):
        stood(run, rank, 100, 200, purpose="gradient_reduce")
    for rank in (1, 2):
        stood(run, rank, 500, 800, purpose="pipeline", group=(1, 2), pg="pair")
    frame = times(run, "purpose")
    assert values(frame, "purpose", "ranks", "exposed_ns", "exposed_share") == [
        ("gradient_reduce", 4, 100, 0.1),
        ("pipeline", 2, 300, 0.3),
    ]
    assert times(run)["exposed_ns"].tolist() == [250]
    assert values(times(run, "rank"), "rank", "ranks", "exposed_ns") == [
        (0, 1, 100),
        (1, 1, 400),
        (2, 1, 400),
        (3, 1, 100),
    ]


def test_each_collective_by_itself():
    run = SyntheticRun(world_size=2)
    run.add_step(0, begin_ns=0, end_ns=1_000)
    for number, (first, second) in enumerate([((10, 40), (30, 40)), ((100, 130), (120, 150))]):
        stood(run, 0, *first, pg_seq=number)
        stood(run, 1, *second, pg_seq=number)
    assert values(times(run, "pg", "pg_seq"), "pg_seq", "records", "exposed_ns") == [(0, 2, 20), (1, 2, 30)]


def test_attempts_stand_apart_and_add_up():
    run = SyntheticRun(world_size=1)
    for attempt, spent in ((0, 100), (1, 300)):
        run.add_step(7, begin_ns=0, end_ns=1_000, attempt=attempt)
        stood(run, 0, 0, spent, attempt=attempt, step=7)
    assert values(times(run, "attempt", "step"), "attempt", "exposed_ns", "step_ns") == [
        (0, 100, 1_000),
        (1, 300, 1_000),
    ]
    assert values(times(run, "step"), "exposed_ns", "step_ns", "exposed_share") == [(400, 2_000, 0.2)]


def test_a_step_typically():
    run = SyntheticRun(world_size=1)
    for step, spent in enumerate((900, 100, 300, 200)):
        run.add_step(step, begin_ns=1_000 * step, end_ns=1_000 * step + 1_000)
        stood(run, 0, 1_000 * step, 1_000 * step + spent, step=step, purpose="gradient_reduce")
        if step == 2:
            stood(run, 0, 2_500, 2_600, step=step)
    frame = api.exposure_per_step(run.open())
    assert values(frame, "purpose", "steps", "records", "exposed_ns", "exposed_share") == [
        ("gradient_reduce", 3, 3, 200, pytest.approx(0.2)),
        (None, 3, 1, 0, 0),
        ("all", 3, 4, 200, pytest.approx(0.2)),
    ]
    assert api.step_times(run.open())["exposed_ns"].tolist() == [900, 100, 400, 200]


def test_a_run_of_one_step_shows_that_one_and_one_without_steps_none():
    run = SyntheticRun(world_size=1)
    run.add_step(0, begin_ns=0, end_ns=1_000)
    stood(run, 0, 0, 400)
    assert values(api.exposure_per_step(run.open()), "purpose", "exposed_ns") == [(None, 400), ("all", 400)]
    killed = SyntheticRun(world_size=1)
    killed.add_step(0, begin_ns=0, end_ns=None)
    stood(killed, 0, 0, 400)
    assert len(api.exposure_per_step(killed.open())) == 0
    assert values(times(killed, "step"), "step", "exposed_ns", "step_ns", "exposed_share") == [
        (0, 400, None, None)
    ]
    assert times(SyntheticRun(), "step").empty


def test_a_column_that_is_none_is_refused_with_the_nearest():
    with pytest.raises(UsageError, match="did you mean 'purpose'"):
        times(SyntheticRun(), "purposes")
    described = api.describe_columns("exposure")
    assert set(described) == {*EXPOSURE_BY, *EXPOSURE.names}


STEP_NS = 40
moment = st.integers(0, 4 * STEP_NS)
record = st.tuples(
    st.integers(0, 2),  # The rank.
    st.lists(moment, min_size=3, max_size=3).map(sorted),
    st.booleans(),  # Whether the call is asynchronous.
    st.sampled_from([None, "gradient_reduce", "metric"]),
    # The sampled end, as a fraction of the time until the wait ended.
    st.sampled_from([None, 0.0, 0.5, 1.0]),
)


def built(records) -> SyntheticRun:
    run = SyntheticRun(world_size=3)
    for step in range(3):
        run.add_step(step, begin_ns=10 + STEP_NS * step, end_ns=10 + STEP_NS * (step + 1))
    for rank, (issue, wait, end), is_async, purpose, part in records:
        columns = {"purpose": purpose}
        if part is not None:
            columns["device_end_ns"] = issue + round(part * (end - issue))
        if is_async:
            waited(run, rank, issue, wait, end, **columns)
        else:
            stood(run, rank, issue, end, **columns)
    return run


def moment_by_moment(records, purposes) -> dict[tuple[int, int | None], tuple[int, int]]:
    """Return exposed and overlapped time by rank and step, evaluated separately for every nanosecond."""
    found: dict[tuple[int, int | None], list[int]] = defaultdict(lambda: [0, 0])
    for rank, now in itertools.product(range(3), range(4 * STEP_NS)):
        mine = [r for r in records if r[0] == rank and r[3] in purposes]
        held = running = False
        for _, (issue, wait, end), is_async, _, part in mine:
            held |= (wait if is_async else issue) <= now < end
            last = end if part is None else issue + round(part * (end - issue))
            running |= issue <= now < last
        step = -1 if now < 10 else (now - 10) // STEP_NS if now < 10 + 3 * STEP_NS else None
        found[rank, step][0] += held
        found[rank, step][1] += running and not held
    return {key: tuple(value) for key, value in found.items() if any(value)}


def spent(frame: pd.DataFrame) -> dict[tuple[int, int | None], tuple[int, int]]:
    columns = ("rank", "step", "exposed_ns", "overlapped_at_most_ns")
    rows = [
        (rank, step, (exposed or 0, overlapped or 0))
        for rank, step, exposed, overlapped in values(frame, *columns)
    ]
    return {(rank, step): both for rank, step, both in rows if any(both)}


@settings(max_examples=examples(15), deadline=None)
@given(st.lists(record, max_size=12))
def test_any_run(records):
    run = built(records)
    frame = times(run, "rank", "step")
    assert spent(frame) == moment_by_moment(records, {None, "gradient_reduce", "metric"})
    # Exposed time never exceeds the sum of the records or the length of the step. Parts never exceed the
    # total.
    by_rank = times(run, "rank")
    for exposed, summed in values(by_rank, "exposed_ns", "summed_ns"):
        assert (exposed or 0) <= (summed or 0)
    for step, exposed, overlapped, step_ns in values(
        frame, "step", "exposed_ns", "overlapped_at_most_ns", "step_ns"
    ):
        if step is not None and step >= 0 and step_ns:
            assert (exposed or 0) + (overlapped or 0) <= step_ns
    by_purpose = times(run, "rank", "step", "purpose")
    for purpose in (None, "gradient_reduce", "metric"):
        named = by_purpose["purpose"].isna() if purpose is None else by_purpose["purpose"] == purpose
        assert spent(by_purpose[named]) == moment_by_moment(records, {purpose})


@settings(max_examples=examples(4), deadline=None)
@given(st.lists(record, max_size=12), st.permutations(range(3)))
def test_ranks_have_no_order(records, order):
    renamed = [(order[rank], *rest) for rank, *rest in records]
    by_rank = {
        (order[rank], step): both
        for (rank, step), both in spent(times(built(records), "rank", "step")).items()
    }
    assert by_rank == spent(times(built(renamed), "rank", "step"))
    columns = ("step", "exposed_ns", "overlapped_at_most_ns", "exposed_share")
    first, second = (values(times(built(these), "step"), *columns) for these in (records, renamed))
    assert first == second

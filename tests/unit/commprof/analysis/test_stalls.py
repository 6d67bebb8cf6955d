"""Test how intervals in which C++ waited bound the exposed time.

The results are compared with runs whose exposed time is known.
"""

import itertools

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commprof.analysis import api
from support.runs import SyntheticRun
from support.sample import examples

COLUMNS = ("exposed_ns", "exposed_low_ns", "exposed_high_ns", "unwaited", "bounded")


def stall(run, since, begin, end, low, high, rank=0, step=0) -> None:
    run.rows["stalls"].append(
        {
            "rank": rank,
            "attempt": 0,
            "pid": run.pid(rank),
            "step": step,
            "place": "backward",
            "since_ns": since,
            "begin_ns": begin,
            "end_ns": end,
            "exposed_low_ns": low,
            "exposed_high_ns": high,
        }
    )


def reduced(run, issue, rank=0, **columns) -> None:
    """Add a bucket that DDP's reducer issues, without a recorded wait."""
    said = {"layer": "c10d", "purpose": "gradient_reduce"} | columns
    run.add_collective("all_reduce", ranks=(rank,), issue_ns=issue, host_ns=1, is_async=True, **said)


def waited(run, begin, end, rank=0, **columns) -> None:
    run.add_collective(
        "all_gather", ranks=(rank,), issue_ns=begin, exposed_ns=end - begin, wait_end_ns=end, **columns
    )


def shown(run, *by, columns=COLUMNS):
    frame = api.exposure(run.open(), by=by)
    return [
        tuple(None if pd.isna(value) else value for value in row)
        for row in frame[[*by, *columns]].itertuples(index=False)
    ]


def test_a_stall_bounds_what_nobody_saw():
    run = SyntheticRun(world_size=1)
    run.add_step(0, begin_ns=1_000, end_ns=2_000)
    for issue in (1_100, 1_200):
        reduced(run, issue, bucket=issue)
    waited(run, 1_050, 1_080, purpose="metric")
    stall(run, 1_100, 1_500, 1_900, 300, 380)
    assert shown(run, "step") == [(0, None, 330, 410, 2, 2)]
    assert shown(run, "purpose") == [("gradient_reduce", None, 300, 380, 2, 2), ("metric", 30, 30, 30, 0, 0)]
    # It is not known for which of two buckets the program waited.
    assert shown(run, "bucket", columns=COLUMNS[1:3])[:2] == [(1_100, 0, 380), (1_200, 0, 380)]
    # The bucket is in progress from 1,100 until 1,900 at most. At least 300 of this time are exposed.
    assert shown(run, "step", columns=("overlapped_ns", "overlapped_at_most_ns")) == [(0, None, 530 - 30)]
    assert api.step_times(run.open())["exposed_high_ns"].tolist() == [410]


def test_a_wait_on_a_device_bounds_the_records_of_that_device():
    """The host issues two steps ahead of the device.

    The host times therefore decide which wait belongs to which bucket.
    """
    run = SyntheticRun(world_size=1)
    run.add_step(0, begin_ns=1_000, end_ns=2_000)
    run.add_step(1, begin_ns=2_000, end_ns=3_000)
    for step, issue in ((0, 1_010), (1, 1_110)):
        reduced(run, issue, step=step, device="cuda:0", device_begin_ns=issue + 600 + 900 * step)
        stall(run, issue, issue + 20, issue + 30, 0, 200, step=step)
        device_begin = 1_700 + 1_000 * step
        run.rows["stalls"][-1] |= {"device_begin_ns": device_begin, "device_end_ns": device_begin + 200}
    # The collective is on the host, and no wait of the host is known for it.
    reduced(run, 1_011, step=0, device="cpu")
    assert shown(run, "step") == [(0, None, 0, None, 2, 1), (1, None, 0, 200, 1, 1)]
    assert shown(run, "step", columns=("overlapped_at_most_ns",))[1] == (1, 2_900 - 2_610)


def test_what_no_stall_covers_has_no_upper_bound():
    run = SyntheticRun(world_size=1)
    run.add_step(0, begin_ns=1_000, end_ns=2_000)
    reduced(run, 1_100)
    reduced(run, 1_950)
    # The program itself issues this collective and may wait anywhere.
    reduced(run, 1_100, layer="process_group", purpose="metric")
    stall(run, 1_100, 1_500, 1_900, 300, 380)
    assert shown(run, "step") == [(0, None, 300, None, 3, 1)]
    assert shown(run, "step", columns=("overlapped_at_most_ns",)) == [(0, None)]


def test_a_stall_across_the_end_of_a_step_is_bounded_on_both_sides():
    run = SyntheticRun(world_size=1)
    run.add_step(0, begin_ns=1_000, end_ns=2_000)
    run.add_step(1, begin_ns=2_000, end_ns=3_000)
    reduced(run, 1_100)
    stall(run, 1_100, 1_900, 2_300, 250, 350)
    assert shown(run, "step", columns=COLUMNS[:3]) == [(0, None, 0, 100), (1, None, 150, 300)]


def test_other_purposes_and_a_wait_of_another_thread_in_a_stall_count_once():
    run = SyntheticRun(world_size=1)
    run.add_step(0, begin_ns=1_000, end_ns=2_000)
    reduced(run, 1_100)
    waited(run, 1_500, 1_600, thread="b", purpose="metric")
    stall(run, 1_100, 1_500, 1_900, 300, 380)
    assert shown(run, "step", columns=COLUMNS[:3]) == [(0, None, 100 + 200, 100 + 380)]


def test_a_typical_step_has_the_medians_of_the_bounds():
    run = SyntheticRun(world_size=1)
    for step, (low, high) in enumerate(((900, 950), (100, 110), (300, 340), (200, 240))):
        run.add_step(step, begin_ns=1_000 * step, end_ns=1_000 * step + 1_000)
        reduced(run, 1_000 * step + 10, step=step)
        stall(run, 1_000 * step + 10, 1_000 * step + 20, 1_000 * step + 980, low, high, step=step)
    whole = api.exposure_per_step(run.open()).iloc[-1]
    assert (whole["purpose"], whole["exposed_low_ns"], whole["exposed_high_ns"]) == ("all", 200, 240)
    assert pd.isna(whole["exposed_ns"]) and pd.isna(whole["exposed_share"])
    assert api.exposed_time(whole) == "200 ns to 240 ns (bounds)"
    assert api.exposed_share(whole) == "20.0 % to 24.0 % (bounds)"


STEP_NS = 40
PURPOSES = ("gradient_reduce", "unused_parameters")

window = st.tuples(
    st.integers(0, 10),  # The time from the end of the previous collective until this one is issued.
    st.integers(0, 10),  # The time until the wait.
    st.integers(1, 25),  # The time until the collective is complete.
    # The blocked part, as fractions of the interval.
    st.tuples(st.floats(0, 1), st.floats(0, 1)).map(sorted),
    st.tuples(st.integers(0, 3), st.integers(0, 3)),  # The distance of the bounds from the true times.
    st.sampled_from([PURPOSES[:1], PURPOSES[1:], PURPOSES]),
    st.floats(0, 1),  # From this point on, the program was blocked by the last of its purposes.
)
wait = st.tuples(st.integers(0, 150), st.integers(1, 20))


@settings(max_examples=examples(20), deadline=None)
@given(st.lists(window, max_size=5), st.lists(wait, max_size=3))
def test_the_truth_lies_between_the_bounds(windows, waits):
    run = SyntheticRun(world_size=1)
    for step in range(3):
        run.add_step(step, begin_ns=10 + STEP_NS * step, end_ns=10 + STEP_NS * (step + 1))
    blocked = {purpose: set() for purpose in (*PURPOSES, "metric")}
    now = 0
    for before, until, length, (first, last), (below, above), purposes, change in windows:
        since = now + before + 1
        begin, end = since + until, since + until + length
        held = range(begin + round(first * length), begin + round(last * length))
        for place, moment in enumerate(held):
            blocked[purposes[0] if place < change * len(held) else purposes[-1]].add(moment)
        for purpose in purposes:
            reduced(run, since, purpose=purpose)
        stall(run, since, begin, end, max(0, len(held) - below), min(length, len(held) + above))
        now = end
    for begin, length in waits:
        waited(run, begin, begin + length, purpose="metric", thread="b")
        blocked["metric"].update(range(begin, begin + length))
    held_to(run, ("step",), lambda _: set().union(*blocked.values()))
    held_to(run, ("step", "purpose"), lambda row: blocked[row["purpose"]])


def held_to(run, by, moments) -> None:
    for row in api.exposure(run.open(), by=by).astype(object).replace({pd.NA: None}).to_dict("records"):
        step = row["step"]
        inside = [
            moment for moment in moments(row)
            if (-1 if moment < 10 else (moment - 10) // STEP_NS if moment < 10 + 3 * STEP_NS else None)
            == (None if pd.isna(step) else step)
        ]  # fmt: skip
        if row["exposed_low_ns"] is None:
            assert not inside  # The purposes of this row have no exposed time here.
        else:
            assert row["exposed_low_ns"] <= len(inside) <= row["exposed_high_ns"], row


@pytest.mark.parametrize("order", itertools.permutations(range(3)))
def test_stalls_have_no_order(order):
    run = SyntheticRun(world_size=1)
    run.add_step(0, begin_ns=0, end_ns=10_000)
    for number in order:
        reduced(run, 1_000 * number + 10)
        stall(run, 1_000 * number + 10, 1_000 * number + 100, 1_000 * number + 900, 300 + number, 400)
    assert shown(run, "step") == [(0, None, 903, 1_200, 3, 3)]

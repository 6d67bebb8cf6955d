"""Test which traffic counts in the values per step, and which traffic is one-off.

The expected numbers are computed by hand.
"""

from __future__ import annotations

import time

import pandas as pd

from commprof.analysis.time.training_steps import step_totals
from commprof.analysis.traffic.operation_totals import operations
from commprof.analysis.traffic.steady_steps import steady, warm_steps, when
from support.runs import SyntheticRun

WHOLE = [(0, step) for step in range(9)]


def rows_of(purpose: str, sent: dict[int, int]) -> list[dict]:
    """Return the rows of a purpose. ``sent`` gives the number of collectives of 10 bytes for each step."""
    return [
        {
            "attempt": 0,
            "step": step,
            "purpose": purpose,
            "collectives": n,
            "payload_bytes": 10 * n,
            "wire_bytes": 5.0 * n,
        }
        for step, n in sent.items()
    ]


def judged(sent: dict[int, int]) -> tuple[list[tuple], list[tuple]]:
    found = steady(rows_of("x", sent), ["purpose"], WHOLE)
    return (
        [(row["collectives"], row["payload_bytes"], row["every"]) for row in found.per_step],
        [(row["step"], row["collectives"], row["payload_bytes"]) for row in found.one_offs],
    )


def test_what_comes_in_each_step_has_the_value_of_each_step():
    assert judged(dict.fromkeys(range(9), 12)) == ([(12, 120, 1)], [])
    assert judged(dict.fromkeys(range(1, 9), 12)) == (
        [(12, 120, 1)],
        [],
    )  # One step has no such traffic, and the value is still 12.


def test_what_single_steps_sent_beyond_it_is_listed_apart():
    assert judged({**dict.fromkeys(range(9), 12), 0: 14, 5: 15}) == ([(12, 120, 1)], [(0, 2, 20), (5, 3, 30)])


def test_what_was_sent_once_is_in_no_mean():
    assert judged({1: 2}) == ([], [(1, 2, 20)])
    assert judged({0: 300}) == ([], [(0, 300, 3000)])
    assert judged({2: 1, 3: 1, 7: 1}) == ([], [(2, 1, 10), (3, 1, 10), (7, 1, 10)])


def test_what_comes_in_every_kth_step_counts_as_a_kth_part():
    assert judged({1: 4, 3: 4, 5: 4, 7: 4}) == ([(2, 20, 2)], [])
    assert judged({4: 4, 8: 4}) == ([(1, 10, 4)], [])


def test_what_varies_has_its_mean():
    assert judged({step: step for step in range(1, 9)}) == ([(4.5, 45, 1)], [])


def test_a_run_of_one_step_is_that_step():
    assert warm_steps([(0, 0)]) == [(0, 0)] and warm_steps([(0, 0), (0, 1), (1, 1)]) == [(0, 1)]
    assert when(rows_of("x", {0: 1, 3: 1, 4: 1})) == "steps 0, 3-4" and when(rows_of("x", {7: 1})) == "step 7"


def test_the_totals_that_settings_are_compared_by_have_no_one_offs():
    run = SyntheticRun(world_size=2)
    for step in range(8):
        run.add_step(step)
        for _ in range(3):
            run.add_collective("all_reduce", payload_bytes=100, step=step)
        if step == 3:
            run.add_collective("all_gather", payload_bytes=5000, step=step)
    sums = operations(run.tables("collectives", "aggregates", "groups"))
    times = pd.DataFrame({"attempt": [0] * 8, "step": range(8), "duration_ns": [10] * 8})
    totals = step_totals(run.table("steps"), sums, times, 2)
    assert totals.steps == 8
    rows = totals.totals.to_dict("records")
    assert [(row["op"], row["collectives"] / 8, row["payload_bytes"] / 8) for row in rows] == [
        ("all_reduce", 3, 300)
    ]


def test_totals_of_steps_are_not_rounded():
    """3 and 4 collectives in the two warm steps are 3.5 per step.

    The total over three steps is therefore 10.5 and not 10.
    """
    run = SyntheticRun(world_size=2)
    for step, count in enumerate((3, 3, 4)):
        run.add_step(step)
        for number in range(count):
            run.add_collective("all_reduce", payload_bytes=100 + 7 * step + number, step=step)
    sums = operations(run.tables("collectives", "aggregates", "groups"))
    times = pd.DataFrame({"attempt": [0] * 3, "step": range(3), "duration_ns": [10] * 3})
    (row,) = step_totals(run.table("steps"), sums, times, 2).totals.to_dict("records")
    assert row["collectives"] / 3 == 3.5
    assert row["payload_bytes"] / 3 == (3 * 107 + 3 + 4 * 114 + 6) / 2


def test_the_time_grows_with_the_steps_and_not_with_their_square():
    def seconds(steps: int) -> float:
        ended = [(0, step) for step in range(steps)]
        rows = rows_of("each", dict.fromkeys(range(steps), 4)) + rows_of(
            "other", dict.fromkeys(range(1, steps, 2), 4)
        )
        begin = time.process_time()
        found = steady(rows, ["purpose"], ended)
        taken = time.process_time() - begin
        assert [row["every"] for row in found.per_step] == [1, 2]
        return taken

    few = min(seconds(500) for _ in range(5))
    # The number of steps is 16 times larger. A quadratic algorithm would take 256 times as long.
    assert seconds(8000) < 80 * few

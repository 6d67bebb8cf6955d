"""Test the summary of the ranks that arrive late.

The expected numbers are computed by hand. test_arrivals.py tests single arrivals.
"""

import random

from commprof.analysis import api
from support.runs import SyntheticRun


def a_run(ranks=3, late=(0, 10_000, 500_000), count=4, end_ns=1_000_000):
    """Return a run in which each rank arrives ``late`` after the first.

    Each call returns ``end_ns`` after the first arrival.
    """
    run = SyntheticRun(world_size=ranks)
    for number in range(count):
        begin = 10_000_000 * (number + 1)
        run.add_step(number, begin_ns=begin, duration_ns=5_000_000)
        for rank in range(ranks):
            run.add_collective(
                "all_reduce", payload_bytes=400, step=number, ranks=(rank,), issue_ns=begin + late[rank],
                host_ns=end_ns - late[rank], purpose="gradient_reduce",
            )  # fmt: skip
    return run


def test_how_late_each_rank_comes():
    found = api.straggling(a_run(count=12).open())
    assert found.lateness[["rank", "collectives", "p5_ns", "median_ns", "highest_ns", "error_ns"]].values.tolist() == [
        [0, 12, 0, 0, 0, 0],
        [1, 12, 10_000, 10_000, 10_000, 0],
        [2, 12, 500_000, 500_000, 500_000, 0],
    ]  # fmt: skip
    assert list(found.ranks["last"]) == [0, 0, 12]
    assert "Rank 2 is a straggler: it arrived last" in found.ranks.attrs["statement"]


def late_from(step, ranks=3, steps=12):
    """Return a run in which rank 1 arrives 5 ms late from ``step`` on.

    Rank 1 is late for the first of two collectives of each step. In step 0 it is 8 ms late.
    """
    run = SyntheticRun(world_size=ranks)
    for number in range(steps):
        begin = 100_000_000 * (number + 1)
        run.add_step(number, begin_ns=begin, duration_ns=90_000_000)
        for place in range(2):
            for rank in range(ranks):
                delay = 8_000_000 if number == 0 else 5_000_000 if number >= step else 0
                late = delay if rank == 1 and place == 0 else 0
                run.add_collective(
                    "all_reduce", payload_bytes=400, step=number, ranks=(rank,), purpose="gradient_reduce",
                    issue_ns=begin + place * 40_000_000 + late + rank, host_ns=20_000_000 - late,
                )  # fmt: skip
    return run


def test_the_lateness_of_each_step_adds_up_to_what_the_verdict_says():
    found = api.straggling(late_from(5).open())
    of_rank = found.steps[found.steps["rank"] == 1].set_index("step")
    assert of_rank["lateness_ns"].tolist() == [8_000_001, *[1] * 4, *[5_000_001] * 7]
    assert of_rank["is_warm"].tolist() == [False, *[True] * 11] and set(of_rank["steps"]) == {1}
    waited = of_rank.loc[of_rank["is_warm"], "others_waited_own_ns"]
    assert waited.tolist() == [0, 0, 0, 0, *[4_999_999.0] * 7]
    said = found.ranks.attrs
    last, compared = of_rank.loc[of_rank["is_warm"], ["last", "collectives"]].sum()
    assert (last, compared) == (7, 22)
    assert f"arrived last in {100 * last / compared:.0f} % of {compared} collectives" in said["statement"]
    assert f"waited {api.format_ns(waited.sum() / 11)} per step for its own delay" in said["statement"]
    assert said["since"] == [[1, 5]] and "from step 5 on" in said["statement"]


def test_many_steps_are_summed_in_ranges_of_which_the_first_step_is_none():
    found = api.straggling(late_from(301, steps=601).open())
    steps = found.steps[found.steps["rank"] == 1]
    assert len(steps) <= 251 and steps["steps"].sum() == 601
    assert steps[["step", "steps", "is_warm"]].values.tolist()[:2] == [[0, 1, False], [1, 3, True]]
    assert steps["collectives"].sum() == 1202 and steps["last"].sum() == 301
    of_late = steps[steps["step"] == 301]
    assert of_late["lateness_ns"].tolist() == [5_000_001]
    assert found.ranks.attrs["since"] == [[1, 301]]


def test_steps_of_one_attempt_are_not_summed_with_those_of_the_next():
    run = SyntheticRun(world_size=2)
    for attempt in range(2):
        for step in range(3):
            run.add_step(step, attempt=attempt, begin_ns=10_000_000 * (3 * attempt + step + 1))
            run.add_collective("all_reduce", payload_bytes=4, step=step, attempt=attempt)
    steps = api.straggling(run.open()).steps
    assert steps.loc[steps["rank"] == 0, ["attempt", "step", "is_warm"]].values.tolist() == [
        [0, 0, False], [0, 1, True], [0, 2, True], [1, 0, False], [1, 1, True], [1, 2, True],
    ]  # fmt: skip


def test_a_run_without_steps_has_no_lateness_of_steps():
    run = SyntheticRun(world_size=2)
    run.add_collective("all_reduce", payload_bytes=4, step=-1)
    found = api.straggling(run.open())
    assert found.steps.empty and len(found.ranks) == 2 and list(found.steps.columns)


def test_what_took_longest_is_told_apart():
    slow = api.straggling(a_run(late=(0, 10, 20)).open()).causes.set_index(["rank", "cause"])
    assert slow.loc[(0, "slow_transfer"), "collectives"] == 4
    late = api.straggling(a_run(late=(0, 0, 900_000)).open()).causes.set_index(["rank", "cause"])
    assert late.loc[(0, "late_arrival"), ["collectives", "of_collectives", "time_ns"]].tolist() == [
        4,
        4,
        3_600_000,
    ]
    assert late.loc[(2, "late_arrival"), "collectives"] == 0


def test_the_worst_collectives_come_first():
    run = a_run(count=3)
    run.add_collective("all_gather", payload_bytes=8, ranks=(0,), issue_ns=70_000_000, host_ns=3_000_000)
    run.add_collective("all_gather", payload_bytes=8, ranks=(1,), issue_ns=71_000_000, host_ns=2_000_000)
    run.add_collective("all_gather", payload_bytes=8, ranks=(2,), issue_ns=70_400_000, host_ns=2_600_000)
    frame = api.straggling(run.open(), limit=2).collectives
    assert list(frame["op"]) == ["all_gather", "all_reduce"]
    worst = frame.iloc[0]
    assert (worst["spread_ns"], worst["last_rank"], worst["certain"]) == (1_000_000, 1, True)
    assert (worst["lead_ns"], worst["begin_ns"], worst["end_ns"]) == (600_000, 70_000_000, 73_000_000)
    # The call ends 2 ms after the last arrival, and the wait is only 1 ms.
    assert worst["cause"] == "slow_transfer"


def test_a_run_of_one_rank_or_with_a_missing_rank_names_nobody():
    for run in (SyntheticRun(world_size=1), SyntheticRun(world_size=2)):
        run.add_collective("all_reduce", payload_bytes=4, ranks=(0,))
        found = api.straggling(run.open())
        assert found.ranks.empty and found.lateness.empty and found.causes.empty and found.collectives.empty
    run = SyntheticRun(world_size=3, recorded_ranks=(0, 1))
    run.add_collective("all_reduce", payload_bytes=4)
    frame = api.straggling(run.open()).collectives
    assert len(frame) == 1
    assert frame["last_rank"].isna().all()


def test_other_numbers_for_the_ranks_give_the_same_answers_under_these_numbers():
    late = [0, 30_000, 70_000, 200_000]
    names = random.Random(3).sample(range(4), 4)
    moved = [late[names.index(rank)] for rank in range(4)]
    plain, renamed = (api.straggling(a_run(4, times).open()) for times in (late, moved))
    for table, key in (("lateness", "rank"), ("causes", "rank")):
        before = getattr(plain, table).assign(rank=lambda frame: [names[rank] for rank in frame["rank"]])
        columns = list(before.columns)
        assert (
            before.sort_values(columns).values.tolist()
            == getattr(renamed, table).sort_values(columns).values.tolist()
        ), key
    assert [names[rank] for rank in plain.collectives["last_rank"]] == list(renamed.collectives["last_rank"])

"""Test ``arrivals()`` and ``stragglers()``.

The answers give the arrival times, the last rank, and the waits of the other ranks. The expected numbers are
computed by hand.
"""

from __future__ import annotations

import random

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commprof.analysis import api
from commprof.analysis.stragglers import straggler_answers
from commprof.analysis.stragglers.arrivals import arrivals, arrivals_frame
from commprof.analysis.stragglers.straggling import straggling
from commprof.errors import UsageError
from support.runs import SyntheticRun
from support.sample import examples


def arrived(run: SyntheticRun, one_host: bool = True):
    return arrivals(run.table("collectives"), run.table("clocks"), run.table("clock_offsets"), one_host)


def stragglers_of(found) -> pd.DataFrame:
    return straggling([found], lambda part: part, 1).ranks


def frame(run: SyntheticRun, one_host: bool = True) -> pd.DataFrame:
    return arrivals_frame(arrived(run, one_host))


def column(found: pd.DataFrame, name: str) -> list:
    return [None if pd.isna(value) else value for value in found[name]]


def collective(run: SyntheticRun, op: str, issues: list[int | None], **columns) -> None:
    """Add one ``op`` that rank r issues at ``issues[r]``.

    Every rank has its result 10 ns after the last issue.
    """
    times = [time for time in issues if time is not None]
    number = run._next_pg_seq.get("collective", 0)
    run._next_pg_seq["collective"] = number + 1
    for rank, issue in enumerate(issues):
        if issue is not None:
            wait = {"wait_begin_ns": issue + 1, "wait_end_ns": max(times) + 10}
            run.add_collective(
                op, ranks=(rank,), issue_ns=issue, host_ns=1, pg_seq=number, payload_bytes=8, **wait | columns
            )


def clocks(run: SyntheticRun, *names: str) -> None:
    for rank, name in enumerate(names):
        run.add(
            "clocks",
            rank=rank, attempt=0, pid=run.pid(rank), host=f"host-{name}", monotonic_ns=0, realtime_ns=0,
            uncertainty_ns=0, clock=name,
        )  # fmt: skip


def measured(run: SyntheticRun, rank: int, offset_ns: int, error_ns: int, time_ns: int = 0) -> None:
    run.add(
        "clock_offsets",
        rank=rank, attempt=0, pid=run.pid(rank), host="h", reference_rank=0, time_ns=time_ns,
        offset_ns=offset_ns, error_ns=error_ns, exchanges=30,
    )  # fmt: skip


def test_arrivals_on_one_clock_are_exact():
    run = SyntheticRun(world_size=3)
    collective(run, "all_reduce", [100, 160, 130])
    found = frame(run)
    assert column(found, "rank") == [0, 1, 2]
    assert column(found, "arrived_ns") == [100, 160, 130]
    assert column(found, "error_ns") == column(found, "lateness_error_ns") == [0, 0, 0]
    assert column(found, "lateness_ns") == [0, 60, 30]
    assert column(found, "from_median_ns") == [-30, 30, 0]
    assert column(found, "is_last") == [False, True, False]
    assert column(found, "certain") == [None, True, None]
    assert column(found, "lead_ns") == [None, 30, None]
    assert column(found, "waiting_ns") == [60, 0, 30]
    assert column(found, "transfer_ns") == [10, 10, 10]
    # From 130 to 160 only rank 1 was missing.
    assert column(found, "waited_ns") == [30, None, 30]
    assert column(found, "others_waited_ns") == [None, 30, None]
    assert column(found, "cause") == ["late_arrival", "slow_transfer", "late_arrival"]


def test_another_clock_is_moved_by_its_offset_and_the_bound_goes_with_it():
    run = SyntheticRun(world_size=3)
    clocks(run, "a", "b", "a")
    measured(run, 0, 0, 0)
    measured(run, 1, 1_000_000, 20)
    collective(run, "all_reduce", [2_000_000, 1_000_050, 2_000_030])
    found = frame(run, one_host=False)
    assert column(found, "arrived_ns") == [2_000_000, 2_000_050, 2_000_030]
    assert column(found, "lateness_ns") == [0, 50, 30]
    # Clock b drifts by at most 100 ppm from its one measurement at 0. After 1_000_050 ns these are 101 ns.
    assert column(found, "error_ns") == [0, 121, 0]
    assert column(found, "lateness_error_ns") == [0, 121, 0]
    assert column(found, "is_last") == [False, True, False]
    assert column(found, "certain") == [None, False, None]  # The lead is 20 ns and the error is 121 ns.


def test_the_last_is_certain_only_against_every_other_rank():
    run = SyntheticRun(world_size=3)
    clocks(run, "a", "a", "b")
    measured(run, 0, 0, 0)
    measured(run, 2, 0, 500, time_ns=1000)
    collective(run, "all_reduce", [1000, 1200, 900])  # Rank 2 may have arrived as late as 1400.
    assert column(frame(run, one_host=False), "certain") == [None, False, None]
    collective(run, "all_reduce", [1000, 1500, 900])
    assert column(frame(run, one_host=False), "certain")[3:] == [None, True, None]


def test_hosts_that_were_never_compared_give_no_order():
    run = SyntheticRun(world_size=2)
    clocks(run, "a", "b")
    measured(run, 0, 0, 0)
    collective(run, "all_reduce", [100, 90])
    found = frame(run, one_host=False)
    assert column(found, "arrived_ns") == [100, None]
    for name in ("lateness_ns", "is_last", "cause", "waited_ns"):
        assert column(found, name) == [None, None]
    ranked = stragglers_of(arrived(run, one_host=False))
    assert ranked.empty and "never compared" in ranked.attrs["statement"]


def test_a_group_within_one_host_needs_no_reference():
    run = SyntheticRun(world_size=3)
    clocks(run, "a", "b", "b")
    for rank, issue in ((1, 100), (2, 140)):
        run.add_collective("all_reduce", group=(1, 2), pg="tp", ranks=(rank,), issue_ns=issue, pg_seq=0)
    found = frame(run, one_host=False)
    assert column(found, "lateness_ns") == [0, 40]
    assert column(found, "is_last") == [False, True]


def test_attempts_groups_and_operations_stand_apart():
    run = SyntheticRun(world_size=2)
    run.add_collective("all_reduce", issue_ns=100)
    run.add_collective("all_reduce", issue_ns=200, attempt=1)
    run.add_collective("all_reduce", issue_ns=300, pg="1")
    run.add_collective("all_reduce", issue_ns=400, pg_seq=5, ranks=(0,))
    # The ranks disagree about the operation.
    run.add_collective("broadcast", issue_ns=400, pg_seq=5, ranks=(1,), peer=0)
    found = frame(run)
    assert found["collective"].nunique() == 5
    assert sorted(found.groupby("collective").size()) == [1, 1, 2, 2, 2]
    alone = found[found["members"] == 1]
    assert alone["is_last"].isna().all()


def test_a_message_pairs_by_sender_receiver_and_order():
    run = SyntheticRun(world_size=2)
    for number, (sent, received) in enumerate(((100, 150), (300, 220))):
        run.add_collective("send", ranks=(0,), peer=1, issue_ns=sent, pg_seq=number)
        run.add_collective("recv", ranks=(1,), peer=0, issue_ns=received, pg_seq=number)
    run.add_collective("recv", ranks=(1,), peer=-1, issue_ns=999, pg_seq=7)
    found = frame(run)
    assert list(zip(found["rank"], column(found, "lateness_ns"), strict=True)) == [
        (0, 0),
        (1, 50),
        (0, 80),
        (1, 0),
    ]
    assert stragglers_of(arrived(run)).empty  # Messages have no stragglers.


def test_what_the_others_waited_is_only_the_part_in_which_they_stood_still():
    run = SyntheticRun(world_size=2)
    # Rank 0 issues at 100 and continues. It begins to wait at 170, and rank 1 arrives at 200.
    waits = {"is_async": True, "host_ns": 5}
    run.add_collective("all_reduce", ranks=(0,), issue_ns=100, wait_begin_ns=170, wait_end_ns=210, **waits)
    run.add_collective("all_reduce", ranks=(1,), issue_ns=200, wait_begin_ns=205, wait_end_ns=210, **waits)
    found = frame(run)
    assert column(found, "waited_ns") == [30, None]
    assert column(found, "lead_ns") == [None, 100]


def test_a_wait_that_was_never_seen_is_not_known():
    run = SyntheticRun(world_size=2)
    collective(run, "all_reduce", [100, 200], is_async=True, wait_begin_ns=None, wait_end_ns=None)
    found = frame(run)
    assert column(found, "waited_ns") == [None, None]
    assert column(found, "transfer_ns") == [None, None]


def test_late_arrival_late_launch_and_slow_transfer_are_told_apart():
    run = SyntheticRun(world_size=2)
    device = {"device": "cuda:0", "is_async": True, "wait_begin_ns": None, "wait_end_ns": None}
    times = {
        "late_arrival": ([100, 900], 910, 950),
        "late_launch": ([100, 110], 800, 850),
        "slow_transfer": ([100, 110], 120, 900),
    }
    for issues, begin, end in times.values():
        collective(run, "all_reduce", issues, device_begin_ns=begin, device_end_ns=end, **device)
    found = frame(run)
    assert column(found[found["rank"] == 0], "cause") == list(times)
    assert column(found[found["rank"] == 0], "launch_ns") == [10, 690, 10]
    assert column(found[found["rank"] == 0], "transfer_ns") == [40, 50, 780]


def test_a_straggler_is_named_with_its_share_and_its_cost():
    run = SyntheticRun(world_size=4)
    for number in range(100):
        begin = number * 1_000_000
        late = 3 if number % 10 else 1  # Rank 3 is late in 90 of 100 collectives.
        collective(
            run,
            "all_reduce",
            [begin + (120_000 if rank == late else rank) for rank in range(4)],
            step=number // 10,
        )
    found = stragglers_of(arrived(run))
    assert found["rank"].tolist() == [0, 1, 2, 3]
    assert found["last"].tolist() == [0, 10, 0, 90]
    assert found["expected_last"].tolist() == [25.0] * 4
    assert found["stands_out"].tolist() == [False, False, False, True]
    three = found.iloc[3]
    # When rank 3 was late, rank 2 was the last but one. No rank was blocked before it had issued.
    assert three["lead_ns"] == 90 * (120_000 - 2)
    assert three["others_waited_ns"] == 90 * (120_000 - 2)
    assert three["others_waited_per_step_ns"] == 9 * (120_000 - 2)
    assert three["median_lateness_ns"] == 120_000
    assert found.attrs["statement"] == (
        "Rank 3 is a straggler: it arrived last in 90 % of 90 collectives; the others waited 1.08 ms per step for its own "
        "delay."
    )


def test_equal_ranks_are_no_stragglers():
    chance = random.Random(7)
    run = SyntheticRun(world_size=4)
    for number in range(200):
        collective(run, "all_reduce", [number * 1000 + chance.randrange(100) for _ in range(4)])
    found = stragglers_of(arrived(run))
    # If two ranks arrive at the same time, neither is certainly the last.
    assert found["last"].sum() + found["within_bound"].sum() == 200
    assert not found["stands_out"].any()
    assert found.attrs["statement"] is None


def test_a_rank_that_is_last_but_costs_nothing_is_not_worth_a_sentence():
    run = SyntheticRun(world_size=2)
    for number in range(100):
        collective(run, "all_reduce", [number * 1_000_000, number * 1_000_000 + 50])
    found = stragglers_of(arrived(run))
    assert found["stands_out"].tolist() == [False, True]
    assert found.attrs["statement"] is None


def test_below_the_bound_no_rank_is_distinguishable():
    run = SyntheticRun(world_size=2)
    clocks(run, "a", "b")
    measured(run, 0, 0, 0)
    for time in (0, 10**9):
        measured(run, 1, 0, 40_000, time_ns=time)
    for number in range(50):
        collective(run, "all_reduce", [number * 1_000_000, number * 1_000_000 + 30_000])
    found = stragglers_of(arrived(run, one_host=False))
    assert found["last"].tolist() == [0, 0]
    assert found["within_bound"].tolist() == [0, 50]
    assert found.attrs["statement"].startswith("No rank can be distinguished")


def test_broadcasts_and_partly_recorded_collectives_make_no_stragglers():
    run = SyntheticRun(world_size=3)
    collective(run, "broadcast", [100, 900, 100], peer=0)
    collective(run, "all_reduce", [100, None, 900])
    assert len(frame(run)) == 5
    assert stragglers_of(arrived(run)).empty


def test_no_records_give_no_rows():
    run = SyntheticRun()
    assert frame(run).empty
    assert stragglers_of(arrived(run)).attrs["statement"] is None


def test_the_api_answers_from_a_run_directory(tmp_path):
    run = SyntheticRun(world_size=2)
    for number in range(40):
        collective(run, "all_reduce", [number * 1_000_000, number * 1_000_000 + 90_000])
    path = run.write(tmp_path / "run")
    found = api.arrivals(path)
    assert len(found) == 80 and str(found["lateness_ns"].dtype) == "Int64"
    assert pd.concat(api.arrivals_parts(path), ignore_index=True).equals(found)
    assert api.arrivals(path, steps=(-5, -2)).empty and next(iter(api.arrivals_parts(path, (-5, -2)))).empty
    assert len(api.arrivals(path, steps=(-1, 0))) == 80
    assert (
        api.stragglers(path).attrs["statement"].startswith("Rank 1 is a straggler: it arrived last in 100 %")
    )
    assert api.describe_columns("arrivals")["lead_ns"].unit == "ns"


def test_a_frame_that_does_not_fit_says_how_to_ask_for_less(monkeypatch):
    run = SyntheticRun(world_size=2)
    collective(run, "all_reduce", [100, 200])
    monkeypatch.setattr(straggler_answers, "limit_bytes", lambda: 100)
    with pytest.raises(UsageError, match=r"steps=.*arrivals_parts"):
        api.arrivals(run.open())


@pytest.mark.parametrize("name", ["arrivals", "stragglers"])
def test_answers_hold_exactly_what_is_declared(name):
    run = SyntheticRun(world_size=2)
    collective(run, "all_reduce", [100, 200])
    found = {"arrivals": frame(run), "stragglers": stragglers_of(arrived(run))}[name]
    assert list(found.columns) == list(api.describe_columns(name))


def without_waits(steps):
    """Return the stragglers of 40 collectives in the given number of steps, without recorded waits.

    Rank 1 arrives 90 us late at each collective.
    """
    run = SyntheticRun(world_size=2)
    for number in range(40):
        begin = number * 1_000_000
        unseen = {"is_async": True, "wait_begin_ns": None, "wait_end_ns": None}
        collective(run, "all_reduce", [begin, begin + 90_000], step=number * steps // 40, **unseen)
    return stragglers_of(arrived(run))


def test_where_no_wait_was_seen_a_rank_is_late_once_in_a_step():
    """A rank that is late for one collective is equally late for the next ones.

    The others wait once per step, which is 4.5 % of a step here.
    """
    assert without_waits(steps=20).attrs["statement"] is None


def test_where_no_wait_was_seen_the_sentence_says_so():
    found = without_waits(steps=40)
    assert column(found, "others_waited_ns") == [0, None]
    assert found.attrs["statement"] == (
        "Rank 1 arrived last in 100 % of 39 collectives; it was the only missing rank for 90.0 us per step, and "
        "whether the others waited was not recorded. It is not known whether this is its own delay or an inherited "
        "one: not all waits of the program for its collectives were recorded."
    )


@settings(max_examples=examples(60), deadline=None)
@given(st.data())
def test_arrivals_agree_with_a_plain_computation(data):
    """Compare random ranks, clocks, groups and missing records with the definitions, row by row."""
    world = data.draw(st.integers(2, 4))
    names = data.draw(st.lists(st.sampled_from("abc"), min_size=world, max_size=world))
    run = SyntheticRun(world_size=world)
    clocks(run, *names)
    truth = {names[0]: (0, 0)}
    measured(run, 0, 0, 0)
    for name in sorted(set(names) - {names[0]}):
        if data.draw(st.booleans()):
            truth[name] = (data.draw(st.integers(-500, 500)), data.draw(st.integers(0, 60)))
            # Both measurements are equal, so the clocks do not drift between them.
            for time in (0, 1_000_000):
                measured(run, names.index(name), *truth[name], time_ns=time)
    for number in range(data.draw(st.integers(1, 4))):
        group = tuple(sorted(data.draw(st.sets(st.integers(0, world - 1), min_size=2))))
        for rank in group:
            if data.draw(st.integers(0, 9)):
                issue = data.draw(st.integers(0, 300))
                run.add_collective("all_reduce", ranks=(rank,), group=group, pg_seq=number, issue_ns=issue)
    found = frame(run, one_host=False)
    records = run.rows["collectives"]
    assert len(found) == len(records)
    for each in found.to_dict("records"):
        mates = [
            r for r in records if (r["group_ranks"], r["pg_seq"]) == (each["group_ranks"], each["pg_seq"])
        ]
        assert each["members"] == len(mates)
        check_row(each, {r["rank"]: r["issue_ns"] for r in mates}, names, truth)


def check_row(each, issues, names, truth):
    same = len({names[rank] for rank in issues}) == 1
    if not same and not all(names[rank] in truth for rank in issues):
        assert pd.isna(each["lateness_ns"]) and pd.isna(each["is_last"])
        return
    place = {rank: time + (0 if same else truth[names[rank]][0]) for rank, time in issues.items()}
    mine = place[each["rank"]]
    assert each["lateness_ns"] == mine - min(place.values())
    assert each["waiting_ns"] == max(place.values()) - mine
    if len(issues) < each["group_size"]:
        assert pd.isna(each["is_last"])
        return
    last = max(place, key=lambda rank: (place[rank], rank))
    assert each["is_last"] == (each["rank"] == last)
    if not each["is_last"]:
        return
    others = {rank: time for rank, time in place.items() if rank != last}
    assert each["lead_ns"] == mine - max(others.values())
    errors = {
        rank: 0 if names[rank] == names[last] else truth[names[rank]][1] + truth[names[last]][1]
        for rank in others
    }
    slack = min(mine - time - errors[rank] for rank, time in others.items())
    if not 0 < slack <= 4:  # The drift between measurements is rounded up.
        assert each["certain"] == (slack > 0)

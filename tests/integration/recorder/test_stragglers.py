"""A rank that arrives late by a known time is detected with this time.

Nothing that is sent changes.
"""

from __future__ import annotations

import time

import pytest

from commprof.analysis import api
from commprof.cli import execute
from support.recording import record

pytestmark = [pytest.mark.ranks, pytest.mark.alone]

WORLD, LATE, COUNT = 3, 1, 12


def late_rank(rank: int, world: int, delay: float) -> float:
    import torch
    import torch.distributed as dist

    from commprof import hooks

    total = 0.0
    for number in range(COUNT):
        hooks.step(number)
        if rank == LATE:
            time.sleep(delay)
        tensor = torch.full((64,), float(rank + number))
        dist.all_reduce(tensor)
        total += float(tensor.sum())
    return total


def expected_total() -> float:
    return float(sum(64 * sum(rank + number for rank in range(WORLD)) for number in range(COUNT)))


@pytest.fixture(scope="module", params=[pytest.param(0.02, marks=pytest.mark.long), 0.05])
def delayed(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("late") / "run"
    run, outcomes = record(path, WORLD, late_rank, request.param)
    assert [outcome["result"] for outcome in outcomes] == [expected_total()] * WORLD
    return run, int(request.param * 1e9)


def test_the_delay_is_what_the_others_waited(delayed):
    run, delay = delayed
    found = api.stragglers(run)
    late = found[found["rank"] == LATE].iloc[0]
    assert late["last"] >= COUNT - 1 and late["stands_out"]
    assert 0.8 * delay < late["lead_ns"] / late["last"] < delay + 20_000_000
    assert 0.8 * delay < late["others_waited_ns"] / late["last"] < delay + 20_000_000
    assert 0.8 * delay < late["others_waited_per_step_ns"] < delay + 20_000_000
    assert found[found["rank"] != LATE]["last"].sum() <= 1


def test_on_one_host_clocks_are_one_and_nothing_was_exchanged(delayed):
    run, _ = delayed
    rows = run.table("clock_offsets").to_pylist()
    assert [(row["rank"], row["offset_ns"], row["error_ns"], row["exchanges"]) for row in rows] == [
        (rank, 0, 0, 0) for rank in range(WORLD)
    ]
    assert len({row["clock"] for row in run.table("clocks").to_pylist()}) == 1
    assert (api.arrivals(run)["lateness_error_ns"] == 0).all()


def test_what_is_sent_does_not_depend_on_who_is_late(delayed):
    run, _ = delayed
    (row,) = api.traffic(run, by=("op",)).to_dict("records")
    assert (row["op"], row["collectives"], row["payload_bytes"]) == ("all_reduce", COUNT, COUNT * 64 * 4)


def test_a_wait_for_a_late_rank_is_a_late_arrival(delayed):
    run, _ = delayed
    found = api.arrivals(run)
    waiting = found[found["rank"] != LATE]
    assert (waiting["cause"] == "late_arrival").sum() >= 0.8 * len(waiting)


def test_the_report_names_the_rank(delayed, capsys):
    run, _ = delayed
    assert execute(["report", str(run.path)]) == 0
    text = capsys.readouterr().out
    assert f"Stragglers: Rank {LATE} is a straggler: it arrived last in " in text

"""Hosts with clocks of their own.

The test sets the shifts, so the measured offsets can be checked. The hosts are network and time namespaces of
one machine. Two of them are shifted by hours, and one shares the clock of rank 0.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from commprof.analysis import api
from commprof.trace.reader import open_run
from support import hosts as network
from support.warm_hosts import run_on_each

ROOT = Path(__file__).parents[3]
AHEAD = (0, 5000, 90_000, 0)
WHY_NOT = network.why_no_shifted_clocks()
SECOND = 10**9
LATE = 2

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or ""),
    pytest.mark.alone,
]

PROGRAM = f"""
import os, sys, time
import torch, torch.distributed as dist
import commprof

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
if rank not in map(int, sys.argv[2:]):
    commprof.attach(sys.argv[1], quiet=True)
for delay in (0.0, 0.02, 0.06):
    for _ in range(10):
        if rank == {LATE}:
            time.sleep(delay)
        tensor = torch.full((1000,), float(rank))
        dist.all_reduce(tensor)
        assert float(tensor[0]) == 6.0
time.sleep(0.3)
dist.destroy_process_group()
"""


def record(directory: Path, *unrecorded: int) -> Path:
    """Run one rank on each of four hosts, and record all except the ``unrecorded`` ones."""
    script, run = directory / "train.py", directory / "run"
    script.write_text(textwrap.dedent(PROGRAM))
    with network.hosts(len(AHEAD), ahead=AHEAD) as machines:
        said = run_on_each(machines, [str(script), str(run), *map(str, unrecorded)], directory)
        # torch prints these lines because the names of the hosts cannot be resolved.
        lines = [
            line for _, text in said for line in text.splitlines() if "hostname of the client" not in line
        ]
        assert lines == []
    return run


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return record(tmp_path_factory.mktemp("hosts"))


def test_the_shift_of_each_host_is_within_the_bound_of_what_was_measured(run):
    offsets = open_run(run).table("clock_offsets").to_pylist()
    by_rank = {rank: [row for row in offsets if row["rank"] == rank] for rank in range(len(AHEAD))}
    for rank in (0, 3):  # these two ranks read the same clock
        assert [(row["offset_ns"], row["error_ns"], row["exchanges"]) for row in by_rank[rank]] == [(0, 0, 0)]
    for rank in (1, 2):
        assert len(by_rank[rank]) == 2  # at the start and at the end
        for row in by_rank[rank]:
            assert abs(row["offset_ns"] + AHEAD[rank] * SECOND) <= row["error_ns"] < 20_000_000
            assert row["exchanges"] == 30


def test_processes_know_which_of_them_read_one_clock(run):
    clocks = {row["rank"]: row["clock"] for row in open_run(run).table("clocks").to_pylist()}
    assert clocks[0] == clocks[3]
    assert len(set(clocks.values())) == 3


def test_no_rank_finds_a_result_before_the_last_rank_came(run):
    """No rank finds a result before the last rank arrived.

    This must be true for any true order of events, even with shifts of hours.
    """
    found = api.arrivals(run)
    assert len(found) == 4 * 30
    records = api.table(run, "collectives").set_index(["rank", "seq"])
    for _, each in found.groupby("collective"):
        last = each.loc[each["arrived_ns"].idxmax()]
        for _, row in each.iterrows():
            shift = row["arrived_ns"] - records.loc[(row["rank"], row["seq"]), "issue_ns"]
            ended = records.loc[(row["rank"], row["seq"]), "wait_end_ns"] + shift
            assert ended + row["error_ns"] + last["error_ns"] >= last["arrived_ns"]


@pytest.mark.parametrize(("first", "delay_ns"), [(10, 20_000_000), (20, 60_000_000)])
def test_the_late_rank_and_its_delay_are_found_across_hosts(run, first, delay_ns):
    found = api.arrivals(run)
    some = found[(found["pg_seq"] >= first) & (found["pg_seq"] < first + 10) & found["is_last"].fillna(False)]
    assert (some["rank"] == LATE).sum() >= 9
    late = some[some["rank"] == LATE]
    assert abs(late["lead_ns"].median() - delay_ns) < 0.3 * delay_ns
    assert abs(late["others_waited_ns"].median() - delay_ns) < 0.3 * delay_ns
    assert late["certain"].sum() >= 9


def test_the_statement_names_the_late_rank(run):
    assert (
        api.stragglers(run).attrs["statement"].startswith(f"Rank {LATE} is a straggler: it arrived last in ")
    )


@pytest.mark.long
def test_without_a_record_of_rank_0_hosts_are_not_compared_and_it_says_so(tmp_path):
    run = record(tmp_path, 0)
    assert len(open_run(run).table("clock_offsets")) == 0
    assert "never compared" in (api.stragglers(run).attrs["statement"] or "") or api.arrivals(run).empty


@pytest.mark.long
def test_a_host_without_a_record_is_left_out(tmp_path):
    run = record(tmp_path, 1)
    ranks = {row["rank"] for row in open_run(run).table("clock_offsets").to_pylist()}
    assert ranks == {0, 2, 3}

"""Test the detection of stragglers from the host files.

The answers for jobs with a planted late rank are compared with the answers from their records.
"""

import json
import os

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from commprof.align.ranks.own_times import with_own_times
from commprof.analysis import api
from commprof.analysis.storage import host_files
from commprof.analysis.stragglers import arrival_sample
from commprof.analysis.stragglers.arrivals import aligned, hosts_of
from commprof.analysis.stragglers.straggling import straggling
from commprof.cli import execute
from commprof.cli.verbs import report
from commprof.trace.directory import COLLECTIVES_DIRECTORY, HOSTS_DIRECTORY
from commprof.trace.reader import open_run
from support.runs import SyntheticRun
from support.simulated_jobs import MS, Call, Compute, Job, Step

HOSTS = [f"h{rank // 2}" for rank in range(6)]
SHIFTS = {"h1": 10**12, "h2": -(10**9)}  # The offsets of the hosts' clocks in ns.
PAIRS = [(0, 1), (2, 3), (4, 5)]  # The ranks of each host.
STEPS = 24
LATE = 3


def job_of(groups, delay=20 * MS, calls=1):
    """Return a job whose steps have calls of the ranks of each host, of all ranks, or of both.

    One rank works longer before some of the calls.
    """
    job = Job(len(HOSTS), hosts=HOSTS, shifts=SHIFTS)
    for step in range(STEPS):
        for rank in range(job.world):
            work = 5 * MS + 10_000 * ((7 * rank + 3 * step) % 6)
            job.do(rank, Step(step), Compute(work + (delay if rank == LATE else 0)))
            if "host" in groups:
                job.do(rank, Call("all_reduce", 4096, PAIRS[rank // 2], "host"))
            if "all" in groups:
                for call in range(calls):
                    job.do(rank, Compute(MS + (delay if rank == LATE and call else 0)))
                    job.do(rank, Call("all_reduce", 4096), Compute(2 * MS), Call("all_gather", 64))
    return job


def written(path, job, are_compared=True):
    run = job.run()
    run.hosts = dict(enumerate(job.hosts))
    if not are_compared:
        run.rows["clock_offsets"] = []
    return run.write(path)


def cost_of(statement):
    """Return the cost that the statement names, in ms."""
    return float(statement.split("the others waited ")[1].split(" ms")[0])


@pytest.fixture
def only_files():
    """Return a function that keeps the host files of a run and makes its records unreadable."""

    def prepare(path):
        assert host_files.keep_missing(path) == len(set(HOSTS))
        spoil(path)
        return path

    return prepare


def spoil(path, but=()):
    """Make the record files of all ranks except ``but`` unreadable.

    The files keep their size and modification time.
    """
    for file in (path / COLLECTIVES_DIRECTORY).iterdir():
        if int(file.name.split("-")[1]) not in but:
            status = file.stat()
            file.write_bytes(b"x" * status.st_size)
            os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.sampled
@pytest.mark.parametrize("groups", [("all",), ("host",), ("host", "all")])
def test_the_late_rank_is_the_one_that_the_records_name(tmp_path, only_files, groups):
    path = written(tmp_path / "run", job_of(groups))
    expected = api.stragglers(path)
    assert expected.attrs["statement"].startswith(f"Rank {LATE} is a straggler")
    found = api.sampled_stragglers(only_files(path))
    assert found.attrs.pop("steps") == found.attrs.pop("of_steps") == STEPS
    assert found.attrs.pop("share") == 1 and found.attrs.pop("hosts") == {LATE: "h1"}
    assert found.attrs == expected.attrs
    pd.testing.assert_frame_equal(found, expected)


@pytest.mark.long
@pytest.mark.sampled
@pytest.mark.parametrize("groups", [("all",), ("host",), ("host", "all")])
def test_some_steps_say_what_their_records_say(tmp_path, only_files, monkeypatch, groups):
    path = written(tmp_path / "run", job_of(groups))
    whole = api.stragglers(path).attrs["statement"]
    records = open_run(path).table("collectives")
    monkeypatch.setattr(arrival_sample, "MOST_ROWS", len(records) // 3)
    found = api.sampled_stragglers(only_files(path))
    run = open_run(path)
    sample = arrival_sample.of_table(host_files.sample(run))
    steps = sample.rows["step"].unique()
    assert 4 <= len(steps) == found.attrs["steps"] <= STEPS / 3
    # The same evaluation runs on the records of these steps, with own times from all records.
    some = with_own_times(records).filter(pc.is_in(records["step"], steps))
    expected = straggling([some], aligned(run), 1, hosts_of(run), sample.span_ns * len(steps) // STEPS).ranks
    assert found.attrs["statement"] == expected.attrs["statement"]
    pd.testing.assert_frame_equal(found, expected)
    assert found.attrs["statement"].startswith(f"Rank {LATE} is a straggler")
    # The cost per step equals the cost in the complete run to within 2 %.
    assert cost_of(found.attrs["statement"]) == pytest.approx(cost_of(whole), rel=0.02)


@pytest.mark.long
def test_clocks_that_were_not_compared_name_no_rank_across_hosts(tmp_path, only_files):
    path = only_files(written(tmp_path / "run", job_of(("all",)), are_compared=False))
    said = api.sampled_stragglers(path).attrs["statement"]
    assert said.startswith(f"In {2 * STEPS} collectives the last rank is not known") and "Rank" not in said


def test_clocks_that_were_not_compared_still_name_a_rank_within_its_host(tmp_path, only_files):
    path = only_files(written(tmp_path / "run", job_of(("host", "all")), are_compared=False))
    said = api.sampled_stragglers(path).attrs["statement"]
    assert said.startswith(f"Rank {LATE} is a straggler")
    assert f"In {2 * STEPS} collectives the last rank is not known" in said


@pytest.mark.long
@pytest.mark.sampled
@pytest.mark.parametrize("damage", ["missing", "damaged", "older"])
def test_a_host_without_a_file_is_sampled_from_its_records(tmp_path, damage):
    path = written(tmp_path / "run", job_of(("all",)))
    expected = api.stragglers(path)
    host_files.keep_missing(path)
    file = path / HOSTS_DIRECTORY / "rank-00002-0-1002.parquet"
    if damage == "missing":
        file.unlink()
    elif damage == "damaged":
        file.write_bytes(file.read_bytes()[:-9])
    else:
        file.write_bytes((path / HOSTS_DIRECTORY / "rank-00000-0-1000.parquet").read_bytes())
    spoil(path, but=(2, 3))
    pd.testing.assert_frame_equal(api.sampled_stragglers(path), expected)


@pytest.mark.long
def test_a_report_of_many_records_names_the_rank_and_says_of_what(tmp_path, only_files, monkeypatch, capsys):
    path = written(tmp_path / "run", job_of(("host", "all")))
    monkeypatch.setattr(report, "_MOST_COMPARED", 5)
    assert execute(["report", str(path)]) == 0
    assert "Stragglers: not evaluated for more than 5 records" in capsys.readouterr().out
    monkeypatch.setattr(arrival_sample, "MOST_ROWS", 200)
    only_files(path)
    assert execute(["report", str(path)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"Stragglers: Rank {LATE} is a straggler" in said
    assert "Hosts: rank 3: h1. Examined: the collectives of 11 of 24 steps, no messages." in said
    assert execute(["report", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (
        found["stragglers_sample"] == {"steps": 11, "of_steps": 24, "share": 1.0}
        and len(found["stragglers"]) == 6
    )


@pytest.mark.long
def test_a_report_of_many_records_says_that_nobody_stands_out(tmp_path, only_files, monkeypatch, capsys):
    path = only_files(written(tmp_path / "run", job_of(("all",), delay=0)))
    monkeypatch.setattr(report, "_MOST_COMPARED", 5)
    assert execute(["report", str(path)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "Stragglers: None stands out. Examined: the collectives of all 24 steps, no messages." in said


@pytest.mark.long
def test_of_long_steps_a_part_of_the_collectives_is_compared(tmp_path, only_files, monkeypatch, capsys):
    path = written(tmp_path / "run", job_of(("host", "all"), calls=20, delay=2 * MS))
    whole = api.stragglers(path).attrs["statement"]
    monkeypatch.setattr(report, "_MOST_COMPARED", 5)
    monkeypatch.setattr(arrival_sample, "MOST_ROWS", 600)  # The run has 6,048 rows.
    only_files(path)
    found = api.sampled_stragglers(path)
    assert found.attrs["steps"] == 8 and found.attrs["share"] in (0.5, 0.25)
    assert len(host_files.sample(open_run(path))) <= 600
    said = found.attrs["statement"]
    assert said.startswith(f"Rank {LATE} is a straggler: it arrived last in ")
    assert cost_of(said) == pytest.approx(cost_of(whole), rel=0.5)
    assert execute(["report", str(path)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"Examined: 1/{round(1 / found.attrs['share'])} of the collectives of 8 of 24 steps" in said


@pytest.mark.parametrize("seed", range(3))
def test_hosts_with_different_room_have_collectives_in_common(seed):
    """Check the joined collectives with plain sets.

    The joined collectives are those that every host has, and as many as the host with the least room has.
    """
    draw = np.random.default_rng(seed)
    samples = []
    for host in range(4):
        steps = np.repeat(np.arange(60), 10 if host else 40)
        run = SyntheticRun(world_size=4)
        for number, step in enumerate(steps.tolist()):
            run.add_collective("all_reduce", payload_bytes=4, step=step, ranks=(host,), issue_ns=10 * number)
        room = int(draw.integers(100, 500))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(arrival_sample, "MOST_ROWS", 4 * room)
            sample = arrival_sample.of_host(run.table("collectives"), 1, 4)
        assert 0 < len(sample) <= room
        samples.append(sample)
    facts = [arrival_sample.facts_of(sample) for sample in samples]
    found = arrival_sample.joined(pa.concat_tables(samples, promote_options="permissive"), facts)
    of_hosts = [{(row["step"], row["pg_seq"]) for row in sample.to_pylist()} for sample in samples]
    for host, has in enumerate(of_hosts):
        mine = {(row["step"], row["pg_seq"]) for row in found.rows.to_pylist() if row["rank"] == host}
        assert mine <= has and mine
    assert found.halvings == max(of["halvings"] for of in facts) and found.steps == 60

"""Test the host files, which give the first answers about a run of several hosts without its records."""

import os
import random
import shutil
from functools import partial

import pandas as pd
import pytest

from commprof.analysis import api
from commprof.analysis.relations.sql_engine import evaluate
from commprof.analysis.storage import host_files, run_totals, summaries
from commprof.cli import execute
from commprof.errors import TraceError
from commprof.trace.directory import COLLECTIVES_DIRECTORY, HOSTS_DIRECTORY
from commprof.trace.reader import open_run
from commprof.trace.tables import table_from_rows
from support.random_records import random_records
from support.runs import SyntheticRun

EACH = 3  # The ranks per host.
ISSUED = "host_operations"
QUESTIONS = {
    "traffic": partial(api.traffic, by=("step", "op", "purpose", "group_ranks", "span")),
    "untagged": api.untagged,
    "one_offs": api.one_offs,
    "steps": api.step_times,
    "exposure": partial(api.exposure, by=("attempt", "step")),
    "exposure_per_step": api.exposure_per_step,
}


def planted(path, seed, hosts=3, disagree=False):
    """Write a run of ``hosts`` hosts.

    The groups are one of all ranks, one of each host, and one of the ranks with the same position on each
    host.
    """
    draw = random.Random(seed)
    world = hosts * EACH
    run = SyntheticRun(world, seconds=5.0)
    run.hosts = {rank: f"node-{rank // EACH}" for rank in range(world)}
    groups = {"0": [tuple(range(world))]}
    groups["tensor"] = [tuple(range(EACH * host, EACH * host + EACH)) for host in range(hosts)]
    groups["data"] = [tuple(range(place, world, EACH)) for place in range(EACH)]
    run.add_collective("broadcast", payload_bytes=800, step=-1, phase="init", peer=0)
    for step in range(draw.randrange(3, 6)):
        for rank in range(world):
            ended = draw.random() < 0.95
            begin = 10_000_000 * (step + 1) + draw.randrange(1000)
            end = begin + draw.randrange(5_000_000, 9_000_000) if ended else None
            loss, cpu_ns = draw.choice([None, draw.random()]), draw.randrange(10**6)
            run.add_step(step, begin_ns=begin, end_ns=end, ranks=(rank,), loss=loss, samples=4, cpu_ns=cpu_ns)
        for pg, members in groups.items():
            for _ in range(draw.randrange(3)):
                op, purpose = (
                    draw.choice(["all_reduce", "all_gather", "reduce", "barrier"]),
                    draw.choice(["gradient_reduce", None]),
                )
                size, peer = draw.randrange(1 << 20) * 4, 0 if op == "reduce" else -1
                for group in members:
                    for rank in group:
                        run.add_collective(
                            op, payload_bytes=0 if op == "barrier" else size, step=step, purpose=purpose, pg=pg, group=group,
                            ranks=(rank,), peer=group[0] if op == "reduce" else peer, exposed_ns=draw.randrange(500_000),
                            host_ns=draw.randrange(90_000), call_site=draw.choice(["a.py:1"]),
                            issue_ns=10_000_000 * (step + 1) + draw.randrange(4_000_000),
                        )  # fmt: skip
    if disagree:
        run.add_collective("all_reduce", payload_bytes=4, step=1, ranks=(1,), purpose="gradient_norm")
    for row in run.table("groups").to_pylist():
        run.add("groups", **row | {"host": run.hosts[row["rank"]]})
    return run.write(path)


def keep_all(path):
    run = open_run(path)
    by_host = {}
    for entry in run.manifest.ranks:
        by_host.setdefault(entry["host"], []).append(entry)
    for host, entries in by_host.items():
        host_files.keep(run, host, entries)
    return sorted((path / HOSTS_DIRECTORY).iterdir())


def answers(path):
    run = open_run(path)
    return {name: question(run) for name, question in QUESTIONS.items()}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Return a function that gives a copy of the planted run of a seed and its answers.

    Each run is written and evaluated only once.
    """
    base = tmp_path_factory.mktemp("recorded")
    known = {}

    def copy(path, seed):
        if seed not in known:
            known[seed] = answers(planted(base / str(seed), seed))
        return shutil.copytree(base / str(seed), path), known[seed]

    return copy


def assert_same(found, expected):
    for name, frame in expected.items():
        pd.testing.assert_frame_equal(found[name], frame, obj=name, check_exact=False, rtol=1e-12, atol=0)


def spoil_records(path, host=None):
    """Replace record files by unreadable data of the same size and modification time."""
    for entry in open_run(path).manifest.ranks:
        if host in (None, entry["host"]):
            file = path / COLLECTIVES_DIRECTORY / f"{entry['file']}.parquet"
            status = file.stat()
            file.write_bytes(b"x" * status.st_size)
            os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.sampled
@pytest.mark.parametrize("seed", range(4))
def test_the_first_answers_are_those_of_the_records_and_read_none(tmp_path, recorded, seed):
    path, expected = recorded(tmp_path / "run", seed)
    assert len(keep_all(path)) == 3
    assert set(host_files.answers(open_run(path))) >= {("step_times",), ("exposure_of_steps",)}
    spoil_records(path)
    assert_same(answers(path), expected)


def test_where_ranks_disagree_the_records_tell_the_operations(tmp_path):
    path = planted(tmp_path / "run", 1, disagree=True)
    expected = answers(path)
    keep_all(path)
    assert ("step_times",) not in host_files.answers(open_run(path))
    assert_same(answers(path), expected)


@pytest.mark.sampled
@pytest.mark.parametrize("damage", ["missing", "damaged", "older", "records"])
def test_a_host_without_a_file_that_counts_is_evaluated_from_its_records(tmp_path, recorded, damage):
    path, expected = recorded(tmp_path / "run", 3)
    file = keep_all(path)[1]
    if damage == "missing":
        file.unlink()
    elif damage == "damaged":
        file.write_bytes(file.read_bytes()[:-100])
    elif damage == "older":
        file.write_bytes((path / HOSTS_DIRECTORY / "rank-00000-0-1000.parquet").read_bytes())
    else:
        os.utime(path / COLLECTIVES_DIRECTORY / f"{file.stem}.parquet")
    spoil_records(path, "node-0")
    spoil_records(path, "node-2")
    assert len(host_files.valid_files(path)) == 2
    assert_same(answers(path), expected)


def test_a_host_that_cannot_be_evaluated_is_named(tmp_path, capsys):
    path = planted(tmp_path / "run", 3)
    keep_all(path)[2].unlink()
    spoil_records(path, "node-2")
    with pytest.raises(TraceError, match=r"host node-2 is missing \(ranks 6, 7, 8\)"):
        run_totals.step_times(open_run(path))
    assert execute(["report", str(path)]) == 1
    error = capsys.readouterr().err
    assert "node-2" in error and error.count("\n") == 1


def test_the_launcher_of_a_host_keeps_its_file_alone_and_none_of_many_records(tmp_path, monkeypatch):
    path = planted(tmp_path / "run", 4, hosts=2)
    host_files.keep_host(path, "node-1")
    assert [file.host for file in host_files.valid_files(path)] == ["node-1"]
    monkeypatch.setattr(summaries, "_SMALL", 5)
    monkeypatch.setattr(summaries, "_RECORD_NS", 10**9)
    host_files.keep_host(path, "node-0")
    assert [file.host for file in host_files.valid_files(path)] == ["node-1"]
    monkeypatch.setattr(summaries, "_RECORD_NS", 1)  # With this value the job was long enough for summaries.
    host_files.keep_host(path, "node-0")
    assert sorted(file.host for file in host_files.valid_files(path)) == ["node-0", "node-1"]
    monkeypatch.undo()
    alone = planted(tmp_path / "alone", 4, hosts=1)
    host_files.keep_host(alone, "node-0")
    assert not (alone / HOSTS_DIRECTORY).exists()


@pytest.mark.long
def test_finalise_makes_the_files_that_are_missing_whatever_the_records(tmp_path, monkeypatch, capsys):
    path = planted(tmp_path / "run", 2)
    expected = answers(path)
    _, missing, damaged = keep_all(path)
    missing.unlink()
    damaged.write_bytes(damaged.read_bytes()[:-9])
    monkeypatch.setattr(summaries, "_SMALL", 5)
    monkeypatch.setattr(summaries, "_RECORD_NS", 10**9)
    assert execute(["finalise", str(path)]) == 0
    assert "finalised, 2 files of hosts written: 9 ranks" in capsys.readouterr().err
    assert len(host_files.valid_files(path)) == 3
    spoil_records(path)
    assert_same(answers(path), expected)
    assert execute(["finalise", str(path)]) == 0
    assert "made" not in capsys.readouterr().err


def test_finalise_makes_the_files_of_the_other_hosts_where_records_of_one_are_damaged(tmp_path):
    path = planted(tmp_path / "run", 2)
    spoil_records(path, "node-1")
    assert host_files.keep_missing(path) == 2
    assert {file.host for file in host_files.valid_files(path)} == {"node-0", "node-2"}


@pytest.mark.parametrize("seed", range(3))
def test_ranks_that_issued_the_same_are_one_row(seed):
    """Check with plain loops: the rows of every two ranks in a group are compared one by one."""
    draw = random.Random(seed)
    records = random_records(seed, 40).to_pylist()
    records = [row | {"rank": 0} for row in records]
    copies = [
        row | {"rank": rank} for rank in (1, 2, 3) for row in records if rank < 3 or draw.random() < 0.9
    ]
    tables = {"collectives": table_from_rows("collectives", records + copies)}
    by = ("step", "purpose")
    issued = evaluate("rank_operations", tables, by).to_pylist()
    merged = evaluate(ISSUED, tables, by).to_pylist()
    own = ("rank", "ranks", "host_ns", "exposed_ns")
    groups = {}
    for row in issued:
        key = tuple(row[name] for name in ("attempt", "pg", "group_ranks"))
        groups.setdefault(key, {}).setdefault(row["rank"], set()).add(
            tuple((name, value) for name, value in row.items() if name not in own)
        )
    expected = {}
    for key, ranks in groups.items():
        for rank in sorted(ranks):
            first = min(other for other in ranks if ranks[other] == ranks[rank])
            expected[key, first] = expected.get((key, first), 0) + 1
    found = {
        (tuple(row[name] for name in ("attempt", "pg", "group_ranks")), row["rank"]): row["ranks"]
        for row in merged
    }
    assert found == expected and max(found.values()) >= 3
    assert sum(row["host_ns"] or 0 for row in merged) == sum(row["host_ns"] or 0 for row in issued)
    of_hosts = evaluate("agreement", tables, by)
    assert len(of_hosts) and len(merged) < len(issued)

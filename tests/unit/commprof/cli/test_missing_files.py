"""Test a finalized run with a missing file.

The message names the file, and no conclusion is drawn from the remaining files.
"""

from __future__ import annotations

import json
import shutil

import pytest

from commprof.cli import execute
from commprof.trace.finaliser import finalise
from commprof.trace.manifest import Manifest, create_run, read_manifest
from commprof.trace.pending_ranks import SIDE_TABLES
from commprof.trace.reader import open_run
from support.rank_files import write_rank
from support.runs import SyntheticRun

READING = {
    "host": "h",
    "device": "lo",
    "kind": "interface",
    "sent_bytes": 1,
    "received_bytes": 2,
    "time_ns": 3,
}


@pytest.fixture(scope="module")
def finalised(tmp_path_factory):
    run = tmp_path_factory.mktemp("finalised") / "run"
    create_run(run, Manifest(started_realtime_ns=1_700_000_000_000_000_000, nproc=2, world_size=2))
    for rank in range(2):
        write_rank(run, rank, 2)
    (run / "wire.jsonl").write_text(json.dumps(READING) + "\n")
    finalise(run)
    return run


@pytest.fixture
def run(finalised, tmp_path):
    return shutil.copytree(finalised, tmp_path / "run")


def told(capsys, *words):
    """Return the exit code of a command and its output on one line."""
    code = execute(list(words))
    said = capsys.readouterr()
    return code, " ".join((said.out + said.err).split())


def forget_tables(run):
    """Change the manifest of ``run`` to the format that an earlier version wrote."""
    content = json.loads((run / "run.json").read_text())
    content.pop("tables", None)
    (run / "run.json").write_text(json.dumps(content))


def test_the_tables_that_were_written_are_listed(run):
    assert read_manifest(run).tables == sorted([*SIDE_TABLES, "wire"])
    before = (run / "run.json").stat().st_mtime_ns
    finalise(run)
    assert (run / "run.json").stat().st_mtime_ns == before
    forget_tables(run)
    finalise(run)
    assert read_manifest(run).tables is None


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["steps", "groups", "wire", "clocks"])
def test_a_missing_table_is_named(run, capsys, name):
    (run / f"{name}.parquet").unlink()
    for verb in ("report", "verify"):
        code, said = told(capsys, verb, str(run))
        assert code == 1 and said == (
            f"commprof: error: {name}.parquet of {run} is missing; it was written when the run was finalized or "
            "aligned; copy the run again with all its files"
        )
    forget_tables(run)
    assert execute(["report", str(run)]) == 0


def test_ranks_that_come_later_do_not_hide_a_missing_table(run, capsys):
    (run / "steps.parquet").unlink()
    write_rank(run, 2, 3)
    code, said = told(capsys, "report", str(run))
    assert code == 1 and "steps.parquet of" in said
    assert not (run / "steps.parquet").exists() and len(list(run.glob("rank-00002-*"))) == 2


def test_missing_records_of_a_rank_leave_the_ledger_open(run, capsys):
    assert told(capsys, "verify", str(run))[1].count("20 records of 2 ranks") == 1
    file = next(run.glob("collectives/rank-00001-*"))
    file.unlink()
    for _ in ("as listed", "finalised by an earlier version"):
        code, said = told(capsys, "verify", str(run))
        assert code == 3 and "10 records of 1 rank," in said and "Mismatch" not in said
        assert f"Cannot tell: rank 1: collectives/{file.name} is missing, and 10 records with it" in said
        assert "ranks 1 of 2" in told(capsys, "report", str(run))[1]
        assert "1 of 2 ranks, 10 records" in told(capsys, "finalise", str(run))[1]
        forget_tables(run)
    health = open_run(run).health
    assert health.gone == (f"collectives/{file.name}",) and health.missing_ranks == ()


def test_records_of_steps_without_their_table_are_no_mismatch(tmp_path, capsys):
    config = {"train_batch_size": 2, "zero_optimization": {"stage": 1}}
    made = SyntheticRun(world_size=2, config=config)
    made.add_parameters({"w": 1000})
    made.add_step(0)
    made.add_collective("all_reduce", step=0, phase="backward", payload_bytes=4000, purpose="metric")
    run = made.write(tmp_path / "run")
    assert told(capsys, "verify", str(run))[0] == 1
    (run / "steps.parquet").unlink()
    code, said = told(capsys, "verify", str(run))
    assert (
        code == 3
        and "mismatch" not in said
        and "the table of the training steps (steps.parquet) is missing" in said
    )


@pytest.mark.sampled
@pytest.mark.parametrize("finalises", [True, False])
def test_damaged_lines_of_readings_are_counted_by_file_and_host(tmp_path, capsys, finalises):
    run = tmp_path / "run"
    create_run(run, Manifest(started_realtime_ns=1_700_000_000_000_000_000, nproc=1, world_size=1))
    write_rank(run, 0, 1)
    good = json.dumps(READING)
    (run / "wire.jsonl").write_text(f'{good}\n{{"host": "h", \x00\n7\n{good}\n{{"cut off')
    sample = {"host": "g", "source": "proc", "device": "0", "name": "x", "value": 1.0, "time_ns": 1}
    (run / "samples-g.jsonl").write_text(
        json.dumps(sample) + "\n" + json.dumps(sample | {"time_ns": "x"}) + "\n"
    )
    if finalises:
        finalise(run)
        finalise(run)
    expected = [
        "wire.jsonl of host h: 2 of 4 lines are damaged and were left out",
        "samples-g.jsonl of host g: 1 of 2 lines are damaged and were left out",
    ]
    assert [note for note in open_run(run).health.notes if "lines" in note] == expected
    for verb in ("report", "verify"):
        _, said = told(capsys, verb, str(run))
        assert all(said.count(sentence) == 1 for sentence in expected), said

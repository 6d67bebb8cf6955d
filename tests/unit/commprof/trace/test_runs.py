"""Test run directories: manifests, finalizing once, and the messages about missing data."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime

import pytest

import commprof
from commprof.analysis import api
from commprof.cli import execute
from commprof.errors import SchemaError, TraceError, UsageError
from commprof.schema import TABLES
from commprof.trace import collective_files, finaliser
from commprof.trace.directory import claim_run_directory, default_run_directory, find_runs, is_run, resolve
from commprof.trace.finaliser import finalise, finalise_ended
from commprof.trace.manifest import Manifest, create_run, read_manifest, write_manifest
from commprof.trace.process import start_ticks
from commprof.trace.reader import open_run
from commprof.trace.tables import conform, pa, read_table, table_from_rows, write_table
from support.rank_files import write_rank

NOW = datetime(2026, 3, 4, 5, 6, 7)


def two_ranks(run, **options):
    for rank in range(2):
        write_rank(run, rank, 2, records=10, **options)
    return run


def test_names_of_new_runs(tmp_path):
    first = default_run_directory("examples/train_gpt.py", NOW, tmp_path)
    assert first == tmp_path / "train_gpt-20260304-050607"
    first.mkdir()
    assert default_run_directory("examples/train_gpt.py", NOW, tmp_path).name == "train_gpt-20260304-050607-2"
    assert default_run_directory("package.module", NOW, tmp_path).name == "module-20260304-050607"


def test_jobs_that_start_in_the_same_second_get_a_directory_each(tmp_path):
    traces = tmp_path / "traces"
    with ThreadPoolExecutor(8) as pool:
        claimed = list(pool.map(lambda _: claim_run_directory("train.py", NOW, traces), range(16)))
    assert len(set(claimed)) == 16 and set(claimed) == set(traces.iterdir())


def test_finding_and_resolving_runs(tmp_path):
    for name, started in (("b", 5), ("a/x", 9), ("a/y", 7)):
        create_run(tmp_path / name, Manifest(started_realtime_ns=started))
    (tmp_path / "empty").mkdir()
    assert [str(run.relative_to(tmp_path)) for run in find_runs(tmp_path)] == ["a/x", "a/y", "b"]
    assert resolve("latest", tmp_path) == tmp_path / "a/x"
    assert resolve(tmp_path / "b") == tmp_path / "b"
    assert not is_run(tmp_path / "empty")
    for path, words in (
        (tmp_path / "nowhere", "does not exist"),
        (tmp_path / "empty", "Record a run with"),
        (tmp_path / "a", "holds 2 run"),
        (tmp_path / "b" / "run.json", "is a file"),
    ):
        with pytest.raises(TraceError, match=words):
            resolve(path)
    with pytest.raises(TraceError, match="no run in"):
        resolve("latest", tmp_path / "empty")


def test_a_manifest_reads_back_with_keys_of_others(tmp_path):
    create_run(
        tmp_path / "r", Manifest(script="train.py", nproc=2, sweep={"name": "s", "point": {}, "repeat": 0})
    )
    file = tmp_path / "r" / "run.json"
    content = json.loads(file.read_text())
    content["later"] = {"a": 1}
    file.write_text(json.dumps(content))
    manifest = read_manifest(tmp_path / "r")
    assert manifest.script == "train.py" and manifest.extra == {"later": {"a": 1}}
    write_manifest(tmp_path / "r", manifest)
    assert json.loads(file.read_text())["later"] == {"a": 1}


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        ("", TraceError, "not valid JSON"),
        ('{"schema_version": 1, "ranks": ', TraceError, "not valid JSON"),
        ("[]", TraceError, "no schema_version"),
        ('{"schema_version": 1, "ranks": 5}', TraceError, "ranks is int"),
        ('{"schema_version": 99, "commprof_version": "9.9"}', SchemaError, "commprof 9.9"),
    ],
)
def test_manifests_that_cannot_be_used(tmp_path, text, error, words):
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(error, match=words):
        open_run(tmp_path)


def test_nothing_is_overwritten_without_force_and_only_ever_a_run(tmp_path):
    create_run(tmp_path / "r", Manifest(script="old"))
    with pytest.raises(UsageError, match="--force"):
        create_run(tmp_path / "r", Manifest(script="new"))
    assert read_manifest(tmp_path / "r").script == "old"
    create_run(tmp_path / "r", Manifest(script="new"), force=True)
    assert read_manifest(tmp_path / "r").script == "new"
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("x")
    with pytest.raises(UsageError, match="is not a run"):
        create_run(tmp_path / "home", Manifest(), force=True)
    assert (tmp_path / "home" / "thesis.tex").exists()
    (tmp_path / "r" / "model.pt").write_text("x")
    with pytest.raises(UsageError, match=r"model\.pt"):
        create_run(tmp_path / "r", Manifest(), force=True)
    assert (tmp_path / "r" / "model.pt").exists()


def test_finalising_keeps_every_row_and_may_be_repeated(tmp_path):
    run = two_ranks(tmp_path / "run")
    health = finalise(run)
    assert (health.records, health.ranks_recorded, health.state) == (20, 2, "complete")
    assert not list(run.glob("rank-*"))
    first = {name: open_run(run).table(name) for name in TABLES}
    assert len(first["collectives"]) == 20 and len(first["steps"]) == 4 and len(first["groups"]) == 2
    assert finalise(run) == health
    for name, table in first.items():
        assert open_run(run).table(name).equals(table)
    assert read_manifest(run).state == "complete" and len(read_manifest(run).ranks) == 2


@pytest.mark.sampled
@pytest.mark.parametrize(
    "moment", ["write_collectives", "check_copy", "_extend", "write_parquet", "write_manifest", "unlink"]
)
@pytest.mark.parametrize("after", [0, 1])
def test_a_crash_while_finalising_loses_and_doubles_nothing(tmp_path, monkeypatch, moment, after):
    run = two_ranks(tmp_path / "run")
    target = {"unlink": finaliser.Path, "check_copy": collective_files}.get(moment, finaliser)
    original = getattr(target, moment)
    calls = []

    def crash(*args, **kwargs):
        calls.append(1)
        if len(calls) > after:
            raise KeyboardInterrupt
        return original(*args, **kwargs)

    monkeypatch.setattr(target, moment, crash)
    with contextlib.suppress(KeyboardInterrupt):
        finalise(run)
    assert calls
    monkeypatch.undo()
    for _ in ("as it was left", "finalised"):
        opened = open_run(run)
        assert opened.health.records == len(opened.table("collectives")) == 20
        assert len(opened.table("steps")) == 4
        assert len(opened.table("groups")) == len(opened.table("clocks")) == 2
        finalise(run)
    assert not list(run.glob("rank-*"))


def test_two_processes_finalise_at_once(tmp_path):
    run = two_ranks(tmp_path / "run")
    children = []
    for _ in range(3):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                code = 0 if finalise(run).records == 20 else 2
            finally:
                os._exit(code)
        children.append(pid)
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children] == [0, 0, 0]
    opened = open_run(run)
    assert len(opened.table("collectives")) == 20 and len(opened.table("steps")) == 4


def test_a_copy_that_differs_keeps_the_binary_files(tmp_path, monkeypatch):
    run = two_ranks(tmp_path / "run")
    read = collective_files._row_groups
    monkeypatch.setattr(collective_files, "_row_groups", lambda file: (part.slice(1) for part in read(file)))
    with pytest.raises(TraceError, match="binary files"):
        finalise(run)
    monkeypatch.undo()
    assert len(list(run.glob("rank-*.records"))) == 2


def test_a_run_without_records_is_told_in_one_note(tmp_path, capsys):
    run = tmp_path / "run"
    create_run(run, Manifest(started_realtime_ns=5, nproc=2, ended_realtime_ns=6, exit_code=0))
    (note,) = open_run(run).health.notes
    assert "never initialized torch.distributed" in note
    assert execute(["verify", str(run)]) == 3
    said = capsys.readouterr().out
    assert "No payload is among the records." in said and "0 of 0" not in said


def test_missing_and_killed_ranks_are_named(tmp_path):
    run = tmp_path / "run"
    write_rank(run, 0, 4, records=5)
    write_rank(run, 2, 4, records=5, ended=False)
    for file in run.glob("rank-*"):
        os.utime(file, (1, 1))
    health = open_run(run).health
    assert health.missing_ranks == (1, 3) and health.ranks_expected == 4 and health.state == "killed"
    assert any("ranks 1, 3 of 4 left no files" in note for note in health.notes)
    assert any("rank 2 ended without closing its recording" in note for note in health.notes)
    assert any("run.json was missing" in note for note in health.notes)


def test_two_jobs_in_one_run_are_noted(tmp_path):
    run = two_ranks(tmp_path / "run")
    assert not any("as one rank" in note for note in open_run(run).health.notes)
    two_ranks(run, first_pid=5_000_000)
    for health in (open_run(run).health, finalise(run), open_run(run).health):
        assert any("ranks 0, 1: 2 processes recorded as one rank" in note for note in health.notes)


def test_a_run_that_still_works_is_left_alone(tmp_path):
    run = tmp_path / "run"
    mine = {"pid": os.getpid(), "host": socket.gethostname(), "start_ticks": start_ticks(os.getpid())}
    write_rank(run, 0, 1, records=5, ended=False, **mine)
    opened = open_run(run)
    assert opened.health.state == "running" and len(opened.table("collectives")) == 5
    assert len(list(run.glob("rank-*"))) == 2 and not (run / "collectives").exists()
    assert not (run / "run.json").exists()


def test_a_directory_that_cannot_be_written_to_is_read_as_it_is(tmp_path, monkeypatch):
    run = two_ranks(tmp_path / "run")

    def refuse(run, kind):
        raise TraceError(f"{run} cannot be written to")

    monkeypatch.setattr(finaliser, "locked", refuse)
    assert finalise_ended(run) is None
    opened = open_run(run)
    assert opened.health.records == len(opened.table("collectives")) == 20
    assert len(opened.table("steps")) == 4


def files_of(run):
    return {file: (file.stat().st_mtime_ns, file.read_bytes()) for file in run.rglob("*") if file.is_file()}


def test_opening_writes_nothing_and_commands_finalise_once(tmp_path, capsys):
    run = two_ranks(tmp_path / "run")
    before = files_of(run)
    opened = open_run(run)
    assert len(opened.table("collectives")) == 20 and opened.health.state == "complete"
    assert len(commprof.open(run).traffic()) and len(api.timeline(run).bars) == 20
    assert files_of(run) == before
    assert execute(["report", str(run)]) == 0
    assert "was not finalised when it ended; it is now: 2 ranks, 20 records" in capsys.readouterr().err
    assert not list(run.glob("rank-*"))
    assert execute(["report", str(run)]) == 0
    assert capsys.readouterr().err == ""
    assert open_run(run).table("collectives").num_rows == 20


@pytest.mark.long
def test_finalise_takes_several_runs_and_may_be_repeated(tmp_path, capsys):
    for name in ("a", "b"):
        two_ranks(tmp_path / name)
    for _ in range(2):
        assert execute(["finalise", str(tmp_path)]) == 0
        said = capsys.readouterr().err
        assert said.count("finalised: 2 ranks, 20 records, 0 dropped, 0 unseen") == 2
    assert not list(tmp_path.rglob("rank-*.records"))
    assert execute(["finalise", str(tmp_path / "c")]) == 1


def test_one_damaged_rank_does_not_hide_the_others(tmp_path):
    run = two_ranks(tmp_path / "run")
    next(run.glob("rank-00001-*.records")).write_bytes(b"x" * 5000)
    opened = open_run(run)
    assert opened.health.records == 10
    assert any("rank 1" in note and "cannot be read" in note for note in opened.health.notes)
    assert list(run.glob("rank-00001-*.records"))  # The files are kept so that a user can repair them.
    shutil.rmtree(run)
    write_rank(run, 0, 1)
    next(run.glob("*.records")).write_bytes(b"")
    with pytest.raises(TraceError, match="holds 0 bytes"):
        open_run(run)


def test_tables_of_others_are_checked_against_the_schema(tmp_path):
    rows = [
        {"host": "h", "device": "lo", "kind": "interface", "time_ns": 1, "sent_bytes": 2, "received_bytes": 3}
    ]
    table = table_from_rows("wire", rows)
    write_table(tmp_path, "wire", table)
    empty = dict.fromkeys(TABLES["wire"].names)
    assert read_table(tmp_path, "wire").to_pylist() == [{**empty, **row} for row in rows]
    assert len(read_table(tmp_path, "samples")) == 0
    with pytest.raises(SchemaError, match="does not have column"):
        conform("wire", table.append_column("speed", pa.array([1])))
    with pytest.raises(SchemaError, match="lacks column device"):
        conform("wire", table.drop_columns(["device"]))
    with pytest.raises(TraceError, match="there is no table 'wires'"):
        read_table(tmp_path, "wires")
    (tmp_path / "wire.parquet").write_bytes(b"PAR1 nonsense")
    with pytest.raises(TraceError, match=r"wire\.parquet cannot be read"):
        read_table(tmp_path, "wire")


def test_wire_samples_become_a_table(tmp_path):
    run = two_ranks(tmp_path / "run")
    row = {
        "host": "h",
        "device": "lo",
        "kind": "interface",
        "time_ns": 1,
        "sent_bytes": 2,
        "received_bytes": 3,
    }
    (run / "wire.jsonl").write_text(json.dumps(row) + "\n" + '{"host": "h", "dev')
    (read,) = open_run(run).table("wire").to_pylist()
    assert read == {**dict.fromkeys(TABLES["wire"].names), **row}
    assert finalise_ended(run) is not None and finalise_ended(run) is None
    assert not (run / "wire.jsonl").exists()
    (read,) = open_run(run).table("wire").to_pylist()
    assert read == {**dict.fromkeys(TABLES["wire"].names), **row}


def test_disk_space_per_record(tmp_path):
    run = tmp_path / "run"
    write_rank(run, 0, 1, records=20_000)
    finalise(run)
    size = sum(file.stat().st_size for file in run.rglob("*") if file.is_file())
    assert size / 20_000 < 40


@pytest.mark.long
def test_answers_about_a_large_run_are_those_about_a_small_one(tmp_path, monkeypatch):
    from commprof.analysis import api
    from commprof.trace import reader

    run = two_ranks(tmp_path / "run")
    finalise(run)
    mine = {"pid": os.getpid(), "host": socket.gethostname(), "start_ticks": start_ticks(os.getpid())}
    # This rank is still running, and its file is not a Parquet file.
    write_rank(run, 2, 3, records=7, ended=False, **mine)
    answers = (lambda: api.traffic(run), lambda: api.step_times(run))
    small = [answer().to_dict("list") for answer in answers]
    assert sum(small[0]["records"]) == 27
    monkeypatch.setattr(reader, "_MOST_ROWS", 0)
    scanned = open_run(run).scan("collectives")
    assert isinstance(scanned, reader.Scan) and len(scanned.files) == 2 and len(scanned.rest) == 7
    assert repr([answer().to_dict("list") for answer in answers]) == repr(small)
    next((run / "collectives").iterdir()).write_bytes(b"PAR1 nonsense PAR1")
    with pytest.raises(TraceError, match="cannot be read"):
        api.traffic(run)

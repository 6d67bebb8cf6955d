"""Test that logs that are followed while they are written give the same tables as the finished files."""

from __future__ import annotations

import gzip
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from commprof.cli.application import invoke
from commprof.errors import LogError, UsageError
from commprof.nccl.following import Follower
from commprof.nccl.parser import parse_logs, parse_sources


def log_of(pid: int, operations: int) -> bytes:
    """Return a log with lines of several kinds and multi-byte characters."""
    head = f"n0:{pid}:{pid} [0] NCCL INFO "
    lines = [f"{head}comm 0x{pid:x} rank 0 nranks 2 cudaDev 0 busId 1000 commId 0x9 - Init START"]
    for number in range(operations):
        lines.append(f"Schritt {number}: Größe ✓")
        lines.append(
            f"{head}AllReduce: opCount {number:x} sendbuff 0x1 recvbuff 0x2 count {number + 1} datatype 7 op 0 root 0 "
            f"comm 0x{pid:x} [nranks=2] stream 0x4"
        )
    return "\n".join(lines).encode() + b"\n"


def everything(parsed):
    tables = {name: table.to_pylist() for name, table in parsed.tables.items()}
    return parsed.ops.to_pylist(), tables, parsed.counts, parsed.kinds, parsed.notes, parsed.files


@pytest.fixture
def logs(tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "scratch").mkdir()
    return tmp_path / "logs"


def follower_of(logs: Path, *paths: Path) -> Follower:
    return Follower([str(path) for path in paths or (logs,)], logs.parent / "scratch")


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as stream:
        stream.write(data)


def trickle(path: Path, data: bytes, seed: int) -> None:
    """Write ``data`` in parts of random sizes with pauses, so that lines and characters are cut."""
    rng = random.Random(seed)
    while data:
        size = rng.choice([1, 2, 7, 100, 3000])
        append(path, data[:size])
        data = data[size:]
        time.sleep(rng.choice([0, 0, 0.001]))


@pytest.mark.long
def test_files_that_grow_and_appear_give_what_they_give_when_finished(logs):
    texts = {logs / f"n0.{pid}": log_of(pid, 150) for pid in (1, 2, 3)}
    texts[logs / "n0.3"] = texts[logs / "n0.3"][:-30]  # The last line stays unfinished.

    def write() -> None:
        for seed, (path, text) in enumerate(texts.items()):
            trickle(path, text, seed)

    writer = threading.Thread(target=write)
    follower = follower_of(logs)
    reports = []
    writer.start()
    follower.follow(1.0, reports.append)
    writer.join()
    assert everything(parse_sources(follower.sources())) == everything(parse_logs(logs))
    assert follower.troubles == ()
    last = reports[-1]
    whole = [text.rpartition(b"\n")[0] + b"\n" for text in texts.values()]
    assert (last.files, last.bytes) == (3, sum(map(len, whole)))
    assert last.lines == sum(text.count(b"\n") for text in whole)
    assert last.operations == 150 + 150 + 149
    assert [report.bytes for report in reports] == sorted(report.bytes for report in reports)


def test_every_cut_of_a_line_is_counted_once(logs):
    text = log_of(1, 3)
    path = logs / "a"
    follower = follower_of(logs)
    for position in range(len(text)):
        append(path, text[position : position + 1])
        follower.look()
    assert follower.count == (1, len(text), text.count(b"\n"), 3)


def test_what_stood_in_a_file_before_it_was_cut_is_kept(logs):
    path, follower = logs / "a", follower_of(logs)
    append(path, log_of(1, 5) + b"unfinished")
    follower.look()
    path.write_bytes(log_of(1, 2))
    follower.look()
    append(path, log_of(2, 1))
    parsed = parse_sources(follower.sources())
    before = f"{path} (until it was cut)"
    assert parsed.files == (before, str(path))
    assert parsed.ops["file"].to_pylist() == [before] * 5 + [str(path)] * 3
    assert any("was cut while it was followed" in note for note in parsed.notes)
    assert parsed.counts.lines == 12 + 5 + 3


def test_a_file_that_was_cut_and_has_grown_beyond_what_it_was_is_noticed(logs):
    path, follower = logs / "a", follower_of(logs)
    append(path, log_of(1, 2))
    follower.look()
    path.write_bytes(log_of(2, 50))
    follower.look()
    parsed = parse_sources(follower.sources())
    assert parsed.counts.coll == 52


def test_a_file_that_is_rotated_is_read_under_its_new_name_and_not_twice(logs):
    path, follower = logs / "a", follower_of(logs)
    append(path, log_of(1, 2))
    follower.look()
    append(path, log_of(1, 1))
    path.rename(logs / "a.1")
    append(path, log_of(1, 4))
    follower.look()
    append(logs / "a.1", b"late line\n")
    follower.look()
    assert everything(parse_sources(follower.sources())) == everything(parse_logs(logs))
    assert follower.count.files == 2


def test_a_file_that_is_rotated_out_of_the_pattern_stays(logs):
    path, follower = logs / "a.log", follower_of(logs, logs / "a.log")
    append(path, log_of(1, 2))
    follower.look()
    path.rename(logs / "a.log.1")
    append(path, log_of(1, 4))
    follower.look()
    parsed = parse_sources(follower.sources())
    assert parsed.files == (str(logs / "a.log.1"), str(path))
    assert parsed.counts.coll == 6


def test_a_file_that_is_removed_stays(logs):
    path, follower = logs / "a", follower_of(logs)
    append(path, log_of(1, 3))
    append(logs / "b", log_of(2, 1))
    follower.look()
    path.unlink()
    follower.look()
    parsed = parse_sources(follower.sources())
    assert parsed.files == (f"{path} (until it was removed)", str(logs / "b"))
    assert parsed.counts.coll == 4


def test_compressed_files_are_read_at_the_end(logs):
    packed = gzip.compress(log_of(1, 200))
    follower = follower_of(logs)
    append(logs / "a.gz", packed[:300])
    follower.look()
    append(logs / "a.gz", packed[300:])
    follower.look()
    assert parse_sources(follower.sources()).counts.coll == 200
    assert follower.count.bytes == len(packed)
    (logs / "a.gz").unlink()
    follower.look()
    append(logs / "b", b"x\n")
    assert parse_sources(follower.sources()).counts.coll == 200


def test_copies_are_small_however_the_file_was_read(logs, monkeypatch):
    text = log_of(1, 20_000)
    append(logs / "a", text)
    follower = follower_of(logs)
    monkeypatch.setattr("commprof.nccl.following._PIECE_BYTES", 1 << 18)
    follower.look()
    assert follower.count.lines == 40_001
    assert sum(file.stat().st_size for file in (logs.parent / "scratch").iterdir()) < len(text) / 5


def test_without_room_for_copies_it_goes_on_and_says_what_is_lost(logs):
    (logs.parent / "scratch").rmdir()
    path, follower = logs / "a", follower_of(logs)
    append(path, log_of(1, 3))
    follower.look()
    path.write_bytes(log_of(2, 1))
    follower.look()
    assert parse_sources(follower.sources()).counts.coll == 1
    assert any("is lost" in trouble for trouble in follower.troubles)


def test_nothing_at_all_is_an_error_once_it_ends(logs):
    follower = follower_of(logs)
    follower.follow(0.0, lambda count: None)
    with pytest.raises(LogError, match="has no log file"):
        follower.sources()


def test_the_command_ends_when_nothing_is_written(logs, tmp_path, capsys):
    append(logs / "a", log_of(1, 5))
    out = tmp_path / "out"
    assert invoke(["nccl", "parse", str(logs), "--follow", "--idle", "0.3", "--out", str(out)]) == 0
    assert pq.read_table(out / "nccl_ops.parquet").num_rows == 5
    assert "5 COLL lines" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["--idle", "1"], ["--follow", "--idle", "-1"], ["--follow", "-"]])
def test_options_that_make_no_sense_are_refused(logs, arguments):
    append(logs / "a", log_of(1, 1))
    with pytest.raises(UsageError):
        invoke(["nccl", "parse", str(logs), *arguments])


@pytest.mark.long
def test_an_interrupt_ends_it_cleanly_with_all_tables_written(logs, tmp_path):
    append(logs / "a", log_of(1, 5))
    out = tmp_path / "out"
    command = [sys.executable, "-m", "commprof", "nccl", "parse", str(logs), "--follow", "--out", str(out)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ}
    )
    try:
        assert process.stderr is not None and "following" in process.stderr.readline()
        time.sleep(0.5)
        append(logs / "a", log_of(2, 2))
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        shown, said = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0, said
    assert "7 COLL lines" in shown and "Traceback" not in said
    assert pq.read_table(out / "nccl_ops.parquet").num_rows == 7

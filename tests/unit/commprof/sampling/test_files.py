"""Test how a rank's files are read while they are being written, and which files samplers write."""

import json
import os
import random
import re
import socket
import subprocess
import sys
import textwrap
import time

import pytest

from commprof.errors import TraceError
from commprof.launch.observers import make_samplers, observed, sampled
from commprof.recorder.process.recorder_options import Options
from commprof.sampling.calls import WINDOW
from commprof.sampling.dump_text import dump_text
from commprof.sampling.job_dump import keep_dump, take_dump
from commprof.sampling.live import fingerprint, latest, latest_files, read_live, read_tail
from commprof.sampling.processes import local_ranks
from commprof.sampling.samples import Sample, SampleWriter
from commprof.sampling.watchdog import RunningTime, Stillness, Watchdog
from commprof.schema import RECORD
from commprof.trace.finaliser import finalise
from commprof.trace.process import start_ticks
from commprof.trace.rank_files.layout import RankFile
from commprof.trace.rank_files.segments import pack_tail
from commprof.trace.rank_files.writer import RecordFile
from commprof.trace.reader import open_run
from support.rank_files import write_rank


def test_the_end_of_a_file_that_somebody_writes_to(tmp_path):
    """The last 100 of 5000 records are read from behind the reserved zeros.

    Reading does not change the file.
    """
    identity = RankFile(0, 0, 7, 1)
    file = RecordFile(tmp_path / identity.stem, identity)
    for n in range(5000):
        file.append(1000 + n, n, 1, 0, 2, 3, pack_tail(0, 0, 0, 2, 0))
    path = file.path
    before = path.read_bytes()
    tail = read_tail(path, 100)
    assert (tail.total, len(tail.data), tail.totals) == (5000, 100 * RECORD.size, None)
    assert [fields[0] for fields in RECORD.iter_unpack(tail.data)] == list(range(5900, 6000))
    assert path.stat().st_size > 5000 * RECORD.size + 4096  # Reserved space follows the records.
    assert path.read_bytes() == before
    file.close({"records": 5000})
    assert read_tail(path).totals == {"records": 5000}


def test_an_empty_missing_or_cut_off_file_holds_nothing(tmp_path):
    assert read_tail(tmp_path / "none.records").total == 0
    (tmp_path / "short.records").write_bytes(b"COMM")
    assert read_tail(tmp_path / "short.records").total == 0
    (tmp_path / "other.records").write_bytes(b"x" * 5000)
    with pytest.raises(TraceError, match="it is damaged, or was not"):
        read_tail(tmp_path / "other.records")


def test_a_completion_changes_the_fingerprint_as_a_record_does(tmp_path):
    identity = RankFile(0, 0, 7, 1)
    stem = tmp_path / identity.stem
    file = RecordFile(stem, identity)
    seen = [fingerprint(stem)]
    words, base = file.append(5, 0, 1, 0, 2, 3, pack_tail(0, 0, 0, 2, 0))
    seen.append(fingerprint(stem))
    words[base + 1] = 9
    seen.append(fingerprint(stem))
    assert len(set(seen)) == 3 and fingerprint(stem) == seen[-1]
    file.drop()


def test_a_rank_as_its_files_tell(tmp_path):
    stem = write_rank(tmp_path, rank=1, world=2, records=10, ended=False)
    calls = read_live(RankFile(1, 0, 4_000_001, 1), stem)
    assert (calls.rank, calls.total, calls.ended, calls.whole) == (1, 10, False, True)
    last = calls.calls[-1]
    assert (last.what.op, last.pg_seq, last.site, last.thread) == (
        "all_reduce",
        9,
        "train.py:7 step",
        "MainThread",
    )
    assert (last.issue_ns, last.return_ns, last.wait_end_ns, last.step) == (9010, 9020, 9090, 1)
    assert calls.groups["0"].ranks == (0, 1)
    assert not calls.inside() and calls.last_done() == last


def test_calls_that_raised_before_the_last_records_take_no_numbers(tmp_path):
    stem = write_rank(tmp_path, records=WINDOW + 20, ended=False, raised=(3, 7, WINDOW + 15))
    calls = read_live(RankFile(0, 0, 4_000_000, 1), stem).calls
    assert len(calls) == WINDOW
    assert [call.pg_seq for call in calls[-6:]] == [WINDOW + n for n in (12,)] + [
        -1 - (WINDOW + 13),
        *(WINDOW + n for n in (13, 14, 15, 16)),
    ]
    assert calls[-5].raised and calls[0].pg_seq == 20 - 2


def test_of_several_processes_of_a_rank_the_last_attempt_counts(tmp_path):
    def files(*identities):
        found = []
        for rank, attempt, pid, part in identities:
            identity = RankFile(rank, attempt, pid, part)
            (tmp_path / f"{identity.stem}.events").write_text("")
            found.append((identity, tmp_path / identity.stem))
        return [identity.stem for identity, _ in latest(found)]

    assert files((0, 0, 5, 1), (1, 0, 6, 1), (0, 1, 7, 1)) == ["rank-00000-1-7"]
    os.utime(tmp_path / "rank-00000-1-7.events", ns=(1, 1))
    assert files((0, 1, 8, 1)) == ["rank-00000-1-8"]
    os.utime(tmp_path / "rank-00000-1-8.events", ns=(2, 2))
    os.utime(tmp_path / "rank-00000-1-7.events", ns=(1, 1))
    found = [
        (RankFile(0, 1, 7, 1), tmp_path / "rank-00000-1-7"),
        (RankFile(0, 1, 8, 1), tmp_path / "rank-00000-1-8"),
    ]
    assert [identity.pid for identity, _ in latest(found)] == [8]


def write_own_files(run):
    """Write the files of rank 2 for this process."""
    identity = RankFile(2, 0, os.getpid(), 1)
    begin = {"kind": "begin", "host": socket.gethostname(), "start_ticks": start_ticks(os.getpid())}
    (run / f"{identity.stem}.events").write_text(json.dumps(begin) + "\n")


def test_local_ranks_are_those_that_live_on_this_host(tmp_path):
    write_rank(tmp_path, rank=0, ended=False, host="elsewhere")
    # This process is dead, because its pid does not exist.
    write_rank(tmp_path, rank=1, ended=False, host=socket.gethostname())
    write_own_files(tmp_path)
    assert [(process.rank, process.pid) for process in local_ranks(tmp_path)] == [(2, os.getpid())]


def test_a_dump_of_files_of_another_host_says_so(tmp_path):
    write_rank(tmp_path, rank=0, world=1, ended=False, host="elsewhere")
    dump = take_dump(tmp_path, watch_seconds=0)
    assert dump.as_dict()["ranks"][0]["state"] == "elsewhere"
    assert "for the others run commprof dump on elsewhere" in dump.verdict.notes[0]


def test_a_dump_of_a_job_that_goes_on_needs_the_base_install_only(tmp_path):
    write_rank(tmp_path / "run", ended=False)
    (tmp_path / "new").mkdir()
    script = """
        import sys
        for name in ("numpy", "pandas", "pyarrow", "duckdb", "rich", "pynvml"):
            sys.modules[name] = None
        import pathlib
        import commprof.launch.job, commprof.sampling.watchdog
        from commprof.sampling.job_dump import take_dump
        from commprof.sampling.dump_text import dump_text
        for run in sys.argv[1:]:
            print(dump_text(take_dump(pathlib.Path(run), watch_seconds=0)).splitlines()[0])
    """
    words = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path / "run"), str(tmp_path / "new")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first.startswith(
        "no rank waits: none is inside a collective; the last one, all_reduce #9 of group default_pg"
    )
    assert second.startswith("no rank has recorded a collective")


def test_a_rank_that_cannot_be_read_is_noted_and_the_others_are_told(tmp_path):
    for rank in range(3):
        stem = write_rank(tmp_path, rank=rank, world=3, ended=False)
    stem.with_suffix(".records").write_bytes(b"x" * 5000)
    dump = take_dump(tmp_path, watch_seconds=0)
    assert [row["rank"] for row in dump.as_dict()["ranks"]] == [0, 1]
    (damaged,) = [note for note in dump.verdict.notes if "rank 2" in note]
    assert damaged.startswith("rank 2 cannot be read: ") and "it is damaged" in damaged
    for rank in range(2):
        (tmp_path / f"rank-0000{rank}-0-400000{rank}.records").write_bytes(b"x" * 5000)
    with pytest.raises(TraceError, match="it is damaged"):
        take_dump(tmp_path, watch_seconds=0)


def test_damaged_files_never_give_anything_but_a_dump_or_one_sentence(tmp_path):
    for rank in range(2):
        write_rank(tmp_path / "good", rank=rank, world=2, records=12, ended=False, host=socket.gethostname())
    good = {file.name: file.read_bytes() for file in sorted((tmp_path / "good").iterdir())}
    values = [b"0", b"-1", b"null", b'"x"', b"[]", b"{}", b"9" * 30, b'"0-999999999"']
    chance, dumps = random.Random(7), 0
    for turn in range(200):
        run = tmp_path / str(turn)
        run.mkdir()
        for name, content in good.items():
            data = bytearray(content[: 4096 + 14 * RECORD.size])
            for _ in range(chance.choice([0, 1, 4])):
                data[chance.randrange(len(data))] = chance.randrange(256)
            found = list(re.finditer(rb':("[^"]*"|-?\d+|null|true|false)', bytes(data)))
            if found and chance.random() < 0.5:
                at = chance.choice(found)
                data[at.start(1) : at.end(1)] = chance.choice(values)
            (run / name).write_bytes(data[: chance.randrange(len(data))] if turn % 5 == 0 else data)
        try:
            dump = take_dump(run, watch_seconds=0)
        except TraceError as error:
            assert "\n" not in str(error)
            continue
        assert dump_text(dump) and json.dumps(dump.as_dict())
        dumps += 1
    assert dumps > 100


class Counting:
    """A sampler that counts its readings."""

    def __init__(self, fails_at=None):
        self.readings, self.fails_at, self.closed = 0, fails_at, False

    def read(self):
        self.readings += 1
        if self.readings == self.fails_at:
            raise RuntimeError("gone")
        return [Sample("proc", None, "readings", float(self.readings), time.perf_counter_ns())]

    def close(self):
        self.closed = True


def test_samples_become_a_table_of_the_run(tmp_path):
    write_rank(tmp_path, records=1)
    sampler = Counting()
    with SampleWriter(tmp_path, [sampler], 0.01):
        while sampler.readings < 5:
            time.sleep(0.005)
    assert sampler.closed
    written = sampler.readings
    assert (tmp_path / "samples.jsonl").exists()
    rows = open_run(tmp_path).table("samples").to_pylist()
    assert [row["value"] for row in rows] == [float(n + 1) for n in range(written)]
    assert {(row["host"], row["source"], row["device"], row["name"]) for row in rows} == {
        (socket.gethostname(), "proc", None, "readings")
    }
    finalise(tmp_path)
    assert not (tmp_path / "samples.jsonl").exists() and (tmp_path / "samples.parquet").exists()
    assert open_run(tmp_path).table("samples").num_rows == written


def test_samples_of_a_job_that_goes_on_and_of_other_hosts_are_read_too(tmp_path):
    alive = {"host": socket.gethostname(), "pid": os.getpid(), "start_ticks": start_ticks(os.getpid())}
    write_rank(tmp_path, records=1, ended=False, **alive)
    row = {
        "host": "a",
        "source": "nvml",
        "device": "GPU 0",
        "name": "power_watts",
        "value": 1.0,
        "time_ns": 5,
    }
    (tmp_path / "samples.jsonl").write_text(json.dumps(row) + '\n{"host": "a", "sour')
    (tmp_path / "samples-b.jsonl").write_text(json.dumps({**row, "host": "b"}) + "\n")
    assert sorted(r["host"] for r in open_run(tmp_path).table("samples").to_pylist()) == ["a", "b"]


def test_a_sampler_that_fails_ends_the_sampling_and_nothing_else(tmp_path):
    sampler = Counting(fails_at=3)
    with SampleWriter(tmp_path, [sampler], 0.01):
        time.sleep(0.2)
    assert sampler.readings == 3
    assert len((tmp_path / "samples.jsonl").read_text().splitlines()) == 2


def test_what_cannot_be_sampled_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr("commprof.launch.observers.py_spy_program", lambda: None)
    said = []
    options = Options(samplers=("nvml", "interfaces", "proc", "stacks"))
    samplers = make_samplers(tmp_path, options, said.append)
    assert [type(sampler).__name__ for sampler in samplers] == ["ProcessSampler"]
    assert said == [
        "--sample nvml: no samples of GPUs: nvidia-ml-py is not installed (pip install 'commprof[sampling]')",
        "--sample stacks: no samples of stacks: py-spy is not installed (pip install 'commprof[sampling]')",
    ]


def test_nothing_is_sampled_unless_it_is_asked_for(tmp_path):
    with observed(tmp_path, Options(), pytest.fail):
        time.sleep(0.05)
    assert [path.name for path in tmp_path.iterdir()] == ["wire.jsonl"]


def test_samples_of_another_host_go_into_a_file_of_its_own(tmp_path):
    with sampled(tmp_path, Options(samplers=("proc",), sample_every=0.02), pytest.fail):
        write_own_files(tmp_path)
        time.sleep(0.3)
    (file,) = tmp_path.glob("samples*.jsonl")
    assert file.name == f"samples-{socket.gethostname()}.jsonl"
    assert {json.loads(line)["device"] for line in file.read_text().splitlines()} == {"rank 2"}


def test_interfaces_are_read_at_the_interval_that_was_asked_for(tmp_path):
    with observed(tmp_path, Options(samplers=("interfaces",), sample_every=0.02), pytest.fail):
        time.sleep(0.3)
    rows = [json.loads(line) for line in (tmp_path / "wire.jsonl").read_text().splitlines()]
    times = sorted({row["time_ns"] for row in rows})
    assert len(times) > 5
    # Reading the send buffers takes milliseconds. The value matters only at the end.
    assert {row["time_ns"] for row in rows if "queued_bytes" in row} == {times[-1]}


FILE = RankFile(0, 0, 1, 1)


def test_stillness_is_reported_once_until_something_moves():
    still = Stillness(10)
    assert not still.is_long({}, 100)
    assert not still.is_long({FILE: (1, 1)}, 100)
    assert not still.is_long({FILE: (1, 1)}, 109)
    assert still.is_long({FILE: (1, 1)}, 110)
    assert not still.is_long({FILE: (1, 1)}, 115)  # The file was checked a moment ago.
    assert still.is_long({FILE: (1, 1)}, 120)
    still.reported = True
    assert not still.is_long({FILE: (1, 1)}, 500)
    assert not still.is_long({FILE: (1, 2)}, 501)  # A completion changed the file.
    assert still.is_long({FILE: (1, 2)}, 511)


def test_a_run_without_records_is_no_stillness():
    still = Stillness(1)
    assert not any(still.is_long({}, now) for now in range(100))


def test_a_job_that_stood_still_together_with_its_watchdog_is_no_stillness():
    still, running = Stillness(10), RunningTime(5)
    found = {FILE: (1, 1)}
    # The running time is 4 s, plus at most 5 s of the 896 s between, plus 0.5 s.
    assert not any(still.is_long(found, running.at(now)) for now in (100, 102.5, 104, 1000, 1000.5))
    assert still.is_long(found, running.at(1001))


def test_a_watchdog_that_fails_says_so_and_ends(tmp_path):
    write_rank(tmp_path, ended=False)
    said = []

    def take(run, **options):
        raise ZeroDivisionError("boom")

    with Watchdog(tmp_path, 0.1, said.append, take):
        time.sleep(0.8)
    assert said == ["watchdog: stopped after an error: ZeroDivisionError: boom"]


def test_dumps_do_not_overwrite_each_other(tmp_path):
    first = keep_dump(tmp_path / "dumps", "hang", [(".txt", "one"), (".json", "{}")])
    second = keep_dump(tmp_path / "dumps", "hang", [(".txt", "two"), (".json", "{}")])
    assert (first.name, second.name) == ("hang.txt", "hang-2.txt")
    assert (first.read_text(), second.read_text()) == ("one", "two")
    assert sorted(path.name for path in first.parent.glob("*.json")) == ["hang-2.json", "hang.json"]


def test_latest_files_of_no_directory(tmp_path):
    with pytest.raises(TraceError, match="cannot be read"):
        latest_files(tmp_path / "none")

"""Test the readings of the interface counters at steps, and the table that is built from them.

One process of each host reads the counters.
"""

import json
from types import SimpleNamespace

import pytest

from commprof.analysis.traffic import moved_bytes
from commprof.errors import TraceError
from commprof.recorder.process.counters import HostReadings, InterfaceCounters, host_readings, parse_net_dev
from commprof.trace.coverage import uncovered
from commprof.trace.tables import read_table, table_from_rows
from commprof.trace.wire import read_readings, reading_files, write_wire
from support.runs import SyntheticRun

PROC = """Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier compressed
    lo:  {0}      3    0    0    0     0          0         0  {1}      3    0    0    0     0       0          0
  eth0: 1234567890123 9 0 0 0 0 0 0 7 1 0 0 0 0 0 0
"""


@pytest.fixture
def source(tmp_path):
    file = tmp_path / "dev"
    file.write_text(PROC.format(10, 20))
    return file


def rows(directory):
    (file,) = directory.glob("*.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


def of_lo(directory):
    """Return (step, bytes sent) of each reading of the loopback interface, in the order of the files and lines."""
    return [(row.get("step"), row["sent_bytes"]) for row in rows(directory) if row["device"] == "lo"]


def test_a_reading_tells_the_step_that_has_ended(tmp_path, source):
    readings = HostReadings(tmp_path / "wire", every_step=True, counters=InterfaceCounters(source, "h"))
    readings.open()
    for step in (0, 1, 5):
        source.write_text(PROC.format(100 * step, 1000 * step))
        readings.begin(step)
    source.write_text(PROC.format(0, 9000))
    readings.finish()
    assert of_lo(tmp_path / "wire") == [(None, 20), (-1, 0), (0, 1000), (1, 5000), (5, 9000)]


def test_without_steps_it_is_read_at_both_ends_and_each_half_second_in_between(tmp_path, source):
    readings = HostReadings(tmp_path / "wire", counters=InterfaceCounters(source, "h"))
    readings.open()
    for step in range(100):
        source.write_text(PROC.format(0, step))
        readings.begin(step, now=10**12 + step * 50_000_000)
    source.write_text(PROC.format(0, 9000))
    readings.finish()
    sent = [20, *range(0, 100, 10), 9000]
    assert of_lo(tmp_path / "wire") == [(None, number) for number in sent]


def test_every_process_of_a_host_reads_at_both_ends_and_one_of_them_in_between(tmp_path, source):
    first, second, third = (
        HostReadings(tmp_path / "wire", True, is_first, InterfaceCounters(source, name))
        for name, is_first in (("a", True), ("b", None), ("c", False))
    )
    for readings in (first, second, third):
        readings.open()
    for readings in (first, second, third):
        readings.begin(0)
        readings.begin(1)
        readings.end_steps()
    for readings in (second, third, first):
        readings.finish()
    found = {}
    for file in (tmp_path / "wire").glob("*.jsonl"):
        for line in file.read_text().splitlines():
            row = json.loads(line)
            if row["device"] == "lo":
                found.setdefault(row["host"], []).append(row.get("step"))
    assert found == {"a": [None, -1, 0, 1, None], "b": [None, None], "c": [None, None]}


@pytest.mark.parametrize(
    ("environment", "steps"),
    [
        ({}, [None, None, None]),
        ({"COMMPROF_WIRE": "1"}, [None, -1, 0]),
        ({"COMMPROF_WIRE": "1", "LOCAL_RANK": "0"}, [None, -1, 0]),
        ({"COMMPROF_WIRE": "1", "LOCAL_RANK": "1"}, [None, None]),
        ({"COMMPROF_WIRE": "1", "SLURM_LOCALID": "3"}, [None, None]),
        ({"LOCAL_RANK": "0"}, [None, None, None]),
    ],
)
def test_who_reads(tmp_path, environment, steps):
    readings = host_readings(environment, tmp_path)
    readings.open()
    readings.begin(0, now=1)
    readings.finish()
    assert [row.get("step") for row in rows(tmp_path / "wire") if row["device"] == "lo"] == steps


def test_a_place_that_cannot_be_written_to_and_counters_that_are_not_there_raise_nothing(tmp_path, source):
    (tmp_path / "wire").write_text("a file")
    readings = HostReadings(tmp_path / "wire", counters=InterfaceCounters(source))
    readings.open()
    readings.begin(0)
    readings.finish()
    gone = HostReadings(tmp_path / "other", counters=InterfaceCounters(tmp_path / "nothing"))
    gone.open()
    gone.finish()
    assert rows(tmp_path / "other") == []


def test_a_process_that_is_held_up_between_reading_and_looking_at_the_clock_reads_again(source):
    times = iter((0, 90_000_000, 100_000_000, 100_100_000))
    read = InterfaceCounters(source, "h", clock=lambda: next(times)).read()
    assert {row["time_ns"] for row in read} == {100_100_000}


def test_lines_that_are_no_counters_are_left_out():
    assert parse_net_dev(PROC.format(10, 20) + "eth1: 1 2\nnoise\n") == [
        ("lo", 20, 10, 3),
        ("eth0", 7, 1234567890123, 1),
    ]


def reading(time_ns, sent, step=None, host="h"):
    return {
        "host": host,
        "device": "lo",
        "kind": "interface",
        "time_ns": time_ns,
        "sent_bytes": sent,
        "received_bytes": 0,
        "step": step,
    }


def put(file, readings, end=""):
    file.parent.mkdir(exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in readings) + end)


def test_all_files_become_one_table_once_and_later_ones_are_added(tmp_path):
    put(tmp_path / "wire.jsonl", [reading(1, 0), reading(9, 5)], end='{"host": "h", "dev')
    put(tmp_path / "wire" / "h-1.jsonl", [reading(4, 2, step=0)], end='{"host": 3}\n[]\n')
    assert len(read_readings(reading_files(tmp_path))) == 3
    write_wire(tmp_path)
    assert reading_files(tmp_path) == []
    assert not (tmp_path / "wire").exists()
    put(tmp_path / "wire" / "g-1.jsonl", [reading(4, 2, step=0), reading(2, 7, step=-1, host="g")])
    write_wire(tmp_path)
    write_wire(tmp_path)
    table = read_table(tmp_path, "wire").to_pylist()
    assert [(row["host"], row["time_ns"], row["step"]) for row in table] == [
        ("g", 2, -1),
        ("h", 1, None),
        ("h", 4, 0),
        ("h", 9, None),
    ]


def test_readings_of_two_processes_in_the_wrong_order_do_not_count_a_counter_twice():
    listed = [reading(1, 1_000), reading(5, 1_900, step=0), reading(6, 1_800), reading(9, 2_000)]
    listed += [reading(1, 10, step=-1, host="g"), reading(2, 40, step=0, host="g")]
    moved = moved_bytes.moved(table_from_rows("wire", listed), {}).set_index("host")["sent_bytes"].to_dict()
    assert moved == {"g": 30, "h": 1_000}


SECOND = 10**9


def a_run_of_two_hosts(times, state="complete", ended=(True, True)):
    """Return a run with rank 0 on host g and rank 1 on host h, both from 10 s to 20 s.

    ``times`` gives the times of the readings of each host in seconds.
    """
    run = SyntheticRun(world_size=2)
    for rank, host in enumerate("gh"):
        for at in (10, 20):
            run.add(
                "clocks",
                rank=rank,
                attempt=0,
                pid=1000 + rank,
                host=host,
                monotonic_ns=at * SECOND,
                realtime_ns=at * SECOND,
                uncertainty_ns=1,
            )
    for host, seconds in times.items():
        for n, at in enumerate(seconds):
            row = reading(round(at * SECOND), 1000 * n, host=host)
            run.add("wire", **row)
    opened = run.open()
    opened.manifest.ranks = [
        {"rank": rank, "attempt": 0, "pid": 1000 + rank, "ended": ended[rank]} for rank in (0, 1)
    ]
    opened.health = SimpleNamespace(state=state)
    return opened


@pytest.mark.parametrize(
    ("of_h", "said"),
    [
        ((9.9, 20.1), None),
        ((), "its counters were not read"),
        ((9.9,), "its counters were read only once"),
        ((11.5, 20.1), "its first reading was taken 1.5 s after rank 1 had begun"),
        ((9.9, 19.75), "its last reading was taken 0.25 s before rank 1 had ended"),
    ],
)
def test_what_the_readings_of_a_host_leave_out_is_said(of_h, said):
    found = uncovered(a_run_of_two_hosts({"g": (9, 15, 21), "h": of_h}))
    assert found == ({} if said is None else {"h": said})


def test_nothing_is_said_of_a_run_without_readings_or_that_still_works():
    assert uncovered(a_run_of_two_hosts({})) == {}
    assert uncovered(a_run_of_two_hosts({"g": (9, 12), "h": (9, 12)}, state="running")) == {}


def test_of_a_job_that_was_killed_the_last_reading_is_one_at_an_interval():
    run = a_run_of_two_hosts({"g": (9, 21), "h": (9, 20.25)}, state="killed", ended=(True, False))
    assert uncovered(run) == {
        "h": "rank 1 was killed or exited without closing its recording, and the last reading was taken 0.25 s "
        "after its last record: bytes that moved after this reading are not counted"
    }
    # The launcher saw the end and read the counters after the end.
    assert uncovered(a_run_of_two_hosts({"g": (9, 21), "h": (9, 21)}, "failed", (True, False))) == {}


def test_a_row_that_does_not_fit_is_an_error_by_itself():
    with pytest.raises(TraceError):
        table_from_rows("wire", [{"host": 3}])

"""Readings of the interface counters: at steps by one process of a host, and the table that they become."""

import json

import pytest

from commprof.analysis import counters as analysis
from commprof.errors import TraceError
from commprof.recorder.counters import InterfaceCounters, StepReadings, parse_net_dev, step_readings
from commprof.trace.tables import read_table, table_from_rows
from commprof.trace.wire import read_readings, reading_files, write_wire

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


def test_a_reading_tells_the_step_that_has_ended(tmp_path, source):
    readings = StepReadings(tmp_path / "wire", InterfaceCounters(source, "h"))
    for step in (0, 1, 5):
        source.write_text(PROC.format(100 * step, 1000 * step))
        readings.begin(step)
    source.write_text(PROC.format(0, 9000))
    readings.finish()
    lo = [(row["step"], row["sent_bytes"]) for row in rows(tmp_path / "wire") if row["device"] == "lo"]
    assert lo == [(-1, 0), (0, 1000), (1, 5000), (5, 9000)]


def test_one_process_of_a_host_reads(tmp_path, source):
    first, second = (StepReadings(tmp_path / "wire", InterfaceCounters(source, name)) for name in "ab")
    first.begin(0)
    second.begin(0)
    second.begin(1)
    second.finish()
    first.finish()
    assert {row["host"] for row in rows(tmp_path / "wire")} == {"a"}


@pytest.mark.parametrize(
    ("environment", "reads"),
    [
        ({}, False),
        ({"COMMPROF_WIRE": "1"}, True),
        ({"COMMPROF_WIRE": "1", "LOCAL_RANK": "0"}, True),
        ({"COMMPROF_WIRE": "1", "LOCAL_RANK": "1"}, False),
        ({"COMMPROF_WIRE": "1", "SLURM_LOCALID": "3"}, False),
        ({"LOCAL_RANK": "0"}, False),
    ],
)
def test_who_reads(tmp_path, environment, reads):
    assert (step_readings(environment, tmp_path) is not None) == reads


def test_a_place_that_cannot_be_written_to_and_counters_that_are_not_there_raise_nothing(tmp_path, source):
    (tmp_path / "wire").write_text("a file")
    readings = StepReadings(tmp_path / "wire", InterfaceCounters(source))
    readings.begin(0)
    readings.begin(1)
    readings.finish()
    gone = StepReadings(tmp_path / "other", InterfaceCounters(tmp_path / "nothing"))
    gone.begin(0)
    gone.finish()
    assert rows(tmp_path / "other") == []


def test_lines_that_are_no_counters_are_left_out():
    assert parse_net_dev(PROC.format(10, 20) + "eth1: 1 2\nnoise\n") == [
        ("lo", 20, 10),
        ("eth0", 7, 1234567890123),
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


def test_readings_of_two_processes_in_the_wrong_order_do_not_count_a_counter_twice(tmp_path):
    listed = [reading(1, 1_000), reading(5, 1_900, step=0), reading(6, 1_800), reading(9, 2_000)]
    listed += [reading(1, 10, step=-1, host="g"), reading(2, 40, step=0, host="g")]
    moved = analysis.moved(table_from_rows("wire", listed)).set_index("host")["sent_bytes"].to_dict()
    assert moved == {"g": 30, "h": 1_000}


def test_a_row_that_does_not_fit_is_an_error_by_itself():
    with pytest.raises(TraceError):
        table_from_rows("wire", [{"host": 3}])

"""torch's Flight Recorder in the trace, compared with records and counts that are independent of it."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from commprof.recorder.coverage import flight_comparison
from support.ranks import run_ranks
from support.recording import calls, record

pytestmark = [pytest.mark.ranks, pytest.mark.filterwarnings("ignore::FutureWarning")]


def ones(n: int) -> torch.Tensor:
    return torch.ones(n)


def mixed(rank: int, world: int) -> None:
    pair = dist.new_group(list(range(world)), group_desc="the pair")
    for size in (3, 5, 7):
        dist.all_reduce(ones(size))
        dist.broadcast(ones(size), src=0, group=pair)
    dist.all_gather_into_tensor(ones(2 * world), ones(2))
    dist.reduce_scatter_tensor(ones(2), ones(2 * world), group=pair)
    dist.barrier()


def test_entries_agree_with_the_records_by_group_and_number(tmp_path):
    run, _ = record(tmp_path / "run", 2, mixed)
    rows = run.table("flight").to_pylist()
    for rank in range(2):
        entries = [row for row in rows if row["rank"] == rank]
        listed = {(row["pg"], row["seq"] - 1): row for row in entries}
        assert len(listed) == len(entries) == 9
        for pg, number, op, payload in calls(run, rank, "pg", "pg_seq", "op", "payload_bytes"):
            entry = listed[pg, number]
            assert entry["op"] == ("all_reduce" if op == "reduce_scatter" else op)
            assert op == "barrier" or max(entry["input_bytes"], entry["output_bytes"]) == payload
            assert not entry["is_p2p"] and entry["pid"] > 0
        assert Counter(row["name"] for row in entries) == {
            "gloo:all_reduce": 4,
            "gloo:broadcast": 3,
            "gloo:all_gather": 1,
            "gloo:barrier": 1,
        }
        assert Counter(row["group_desc"] for row in entries) == {"default_pg": 5, "the pair": 4}
    assert all(len({**row}) == 14 and row["time_realtime_ns"] > 1e18 for row in rows)


def before_and_after(rank: int, world: int, run: str, store: str) -> None:
    import commprof

    dist.all_reduce(ones(1))
    commprof.attach(run, quiet=True)
    dist.all_reduce(ones(2))
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    dist.all_reduce(ones(3))
    commprof.detach()
    dist.all_reduce(ones(4))


@pytest.mark.long
def test_a_group_of_the_same_name_is_another_group_and_only_what_was_recorded_is_listed(tmp_path):
    from commprof.trace.reader import open_run

    run_ranks(2, before_and_after, str(tmp_path / "run"), str(tmp_path / "store"))
    run = open_run(tmp_path / "run")
    rows = [row for row in run.table("flight").to_pylist() if row["rank"] == 0]
    assert [(row["pg"], row["input_bytes"]) for row in rows] == [("0", 8), ("0#2", 12)]
    assert sorted(calls(run, 0, "pg", "payload_bytes")) == [("0", 8), ("0#2", 12)]


def many(rank: int, world: int, count: int) -> float:
    tensor = ones(1)
    for _ in range(count):
        dist.all_reduce(tensor)
    return 0.0


def test_the_list_is_bounded_and_holds_the_newest(tmp_path):
    run, _ = record(tmp_path / "run", 2, many, 2100)
    rows = [row for row in run.table("flight").to_pylist() if row["rank"] == 1]
    assert [row["op_id"] for row in rows] == list(range(101, 2101))
    assert len(calls(run, 1, "op")) == 2100


class Lines:
    """A stand-in for a rank's events file that collects the lines."""

    events = True

    def __init__(self):
        self.lines, self.notes = [], []

    def write_line(self, kind, line):
        self.lines.append(json.loads(line))

    def note(self, text):
        self.notes.append(text)


@pytest.fixture
def lines(monkeypatch):
    """Return the lines that a dump writes when torch has 20 entries."""
    import torch._C._distributed_c10d as c10d

    now = time.time_ns()
    entry = {
        "process_group": ["0", "default_pg"],
        "is_p2p": False,
        "profiling_name": "gloo:barrier",
        "collective_seq_id": 1,
        "input_sizes": [],
        "output_sizes": [],
        "state": "scheduled",
    }
    entries = [
        {**entry, "record_id": number, "op_id": number, "time_created_ns": now + number - 10}
        for number in range(20)
    ]
    monkeypatch.delattr(c10d, "_dump_nccl_trace_json", raising=False)
    monkeypatch.setattr(c10d, "_dump_fr_trace_json", lambda: json.dumps({"entries": entries}))
    monkeypatch.setattr(flight_comparison.time, "time_ns", lambda: now)
    return Lines()


def test_a_list_that_is_too_long_is_not_read_and_that_is_said(lines, monkeypatch):
    monkeypatch.setattr(flight_comparison, "_LONGEST_JSON", 1000)
    flight_comparison.FlightDump(lines, lambda name: name).write()
    assert lines.lines == []
    (note,) = lines.notes
    assert "at most 1,000 are read" in note and "TORCH_FR_BUFFER_SIZE" in note


@pytest.mark.parametrize("set_back", [False, True])
def test_entries_since_the_beginning_are_there_where_the_clock_was_set_back(lines, monkeypatch, set_back):
    now = time.time_ns()
    second = 1_000_000_000
    monkeypatch.setattr(flight_comparison.time, "time_ns", lambda: now + set_back * second)
    monkeypatch.setattr(flight_comparison.time, "monotonic_ns", lambda: 0)
    dump = flight_comparison.FlightDump(lines, lambda name: name)
    monkeypatch.setattr(flight_comparison.time, "time_ns", lambda: now)
    dump.write()
    assert [line["op_id"] for line in lines.lines] == list(range(10, 20))
    assert lines.notes == []


def without_json(rank: int, world: int) -> None:
    import torch._C._distributed_c10d as c10d

    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        if hasattr(c10d, name):
            delattr(c10d, name)
    dist.all_reduce(ones(1))


def broken_json(rank: int, world: int) -> None:
    import torch._C._distributed_c10d as c10d

    c10d._dump_fr_trace_json = lambda: b'{"entries": [{"record_id": 0}]}'
    dist.all_reduce(ones(1))


def switched_off(rank: int, world: int) -> None:
    os.environ["TORCH_FR_BUFFER_SIZE"] = "0"
    dist.all_reduce(ones(1))


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("body", "said"),
    [
        (without_json, "has no Flight Recorder that answers in JSON"),
        (broken_json, "could not be read: KeyError"),
        (switched_off, "TORCH_FR_BUFFER_SIZE=0"),
    ],
)
def test_what_cannot_be_read_is_said_and_nothing_else_suffers(tmp_path, body, said):
    run, _ = record(tmp_path / "run", 2, body)
    assert len(run.table("flight")) == 0
    assert calls(run, 0, "op") == ["all_reduce"]
    assert any(said in note for note in run.health.notes), run.health.notes


def test_no_pickle_is_ever_asked_for():
    source = Path(flight_comparison.__file__).read_text()
    assert "pickle.load" not in source and '_dump_fr_trace"' not in source


@pytest.mark.parametrize(
    ("name", "op"),
    [
        ("gloo:all_reduce", "all_reduce"),
        ("gloo:recvAnySource", "recv"),
        ("nccl:_all_gather_base", "all_gather"),
        ("nccl:_reduce_scatter_base", "reduce_scatter"),
        ("nccl:all_reduce_barrier", "barrier"),
        ("nccl:reduce_scatter_tensor_coalesced", "reduce_scatter"),
        ("nccl:send 0->1", "send"),
        ("nccl:recv 0<-1", "recv"),
        ("nccl:coalesced", None),
        ("ucc:something_new", None),
        ("", None),
    ],
)
def test_names_of_backends(name, op):
    from commprof.trace.rank_files.flight_entries import operation_of

    assert operation_of(name) == op


def test_an_nccl_entry():
    from commprof.trace.rank_files.flight_entries import flight_row

    entry = json.loads(
        """{"process_group": ["1", "dp"], "is_p2p": true, "profiling_name": "nccl:send 0->1", "p2p_seq_id": 4,
        "collective_seq_id": 9, "op_id": 13, "input_sizes": [[3, 4], []], "input_dtypes": ["BFloat16", "Double"],
        "output_sizes": [[2]], "output_dtypes": ["NewType"], "state": "completed", "time_created_ns": 17}"""
    )
    assert flight_row(entry) == {
        "pg": "1",
        "group_desc": "dp",
        "seq": 4,
        "op_id": 13,
        "is_p2p": True,
        "name": "nccl:send 0->1",
        "op": "send",
        "input_bytes": 32,
        "output_bytes": None,
        "state": "completed",
        "time_realtime_ns": 17,
    }

"""Test the import of recordings of other tools.

The numbers are correct, missing data is reported, and no code from a file is executed.
"""

from __future__ import annotations

import gzip
import json
import pickle
from pathlib import Path

import pytest

from commprof.cli import main
from commprof.errors import LogError
from commprof.imports.comms_logger import latencies
from commprof.imports.formats import Format, import_files, recognise
from commprof.imports.plain_pickle import read_plain_pickle
from commprof.trace.reader import open_run


def commprof(*words):
    """Run a command and return its exit code."""
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    return ended.value.code or 0


def rows(run, **wanted):
    found = open_run(run).table("collectives").to_pylist()
    return [row for row in found if all(row[name] == value for name, value in wanted.items())]


# Pickles


@pytest.mark.parametrize("protocol", range(2, 6))
@pytest.mark.parametrize(
    "value",
    [
        {"entries": [], "version": "2.10"},
        [1, -1, 255, 65536, 2**40, -(2**70), 1.5, None, True, False, "text", "\u00e9" * 300],
        {"a": ((), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)), 3: [[], {}, [{}]], (1, 2): "x" * 70_000},
    ],
)
def test_plain_data_is_read_as_python_would(value, protocol):
    assert read_plain_pickle(pickle.dumps(value, protocol)) == value


def test_shared_values_are_read_as_python_would():
    shared = ["once"]
    assert read_plain_pickle(pickle.dumps([shared, shared, {"k": shared}])) == [shared, shared, {"k": shared}]


class Harmful:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize("protocol", range(6))
def test_code_in_a_pickle_is_refused_and_not_run(tmp_path, protocol):
    mark = tmp_path / "ran"
    data = pickle.dumps({"entries": [Harmful(mark)]}, protocol)
    with pytest.raises(LogError, match="plain data"):
        read_plain_pickle(data)
    dump = tmp_path / "trace_0"
    dump.write_bytes(data if protocol >= 2 else pickle.dumps({"entries": [Harmful(mark)]}))
    assert commprof("import", dump, "--out", tmp_path / "run") == 1
    assert not mark.exists()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x04",
        b"\x80\x04e.",
        b"\x80\x04]0u.",
        b"\x80\x04K\x01a.",
        b"\x80\x04(.",
        b"\x80\x04h\x05.",
        b"\x80\x04}]s.",
    ],
)
def test_a_damaged_pickle_is_an_error_in_words(data):
    with pytest.raises(LogError, match="pickle"):
        read_plain_pickle(data)


@pytest.mark.parametrize("cut", range(0, 400, 13))
def test_a_pickle_that_is_cut_anywhere_is_an_error_in_words(cut):
    data = pickle.dumps({"entries": [{"a": [1, 2], "b": (1, "x" * 50)}] * 9, "pg": {"n": 1.5}})
    with pytest.raises(LogError):
        read_plain_pickle(data[: min(cut, len(data) - 1)])


# Flight Recorder


def entry(number, name="nccl:all_reduce", sizes=((1024,),), out=None, pg=("0", "default_pg"), **more):
    p2p = "send" in name or "recv" in name
    return {
        "frames": [
            {"name": "all_reduce", "filename": "/env/site-packages/torch/distributed/c.py", "line": 9},
            {"name": "step", "filename": "train.py", "line": 88},
        ],
        "record_id": number,
        "pg_id": 0,
        "process_group": pg,
        "collective_seq_id": number + 1,
        "p2p_seq_id": number + 1 if p2p else 0,
        "op_id": number + 1,
        "profiling_name": name,
        "time_created_ns": 1_700_000_000_000_000_000 + 1000 * number,
        "input_sizes": [list(size) for size in sizes],
        "input_dtypes": ["BFloat16"] * len(sizes),
        "output_sizes": [list(size) for size in out or sizes],
        "output_dtypes": ["BFloat16"] * len(out or sizes),
        "state": "completed",
        "retired": True,
        "is_p2p": p2p,
        **more,
    }


def dump(*entries):
    return {
        "version": "2.10",
        "pg_config": {
            "0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2, 3]"},
            "7": {"name": "7", "ranks": "[1, 3]"},
        },
        "entries": list(entries),
    }


@pytest.mark.parametrize("form", ["pickle", "json"])
def test_dumps_of_the_flight_recorder(tmp_path, form):
    for rank in (1, 3):
        content = dump(
            entry(0),
            entry(1, "nccl:_all_gather_base", ((256,),), ((1024,),)),
            entry(2, "nccl:reduce_scatter", ((64, 16),), ((256,),)),
            entry(3, "nccl:all_reduce", ((8,), (2, 2)), pg=("7", "undefined")),
            entry(4, "nccl:send 0->1" if rank == 1 else "nccl:recv 1<-0", pg=("7", "undefined")),
            entry(5, "nccl:all_reduce", state="started", retired=False),
            entry(6, "nccl:coalesced"),
            {"nonsense": 1},
        )
        file = tmp_path / f"nccl_trace_{rank}"
        file.write_bytes(pickle.dumps(content) if form == "pickle" else json.dumps(content).encode())
    assert commprof("import", tmp_path, "--out", tmp_path / "run") == 0
    run = open_run(tmp_path / "run")
    assert run.manifest.world_size == 4
    found = rows(tmp_path / "run", rank=3)
    told = [
        (row["op"], row["payload_bytes"], row["input_bytes"], row["output_bytes"], row["group_ranks"])
        for row in found
    ]
    assert told == [
        ("all_reduce", 2048, 2048, 2048, "0-3"),
        ("all_gather", 2048, 512, 2048, "0-3"),
        ("reduce_scatter", 2048, 2048, 512, "0-3"),
        ("all_reduce", 24, 24, 24, "1,3"),
        ("recv", 2048, 0, 2048, "1,3"),
        ("all_reduce", 2048, 2048, 2048, "0-3"),
    ]
    assert found[4]["peer"] == 1 and rows(tmp_path / "run", rank=1)[4]["peer"] == 3
    assert {row["dtype"] for row in found} == {"bfloat16"} and found[0]["call_site"] == "train.py:88 step"
    assert [row["status"] for row in found] == ["ok"] * 5 + ["incomplete"]
    assert {row["layer"] for row in found} == {"imported"}
    assert len(run.table("flight")) == 14
    notes = " ".join(run.health.notes)
    assert "2 entries are not of the form" in notes and "ranks 0, 2" in notes.replace("rank 0", "ranks 0")


def test_dumps_must_say_their_rank(tmp_path, capsys):
    (tmp_path / "dump.json").write_text(json.dumps(dump(entry(0))))
    assert commprof("import", str(tmp_path / "dump.json"), "-o", str(tmp_path / "run")) == 1
    assert "does not show its rank" in capsys.readouterr().err
    for name in ("a_0", "b_0"):
        (tmp_path / name).write_text(json.dumps(dump(entry(0))))
    assert commprof("import", str(tmp_path / "a_0"), str(tmp_path / "b_0"), "-o", str(tmp_path / "run")) == 1
    assert "both of rank 0" in capsys.readouterr().err


def hooked(rank, *more):
    """Return the dump of a rank as the hooks of torch 2.15 write it.

    The backend has no recorder of its own, and the job has two ranks.
    """
    own, whole, mine = [[8]], [[8], [8]], rank == 0
    entries = [
        ("all_reduce", own, own),
        ("_all_gather_base", own, [[16]]),
        ("_reduce_scatter_base", [[16]], own),
        ("all_to_all_single", own, own),
        ("barrier", [], []),
        ("allreduce_coalesced", whole, whole),
        ("split", [], []),
        ("gather", own, whole if mine else []),
        ("scatter", whole if mine else [], own),
        ("send 0->1", own, []) if mine else ("recv 1<-0", [], own),
        ("recv 0<-?", [], own) if mine else ("send 1->0", own, []),
        *more,
    ]
    collectives, messages, made = 0, 0, []
    for number, (name, sent, received) in enumerate(entries):
        is_p2p = name.startswith(("send", "recv"))
        collectives, messages = collectives + (not is_p2p), messages + is_p2p
        made.append(
            {
                "record_id": number,
                "pg_id": 0,
                "process_group": ["0", "default_pg"],
                "thread_id": "139652427971456",
                "thread_name": "python",
                "collective_seq_id": collectives,
                "p2p_seq_id": messages,
                "op_id": number,
                "profiling_name": f"nccl2:{name}",
                "time_created_ns": 1_790_000_000_000_000_000 + 1000 * number,
                "input_sizes": sent,
                "input_dtypes": ["Float"] * len(sent),
                "output_sizes": received,
                "output_dtypes": ["Float"] * len(received),
                "state": "completed",
                "time_discovered_started_ns": 0,
                "time_discovered_completed_ns": 0,
                "retired": True,
                "timeout_ms": 1_800_000,
                "is_p2p": is_p2p,
            }
        )
    return {
        "version": "2.10",
        "comm_lib_version": "",
        "nccl_comm_state": {},
        "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}},
        "pg_status": {"0": {"last_enqueued_collective": "10", "last_completed_collective": "10"}},
        "entries": made,
    }


@pytest.mark.parametrize("form", ["pickle", "json"])
def test_dumps_of_torchs_hooks(tmp_path, form):
    for rank in (0, 1):
        content = hooked(rank)
        (tmp_path / f"trace_{rank}").write_bytes(
            pickle.dumps(content) if form == "pickle" else json.dumps(content).encode()
        )
    assert commprof("import", tmp_path, "--out", tmp_path / "run") == 0
    for rank, last in ((0, ("recv", 32, 8, -1)), (1, ("send", 32, 8, 0))):
        found = rows(tmp_path / "run", rank=rank)
        assert [(row["op"], row["payload_bytes"], row["numel"], row["peer"]) for row in found] == [
            ("all_reduce", 32, 8, -1),
            ("all_gather", 64, 16, -1),
            ("reduce_scatter", 64, 16, -1),
            ("all_to_all", 32, 8, -1),
            ("barrier", 0, 0, -1),
            ("all_reduce", 64, 16, -1),
            # This is also the size on a rank that only sends, because the payload is the root's buffer.
            ("gather", 64, 16, -1),
            ("scatter", 64, 16, -1),
            ("send", 32, 8, 1) if rank == 0 else ("recv", 32, 8, 0),
            last,
        ]
        assert {row["backend"] for row in found} == {"nccl2"} and {row["status"] for row in found} == {"ok"}
    assert not any("whether" in note for note in open_run(tmp_path / "run").health.notes)


def test_entries_that_are_retired_when_they_are_issued_are_noted(tmp_path, capsys):
    content = hooked(0)
    for each in content["entries"]:
        each["state"] = "scheduled"
    (tmp_path / "trace_0").write_text(json.dumps(content))
    assert commprof("import", tmp_path / "trace_0", "--out", tmp_path / "run") == 0
    assert "whether 11 entries ended is not known" in capsys.readouterr().err


def test_a_dump_of_another_version_is_an_error_with_the_version(tmp_path, capsys):
    (tmp_path / "trace_0").write_text(json.dumps({**hooked(0), "version": "3.1"}))
    assert commprof("import", tmp_path / "trace_0", "--out", tmp_path / "run") == 1
    told = capsys.readouterr().err.strip()
    assert len(told.splitlines()) == 1 and "version 3.1" in told and "2.x" in told


def test_dumps_with_an_element_type_of_unknown_size_say_so(tmp_path):
    unknown = entry(1, input_dtypes=["Float3"], output_dtypes=["Float3"])
    (tmp_path / "trace_0").write_text(
        json.dumps(dump(entry(0), unknown, entry(2, "nccl:all_reduce_barrier", input_dtypes=[])))
    )
    imported = import_files([tmp_path / "trace_0"], tmp_path / "run")
    assert [note for note in imported.notes if "unknown size" in note] == [
        "1 entries have no size, or an element type of unknown size: they count as 0 bytes"
    ]


@pytest.mark.parametrize("content", [lambda: hooked(0), lambda: kineto(0, [])])
def test_json_that_is_cut_is_an_error_with_the_place(tmp_path, capsys, content):
    whole = json.dumps(content())
    (tmp_path / "trace_0").write_text(whole[: len(whole) // 2])
    assert commprof("import", tmp_path / "trace_0", "--out", tmp_path / "run") == 1
    told = capsys.readouterr().err.strip()
    assert len(told.splitlines()) == 1 and "truncated or damaged at line 1, column" in told


# Kineto


def kineto(rank, events, **more):
    groups = [{"pg_name": "0", "pg_desc": "default_pg", "pg_size": 2, "ranks": [0, 1]}]
    return {
        "schemaVersion": 1,
        "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": 2, "pg_config": groups},
        "baseTimeNanoseconds": 1_700_000_000_000_000_000,
        "traceEvents": events,
        **more,
    }


def span(name, ts, dur, cat="cpu_op", **args):
    return {"ph": "X", "cat": cat, "name": name, "pid": 77, "tid": 1, "ts": ts, "dur": dur, "args": args}


def comms(name, number, ts, sent, received, dtype="BFloat16", **more):
    told = {
        "Collective name": name,
        "In msg nelems": sent,
        "Out msg nelems": received,
        "dtype": dtype,
        "Group size": 2,
        "Process Group Name": "0",
        "Process Group Description": "default_pg",
        "Process Group Ranks": "[0, 1]",
        "External id": number,
        **more,
    }
    kernel = span(f"ncclDevKernel_{name}", ts + 500, 200.5, "kernel", **told)
    return [span("record_param_comms", ts, 20, **told), kernel, span("c10d::" + name, ts - 5, 40)]


def test_kineto_traces_of_nccl(tmp_path):
    for rank in (0, 1):
        events = [
            span("ProfilerStep#7", 0, 1000, "user_annotation"),
            span("ProfilerStep#8", 1000, 1000, "user_annotation"),
            *comms("allreduce", 1, 100.125, 1000, 1000),
            *comms("_allgather_base", 2, 1100, 500, 1000, "Float"),
            *comms("_reduce_scatter_base", 3, 1200, 1000, 500),
            *comms(
                "send" if rank == 0 else "recv",
                4,
                1300,
                10,
                10,
                **({"Dst Rank": 1} if rank == 0 else {"Src Rank": 0}),
            ),
            span("record_param_comms", 1400, 1, **{"Collective name": "wait"}),
        ]
        text = json.dumps(kineto(rank, events)).encode()
        name = tmp_path / f"trace{rank}.json.gz"
        name.write_bytes(gzip.compress(text))
    import_files([tmp_path / "trace0.json.gz", tmp_path / "trace1.json.gz"], tmp_path / "run")
    found = rows(tmp_path / "run", rank=0)
    assert [(row["op"], row["payload_bytes"], row["step"]) for row in found] == [
        ("all_reduce", 2000, 7),
        ("all_gather", 4000, 8),
        ("reduce_scatter", 2000, 8),
        ("send", 20, 8),
    ]
    base = 1_700_000_000_000_000_000
    assert (found[0]["issue_ns"], found[0]["return_ns"]) == (base + 100_125, base + 120_125)
    assert (found[0]["device_begin_ns"], found[0]["device_end_ns"]) == (base + 600_125, base + 800_625)
    assert found[3]["peer"] == 1 and rows(tmp_path / "run", rank=1)[3]["peer"] == 0
    steps = open_run(tmp_path / "run").table("steps").to_pylist()
    assert [
        (row["rank"], row["step"], row["end_ns"] - row["begin_ns"]) for row in steps if row["rank"] == 1
    ] == [
        (1, 7, 1_000_000),
        (1, 8, 1_000_000),
    ]


def test_kineto_takes_the_element_type_of_lists_from_the_backend(tmp_path):
    listed = {
        "Input Dims": [[[8]], [], []],
        "Input type": ["TensorList", "", ""],
        "Concrete Inputs": ["", "", "1"],
    }
    ran = {"Input Dims": [[8]], "Input type": ["double"]}
    events = [
        span("c10d::broadcast_", 10, 5, **listed),
        span("gloo:broadcast", 12, 9, "user_annotation", **ran),
        span("c10d::broadcast_", 30, 5, **listed),
    ]
    (tmp_path / "trace.json").write_text(json.dumps(kineto(0, events)))
    found = import_files([tmp_path / "trace.json"], tmp_path / "run")
    assert [(row["payload_bytes"], row["numel"], row["peer"]) for row in rows(tmp_path / "run")] == [
        (64, 8, 1),
        (0, 8, 1),
    ]
    assert any("1 operators have no size in the trace" in note for note in found.notes)


@pytest.mark.parametrize(
    ("names", "item"),
    [
        (("UInt16", "unsigned short", "c10::Half"), 2),
        (("Float8_e4m3fnuz", "Float8_e8m0fnu", "c10::Float8_e5m2fnuz", "QInt8"), 1),
        (("UInt32", "ComplexHalf", "c10::complex<c10::Half>"), 4),
        (("UInt64", "ComplexFloat", "c10::complex<float>"), 8),
        (("ComplexDouble", "c10::complex<double>"), 16),
    ],
)
def test_kineto_knows_the_sizes_of_torchs_element_types(tmp_path, names, item):
    events = [
        event for at, name in enumerate(names) for event in comms("allreduce", at, 100 * at, 10, 10, name)
    ]
    (tmp_path / "trace0.json").write_text(json.dumps(kineto(0, events)))
    found = import_files([tmp_path / "trace0.json"], tmp_path / "run")
    assert [row["payload_bytes"] for row in rows(tmp_path / "run")] == [10 * item] * len(names)
    assert not any("0 bytes" in note for note in found.notes)


def test_kineto_says_which_element_types_it_does_not_know(tmp_path):
    events = [*comms("allreduce", 1, 100, 10, 10, "Float3"), *comms("barrier", 2, 200, 1, 1, "")]
    (tmp_path / "trace0.json").write_text(json.dumps(kineto(0, events)))
    found = import_files([tmp_path / "trace0.json"], tmp_path / "run")
    assert [note for note in found.notes if "0 bytes" in note] == [
        "1 operations have elements of type 'float3', whose size commprof does not know: they count as 0 bytes"
    ]


def identified(name, comms_id, external, ts, linked=None, dur=200.0, **more):
    """Return a call and its kernel as torch 2.13 and newer write them.

    ``linked`` is the external id of the kernel.
    """
    told = {"Comms Id": comms_id, "Seq": comms_id % 100, **more}
    call, kernel, _ = comms(name, external, ts, 1000, 1000, **told)
    kernel["args"]["External id"] = external if linked is None else linked
    kernel["dur"] = dur
    return [call, kernel]


BIG = 18446744073709551600  # torch writes the hash as an unsigned number of 64 bits.


def write_traces(directory, traces):
    for rank, events in traces.items():
        (directory / f"trace{rank}.json").write_text(json.dumps(kineto(rank, events)))
    import_files([directory / f"trace{rank}.json" for rank in traces], directory / "run")
    return directory / "run"


def device_times(run, rank):
    return [
        None if row["device_end_ns"] is None else row["device_end_ns"] - row["device_begin_ns"]
        for row in rows(run, rank=rank)
    ]


def test_the_comms_id_joins_calls_kernels_and_ranks(tmp_path):
    """The trace of rank 1 begins later, so its first call is the second call of rank 0.

    The position in the file does not matter.
    """
    wait = span("record_param_comms", 260, 1, **{"Collective name": "wait", "Comms Id": BIG + 1, "Seq": 1})
    run = write_traces(
        tmp_path,
        {
            0: [
                *identified(
                    "allreduce", BIG + 2, 2, 300.0, dur=20.0, linked=77
                ),  # No call has this external id.
                *identified(
                    "allreduce", BIG + 1, 1, 200.0, dur=10.0, linked=2
                ),  # The external id is the id of a different call.
                wait,
            ],
            1: identified("allreduce", BIG + 2, 9, 100.0, dur=30.0),
        },
    )
    assert [row["pg_seq"] for row in rows(run, rank=0)] == [0, 1]
    assert [row["pg_seq"] for row in rows(run, rank=1)] == [1]
    assert device_times(run, 0) == [10_000, 20_000] and device_times(run, 1) == [30_000]


def test_calls_of_a_coalesced_block_share_a_comms_id_and_no_kernel(tmp_path):
    """One kernel executes all calls of the block.

    The kernel belongs to the call that the external id names, and it counts once.
    """
    block = [
        comms("allreduce", each, 100.0 + each, 10, 10, **{"Comms Id": 5, "Seq": 5})[0] for each in (1, 2)
    ]
    kernel = identified("allreduce", 5, 2, 100.0, dur=50.0)[1]
    run = write_traces(tmp_path, {rank: [*block, kernel] for rank in (0, 1)})
    for rank in (0, 1):
        assert [row["pg_seq"] for row in rows(run, rank=rank)] == [0, 1]
        assert device_times(run, rank) == [None, 50_000]


def test_messages_are_not_joined_by_the_comms_id(tmp_path):
    """Each rank counts its messages separately.

    The second send of rank 0 belongs to the first recv of rank 1.
    """
    send = identified("send", 1, 1, 100.0, **{"Dst Rank": 1})
    recv = identified("recv", 1, 1, 100.0, **{"Src Rank": 0})
    run = write_traces(tmp_path, {0: send, 1: recv})
    assert [(row["op"], row["peer"], row["pg_seq"]) for row in rows(run)] == [("send", 1, 1), ("recv", 0, 1)]


def test_a_group_that_counts_messages_too_is_joined_by_order(tmp_path, capsys):
    """nccl2 counts messages and collectives together. Rank 1 sent to no rank, so its count is one behind."""
    traces = {
        0: [*identified("send", 101, 1, 100.0, **{"Dst Rank": 1}), *identified("allreduce", 102, 2, 200.0)],
        1: identified("allreduce", 101, 1, 200.0),
    }
    run = write_traces(tmp_path, traces)
    assert {row["pg_seq"] for row in rows(run, op="all_reduce")} == {0}
    assert any("counts messages and collectives together" in note for note in open_run(run).health.notes)


def test_traces_without_a_comms_id_are_joined_by_seq_and_external_id(tmp_path):
    older = {0: comms("allreduce", 1, 100.0, 10, 10, Seq=4), 1: comms("allreduce", 8, 100.0, 10, 10, Seq=4)}
    run = write_traces(tmp_path, older)
    assert [row["pg_seq"] for row in rows(run)] == [4, 4]
    assert device_times(run, 0) == device_times(run, 1) == [200_500]


def test_the_payload_of_a_gather_is_the_roots_buffer(tmp_path):
    run = write_traces(
        tmp_path, {0: comms("gather", 1, 100.0, 10, 20), 1: comms("scatter", 1, 100.0, 20, 10)}
    )
    assert [row["payload_bytes"] for row in rows(run)] == [40, 40]


# NCCL Inspector


def inspected(rank, op, number, size, micros, verbose=False, comm="0xabc", ranks=4, pid=None, **more):
    perf = {"coll": op, "coll_sn": number, "coll_msg_size_bytes": size, "coll_exec_time_us": micros, **more}
    if verbose:
        perf["event_trace_ts"] = {"coll_start_ts": 1_000 + number, "coll_stop_ts": 2_000 + number}
    return {
        "header": {"id": comm, "rank": rank, "n_ranks": ranks, "nnodes": 1},
        "metadata": {
            "inspector_output_format_version": "v4.0",
            "dump_timestamp_us": 5_000_000 + number,
            "hostname": "node1",
            "pid": pid or 100 + rank,
        },
        "coll_perf": perf,
    }


def test_inspector_logs(tmp_path):
    for rank in range(4):
        text = "\n".join(
            [
                json.dumps(inspected(rank, "AllReduce", 1, 4096, 50, verbose=True)),
                json.dumps(inspected(rank, "AllGather", 2, 1024, 30), indent=2),
                "torn {",
                json.dumps(inspected(rank, "ReduceScatter", 3, 1024, 20)),
                json.dumps(
                    inspected(
                        rank % 2, "AllReduce", 1, 512, 10, comm=f"0x{rank // 2}", ranks=2, pid=100 + rank
                    )
                ),
                json.dumps(inspected(rank, "Mystery", 4, 1, 1)),
            ]
        )
        (tmp_path / f"node1-pid{100 + rank}.log").write_text(text)
    found = import_files(sorted(tmp_path.glob("*.log")), tmp_path / "run")
    assert found.world_size == 4 and [rank.rank for rank in found.ranks] == [0, 1, 2, 3]
    mine = {(row["op"], row["group_size"]): row for row in rows(tmp_path / "run", rank=2)}
    assert mine["all_reduce", 4]["payload_bytes"] == 4096 and mine["all_reduce", 4]["issue_ns"] == 1_001_000
    assert mine["all_gather", 4]["payload_bytes"] == 4096 and mine["all_gather", 4]["input_bytes"] == 1024
    assert (
        mine["reduce_scatter", 4]["payload_bytes"] == 4096
        and mine["reduce_scatter", 4]["output_bytes"] == 1024
    )
    assert mine["all_reduce", 2]["payload_bytes"] == 512 and mine["all_reduce", 2]["group_rank"] == 0
    gathered = mine["all_gather", 4]
    assert gathered["device_end_ns"] - gathered["device_begin_ns"] == 30_000
    assert any("4 operations have names" in note for note in found.notes)


def marker(
    rank,
    collectives,
    messages=0,
    dropped=(0, 0),
    version="v4.4",
    comm="0xabc",
    ranks=2,
    pid=None,
    us=5_000_000,
):
    """Return the record at the beginning of a dump, as versions 4.1 and newer write it."""
    return {
        "header": {"id": comm, "comm_name": "unknown", "rank": rank, "n_ranks": ranks, "nnodes": 1},
        "metadata": {
            "inspector_output_format_version": version,
            "git_rev": "",
            "rec_mechanism": "nccl_profiler_interface",
            "dump_timestamp_us": us,
            "hostname": "node1",
            "pid": pid or 100 + rank,
        },
        "dump_stats": {
            "coll_records": collectives,
            "coll_dropped_total": dropped[0],
            "coll_dropped_since_last_dump": 0,
            "p2p_records": messages,
            "p2p_dropped_total": dropped[1],
            "p2p_dropped_since_last_dump": 0,
        },
    }


def perf(op, number, size, micros, begin=0, channels=2, algo="RING", proto="LL128"):
    """Return a collective as versions 4.2 and newer write it. ``begin`` makes the record verbose."""
    body = {
        "coll": op,
        "coll_algo": algo,
        "coll_proto": proto,
        "coll_sn": number,
        "coll_msg_size_bytes": size,
        "coll_exec_time_us": micros,
        "coll_timing_source": "kernel_gpu",
        "coll_algobw_gbs": 0.5,
        "coll_busbw_gbs": 0.5,
    }
    if begin:
        kernels = [{"channel_id": each, "kernel_start_ts": begin + 100 + each} for each in range(channels)]
        body["event_trace_ts"] = {"coll_start_ts": begin, "coll_stop_ts": begin + 5, "kernel_events": kernels}
    return {"coll_perf": body}


def lines(*records):
    return "".join(json.dumps(record) + "\n" for record in records)


def with_context(dump, *records):
    """Return records as version 4.2 writes them, each with the header and metadata of its dump."""
    context = {"header": dump["header"], "metadata": dump["metadata"]}
    return lines(dump, *({**context, **record} for record in records))


@pytest.mark.sampled
@pytest.mark.parametrize("version", ["v4.2", "v4.3", "v4.4"])
def test_inspector_logs_that_name_algorithms(tmp_path, capsys, version):
    """NCCL numbers each operation separately, so AllReduce 7 and AllGather 7 are two collectives.

    This is true whichever ranks recorded them.
    """
    kept = {
        0: (
            perf("AllReduce", 7, 4096, 50, 1000),
            perf("AllGather", 7, 1024, 30, 2000, algo="NVLS", proto="SIMPLE"),
        ),
        1: (
            perf("AllGather", 7, 1024, 40, 2100, algo="NVLS", proto="SIMPLE"),
            perf("AllReduce", 8, 4096, 60, 3000, algo="TREE", proto="LL"),
        ),
    }
    for rank, records in kept.items():
        dump = marker(rank, len(records), dropped=(rank, 0), version=version)
        write = with_context if version == "v4.2" else lines
        (tmp_path / f"node1-pid{100 + rank}.log").write_text(write(dump, *records))
    assert commprof("import", tmp_path, "--out", tmp_path / "run") == 0
    told = capsys.readouterr().err
    assert "1 events dropped by the inspector (1 collectives, 0 messages)" in told
    numbers = [(row["op"], row["rank"], row["pg_seq"]) for row in rows(tmp_path / "run")]
    assert sorted(numbers) == [
        ("all_gather", 0, 1),
        ("all_gather", 1, 1),
        ("all_reduce", 0, 0),
        ("all_reduce", 1, 2),
    ]
    (first,) = rows(tmp_path / "run", rank=0, op="all_reduce")
    assert first["issue_ns"] == 1_000_000 and first["group_ranks"] == "0-1"
    assert (first["device_begin_ns"], first["device_end_ns"]) == (1_100_000, 1_150_000)
    assert open_run(tmp_path / "run").table("nccl_algorithms").to_pylist()[2:] == [
        {
            "rank": 1,
            "attempt": 0,
            "pid": 101,
            "seq": 0,
            "algorithm": "NVLS",
            "protocol": "SIMPLE",
            "channels": 2,
        },
        {"rank": 1, "attempt": 0, "pid": 101, "seq": 1, "algorithm": "TREE", "protocol": "LL", "channels": 2},
    ]
    assert commprof("report", tmp_path / "run") == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "4 records, 1 dropped" in told and "1 events dropped by the inspector" in told


def test_the_report_of_an_inspector_log_has_algorithms_and_the_bandwidths_of_the_plugin(tmp_path, capsys):
    """The bandwidths are computed from bytes and times.

    The plugin's own bandwidths are in units of 10^9 bytes per second.
    """
    records = [
        perf("AllReduce", 1, 1 << 20, 104, 1000),
        perf("AllReduce", 2, 1 << 20, 104, 2000),
        perf("AllReduce", 3, 1 << 20, 200, 3000, channels=4, algo="TREE", proto="LL"),
        perf("ReduceScatter", 1, 1 << 16, 40, 4000, algo="unknown"),
    ]
    for rank in range(4):
        (tmp_path / f"{rank}.log").write_text(lines(marker(rank, len(records), ranks=4), *records))
    assert commprof("import", tmp_path, "--out", tmp_path / "run") == 0
    capsys.readouterr()
    assert commprof("report", tmp_path / "run", "--json") == 0
    found = json.loads(capsys.readouterr().out)["algorithms"]
    names = ("op", "algorithm", "protocol", "channels", "collectives", "records", "time_ns")
    assert [tuple(each[name] for name in names) for each in found] == [
        ("all_reduce", "RING", "LL128", 2, 2, 8, 104_000),
        ("all_reduce", "TREE", "LL", 4, 1, 4, 200_000),
    ]
    assert found[0]["algbw_bytes_per_s"] == pytest.approx((1 << 20) / 1e9 / 104e-6 * 1e9)
    assert found[0]["busbw_bytes_per_s"] == pytest.approx(6 / 4 * found[0]["algbw_bytes_per_s"])
    assert commprof("report", tmp_path / "run") == 0
    told = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["all_reduce", "0-3", "1.00", "MiB", "TREE", "LL", "4", "1", "200", "us", "7.86", "GB/s"] in told


def test_records_of_a_dump_belong_to_its_communicator_and_no_other(tmp_path, capsys):
    """From 4.3 on, a record has no header of its own.

    After a damaged place, it is not known to which communicator a record belongs.
    """
    whole = lines(
        marker(0, 2, 1, comm="0xa"),
        perf("AllReduce", 1, 512, 5),
        perf("AllReduce", 2, 512, 5),
        {
            "p2p_perf": {
                "p2p": "Send",
                "p2p_sn": 1,
                "p2p_peer": 1,
                "p2p_msg_size_bytes": 64,
                "p2p_exec_time_us": 2,
            }
        },
        {"proxy_trace": {"record_type": "proxy_op", "steps": [{"proxy_step_sn": 1}]}},
        marker(0, 1, comm="0xb", ranks=1),
        perf("Broadcast", 1, 8, 1),
        perf("Broadcast", 2, 8, 1),  # The dump announces fewer records.
    )
    torn = (
        json.dumps(marker(0, 1, comm="0xc"))[:40]
        + "\n"
        + lines(perf("Reduce", 1, 8, 1), marker(0, 3, comm="0xd"))
    )
    (tmp_path / "a.log").write_text(whole + torn)
    assert commprof("import", tmp_path / "a.log", "--out", tmp_path / "run") == 0
    told = [(row["pg"], row["op"], row["payload_bytes"], row["peer"]) for row in rows(tmp_path / "run")]
    assert sorted(told) == [
        ("comm 0xa", "all_reduce", 512, -1),
        ("comm 0xa", "all_reduce", 512, -1),
        ("comm 0xa", "send", 64, 1),
        ("comm 0xb", "broadcast", 8, -1),
    ]
    text = capsys.readouterr().err
    assert "3 operations that a dump announces are not in the files" in text
    assert "2 operations lack the dump record that names their communicator" in text
    assert "1 records of the Inspector are incomplete" in text


def test_ranks_of_a_smaller_communicator_are_those_of_the_job(tmp_path):
    for rank in range(4):
        pair = {"comm": f"0x{rank // 2}", "ranks": 2, "pid": 100 + rank}
        text = lines(
            marker(rank, 1, ranks=4, pid=100 + rank),
            perf("AllReduce", 1, 512, 5),
            marker(rank % 2, 1, 1, **pair),
            perf("AllReduce", 1, 256, 5),
            {
                "p2p_perf": {
                    "p2p": "Recv" if rank % 2 else "Send",
                    "p2p_sn": 1,
                    "p2p_peer": 1 - rank % 2,
                    "p2p_msg_size_bytes": 64,
                    "p2p_exec_time_us": 2,
                }
            },
        )
        (tmp_path / f"{rank}.log").write_text(text)
    import_files([tmp_path], tmp_path / "run")
    found = {(row["rank"], row["group_ranks"], row["peer"]) for row in rows(tmp_path / "run", is_p2p=True)}
    assert found == {(0, "0-1", 1), (1, "0-1", 0), (2, "2-3", 3), (3, "2-3", 2)}


def test_operations_that_only_the_dump_dates_keep_the_order_of_the_log(tmp_path):
    sizes = [(1, 900), (2, 10), (3, 500)]
    records = [perf("AllReduce", number, 8 * number, micros) for number, micros in sizes]
    (tmp_path / "a.log").write_text(lines(marker(0, 3, ranks=1), *records))
    import_files([tmp_path / "a.log"], tmp_path / "run")
    found = rows(tmp_path / "run")
    assert [row["payload_bytes"] for row in found] == [8, 16, 24] and [row["pg_seq"] for row in found] == [
        0,
        1,
        2,
    ]
    assert all(row["device_end_ns"] <= 5_000_000_000 for row in found)
    took = [row["device_end_ns"] - row["device_begin_ns"] for row in found]
    assert took == [micros * 1000 for _, micros in sizes]


def test_version_4_0_does_not_count_what_it_drops(tmp_path):
    entries = [inspected(0, "AllReduce", number, 512, 5, ranks=1) for number in (3, 4, 9)]
    (tmp_path / "a.log").write_text(lines(*entries))
    found = import_files([tmp_path / "a.log"], tmp_path / "run")
    assert any("4 sequence numbers between those in the logs are missing" in note for note in found.notes)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda entry: entry["metadata"].update(inspector_output_format_version="v5.0"), "version v5.0"),
        (
            lambda entry: entry["coll_perf"].pop("coll_msg_size_bytes"),
            "1 operations lack coll_msg_size_bytes",
        ),
        (lambda entry: entry["header"].pop("n_ranks"), "1 operations lack n_ranks"),
        (lambda entry: entry["header"].update(rank=4), "1 operations lack rank"),
        (lambda entry: entry["coll_perf"].update(coll="Invalid"), "1 Invalid"),
        (lambda entry: entry.update(coll_perf=[]), "1 operations lack coll_perf"),
        (lambda entry: entry.pop("metadata"), "1 operations lack the dump record"),
    ],
)
def test_an_inspector_log_that_cannot_be_understood_is_an_error_in_one_line(tmp_path, capsys, change, told):
    entry = inspected(0, "AllReduce", 1, 512, 5)
    change(entry)
    (tmp_path / "a.log").write_text(lines(entry))
    assert commprof("import", tmp_path / "a.log", "--out", tmp_path / "run") == 1
    text = capsys.readouterr().err.strip()
    assert len(text.splitlines()) == 1 and told in text and "a.log" in text
    assert not (tmp_path / "run").exists()


def test_an_inspector_log_that_is_cut_is_read_up_to_there(tmp_path, capsys):
    text = lines(marker(0, 2, ranks=1), perf("AllReduce", 1, 512, 5), perf("AllReduce", 2, 512, 5))
    (tmp_path / "a.log").write_text(text[:-40])
    assert commprof("import", tmp_path / "a.log", "--out", tmp_path / "run") == 0
    assert len(rows(tmp_path / "run")) == 1
    told = capsys.readouterr().err
    assert "1 operations that a dump announces are not in the files" in told


def test_a_process_of_several_ranks_is_refused(tmp_path, capsys):
    (tmp_path / "a.log").write_text(lines(*(inspected(rank, "AllReduce", 1, 8, 1, pid=9) for rank in (0, 1))))
    assert commprof("import", tmp_path / "a.log", "--out", tmp_path / "run") == 1
    told = capsys.readouterr().err.strip()
    assert len(told.splitlines()) == 1 and "process 9 of host node1 is rank 0 and rank 1" in told


def test_a_newer_minor_version_is_read_and_said(tmp_path):
    (tmp_path / "a.log").write_text(lines(marker(0, 1, ranks=1, version="v4.7"), perf("All2All", 1, 8, 1)))
    found = import_files([tmp_path / "a.log"], tmp_path / "run")
    assert rows(tmp_path / "run")[0]["op"] == "all_to_all"
    assert any("version v4.7 of the format is newer" in note for note in found.notes)


# DeepSpeed's comms logger


def running_sums(values):
    total, found = 0.0, []
    for value in values:
        total += value
        found.append(total)
    return found


def test_running_sums_become_latencies():
    true = [1.25, 0.5, 10.0, 0.01]
    assert latencies(running_sums(true)) == pytest.approx(true)
    # The logger may have been fixed, so its values are not used or changed.
    assert latencies([3.0, 1.0, 2.0]) is None
    assert latencies([1.0, None]) is None


def test_raw_data_of_the_comms_logger(tmp_path):
    # Calls of two alternating sizes share one timer. The list of each size contains running sums of both
    # sizes.
    true = [2.0, 7.0, 3.0, 5.0]
    sums = running_sums(true)
    raw = {
        "all_reduce": {
            "4000": [2, [sums[0], sums[2]], [8.0, 8.0], [6.0, 6.0]],
            "8000": [2, [sums[1], sums[3]], [8.0, 8.0], [6.0, 6.0]],
        },
        "all_gather_into_tensor": {"1000": [1, [4.0], [8.0], [6.0]]},
        "broadcast": {"16": [2, [9.0, 1.0], [1.0, 1.0], [1.0, 1.0]]},
    }
    (tmp_path / "raw.json").write_text(json.dumps(raw))
    found = import_files([tmp_path / "raw.json"], tmp_path / "run")
    assert found.world_size == 4  # The ratio busbw / algbw is 3/4.
    reduced = rows(tmp_path / "run", op="all_reduce")
    assert [(row["payload_bytes"], row["return_ns"] - row["issue_ns"]) for row in reduced] == [
        (4000, 2_000_000),
        (8000, 7_000_000),
        (4000, 3_000_000),
        (8000, 5_000_000),
    ]
    (gathered,) = rows(tmp_path / "run", op="all_gather")
    assert (gathered["payload_bytes"], gathered["input_bytes"]) == (4000, 1000)
    assert [row["return_ns"] for row in rows(tmp_path / "run", op="broadcast")] == [None, None]
    assert any("no latency is imported for broadcast" in note for note in found.notes)


def test_printed_lines_of_the_comms_logger(tmp_path):
    lines = ["[2026-01-02 03:04:05,006] [INFO] [logging.py:96:log_dist] [Rank 0] something else"]
    for index, total in enumerate(running_sums([1.5, 2.5, 4.0])):
        lines.append(
            f"[2026-01-02 03:04:0{6 + index},500] [INFO] [logging.py:96:log_dist] [Rank 0] comm op: all_reduce | time (ms): "
            f"{total:.2f} | msg size: 1.5 MB | algbw (Gbps): 20.00 | busbw (Gbps): 17.50"
        )
    (tmp_path / "out.txt").write_text("\n".join(lines))
    found = import_files([tmp_path / "out.txt"], tmp_path / "run")
    assert found.world_size == 8
    made = rows(tmp_path / "run")
    assert [row["return_ns"] - row["issue_ns"] for row in made] == [1_500_000, 2_500_000, 4_000_000]
    assert made[1]["return_ns"] - made[0]["return_ns"] == 1_000_000_000
    assert {row["payload_bytes"] for row in made} == {3 << 19}


def test_a_printed_summary_has_counts_and_no_latencies(tmp_path):
    head = (
        "Comm. Op",
        "Message Size",
        "Count",
        "Total Latency(ms)",
        "Avg Latency(ms)",
        "tput_avg (Gbps)",
        "busbw_avg (Gbps)",
    )
    table = [
        head,
        ("all_reduce",),
        ("", "3.91 KB", 3, 155.77, 51.92, 0.01, 0.01),
        ("reduce_scatter_tensor",),
        ("", "2.0 KB", 2, 25.75, 4.18, 0.01, 0.01),
    ]
    text = "\n".join("".join(f"{cell: <20}" for cell in row) for row in table)
    (tmp_path / "out.txt").write_text(text)
    found = import_files([tmp_path / "out.txt"], tmp_path / "run")
    assert [row["op"] for row in rows(tmp_path / "run")] == ["all_reduce"] * 3 + ["reduce_scatter"] * 2
    assert {row["return_ns"] for row in rows(tmp_path / "run")} == {None}
    assert any("sums of sums" in note for note in found.notes)


# All of them


def test_files_of_no_tool_are_an_error_in_one_line(tmp_path, capsys):
    for name, content in {
        "a.txt": "hello",
        "b.json": "{}",
        "c.json": "[1]",
        "empty": "",
        "d.bin": "\x1f\x8bxx",
    }.items():
        (tmp_path / name).write_bytes(content.encode("latin1"))
        assert commprof("import", str(tmp_path / name), "-o", str(tmp_path / "run")) == 1
        told = capsys.readouterr().err.strip()
        assert len(told.splitlines()) == 1 and name in told
    assert commprof("import", str(tmp_path / "nothere"), "-o", str(tmp_path / "run")) == 2
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("content", "left_out"),
    [
        (lambda: dump(), ""),
        (lambda: dump({"of": "another form"}), "1 entries are not of the form that torch writes"),
        (lambda: kineto(0, []), ""),
    ],
)
def test_files_without_an_operation_make_no_run(tmp_path, capsys, content, left_out):
    (tmp_path / "trace_0").write_text(json.dumps(content()))
    assert commprof("import", str(tmp_path / "trace_0"), "-o", str(tmp_path / "run")) == 1
    told = capsys.readouterr().err.strip()
    assert len(told.splitlines()) == 1 and "no collective" in told and left_out in told
    assert not (tmp_path / "run").exists()


def test_a_rank_without_an_operation_is_noted(tmp_path):
    (tmp_path / "trace_0").write_text(json.dumps(dump(entry(0))))
    (tmp_path / "trace_1").write_text(json.dumps(dump()))
    found = import_files([tmp_path / "trace_0", tmp_path / "trace_1"], tmp_path / "run")
    assert "the files of rank(s) 1 hold no operation" in found.notes


def test_files_of_two_tools_are_not_mixed(tmp_path):
    (tmp_path / "trace_0").write_text(json.dumps(dump(entry(0))))
    (tmp_path / "k.json").write_text(json.dumps(kineto(1, [])))
    with pytest.raises(LogError, match="several tools"):
        import_files([tmp_path / "trace_0", tmp_path / "k.json"], tmp_path / "run")


def test_nothing_is_overwritten(tmp_path):
    (tmp_path / "trace_0").write_text(json.dumps(dump(entry(0))))
    command = ["import", str(tmp_path / "trace_0"), "--out", str(tmp_path / "run")]
    assert commprof(*command) == 0
    assert commprof(*command) == 2
    assert commprof(*command, "--force") == 0
    assert recognise(tmp_path / "trace_0").format is Format.FLIGHT_RECORDER


@pytest.mark.sampled
@pytest.mark.parametrize("verb", [["report"], ["report", "--json"], ["compare"], ["verify"]])
def test_an_imported_run_is_read_like_any_other(tmp_path, verb, capsys):
    for rank in (0, 1):
        (tmp_path / f"t{rank}.json").write_text(
            json.dumps(kineto(rank, comms("allreduce", 1, 100.0, 1000, 1000)))
        )
    import_files([tmp_path / "t0.json", tmp_path / "t1.json"], tmp_path / "run")
    assert commprof(*verb, str(tmp_path / "run")) in (0, 3)
    assert "Traceback" not in capsys.readouterr().err

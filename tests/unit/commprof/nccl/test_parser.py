"""Test the reader on planted logs.

Every line of the plan is returned as planned, and nothing else is returned.
"""

from __future__ import annotations

import gzip
import random
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from commprof import schema
from commprof.errors import LogError, UsageError
from commprof.nccl.parser import parse_logs, write
from support.planted_nccl import BYTES_OF_TYPE, Communicator, Operation, Writer
from support.sample import examples

TERM = {
    "AllReduce": "all_reduce", "Reduce": "reduce", "Broadcast": "broadcast", "AllGather": "all_gather",
    "ReduceScatter": "reduce_scatter", "AlltoAll": "all_to_all", "Gather": "gather", "Scatter": "scatter",
    "Send": "send", "Recv": "recv",
}  # fmt: skip
PER_RANK = {"AllGather", "ReduceScatter", "AlltoAll", "Gather", "Scatter"}
ROOTED = {"Reduce", "Broadcast", "Gather", "Scatter"}
VERSIONS = [
    (2, 4, 7),
    (2, 8, 3),
    (2, 12, 12),
    (2, 18, 1),
    (2, 20, 5),
    (2, 21, 5),
    (2, 23, 4),
    (2, 27, 3),
    (2, 30, 7),
]
PREFIXES = [
    "",
    "[1,0]<stdout>:",
    "0: ",
    "[default0]:",
    "(RayTrainWorker pid=12, ip=10.0.0.1) ",
    "\x1b[32m",
    "> ",
]
NOISE = [
    "Channel 00/0 : 1[1] -> 0[0] [receive] via NET/Socket/0",
    "AllReduce: 9649344 Bytes -> Algo RING proto SIMPLE channel{Lo..Hi}={0..31}",
    "comm 0x556f6d2e1e20 rank 1 nRanks 3 nNodes 3 localRanks 1 localRank 0 MNNVL 0",
    "Init timings - ncclCommInitRankConfig: rank 0 nranks 2 total 0.54 (kernels 0.20)",
    "NCCL_SHM_DISABLE set by environment to 1.",
]

LINE = (
    b"n:1:1 [0] NCCL INFO AllReduce: opCount 0 sendbuff 0x1 recvbuff 0x2 count 4 datatype 7 op 0 root 0 "
    b"comm 0x3 [nranks=2] stream 0x4"
)


class Planned(NamedTuple):
    """One planned operation line, with the columns of the table."""

    op: str
    kind: str
    bytes: int
    message_bytes: int
    rank: int
    nranks: int
    comm: str
    comm_epoch: int
    peer: int | None
    root: int | None
    pid: int


def planned(comm, epoch, operation, kind, pid):
    size = operation.count * BYTES_OF_TYPE[operation.datatype]
    name = operation.name
    return Planned(
        TERM[name], kind, size, size * comm.nranks if name in PER_RANK else size, comm.rank, comm.nranks,
        f"0x{comm.address:x}", epoch,
        operation.root if name in ("Send", "Recv") else None, operation.root if name in ROOTED else None, pid,
    )  # fmt: skip


def parsed_rows(directory: Path):
    parsed = parse_logs(directory)
    rows = [
        Planned(*(row[name] for name in Planned._fields))
        for row in parsed.ops.to_pylist()
        if row["state"] == "whole"
    ]
    return parsed, rows


def scenario(seed: int, version, prefix: str, newline: str):
    """Return one process that creates, uses and destroys communicators.

    Some communicators reuse an earlier address.
    """
    chance = random.Random(seed)
    writer = Writer(f"node-{seed % 7}", 1000 + seed % 50, version, device=seed % 8, prefix=prefix)
    writer.banner()
    plan: list[tuple[int, Planned]] = []
    free = [0x55A000000000 + 0x1000 * n for n in range(3)]
    uses: dict[int, int] = {}
    alive: list[Communicator] = []
    splits = 0
    for _ in range(chance.randrange(5, 60)):
        action = chance.random()
        if (action < 0.15 and free) or not alive:
            address = free.pop(chance.randrange(len(free))) if free else None
            if address is None:
                continue
            nranks = chance.choice([1, 2, 3, 8])
            comm = Communicator(address, chance.randrange(nranks), nranks, chance.getrandbits(63) + 1)
            if alive and version >= (2, 21, 5) and chance.random() < 0.4:
                splits += 1
                writer.split(comm, chance.choice(alive), splits, chance.getrandbits(30), comm.rank)
            else:
                writer.init(comm)
            uses[address] = uses.get(address, -1) + 1
            alive.append(comm)
        elif action < 0.25 and version >= (2, 12, 7):
            comm = alive.pop(chance.randrange(len(alive)))
            writer.end(comm, chance.choice(["Abort", "Destroy"]))
            free.append(comm.address)
        elif action < 0.4:
            writer.say(chance.choice(NOISE))
        else:
            comm = chance.choice(alive)
            name = chance.choice(
                sorted(TERM)
                if version >= (2, 28, 3)
                else sorted(set(TERM) - {"AlltoAll", "Gather", "Scatter"})
            )
            root = chance.randrange(comm.nranks) if name in ROOTED | {"Send", "Recv"} else 0
            operation = Operation(name, chance.randrange(1 << 40), chance.choice([1, 2, 4, 6, 7, 8]), 0, root)
            indices = writer.operation(comm, operation, call=version >= (2, 13, 4) and chance.random() < 0.5)
            for index, kind in zip(indices, ("coll", "call"), strict=False):
                plan.append((index, planned(comm, uses[comm.address], operation, kind, writer.pid)))
    return writer, plan


@settings(
    max_examples=examples(120), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    seed=st.integers(0, 10_000),
    version=st.sampled_from(VERSIONS),
    prefix=st.sampled_from(PREFIXES),
    newline=st.sampled_from(["\n", "\r\n"]),
)
def test_every_planned_line_comes_back(tmp_path_factory, seed, version, prefix, newline):
    directory = tmp_path_factory.mktemp("logs")
    writer, plan = scenario(seed, version, prefix, newline)
    (directory / "a.log").write_bytes((newline.join(writer.lines) + newline).encode())
    parsed, rows = parsed_rows(directory)
    assert rows == [row for _, row in plan]
    assert parsed.ops["line"].to_pylist() == [index + 1 for index, _ in plan]
    assert parsed.counts.torn == 0
    assert parsed.counts.lines == len(writer.lines)
    if plan:
        assert set(parsed.ops["version"].to_pylist()) == {".".join(map(str, version))}


@settings(
    max_examples=examples(80), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(seed=st.integers(0, 10_000), tears=st.integers(1, 5), glue=st.booleans())
def test_a_torn_line_is_counted_and_harms_no_other(tmp_path_factory, seed, tears, glue):
    directory = tmp_path_factory.mktemp("logs")
    writer, plan = scenario(seed, (2, 27, 3), "", "\n")
    chance = random.Random(seed)
    torn = set(chance.sample([index for index, _ in plan], min(tears, len(plan))))
    text = ""
    for index, line in enumerate(writer.lines):
        if index in torn:
            begin = line.index("opCount ") + 8 if "opCount " in line else line.index("(") + 1
            end = line.index(" stream ") if "opCount " in line else len(line)
            text += line[: chance.randrange(begin, end)] + ("" if glue else "\n")
        else:
            text += line + "\n"
    (directory / "a.log").write_text(text)
    parsed, rows = parsed_rows(directory)
    assert rows == [row for index, row in plan if index not in torn]
    assert parsed.counts.torn == len(torn)
    assert parsed.ops["state"].to_pylist().count("torn") == len(torn)


@settings(
    max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(seed=st.integers(0, 10_000), count=st.integers(1, 6))
def test_glued_lines_are_split_where_the_next_host_begins(tmp_path_factory, seed, count):
    directory = tmp_path_factory.mktemp("logs")
    writer, plan = scenario(seed, (2, 27, 3), "", "\n")
    chance = random.Random(seed)
    glued = {chance.randrange(1, len(writer.lines)) for _ in range(count)}
    text = "".join(line + ("" if index in glued else "\n") for index, line in enumerate(writer.lines))
    (directory / "a.log").write_text(text)
    assert parsed_rows(directory)[1] == [row for _, row in plan]


@settings(
    max_examples=examples(100), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.binary(max_size=400), seed=st.integers(0, 1000))
def test_nothing_that_a_file_holds_raises_or_invents_an_operation(tmp_path_factory, data, seed):
    directory = tmp_path_factory.mktemp("logs")
    chance = random.Random(seed)
    line = LINE
    place = chance.randrange(len(line))
    (directory / "a.log").write_bytes(data + b"\n" + line[:place] + data + line[place:])
    parsed = parse_logs(directory)
    assert parsed.counts.coll <= 1
    assert parsed.ops.num_rows == parsed.counts.coll + parsed.counts.call + parsed.counts.torn


def comm(rank, nranks, comm_id, address=0x55A000000000):
    return Communicator(address, rank, nranks, comm_id)


def test_global_ranks_of_sub_groups_come_from_the_world(tmp_path):
    for rank in range(4):
        writer = Writer("node-0", 500 + rank, (2, 27, 3), device=rank)
        world, pair = comm(rank, 4, 0xABC), comm(rank // 2, 2, 0x100 + rank % 2, 0x55A000002000)
        writer.init(world)
        writer.init(pair)
        writer.operation(pair, Operation("AllReduce", 5, 7))
        (tmp_path / f"{rank}.log").write_text("\n".join(writer.lines))
    rows = parse_logs(tmp_path).ops.to_pylist()
    assert [(r["global_rank"], r["rank"]) for r in rows] == [(0, 0), (1, 0), (2, 1), (3, 1)]


def test_without_a_world_no_global_rank_is_invented(tmp_path):
    for rank in range(4):
        writer = Writer("node-0", 500 + rank, (2, 27, 3), device=rank)
        first, second = (
            comm(rank // 2, 2, 0x100 + rank % 2),
            comm(rank % 2, 2, 0x200 + rank // 2, 0x55A000002000),
        )
        for each in (first, second):
            writer.init(each)
            writer.operation(each, Operation("AllReduce", 5, 7))
        (tmp_path / f"{rank}.log").write_text("\n".join(writer.lines))
    rows = parse_logs(tmp_path).ops.to_pylist()
    assert {r["global_rank"] for r in rows} == {None}
    assert all(r["rank"] is not None and "every process once" in r["rank_reason"] for r in rows)


def test_split_communicators_without_comm_id_join_by_parent_and_colour(tmp_path):
    for rank in range(4):
        writer = Writer("node-0", 500 + rank, (2, 27, 3), device=rank)
        world = comm(rank, 4, 0xABC)
        half = comm(rank % 2, 2, 0, 0x55A000002000)
        writer.init(world)
        writer.split(half, world, 1, color=rank // 2, key=rank)
        writer.operation(half, Operation("AllReduce", 5, 7))
        (tmp_path / f"{rank}.log").write_text("\n".join(writer.lines))
    parsed = parse_logs(tmp_path)
    halves = [c for c in parsed.communicators if c.nranks == 2]
    assert [c.family for c in halves] == [halves[0].family] * 2 + [halves[2].family] * 2
    assert halves[0].family != halves[2].family
    assert parsed.ops["global_rank"].to_pylist() == [0, 1, 2, 3]


def test_communicators_that_look_alike_are_left_apart_and_said_so(tmp_path):
    for rank in range(4):
        writer = Writer("node-0", 500 + rank, (2, 8, 3), device=rank)
        writer.init(comm(rank % 2, 2, 0))
        (tmp_path / f"{rank}.log").write_text("\n".join(writer.lines))
    parsed = parse_logs(tmp_path)
    assert {c.family for c in parsed.communicators} == {None}
    assert any("no commId distinguishes them" in note for note in parsed.notes)


@pytest.mark.parametrize(
    ("version", "dtype"), [((2, 6, 4), "int8"), ((2, 7, 3), None), ((2, 21, 5), None), ((2, 22, 3), "int8")]
)
def test_int8_of_all_gather_is_believed_only_where_it_is_true(tmp_path, version, dtype):
    writer = Writer("node-0", 7, version)
    world = comm(0, 2, 1)
    writer.banner()
    writer.init(world)
    writer.operation(world, Operation("AllGather", 10, 0))
    writer.operation(world, Operation("AllReduce", 10, 0))
    (tmp_path / "a.log").write_text("\n".join(writer.lines))
    assert parse_logs(tmp_path).ops["dtype"].to_pylist() == [dtype, "int8"]


def test_the_line_of_torch_gives_rank_and_group_where_init_is_missing(tmp_path):
    writer = Writer("node-0", 7, (2, 27, 3))
    world = comm(3, 4, 1)
    writer.lines.append(
        "I0527 15:16:57.738664 58629 ProcessGroupNCCL.cpp:2183] [PG ID 0 PG GUID 0(default_pg) Rank 3] "
        f"ProcessGroupNCCL created ncclComm_ 0x{world.address:x} on CUDA device: \x03"
    )
    writer.operation(world, Operation("AllReduce", 10, 7))
    (tmp_path / "a.log").write_text("\n".join(writer.lines))
    parsed = parse_logs(tmp_path)
    assert parsed.ops.select(["rank", "global_rank"]).to_pylist() == [{"rank": 3, "global_rank": 3}]
    assert parsed.communicators[0].pg_description == "default_pg"


def test_operations_of_unknown_names_are_counted_by_name(tmp_path):
    writer = Writer("node-0", 7, (2, 30, 7))
    writer.operation(comm(0, 2, 1), Operation("PutSignal", 10, 7))
    (tmp_path / "a.log").write_text("\n".join(writer.lines))
    parsed = parse_logs(tmp_path)
    assert parsed.ops.num_rows == 0
    assert parsed.unknown_ops == {"PutSignal": 1}


def test_traces_of_a_build_for_debugging_repeat_nothing(tmp_path):
    about = b"comm 0x3 rank 0 nRanks 2 cudaDev 0 busId 1000"
    lines = [
        b"n:1:1 [0] NCCL INFO ncclCommInitRank comm 0x3 rank 0 nranks 2 cudaDev 0 busId 1000 commId 0x9 - Init START",
        LINE,
        b"n:1:1 [0] NCCL INFO AllReduce: 16 Bytes -> Algo 1 proto 0 time 11.6",
        b"n:1:1 [0] 3.140000 getAlgoInfo:1857 NCCL TRACE 16 Bytes -> Algo 1 proto 0 time 11.6",
        b"n:1:1 [0] 9.000000 ncclCommDestroy:2054 NCCL TRACE " + about,
        b"n:1:1 [0] NCCL INFO " + about.replace(b"nRanks", b"nranks") + b" - Destroy COMPLETE",
    ]
    (tmp_path / "nccl.log").write_bytes(b"\n".join(lines))
    parsed = parse_logs(tmp_path / "nccl.log")
    assert [(c.epoch, c.ended, c.operations) for c in parsed.communicators] == [(0, "destroy", 1)]
    assert parsed.tables["nccl_tuning"].num_rows == 1


def test_the_end_of_a_simulated_group_is_the_end_of_its_launch(tmp_path):
    start, end = b"n:1:1 NCCL CALL ncclGroupStart()", b"n:1:1 NCCL CALL ncclGroupSimulateEnd()"
    (tmp_path / "nccl.log").write_bytes(b"\n".join([start, LINE, end, LINE]))
    assert parse_logs(tmp_path / "nccl.log").ops["launch"].to_pylist() == [1, None]


def test_lines_that_a_collector_left_out_are_stated(tmp_path):
    colored = (
        b"(Worker pid=7) "
        + LINE
        + b"\x1b[32m [repeated 7x across cluster]\x1b[0m (Ray deduplicates logs by default.)"
    )
    (tmp_path / "nccl.log").write_bytes(
        b"\n".join([LINE, colored, b"message repeated 1200 times: [ " + LINE + b"]"])
    )
    for careful in (False, True):
        parsed = parse_logs(tmp_path / "nccl.log", careful=careful)
        assert parsed.counts.coll == 3
        (note,) = [note for note in parsed.notes if "dropped lines" in note]
        assert note.startswith("2 lines stand for 1,207 similar ones") and "RAY_DEDUP_LOGS=0" in note
    (tmp_path / "plain.log").write_bytes(LINE)
    assert not any("dropped lines" in note for note in parse_logs(tmp_path / "plain.log").notes)


def test_compressed_logs_globs_and_single_files_read_alike(tmp_path):
    writer, plan = scenario(5, (2, 27, 3), "", "\n")
    text = "\n".join(writer.lines).encode()
    (tmp_path / "plain.log").write_bytes(text)
    (tmp_path / "packed.gz").write_bytes(gzip.compress(text))
    with pa.CompressedOutputStream(str(tmp_path / "packed.zst"), "zstd") as stream:
        stream.write(text)
    expected = [row for _, row in plan]
    for path in ("plain.log", "packed.gz", "packed.zst", "plain.*"):
        parsed = parse_logs(str(tmp_path / path))
        assert [Planned(*(r[n] for n in Planned._fields)) for r in parsed.ops.to_pylist()] == expected


def test_a_cut_archive_is_read_as_far_as_it_goes_and_said_so(tmp_path):
    writer, _ = scenario(5, (2, 27, 3), "", "\n")
    packed = gzip.compress("\n".join(writer.lines * 50).encode())
    (tmp_path / "packed.gz").write_bytes(packed[: len(packed) // 2])
    assert any("could not be read to its end" in note for note in parse_logs(tmp_path).notes)


def test_a_line_without_end_is_skipped_within_bounded_time(tmp_path):
    (tmp_path / "a.log").write_bytes(b"a:o" * 7_000_000 + b"\n" + LINE)
    parsed = parse_logs(tmp_path)
    assert (parsed.counts.coll, parsed.counts.overlong, parsed.counts.lines) == (1, 1, 2)
    assert parsed.ops["line"].to_pylist() == [2]


@pytest.mark.parametrize("name", ["missing.log", "no-*.log", "empty-directory"])
def test_nothing_to_read_is_one_clear_error(tmp_path, name):
    (tmp_path / "empty-directory").mkdir()
    with pytest.raises(LogError, match=name.replace("*", r"\*")):
        parse_logs(tmp_path / name)


def test_an_empty_log_is_a_result_with_a_note(tmp_path):
    (tmp_path / "a.log").write_text("")
    parsed = parse_logs(tmp_path)
    assert parsed.ops.num_rows == 0
    assert parsed.ops.schema.names == list(schema.NCCL_OPS.names)
    assert any("empty" in note for note in parsed.notes)


def test_tables_are_written_once_and_overwritten_only_by_force(tmp_path):
    writer, plan = scenario(5, (2, 27, 3), "", "\n")
    (tmp_path / "a.log").write_text("\n".join(writer.lines))
    parsed = parse_logs(tmp_path / "a.log")
    paths = {path.name: path for path in write(parsed, tmp_path / "out", csv=True)}
    assert {name.removesuffix(".parquet") for name in paths if name.endswith(".parquet")} == {
        "nccl_ops", "nccl_communicators", "nccl_rings", "nccl_trees", "nccl_links", "nccl_tuning", "nccl_messages",
    }  # fmt: skip
    assert pq.read_table(paths["nccl_ops.parquet"]).to_pylist() == parsed.ops.to_pylist()
    assert paths["nccl_ops.csv"].read_text().count("\n") == len(plan) + 1
    with pytest.raises(UsageError, match="--force"):
        write(parsed, tmp_path / "out")
    write(parsed, tmp_path / "out", force=True)


def test_a_full_disk_leaves_no_part_of_a_table_and_the_former_ones(tmp_path, monkeypatch):
    log, out = tmp_path / "nccl.log", tmp_path / "out"
    log.write_bytes(LINE)
    former = {path: path.read_bytes() for path in write(parse_logs(log), out, csv=True)}
    log.write_bytes(LINE + b"\n" + LINE)

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("commprof.nccl.parser.pa_csv.write_csv", fail)
    with pytest.raises(LogError, match="No space left on device"):
        write(parse_logs(log), out, force=True, csv=True)
    assert {path: path.read_bytes() for path in out.iterdir()} == former

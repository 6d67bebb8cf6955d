"""Generates NCCL logs from records, with known truth: the operations, and the dropped, added or truncated lines.

    python tests/support/planted_nccl.py RUN_DIR --out DIR [--version 2.27.3] [--drop N] [--extra N] [--tear N]
        [--duplicate N] [--renew N] [--frozen] [--one-stream] [--call]

writes one file per process of a recorded run, in the formats of NVIDIA/nccl, and ``planted-truth.json`` in the
same directory. The first line of each file states that the file is generated, so that nobody takes it for the
output of NCCL.

This module is an independent implementation on purpose: it imports nothing from commprof.nccl or
commprof.align. Each rule names its section of the project's reference of NCCL's logs (written from
src/debug.cc, src/enqueue.cc and src/init.cc at the release tags, and from
torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp): 1 heads and banner, 3.1 operation lines, 3.2 their counts and
roots, 3.4 opCount, 4 CALL lines and their order, 5 lifetime of communicators, 7.5 communicators of torch's
groups, 7.7 order of lines, 9 operations behind torch's calls, 10 truncated lines.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

# nccl.h, ncclDataType_t
NUMBER_OF_TYPE = {
    "int8": 0, "uint8": 1, "bool": 1, "int32": 2, "uint32": 3, "int64": 4, "uint64": 5, "float16": 6, "float32": 7,
    "float64": 8, "bfloat16": 9,
}  # fmt: skip
BYTES_OF_TYPE = (1, 1, 4, 4, 8, 8, 2, 4, 8, 2)
# nccl.h, ncclRedOp_t
NUMBER_OF_REDUCTION = {"SUM": 0, "PRODUCT": 1, "MAX": 2, "MIN": 3, "AVG": 4}

FLOAT32 = 7
ITEM_BYTES = 4  # of FLOAT32
PRIMES = (104_729, 104_743, 104_759, 104_761, 104_773, 104_779, 104_789, 104_801, 104_803, 104_827)


class Operation(NamedTuple):
    """One call of NCCL. ``count`` and ``datatype`` are the arguments of the caller, not the printed values."""

    name: str
    count: int
    datatype: int
    reduction: int = 0
    root: int = 0


@dataclass
class Communicator:
    """One communicator on one rank."""

    address: int
    rank: int
    nranks: int
    comm_id: int
    opcount: int = 0
    buffer: int = 0x7F0000000000
    stream: int = 0x55D000001000


@dataclass
class Writer:
    """Writes what one process prints, in the formats of one version of NCCL."""

    host: str
    pid: int
    version: tuple[int, int, int]
    device: int = 0
    prefix: str = ""
    frozen: bool = False  # 3.4: opCount is always 0 in 2.8.3, and on one node also in 2.9 to 2.11
    lines: list[str] = field(default_factory=list)

    def say(self, text: str, tid: int | None = None) -> int:
        """Write one INFO line and return its index in ``lines``."""
        tid = self.pid if tid is None else tid
        self.lines.append(f"{self.prefix}{self.host}:{self.pid}:{tid} [{self.device}] NCCL INFO {text}")
        return len(self.lines) - 1

    def say_call(self, text: str) -> int:
        """Write one CALL line, which contains no device, and return its index in ``lines``."""
        self.lines.append(f"{self.prefix}{self.host}:{self.pid}:{self.pid} NCCL CALL {text}")
        return len(self.lines) - 1

    def banner(self, cuda: str = "cuda12.4") -> None:
        text = f"NCCL version {'.'.join(map(str, self.version))}+{cuda}"
        if self.version < (2, 22, 3):
            self.lines.append(self.prefix + text)  # only rank 0 prints the banner, without a head
        else:
            self.say(text)

    def init(self, comm: Communicator, stages: Iterable[str] = ("START", "COMPLETE")) -> None:
        for stage in stages:
            text = self._init_text(comm, stage)
            if text is not None:
                self.say(text, tid=self.pid + 7)

    def _init_text(self, comm: Communicator, stage: str) -> str | None:
        body = f"comm 0x{comm.address:x} rank {comm.rank} nranks {comm.nranks} cudaDev {self.device}"
        ident = f"commId 0x{comm.comm_id:016x}"
        bus = f"busId {0x1000 * (self.device + 1):x}"
        if self.version < (2, 18, 3) and stage == "START":
            return None
        if self.version < (2, 5, 0):
            return f"{body} nvmlDev {self.device} - Init {stage}"
        if self.version < (2, 16, 2):
            return f"{body} {bus} - Init {stage}"
        if self.version < (2, 18, 3):
            return f"{body} {bus} {ident} - Init {stage}"
        body = f"{body} nvmlDev {self.device} {bus} {ident} - Init {stage}"
        if self.version < (2, 21, 5):
            return body
        if self.version < (2, 23, 4):
            return f"ncclCommInitRank {body}"
        mark = f"[Rank {comm.rank}] " if self.version >= (2, 29, 2) and stage == "START" else ""
        return f"{mark}ncclCommInitRankConfig {body}"

    def split(self, comm: Communicator, parent: Communicator, number: int, color: int, key: int) -> None:
        """Write the lines of a communicator that is split from ``parent``. NCCL 2.23 and newer print no commId here."""
        body = (
            f"ncclCommSplit comm 0x{comm.address:x} rank {comm.rank} nranks {comm.nranks} cudaDev {self.device} "
            f"nvmlDev {self.device} busId {0x1000 * (self.device + 1):x} parent 0x{parent.address:x}"
        )
        if self.version < (2, 23, 4):
            for stage in ("START", "COMPLETE"):
                self.say(f"{body} color {color} key {key} commId 0x{comm.comm_id:x} - Init {stage}")
            return
        counter = (
            ""
            if self.version < (2, 24, 3)
            else f"{'splitCount' if self.version < (2, 29, 2) else 'childCount'} {number} "
        )
        self.say(f"{body} {counter}color {color} key {key}- Init START")
        self.say(f"{body} {counter}color {color} key {key} - Init COMPLETE")

    def end(self, comm: Communicator, how: str = "Abort") -> None:
        self.say(
            f"comm 0x{comm.address:x} rank {comm.rank} nranks {comm.nranks} cudaDev {self.device} "
            f"busId {0x1000 * (self.device + 1):x} - {how} COMPLETE"
        )

    def operation(
        self, comm: Communicator, operation: Operation, *, call: bool = False, coll: bool = True
    ) -> list[int]:
        """Write the lines of one call of NCCL and return their indices."""
        name, count, datatype, reduction, root = operation
        if name in ("AllGather", "Broadcast") and (2, 7, 3) <= self.version <= (2, 21, 5):
            count, datatype = count * BYTES_OF_TYPE[datatype], 0
        comm.buffer += 0x200
        send, receive = f"0x{comm.buffer:x}", f"0x{comm.buffer + 0x100:x}"
        if name == "Recv" or (name == "Send" and self.version >= (2, 12, 7)):
            send = "(nil)"
        elif name == "Send":
            receive = "(nil)"
        written = []
        if coll:
            written.append(
                self.say(
                    f"{name}: opCount {comm.opcount:x} sendbuff {send} recvbuff {receive} count {count} "
                    f"datatype {datatype} op {reduction} root {root} comm 0x{comm.address:x} [nranks={comm.nranks}] "
                    f"stream 0x{comm.stream:x}"
                )
            )
        if call:
            first, second = (text.removeprefix("0x").replace("(nil)", "0") for text in (send, receive))
            written.append(
                self.say_call(
                    f"nccl{name}({first},{second},{count},{datatype},{reduction},{root},0x{comm.address:x},0x{comm.stream:x})"
                )
            )
        comm.opcount += not self.frozen
        return written


def operations_of(record: Mapping[str, Any], version: tuple[int, int, int] = (2, 27, 3)) -> list[Operation]:
    """Return the calls of NCCL that torch makes for one record, on the rank of the record (9; roots and peers 3.2).

    ``version`` is the version of NCCL. From 2.13 on, torch also calls NCCL for empty messages. From 2.28 on, torch
    makes a single call for an all_to_all without splits.
    """
    op, nranks, rank = record["op"], int(record["group_size"]), int(record["group_rank"])
    datatype = NUMBER_OF_TYPE.get(record["dtype"] or "float32", 1)
    size = BYTES_OF_TYPE[datatype]
    total = int(record["payload_bytes"]) // size
    reduction = NUMBER_OF_REDUCTION.get(record["reduce_op"] or "SUM", 0)
    inputs, outputs = elements(record["sizes"])
    peers = range(nranks)
    members = communicator_ranks(record)
    root = members.index(int(record["peer"])) if int(record["peer"]) >= 0 else 0
    if op == "barrier":
        return [Operation("AllReduce", 1, FLOAT32)]
    if op == "all_reduce":
        return [Operation("AllReduce", n, datatype, reduction) for n in (inputs or [total])]
    if op in ("reduce", "broadcast"):
        return [Operation(op.capitalize(), total, datatype, reduction if op == "reduce" else 0, root)]
    if op == "all_gather":
        if "coalesced" in record["backend_method"]:
            return [Operation("AllGather", n, datatype) for n in inputs]
        if len(set(outputs)) > 1:
            return [Operation("Broadcast", n, datatype, 0, peer) for peer, n in enumerate(outputs)]
        return [Operation("AllGather", total // nranks, datatype)]
    if op == "reduce_scatter":
        if "coalesced" in record["backend_method"]:
            return [Operation("ReduceScatter", n, datatype, reduction) for n in outputs]
        if len(set(inputs)) > 1:
            return [Operation("Reduce", n, datatype, reduction, peer) for peer, n in enumerate(inputs)]
        return [Operation("ReduceScatter", total // nranks, datatype, reduction)]
    if op == "all_to_all":
        is_list = len(inputs) == nranks > 1
        texts = [record.get(name) for name in ("input_splits", "output_splits")]
        if version >= (2, 28, 3) and not is_list and not any(texts):
            return [Operation("AlltoAll", total // nranks, datatype)]
        sent, received = (
            tensors
            if is_list
            else [int(part) // size for part in text.split(",")]
            if text
            else [sum(tensors or [total]) // nranks] * nranks
            for text, tensors in zip(texts, (inputs, outputs), strict=True)
        )
        return [
            Operation(name, n, datatype, 0, peer)
            for peer in peers
            for name, n in (("Send", sent[peer]), ("Recv", received[peer]))
            if n or version >= (2, 13, 4)
        ]
    if op in ("gather", "scatter"):
        away, back = ("Send", "Recv") if op == "gather" else ("Recv", "Send")
        if rank != root:
            return [Operation(away, total // nranks, datatype, 0, root)]
        return [Operation(back, total // nranks, datatype, 0, peer) for peer in peers if peer != root]
    return [Operation(op.capitalize(), total, datatype, 0, root)]


def communicator_ranks(record: Mapping[str, Any]) -> list[int]:
    """Return the global ranks of the communicator that torch uses (7.5).

    A send or recv that is not coalesced uses a communicator of two ranks.
    """
    if record["op"] in ("send", "recv") and record.get("coalesce_id") in (None, ""):
        return sorted({int(record["rank"]), int(record["peer"])})
    return ranks_of(record["group_ranks"])


def primes(count: int) -> list[int]:
    """Return the first ``count`` primes from 101 on, which serve as unique sizes of operations."""
    found: list[int] = []
    number = 101
    while len(found) < count:
        if all(number % divisor for divisor in range(2, int(number**0.5) + 1)):
            found.append(number)
        number += 2
    return found


def watermark(prime: int, nranks: int) -> int:
    """Return a payload in bytes that identifies ``prime`` and is divisible by the number of ranks of a group."""
    return ITEM_BYTES * nranks * prime


def elements(sizes: str | None) -> tuple[list[int], list[int]]:
    """Return the numbers of elements of the input and output tensors of a text such as ``4x16;2->8``."""
    inputs, _, outputs = (sizes or "").partition("->")
    return _products(inputs), _products(outputs)


def _products(text: str) -> list[int]:
    found = []
    for shape in filter(None, text.split(";")):
        product = 1
        for side in shape.replace("()", "1").split("x"):
            product *= int(side)
        found.append(product)
    return found


def ranks_of(text: str) -> list[int]:
    first, dash, last = text.partition("-")
    return list(range(int(first), int(last) + 1)) if dash else [int(part) for part in text.split(",")]


@dataclass
class Planted:
    """The lines of the generated logs by file name, and the truth about them.

    ``said`` contains an entry for each complete operation line: the record and the part of the record that the line
    belongs to, or None if the line was added. ``lost`` contains the parts of records that have no complete line.
    """

    files: dict[str, list[str]]
    records: int
    lines: int
    dropped: list[dict[str, Any]]
    extra: list[dict[str, Any]]
    torn: list[dict[str, Any]]
    duplicated: list[dict[str, Any]] = field(default_factory=list)
    said: dict[tuple[str, int], dict[str, Any] | None] = field(default_factory=dict)
    lost: list[dict[str, Any]] = field(default_factory=list)

    def truth(self) -> dict[str, Any]:
        names = ("records", "lines", "dropped", "extra", "torn", "duplicated", "lost")
        return {name: getattr(self, name) for name in names}


class Spoiling(NamedTuple):
    """The numbers of operation lines to drop, truncate, duplicate and add, each at a random place."""

    drop: int = 0
    tear: int = 0
    duplicate: int = 0
    extra: int = 0


@dataclass
class _Line:
    """One line of a log: its text, whether it is an operation line, and the part of a record that it belongs to."""

    text: str
    operation: bool = False
    said: dict[str, Any] | None = None
    torn: bool = False


def plant(
    records: list[dict[str, Any]],
    *,
    version: tuple[int, int, int] = (2, 27, 3),
    drop: int = 0,
    extra: int = 0,
    tear: int = 0,
    duplicate: int = 0,
    call: bool = False,
    coll: bool = True,
    init: bool = True,
    frozen: bool = False,
    renew: int = 0,
    one_stream: bool = False,
    spoil_twins: bool = False,
    seed: int = 0,
    origin: str = "records",
    host: str = "node-0",
) -> Planted:
    """Generate logs for ``records``, with damaged lines.

    Args:
        drop: The number of operation lines to drop.
        extra: The number of operation lines to add.
        tear: The number of operation lines to truncate.
        duplicate: The number of operation lines to write twice.
        frozen: Whether opCount is always 0.
        renew: The number of records after which a communicator is replaced by a new one at the same address (0: never).
        one_stream: Whether all processes write to one log, in a random order (7.7: only the order within each process
            is kept).
        spoil_twins: Whether CALL lines are damaged too. Otherwise only COLL lines are damaged if there are both.
    """
    chance = random.Random(seed)
    logs: dict[str, list[_Line]] = {}
    comm_ids: dict[tuple[Any, ...], int] = {}
    for (rank, attempt, pid), calls in sorted(_by_process(records).items()):
        writer = Writer(host, pid, version, device=rank, frozen=frozen)
        if rank == 0 or version >= (2, 22, 3):
            writer.banner()
        process = _Process(writer, attempt, comm_ids, chance, init, renew)
        said: dict[int, dict[str, Any]] = {}
        for record in calls:
            comm = process.communicator(record)
            whose = {column: int(record[column]) for column in ("rank", "attempt", "pid", "seq")}
            whose["op"] = record["op"]
            for part, operation in enumerate(operations_of(record, version)):
                for index in writer.operation(comm, operation, call=call, coll=coll):
                    said[index] = whose | {"part": part}
        logs[f"{host}.{pid}.log"] = [
            _Line(text, index in said, said.get(index)) for index, text in enumerate(writer.lines)
        ]
    planted = Planted(
        {}, len(records), sum(line.operation for log in logs.values() for line in log), [], [], []
    )
    parts = {_key(line.said): line.said for log in logs.values() for line in log if line.said is not None}
    logs = _spoil(planted, logs, Spoiling(drop, tear, duplicate, extra), chance, spoil_twins)
    kept = {
        _key(line.said) for log in logs.values() for line in log if line.said is not None and not line.torn
    }
    planted.lost = [whose for key, whose in parts.items() if key not in kept]
    for name, log in (_mixed(logs, chance) if one_stream else logs).items():
        planted.files[name] = [f"# GENERATED by planted_nccl.py from {origin}; not the output of NCCL"]
        for line in log:
            planted.files[name].append(line.text)
            if line.operation and not line.torn:
                planted.said[name, len(planted.files[name])] = line.said
    return planted


def _by_process(records: list[dict[str, Any]]) -> dict[tuple[int, int, int], list[dict[str, Any]]]:
    processes: dict[tuple[int, int, int], list[dict[str, Any]]] = {}
    for record in sorted(records, key=lambda r: int(r["seq"])):
        key = (int(record["rank"]), int(record["attempt"]), int(record["pid"]))
        processes.setdefault(key, []).append(record)
    return processes


def _key(said: Mapping[str, Any]) -> tuple[int, ...]:
    return tuple(said[name] for name in ("rank", "attempt", "pid", "seq", "part"))


@dataclass
class _Process:
    """The communicators of one process.

    A communicator is created at its first use (7.5). With ``renew``, it is ended and created again (5).
    """

    writer: Writer
    attempt: int
    comm_ids: dict[tuple[Any, ...], int]
    chance: random.Random
    init: bool
    renew: int
    comms: dict[tuple[Any, ...], Communicator] = field(default_factory=dict)
    uses: dict[tuple[Any, ...], int] = field(default_factory=dict)

    def communicator(self, record: Mapping[str, Any]) -> Communicator:
        ranks = communicator_ranks(record)
        lone = ranks != ranks_of(record["group_ranks"]) or record.get("coalesce_id") in (None, "")
        message = lone and record["op"] in ("send", "recv")
        key = (self.attempt, record["pg"], tuple(ranks), message)
        use = self.uses[key] = self.uses.get(key, -1) + 1
        if key in self.comms and not (self.renew and use % self.renew == 0):
            return self.comms[key]
        address = 0x55A000000000 + self.writer.pid * 0x10000 + len(self.comms) * 0x1000
        if key in self.comms:
            address = self.comms[key].address
            self.writer.end(self.comms[key])
        life = use // self.renew if self.renew else 0
        ident = self.comm_ids.setdefault((*key, life), self.chance.getrandbits(64))
        comm = Communicator(address, ranks.index(int(record["rank"])), len(ranks), ident)
        self.comms[key] = comm
        if self.init:
            self.writer.init(comm)
        return comm


def _mixed(logs: Mapping[str, list[_Line]], chance: random.Random) -> dict[str, list[_Line]]:
    """Merge all logs into one log, in a random order that keeps the order of lines within each log."""
    turns = [name for name, log in logs.items() for _ in log]
    chance.shuffle(turns)
    rest = {name: iter(log) for name, log in logs.items()}
    return {"all.log": [next(rest[name]) for name in turns]}


def _spoil(
    planted: Planted, logs: Mapping[str, list[_Line]], amount: Spoiling, chance: random.Random, twins: bool
) -> dict[str, list[_Line]]:
    """Drop, truncate, duplicate and add lines at random places. An added line has a size that no other line has."""
    places = [(name, index) for name, log in logs.items() for index, line in enumerate(log) if line.operation]
    coll = [(name, index) for name, index in places if "opCount " in logs[name][index].text]
    places = places if twins else coll or places
    chosen = chance.sample(places, min(len(places), amount.drop + amount.tear + amount.duplicate))
    edits: dict[tuple[str, int], list[_Line]] = {}
    for number, (name, index) in enumerate(chosen):
        line = logs[name][index]
        assert line.said is not None
        if number < amount.drop:
            edits[name, index] = []
            planted.dropped.append(line.said)
        elif number < amount.drop + amount.tear:
            edits[name, index] = [_Line(_torn(line.text, chance), True, line.said, torn=True)]
            planted.torn.append(line.said)
        else:
            edits[name, index] = [line, line]
            planted.duplicated.append(line.said)
    for number in range(amount.extra if places else 0):
        name, index = chance.choice(places)
        count = PRIMES[number % len(PRIMES)] * (1 + number // len(PRIMES))
        text = _with_count(logs[name][index].text, count)
        edits.setdefault((name, index), [logs[name][index]]).append(_Line(text, True))
        planted.extra.append({"file": name, "text": text})
    return {
        name: [new for index, line in enumerate(log) for new in edits.get((name, index), [line])]
        for name, log in logs.items()
    }


def _torn(line: str, chance: random.Random) -> str:
    """Truncate the line after the name of its operation (10)."""
    begin = line.index("opCount ") + 8 if "opCount " in line else line.index("(") + 1
    end = line.index(" stream ") if "opCount " in line else len(line) - 1
    return line[: chance.randrange(begin, end)]


def _with_count(line: str, count: int) -> str:
    """Return the line with a different count."""
    if " count " in line:
        before, _, after = line.partition(" count ")
        return f"{before} count {count} {after.partition(' ')[2]}"
    before, _, after = line.partition("(")
    fields = after.split(",")
    return f"{before}({','.join([*fields[:2], str(count), *fields[3:]])}"


def read_records(run: Path) -> list[dict[str, Any]]:
    """Return the collectives of a run.

    Args:
        run: An exported ``collectives.csv``, the directory of such a file, or a run directory.
    """
    table = run / "collectives.csv" if run.is_dir() else run
    if table.exists():
        with table.open(newline="") as stream:
            return [{name: value or None for name, value in row.items()} for row in csv.DictReader(stream)]
    from commprof.trace.reader import open_run

    return list(open_run(run).table("collectives").to_pylist())


def main() -> int:
    parser = argparse.ArgumentParser(description="Plant NCCL logs for a recorded run.")
    parser.add_argument("run", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--version", default="2.27.3")
    parser.add_argument("--drop", type=int, default=0)
    parser.add_argument("--extra", type=int, default=0)
    parser.add_argument("--tear", type=int, default=0)
    parser.add_argument("--duplicate", type=int, default=0)
    parser.add_argument("--renew", type=int, default=0, metavar="N", help="new communicators every N records")
    parser.add_argument("--frozen", action="store_true", help="opCount stays 0")
    parser.add_argument("--one-stream", action="store_true", help="all processes in one log")
    parser.add_argument("--call", action="store_true", help="CALL lines as well")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    records = read_records(options.run)
    major, minor, patch = map(int, options.version.split("."))
    planted = plant(
        records,
        version=(major, minor, patch),
        drop=options.drop,
        extra=options.extra,
        tear=options.tear,
        duplicate=options.duplicate,
        renew=options.renew,
        frozen=options.frozen,
        one_stream=options.one_stream,
        call=options.call,
        seed=options.seed,
        origin=str(options.run),
    )
    options.out.mkdir(parents=True, exist_ok=True)
    for name, lines in planted.files.items():
        (options.out / name).write_text("\n".join(lines) + "\n")
    (options.out / "planted-truth.json").write_text(json.dumps(planted.truth(), indent=1) + "\n")
    print(
        f"GENERATED {len(planted.files)} logs in {options.out} from {len(records)} records: {planted.lines} operation "
        f"lines, of which {len(planted.dropped)} dropped, {len(planted.torn)} torn; {len(planted.extra)} added"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Logs as NCCL would write them, planted from known truth: what was called, what was dropped, added or torn.

    python tests/support/planted_nccl.py RUN_DIR --out DIR [--version 2.27.3] [--drop N] [--extra N] [--tear N] [--call]

writes one file per process of a recorded run, in the formats of NVIDIA/nccl, and ``planted-truth.json`` beside them. The
files say of themselves that they are generated: nobody can take them for the output of NCCL.

A second opinion on purpose: nothing is imported from commprof.nccl or commprof.align. Formats: src/debug.cc (heads),
src/enqueue.cc (operations), src/init.cc (communicators) at the release tags. Operations behind a call:
torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp.
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
PRIMES = (104_729, 104_743, 104_759, 104_761, 104_773, 104_779, 104_789, 104_801, 104_803, 104_827)


class Operation(NamedTuple):
    """One call of NCCL as the caller made it: ``count`` and ``datatype`` are the caller's, not what is printed."""

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
    lines: list[str] = field(default_factory=list)

    def say(self, text: str, tid: int | None = None) -> int:
        """One INFO line; returns its index in ``lines``."""
        tid = self.pid if tid is None else tid
        self.lines.append(f"{self.prefix}{self.host}:{self.pid}:{tid} [{self.device}] NCCL INFO {text}")
        return len(self.lines) - 1

    def say_call(self, text: str) -> int:
        """One CALL line: no device."""
        self.lines.append(f"{self.prefix}{self.host}:{self.pid}:{self.pid} NCCL CALL {text}")
        return len(self.lines) - 1

    def banner(self, cuda: str = "cuda12.4") -> None:
        text = f"NCCL version {'.'.join(map(str, self.version))}+{cuda}"
        if self.version < (2, 22, 3):
            self.lines.append(self.prefix + text)  # rank 0 only, and bare
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
        """A communicator made from ``parent``; 2.23 and newer print no commId for it."""
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
        """The lines of one call of NCCL; returns their indices."""
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
        comm.opcount += 1
        return written


def operations_of(record: Mapping[str, Any]) -> list[Operation]:
    """The calls of NCCL that torch makes for one record, on the rank of the record."""
    op, nranks, rank = record["op"], int(record["group_size"]), int(record["group_rank"])
    datatype = NUMBER_OF_TYPE.get(record["dtype"] or "float32", 1)
    size = BYTES_OF_TYPE[datatype]
    total = int(record["payload_bytes"]) // size
    reduction = NUMBER_OF_REDUCTION.get(record["reduce_op"] or "SUM", 0)
    inputs, outputs = elements(record["sizes"])
    peers = range(nranks)
    root = ranks_of(record["group_ranks"]).index(int(record["peer"])) if int(record["peer"]) >= 0 else 0
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
        sent = inputs if len(inputs) == nranks else [total // nranks] * nranks
        received = outputs if len(outputs) == nranks else [total // nranks] * nranks
        return [
            Operation(name, n, datatype, 0, peer)
            for peer in peers
            for name, n in (("Send", sent[peer]), ("Recv", received[peer]))
            if n
        ]
    if op in ("gather", "scatter"):
        away, back = ("Send", "Recv") if op == "gather" else ("Recv", "Send")
        if rank != root:
            return [Operation(away, total // nranks, datatype, 0, root)]
        return [Operation(back, total // nranks, datatype, 0, peer) for peer in peers if peer != root]
    return [Operation(op.capitalize(), total, datatype, 0, root)]


def elements(sizes: str | None) -> tuple[list[int], list[int]]:
    """Elements of each input and output tensor: ``4x16;2->8``."""
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
    """The logs by file name, and the truth about them."""

    files: dict[str, list[str]]
    records: int
    lines: int
    dropped: list[dict[str, Any]]
    extra: list[dict[str, Any]]
    torn: list[dict[str, Any]]

    def truth(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("records", "lines", "dropped", "extra", "torn")}


def plant(
    records: list[dict[str, Any]],
    *,
    version: tuple[int, int, int] = (2, 27, 3),
    drop: int = 0,
    extra: int = 0,
    tear: int = 0,
    call: bool = False,
    coll: bool = True,
    init: bool = True,
    seed: int = 0,
    origin: str = "records",
    host: str = "node-0",
) -> Planted:
    """Logs for ``records``, with some operation lines left out, put in and torn."""
    chance = random.Random(seed)
    planted = Planted({}, len(records), 0, [], [], [])
    processes: dict[tuple[int, int, int], list[dict[str, Any]]] = {}
    for record in sorted(records, key=lambda r: int(r["seq"])):
        key = (int(record["rank"]), int(record["attempt"]), int(record["pid"]))
        processes.setdefault(key, []).append(record)
    comm_ids: dict[tuple[Any, ...], int] = {}
    written: list[tuple[str, int, dict[str, Any]]] = []
    for (rank, attempt, pid), calls in sorted(processes.items()):
        writer = Writer(host, pid, version, device=rank)
        writer.lines.append(f"# GENERATED by planted_nccl.py from {origin}; not the output of NCCL")
        if rank == 0 or version >= (2, 22, 3):
            writer.banner()
        comms: dict[tuple[Any, ...], Communicator] = {}
        name = f"{host}.{pid}.log"
        for record in calls:
            key = (attempt, record["pg"], record["group_ranks"])
            if key not in comms:
                ident = comm_ids.setdefault(key, chance.getrandbits(64))
                address = 0x55A000000000 + pid * 0x10000 + len(comms) * 0x1000
                comms[key] = Communicator(
                    address, int(record["group_rank"]), int(record["group_size"]), ident
                )
                if init:
                    writer.init(comms[key])
            said = {column: int(record[column]) for column in ("rank", "attempt", "pid", "seq")}
            for operation in operations_of(record):
                indices = writer.operation(comms[key], operation, call=call, coll=coll)
                written.extend((name, index, said | {"op": record["op"]}) for index in indices)
        planted.files[name] = writer.lines
    planted.lines = len(written)
    _spoil(planted, written, chance, drop, extra, tear)
    return planted


def _spoil(
    planted: Planted,
    written: list[tuple[str, int, dict[str, Any]]],
    chance: random.Random,
    drop: int,
    extra: int,
    tear: int,
) -> None:
    """Leave out, tear and add lines at random places; an added line has a size that no other line has.

    Where COLL lines have CALL twins, only the COLL lines are spoiled: it is they that count.
    """
    coll = [entry for entry in written if "opCount " in planted.files[entry[0]][entry[1]]]
    written = coll or written
    chosen = chance.sample(written, min(len(written), drop + tear))
    edits: dict[tuple[str, int], list[str]] = {}
    for name, index, said in chosen[:drop]:
        edits[name, index] = []
        planted.dropped.append(said)
    for name, index, said in chosen[drop:]:
        line = planted.files[name][index]
        body = line.index("opCount ") + 8 if "opCount " in line else line.index("(") + 1
        end = line.index(" stream ") if "opCount " in line else len(line) - 1
        edits[name, index] = [line[: chance.randrange(body, end)]]
        planted.torn.append(said)
    for number in range(extra):
        name, index, _ = chance.choice(written)
        line = planted.files[name][index]
        count = PRIMES[number % len(PRIMES)] * (1 + number // len(PRIMES))
        if " count " in line:
            before, _, after = line.partition(" count ")
            added = f"{before} count {count} {after.partition(' ')[2]}"
        else:
            before, _, after = line.partition("(")
            fields = after.split(",")
            added = f"{before}({','.join([*fields[:2], str(count), *fields[3:]])}"
        edits.setdefault((name, index), [line]).append(added)
        planted.extra.append({"file": name, "text": added})
    for name, lines in planted.files.items():
        planted.files[name] = [text for i, line in enumerate(lines) for text in edits.get((name, i), [line])]


def read_records(run: Path) -> list[dict[str, Any]]:
    """The collectives of a run: an exported ``collectives.csv``, the directory of one, or a run directory."""
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

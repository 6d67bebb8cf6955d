"""The two sides of an alignment, each as ordered streams: records by process and group, lines by communicator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import pyarrow as pa

from commprof.align.expectation import Call, Dialect, Expected, expected_lines
from commprof.schema import Op


class RunProcess(NamedTuple):
    """One process of the run."""

    rank: int
    attempt: int
    pid: int


class GroupKey(NamedTuple):
    """One process group of the run; ``peer`` is set for messages that have a communicator of their own."""

    pg: str
    group_ranks: str
    peer: int | None = None


class Part(NamedTuple):
    """One expected line: which record it belongs to, and which of the record's lines it is."""

    record: int
    number: int
    of: int


@dataclass(slots=True)
class RecordStream:
    """The records of one process in one group, in the order of issue."""

    process: RunProcess
    group: GroupKey
    group_size: int
    group_rank: int
    backend: str | None
    records: list[int] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)

    def expect(self, dialect: Dialect) -> tuple[list[Expected], list[Part], list[int]]:
        """The lines that the records should leave, the part of a record that each is, and records that do not say."""
        lines: list[Expected] = []
        parts: list[Part] = []
        unclear: list[int] = []
        cache: dict[Call, tuple[Expected, ...] | None] = {}
        for record, call in zip(self.records, self.calls, strict=True):
            if call not in cache:
                cache[call] = expected_lines(call, dialect)
            expected = cache[call]
            if expected is None:
                unclear.append(record)
                continue
            lines.extend(expected)
            parts.extend(Part(record, number, len(expected)) for number in range(len(expected)))
        return lines, parts, unclear

    def messages_with(self, peer: int) -> RecordStream:
        """The sends and receives with one peer, as a stream of their own; pairs number the lower rank 0."""
        pair = RecordStream(
            self.process,
            self.group._replace(peer=peer),
            2,
            int(self.process.rank > peer),
            self.backend,
        )
        ranks = f"{min(self.process.rank, peer)},{max(self.process.rank, peer)}"
        for record, call in zip(self.records, self.calls, strict=True):
            if call.op in (Op.SEND, Op.RECV) and call.peer == peer:
                pair.records.append(record)
                pair.calls.append(call._replace(group_ranks=ranks))
        return pair

    def without(self, records: set[int]) -> RecordStream:
        """The stream without some of its records."""
        kept = [(r, c) for r, c in zip(self.records, self.calls, strict=True) if r not in records]
        return RecordStream(
            self.process,
            self.group,
            self.group_size,
            self.group_rank,
            self.backend,
            [record for record, _ in kept],
            [call for _, call in kept],
        )


class LogProcess(NamedTuple):
    """One process of the log."""

    host: str
    pid: int


@dataclass(slots=True)
class LineStream:
    """The whole lines of one communicator in one process, in the order of the log: COLL where there are any, else CALL."""

    process: LogProcess
    comm: str
    comm_epoch: int
    comm_id: str | None
    rank: int | None
    global_rank: int | None
    nranks: int | None
    kind: str
    first: tuple[str, int]
    rows: list[int] = field(default_factory=list)
    printed: list[Expected] = field(default_factory=list)

    @property
    def only_messages(self) -> bool:
        """Whether nothing but sends and receives went through it."""
        return all(line.op in (Op.SEND, Op.RECV) for line in self.printed)

    def dialect(self, calls: Sequence[Call]) -> Dialect:
        """How these lines write what ``calls`` may have caused."""
        ops = {line.op for line in self.printed}
        single = frozenset(ops & {Op.ALL_TO_ALL, Op.GATHER, Op.SCATTER})
        sizes = Counter(line.message_bytes for line in self.printed if line.op == Op.ALL_REDUCE)
        own = sum(call.op == Op.ALL_REDUCE and call.payload_bytes == 1 for call in calls)
        return Dialect(single, 1 if sizes[1] > own else 4)


_CALL_COLUMNS = Call._fields
_RECORD_COLUMNS = ("rank", "attempt", "pid", "seq", "pg", "group_size", "backend", *_CALL_COLUMNS)


def record_streams(collectives: pa.Table) -> dict[tuple[RunProcess, GroupKey], RecordStream]:
    """The records of a run by process and group."""
    columns = {name: collectives[name].to_pylist() for name in _RECORD_COLUMNS}
    order = sorted(range(collectives.num_rows), key=lambda row: columns["seq"][row])
    streams: dict[tuple[RunProcess, GroupKey], RecordStream] = {}
    processes = list(map(RunProcess, columns["rank"], columns["attempt"], columns["pid"]))
    groups = list(map(GroupKey, columns["pg"], columns["group_ranks"]))
    calls = list(map(Call, *(columns[name] for name in _CALL_COLUMNS)))
    for row in order:
        key = (processes[row], groups[row])
        stream = streams.get(key)
        if stream is None:
            stream = streams[key] = RecordStream(
                *key, columns["group_size"][row], columns["group_rank"][row], columns["backend"][row]
            )
        stream.records.append(row)
        stream.calls.append(calls[row])
    return streams


_LINE_COLUMNS = (
    "state", "kind", "host", "pid", "comm", "comm_epoch", "comm_id", "rank", "global_rank", "nranks", "file", "line",
    "op", "bytes", "message_bytes", "root", "peer",
)  # fmt: skip

_IDENTITY_COLUMNS = ("comm_id", "rank", "global_rank", "nranks")


def line_streams(ops: pa.Table) -> list[LineStream]:
    """The whole lines of a log by communicator, in the order of their first line."""
    columns = {name: ops[name].to_pylist() for name in _LINE_COLUMNS}
    streams: dict[tuple[object, ...], LineStream] = {}
    places = zip(
        *(columns[name] for name in ("state", "kind", "host", "pid", "comm", "comm_epoch")), strict=True
    )
    for row, (state, kind, host, pid, comm, epoch) in enumerate(places):
        if state != "whole":
            continue
        key = (host, pid, comm, epoch, kind)
        stream = streams.get(key)
        if stream is None:
            comm_id, rank, global_rank, nranks = (columns[name][row] for name in _IDENTITY_COLUMNS)
            first = (columns["file"][row], columns["line"][row])
            stream = streams[key] = LineStream(
                LogProcess(host, pid), comm, epoch, comm_id, rank, global_rank, nranks, kind, first
            )
        message, other = columns["message_bytes"][row], columns["root"][row]
        stream.rows.append(row)
        stream.printed.append(
            Expected(
                columns["op"][row],
                -1 if message is None else message,
                columns["peer"][row] if other is None else other,
            )
        )
    twins = {key[:4] for key in streams if key[4] == "coll"}
    return [stream for key, stream in streams.items() if key[4] == "coll" or key[:4] not in twins]

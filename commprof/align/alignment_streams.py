"""The two sides of an alignment, each as ordered streams.

Records are divided by process and group, and lines by communicator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from commprof.align.expected_lines import Call, Dialect, Expected, expected_lines
from commprof.align.sequences.edits import Codes
from commprof.align.sequences.group_ids import distinct_rows, split_by
from commprof.schema import Op

_Item = TypeVar("_Item")


class RunProcess(NamedTuple):
    """One process of the run."""

    rank: int
    attempt: int
    pid: int


class GroupKey(NamedTuple):
    """One process group of the run.

    ``pair`` contains two ranks whose messages have a separate communicator.
    """

    pg: str
    group_ranks: str
    pair: str | None = None


class LogProcess(NamedTuple):
    """One process of the log."""

    host: str
    pid: int


class Vocabulary:
    """Numbers for lines and calls, so that streams are arrays.

    Equal lines have equal numbers, and so have equal calls.
    """

    def __init__(self) -> None:
        self.lines: list[Expected] = []
        self.calls: list[Call] = []
        self._line_codes: dict[Expected, int] = {}
        self._call_codes: dict[Call, int] = {}
        self._expected: dict[tuple[int, Dialect], tuple[int, ...] | None] = {}

    def line(self, line: Expected) -> int:
        """Return the number of a line."""
        return _number(line, self.lines, self._line_codes)

    def call(self, call: Call) -> int:
        """Return the number of a call."""
        return _number(call, self.calls, self._call_codes)

    def expected(self, call: int, dialect: Dialect) -> tuple[int, ...] | None:
        """Return the numbers of the lines that a call leaves, or None if the call does not determine them."""
        key = call, dialect
        if key not in self._expected:
            lines = expected_lines(self.calls[call], dialect)
            self._expected[key] = None if lines is None else tuple(map(self.line, lines))
        return self._expected[key]


def _number(item: _Item, items: list[_Item], numbers: dict[_Item, int]) -> int:
    number = numbers.get(item)
    if number is None:
        number = numbers[item] = len(items)
        items.append(item)
    return number


class Expectation(NamedTuple):
    """The lines that a stream of records should leave, by position.

    Attributes:
        codes: The line, as a number of the vocabulary.
        records: The row of the record that leaves the line.
        line_numbers, line_counts: The number of the line among the lines of its record, and the number of
            these lines.
        unclear: The rows of records that do not determine their lines.
        silent: The rows of records that leave no lines.
    """

    codes: Codes
    records: Codes
    line_numbers: Codes
    line_counts: Codes
    unclear: Codes
    silent: Codes


@dataclass(frozen=True, slots=True)
class RecordStream:
    """The records of one process in one group, in the order of issue.

    ``calls`` contains numbers of the vocabulary.
    """

    process: RunProcess
    group: GroupKey
    group_size: int
    group_rank: int
    backend: str | None
    records: Codes
    calls: Codes

    def expect(self, vocabulary: Vocabulary, dialect: Dialect) -> Expectation:
        """Return the lines that the records should leave."""
        used = np.unique(self.calls)
        size = int(used[-1]) + 1 if len(used) else 0
        counts = np.zeros(size, np.int64)
        starts = np.zeros(size, np.int64)
        unclear = np.zeros(size, np.bool_)
        flat: list[int] = []
        for call in used.tolist():
            lines = vocabulary.expected(call, dialect)
            unclear[call] = lines is None
            starts[call], counts[call] = len(flat), len(lines or ())
            flat.extend(lines or ())
        line_counts = counts[self.calls]
        number = _count_up(line_counts)
        codes = np.asarray(flat, np.int64)[np.repeat(starts[self.calls], line_counts) + number]
        silent = (line_counts == 0) & ~unclear[self.calls]
        return Expectation(
            codes,
            np.repeat(self.records, line_counts),
            number,
            np.repeat(line_counts, line_counts),
            self.records[unclear[self.calls]],
            self.records[silent],
        )

    def selected(self, vocabulary: Vocabulary, wanted: Callable[[Call], bool]) -> Codes:
        """Return the positions of the records for whose call ``wanted`` returns true."""
        chosen = [call for call in np.unique(self.calls).tolist() if wanted(vocabulary.calls[call])]
        return np.flatnonzero(np.isin(self.calls, chosen))

    def peers(self, vocabulary: Vocabulary) -> set[int]:
        """Return the global ranks of the peers of messages outside of coalesced blocks."""
        calls = (vocabulary.calls[call] for call in np.unique(self.calls).tolist())
        return {call.peer for call in calls if _is_lone_message(call)}

    def messages_with(self, vocabulary: Vocabulary, peer: int) -> RecordStream:
        """Return the sends and receives with one peer outside of coalesced blocks, as a separate stream.

        In a pair, the lower rank has number 0.
        """
        places = self.selected(vocabulary, lambda call: _is_lone_message(call) and call.peer == peer)
        pair = sorted({self.process.rank, peer})
        ranks = ",".join(map(str, pair))
        renumbered = {
            call: vocabulary.call(vocabulary.calls[call]._replace(group_ranks=ranks))
            for call in np.unique(self.calls[places]).tolist()
        }
        calls = np.asarray([renumbered[call] for call in self.calls[places].tolist()], np.int64)
        return RecordStream(
            self.process,
            self.group._replace(pair=ranks),
            len(pair),
            pair.index(self.process.rank),
            self.backend,
            self.records[places],
            calls,
        )

    def without(self, records: Codes) -> RecordStream:
        """Return the stream without some of its records."""
        remaining = ~np.isin(self.records, records)
        return RecordStream(
            self.process,
            self.group,
            self.group_size,
            self.group_rank,
            self.backend,
            self.records[remaining],
            self.calls[remaining],
        )


def _is_lone_message(call: Call) -> bool:
    return call.op in (Op.SEND, Op.RECV) and not call.coalesced and call.peer >= 0


def _count_up(counts: Codes) -> Codes:
    """Return 0, 1, ... for each of ``counts`` in turn.

    >>> _count_up(np.array([2, 0, 3])).tolist()
    [0, 1, 0, 1, 2]
    """
    ends = np.cumsum(counts)
    return np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts, counts)


_STREAM_COLUMNS: Final = ("rank", "attempt", "pid", "pg", "group_ranks")
_FACT_COLUMNS: Final = ("group_size", "group_rank", "backend")
_CALL_COLUMNS: Final = tuple(name for name in Call._fields if name != "coalesced")


def record_streams(
    collectives: pa.Table, vocabulary: Vocabulary
) -> dict[tuple[RunProcess, GroupKey], RecordStream]:
    """Return the records of a run by process and group, in the order of first use."""
    if not collectives.num_rows:
        return {}
    batched = collectives["coalesce_id"].is_valid()
    calls, samples = distinct_rows(collectives.append_column("coalesced", batched), Call._fields)
    columns = collectives.select(_CALL_COLUMNS).take(samples).to_pylist()
    flags = batched.take(pa.array(samples)).to_pylist()
    numbers = np.asarray(
        [vocabulary.call(Call(**row, coalesced=flag)) for row, flag in zip(columns, flags, strict=True)],
        np.int64,
    )
    streams: dict[tuple[RunProcess, GroupKey], RecordStream] = {}
    order = np.argsort(np.asarray(collectives["seq"]), kind="stable")
    keys, _ = distinct_rows(collectives, _STREAM_COLUMNS)
    for rows in split_by(keys, order):
        first = collectives.select([*_STREAM_COLUMNS, *_FACT_COLUMNS]).slice(int(rows[0]), 1).to_pylist()[0]
        process = RunProcess(first["rank"], first["attempt"], first["pid"])
        group = GroupKey(first["pg"], first["group_ranks"])
        streams[process, group] = RecordStream(
            process,
            group,
            first["group_size"],
            first["group_rank"],
            first["backend"],
            rows,
            numbers[calls[rows]],
        )
    return streams


@dataclass(slots=True)
class LineStream:
    """The calls of the complete lines of one communicator of one process, in the order of the log.

    ``rows`` contains rows of ``nccl_ops``: the COLL line if a call has a COLL and a CALL line, else its only
    line. ``of_log`` contains the codes of all lines of the log, including truncated lines, without
    duplicates.
    """

    process: LogProcess
    comm: str
    comm_epoch: int
    comm_id: str | None
    rank: int | None
    global_rank: int | None
    nranks: int | None
    kind: str
    first: tuple[str, int]
    rows: Codes
    codes: Codes
    of_log: Codes
    pg: str | None = None
    pg_description: str | None = None
    family: int | None = None

    def dialect(self, vocabulary: Vocabulary, calls: Iterable[int]) -> Dialect:
        """Return the dialect in which these lines show ``calls``."""
        printed = dict(zip(*np.unique(self.codes, return_counts=True), strict=True))
        lines = {vocabulary.lines[code]: count for code, count in printed.items()}
        bytewise = sum(
            count for line, count in lines.items() if line.op == Op.ALL_REDUCE and line.message_bytes == 1
        )
        own = sum(
            vocabulary.calls[call].op == Op.ALL_REDUCE and vocabulary.calls[call].payload_bytes == 1
            for call in calls
        )
        # Behavior that depends on the versions of torch and NCCL is the same in all communicators of a job.
        printed_anywhere = [vocabulary.lines[code] for code in self.of_log.tolist()]
        messages = (Op.SEND, Op.RECV)
        single = {line.op for line in printed_anywhere} & {Op.ALL_TO_ALL, Op.GATHER, Op.SCATTER}
        # Messages of a rank to itself belong to an all_to_all.
        to_itself = {line.message_bytes for line in lines if line.op == Op.SEND and line.other == self.rank}
        undivided = {line.message_bytes for line in lines if line.op == Op.ALL_TO_ALL}
        divided = {size * (self.nranks or 0) for size in to_itself} - undivided
        return Dialect(
            frozenset(single),
            1 if bytewise > own else 4,
            any(line.op in messages and line.message_bytes == 0 for line in printed_anywhere),
            frozenset(divided) if Op.ALL_TO_ALL in single else frozenset(),
        )

    def only_messages(self, vocabulary: Vocabulary) -> bool:
        """Return whether the communicator has only sends and receives."""
        return all(vocabulary.lines[code].op in (Op.SEND, Op.RECV) for code in np.unique(self.codes).tolist())


_COMM_COLUMNS: Final = ("host", "pid", "comm", "comm_epoch")
_LINE_COLUMNS: Final = ("op", "message_bytes", "root", "peer")
_IDENTITY_COLUMNS: Final = ("comm_id", "rank", "global_rank", "nranks")


def line_streams(
    ops: pa.Table, vocabulary: Vocabulary, communicators: pa.Table | None = None
) -> list[LineStream]:
    """Return the calls of a log by communicator, in the order of their first line.

    Args:
        ops: The table ``nccl_ops``.
        vocabulary: The vocabulary, in which equal lines have equal numbers.
        communicators: The table ``nccl_communicators``, with the group that torch prints for a communicator.
    """
    chosen = call_rows(ops)
    if not len(chosen):
        return []
    groups_by_comm = _groups_by_torch(communicators)
    lines, samples = distinct_rows(ops, _LINE_COLUMNS)
    numbers = np.asarray(
        [vocabulary.line(_line(row)) for row in ops.select(_LINE_COLUMNS).take(samples).to_pylist()], np.int64
    )
    keys, _ = distinct_rows(ops, _COMM_COLUMNS)
    # Ranks that communicate have the same NCCL, and a truncated line still contains its operation. If there is one
    # AlltoAll line anywhere, an all_to_all is therefore one line even in a process that lost all its AlltoAll lines.
    with_operation = np.union1d(chosen, torn_rows(ops))
    of_log = np.unique(numbers[lines[with_operation]])
    streams = []
    wanted = [*_COMM_COLUMNS, *_IDENTITY_COLUMNS, "file", "line"]
    for rows in split_by(keys, chosen):
        first = ops.select(wanted).slice(int(rows[0]), 1).to_pylist()[0]
        kinds = ops["kind"].take(pa.array(rows)).unique().to_pylist()
        place = tuple(first[name] for name in _COMM_COLUMNS)
        streams.append(
            LineStream(
                LogProcess(first["host"], first["pid"]),
                first["comm"],
                first["comm_epoch"],
                first["comm_id"],
                first["rank"],
                first["global_rank"],
                first["nranks"],
                "coll" if "coll" in kinds else "call",
                (first["file"], first["line"]),
                rows,
                numbers[lines[rows]],
                of_log,
                *groups_by_comm.get(place, (None, None, None)),
            )
        )
    return streams


def call_rows(ops: pa.Table) -> Codes:
    """Return rows of complete lines, one for each call. A CALL line counts only without its COLL line."""
    is_complete = np.asarray(pc.equal(ops["state"], "whole"))
    call = np.asarray(pc.equal(ops["kind"], "call"))
    twin = np.asarray(ops["twin_line"].is_valid())
    return np.flatnonzero(is_complete & ~(call & twin))


def _groups_by_torch(communicators: pa.Table | None) -> dict[tuple[Any, ...], tuple[Any, ...]]:
    if communicators is None:
        return {}
    columns = (*_COMM_COLUMNS, "pg", "pg_description", "family")
    return {
        tuple(row[name] for name in _COMM_COLUMNS): (row["pg"], row["pg_description"], row["family"])
        for row in communicators.select(columns).to_pylist()
    }


def _line(row: Mapping[str, Any]) -> Expected:
    message = row["message_bytes"]
    other = row["peer"] if row["root"] is None else row["root"]
    return Expected(row["op"], -1 if message is None else message, other)


def torn_rows(ops: pa.Table) -> Codes:
    """Return the rows of truncated lines."""
    return np.flatnonzero(np.asarray(pc.equal(ops["state"], "torn")))

"""Reads the last calls of the ranks of a running job from the files that the ranks write. Standard library only.

The module locks, maps and changes no file, and reads the files from their end. A rank writes its records into a memory
mapping of the file. On the same host, readers see these records at once. On another host, readers see the records when
the file system has transferred them.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from commprof.errors import TraceError
from commprof.sampling.calls import WINDOW, Call, GroupFacts, RankCalls, What
from commprof.schema import COMMIT, LAYERS, RECORD, RECORD_FIELDS, STATUSES, Status, after_end, parse_ranks
from commprof.trace.content import open_content
from commprof.trace.rank_files.events import Events, read_events
from commprof.trace.rank_files.issue_order import issued_number, raised_numbers
from commprof.trace.rank_files.layout import (
    EVENTS_SUFFIX,
    HEADER,
    RECORDS_SUFFIX,
    RankFile,
    parse_header,
    parse_totals,
    rank_files,
)

T = TypeVar("T")

_FIELDS: Final = {field.name: number for number, field in enumerate(RECORD_FIELDS)}
_TEXT: Final[frozenset[type]] = frozenset({str, type(None)})
_WHAT_TYPES: Final[Mapping[str, frozenset[type]]] = {
    **dict.fromkeys(("op", "pg"), frozenset({str})),
    **dict.fromkeys(("dtype", "reduce_op", "device", "backend", "input_splits", "output_splits"), _TEXT),
    **dict.fromkeys(("is_p2p", "is_async"), frozenset({bool})),
    **dict.fromkeys(("payload_bytes", "peer"), frozenset({int})),
    **dict.fromkeys(("input_bytes", "output_bytes"), frozenset({int, type(None)})),
}
_RANKS: Final = re.compile(r"\d{1,6}(-\d{1,6}|(,\d{1,6})*)", re.ASCII)  # the format of schema.format_ranks
_RAISED: Final = STATUSES.index(Status.RAISED)
_HEAD_BYTES: Final = 1 << 16
_CHUNK_BYTES: Final = 1 << 20
_WATCHED_RECORDS: Final = 4096
_MOST_RANKS: Final = 1_000_000  # a larger world size can only come from a damaged file


class Tail(NamedTuple):
    """The end of a records file."""

    total: int  # records in the file
    data: bytes  # the last records
    totals: dict[str, Any] | None  # None unless the recording was closed


def latest_files(run: Path) -> list[tuple[RankFile, Path]]:
    """Return the files of the latest process of each rank in ``run``, in order of rank.

    Each result is the identity of the process and the path of its files without suffix.

    Raises:
        TraceError: the directory cannot be read.
    """
    try:
        files = rank_files(run)
    except OSError as error:
        raise TraceError(f"{run} cannot be read: {error.strerror}") from None
    return latest(files)


def latest(files: Iterable[tuple[RankFile, Path]]) -> list[tuple[RankFile, Path]]:
    """Return the files of the last attempt among ``files``, in order of rank, with one process for each rank.

    If a rank has several processes in this attempt, the result has the files that were written last. A rank without
    files in the last attempt is left out.
    """
    by_rank: dict[int, tuple[tuple[int, int, int], RankFile, Path]] = {}
    for identity, stem in files:
        age = (identity.attempt, _modified(stem), identity.part)
        if identity.rank not in by_rank or age > by_rank[identity.rank][0]:
            by_rank[identity.rank] = (age, identity, stem)
    last_attempt = max((age[0] for age, _, _ in by_rank.values()), default=0)
    return [
        (identity, stem) for _, (age, identity, stem) in sorted(by_rank.items()) if age[0] == last_attempt
    ]


def _modified(stem: Path) -> int:
    try:
        return stem.with_name(stem.name + EVENTS_SUFFIX).stat().st_mtime_ns
    except OSError:
        return 0


def read_live(identity: RankFile, stem: Path) -> RankCalls:
    """Return the last calls of the rank whose files have the path ``stem`` without suffix.

    Raises:
        TraceError: the files cannot be read. SchemaError: another version of commprof wrote them.
    """
    events = read_events(stem.with_name(stem.name + EVENTS_SUFFIX))
    tail = read_tail(stem.with_name(stem.name + RECORDS_SUFFIX))
    begin = events.last("begin") or {}
    world_size = _of_type(begin.get("world_size"), int)
    return RankCalls(
        rank=identity.rank,
        attempt=identity.attempt,
        pid=identity.pid,
        host=_of_type(begin.get("host"), str),
        start_ticks=_of_type(begin.get("start_ticks"), int),
        world_size=world_size if world_size is not None and 0 < world_size <= _MOST_RANKS else None,
        calls=_calls(tail.data, events),
        total=tail.total,
        ended=tail.totals is not None,
        groups=_groups(events.rows["group"]),
        last_clock=_clock(events.last("clock")),
        stacks=events.last("stacks"),
    )


def _of_type(value: Any, kind: type[T]) -> T | None:
    """Return ``value``, or None if its type is not ``kind``, which happens in a damaged file."""
    return value if type(value) is kind else None


def _clock(row: Mapping[str, Any] | None) -> tuple[int, int] | None:
    row = row or {}
    monotonic_ns, realtime_ns = _of_type(row.get("monotonic_ns"), int), _of_type(row.get("realtime_ns"), int)
    return None if monotonic_ns is None or realtime_ns is None else (monotonic_ns, realtime_ns)


def read_tail(path: Path, most: int = WINDOW) -> Tail:
    """Return the last ``most`` records of ``path``; no records if the file does not exist or is still empty.

    Raises:
        TraceError: the file cannot be read. SchemaError: another version of commprof wrote the file.
    """
    try:
        stream = open_content(path)
    except FileNotFoundError:
        return Tail(0, b"", None)
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror}") from None
    try:
        descriptor = stream.fileno()
        head = os.pread(descriptor, _HEAD_BYTES, 0)
        if len(head) < HEADER.size:
            return Tail(0, b"", None)
        header = parse_header(head, path)
        total = _used(descriptor, header.header_bytes)
        begin = max(0, total - most)
        data = os.pread(descriptor, (total - begin) * RECORD.size, header.header_bytes + begin * RECORD.size)
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror}") from None
    finally:
        stream.close()
    return Tail(
        total, data[: len(data) // RECORD.size * RECORD.size], parse_totals(head, header.header_bytes)
    )


def _used(descriptor: int, begin: int) -> int:
    """Return the number of records in the file, including a truncated last record.

    The reserved space after the records contains zeros, which are not counted.
    """
    end = os.fstat(descriptor).st_size
    while end > begin:
        low = max(begin, end - _CHUNK_BYTES)
        used = len(os.pread(descriptor, end - low, low).rstrip(b"\0"))
        if used:
            return -(-(low + used - begin) // RECORD.size)
        end = low
    return 0


def fingerprint(stem: Path) -> tuple[int, int]:
    """Return the number of records and a checksum, which show whether the rank with the files ``stem`` makes progress.

    The fingerprint changes when the rank issues a call. It also changes when one of the last 4096 calls completes.

    Raises:
        TraceError: the file cannot be read.
    """
    tail = read_tail(stem.with_name(stem.name + RECORDS_SUFFIX), _WATCHED_RECORDS)
    return tail.total, zlib.crc32(tail.data)


def _calls(data: bytes, events: Events) -> list[Call]:
    signatures = {number: _what(row) for number, row in events.interned("signature").items()}
    sites = _texts(events, "site", "call_site")
    purposes, modules = _texts(events, "tag", "purpose"), _texts(events, "tag", "module")
    threads = _texts(events, "thread", "name")
    idents = {number: _of_type(row.get("ident"), int) for number, row in events.interned("thread").items()}
    raised = raised_numbers(
        (
            (row["signature"], row["pg_seq"])
            for row in events.rows["raised"]
            if type(row.get("signature")) is int and type(row.get("pg_seq")) is int
        ),
        {number: (what.pg, what.is_p2p) for number, what in signatures.items() if what is not None},
    )
    at = _FIELDS
    calls = []
    for record in RECORD.iter_unpack(data):
        what = signatures.get(record[at["signature"]])
        if record[at["commit"]] != COMMIT or what is None or record[at["layer"]] >= len(LAYERS):
            continue
        is_raised = record[at["status"]] == _RAISED
        raised_here = raised.get((what.pg, what.is_p2p), ())
        calls.append(
            Call(
                what=what,
                pg_seq=issued_number(record[at["pg_seq"]], raised_here, is_raised),
                site=sites.get(record[at["call_site"]]),
                purpose=purposes.get(record[at["tag"]]),
                step=step if (step := record[at["step"]]) >= -1 else after_end(step),
                thread=threads.get(record[at["thread"]]),
                layer=LAYERS[record[at["layer"]]],
                raised=is_raised,
                issue_ns=record[at["issue_ns"]],
                return_ns=record[at["return_ns"]],
                wait_begin_ns=record[at["wait_begin_ns"]],
                wait_end_ns=record[at["wait_end_ns"]],
                device_end_ns=record[at["device_end_ns"]],
                thread_ident=idents.get(record[at["thread"]]),
                module=modules.get(record[at["tag"]]),
            )
        )
    return calls


def _texts(events: Events, kind: str, column: str) -> dict[int, str | None]:
    return {number: _of_type(row.get(column), str) for number, row in events.interned(kind).items()}


def _what(row: Mapping[str, Any]) -> What | None:
    """Return the signature in ``row``, or None if the row is damaged."""
    defaults = What._field_defaults  # for values that an older version did not write
    values: dict[str, Any] = {name: row.get(name, defaults.get(name)) for name in What._fields}
    if any(type(values[name]) not in kinds for name, kinds in _WHAT_TYPES.items()):
        return None
    return What(**values)


def _groups(rows: Iterable[Mapping[str, Any]]) -> dict[str, GroupFacts]:
    facts_by_group = {}
    for row in rows:
        pg, desc, ranks = (_of_type(row.get(name), str) for name in ("pg", "group_desc", "group_ranks"))
        if pg is None or ranks is None:
            continue
        try:
            members = parse_ranks(ranks) if _RANKS.fullmatch(ranks) else ()
        except ValueError:
            continue
        if members:
            facts_by_group[pg] = GroupFacts(pg, desc, members)
    return facts_by_group

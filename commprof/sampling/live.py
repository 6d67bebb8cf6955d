"""What the ranks of a run have issued, read from the files that they are writing to. Standard library only.

Nothing is locked, mapped or changed: the files are read as they stand, from their end. What a rank packed into its mapping
is there at once for readers on its host; on another host, when its file system brings it.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from commprof.errors import TraceError
from commprof.sampling.calls import WINDOW, Call, GroupFacts, RankCalls, What
from commprof.schema import COMMIT, LAYERS, RECORD, RECORD_FIELDS, STATUSES, Status, parse_ranks
from commprof.trace.events import Events, read_events
from commprof.trace.layout import (
    EVENTS_SUFFIX,
    HEADER,
    RECORDS_SUFFIX,
    RankFile,
    parse_header,
    parse_totals,
    rank_files,
)

_FIELDS: Final = {field.name: number for number, field in enumerate(RECORD_FIELDS)}
_RAISED: Final = STATUSES.index(Status.RAISED)
_HEAD_BYTES: Final = 1 << 16
_CHUNK_BYTES: Final = 1 << 20
_WATCHED_RECORDS: Final = 4096


class Tail(NamedTuple):
    """The end of a records file."""

    total: int  # records in the file
    data: bytes  # the last of them
    totals: dict[str, Any] | None  # written when the recording was closed


def latest_files(run: Path) -> list[tuple[RankFile, Path]]:
    """The files of each rank's latest process in ``run``, as identity and path without suffix, by rank.

    Raises:
        TraceError: the directory cannot be read.
    """
    try:
        found = rank_files(run)
    except OSError as error:
        raise TraceError(f"{run} cannot be read: {error.strerror}") from None
    return latest(found)


def latest(found: Iterable[tuple[RankFile, Path]]) -> list[tuple[RankFile, Path]]:
    """Of each rank the file of its last attempt, and of several in that one the file that was written to last."""
    by_rank: dict[int, tuple[tuple[int, int, int], RankFile, Path]] = {}
    for identity, stem in found:
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
    """What the rank with the files ``stem`` has issued last.

    Raises:
        TraceError: the files cannot be read. SchemaError: another version wrote them.
    """
    events = read_events(stem.with_name(stem.name + EVENTS_SUFFIX))
    tail = read_tail(stem.with_name(stem.name + RECORDS_SUFFIX))
    begin = events.last("begin") or {}
    clock = events.last("clock") or {}
    return RankCalls(
        rank=identity.rank,
        attempt=identity.attempt,
        pid=identity.pid,
        host=begin.get("host"),
        start_ticks=begin.get("start_ticks"),
        world_size=begin.get("world_size"),
        calls=_calls(tail.data, events),
        total=tail.total,
        ended=tail.totals is not None,
        groups=_groups(events.rows["group"]),
        last_clock=(clock["monotonic_ns"], clock["realtime_ns"]) if "monotonic_ns" in clock else None,
        stacks=events.last("stacks"),
    )


def read_tail(path: Path, most: int = WINDOW) -> Tail:
    """The last ``most`` records of ``path``; none when there is no such file, or no record yet.

    Raises:
        TraceError: it cannot be read. SchemaError: another version wrote it.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return Tail(0, b"", None)
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror}") from None
    try:
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
        os.close(descriptor)
    return Tail(
        total, data[: len(data) // RECORD.size * RECORD.size], parse_totals(head, header.header_bytes)
    )


def _used(descriptor: int, begin: int) -> int:
    """Records in the file, a torn last one included: what lies behind them is zeros, reserved for those to come."""
    end = os.fstat(descriptor).st_size
    while end > begin:
        low = max(begin, end - _CHUNK_BYTES)
        kept = len(os.pread(descriptor, end - low, low).rstrip(b"\0"))
        if kept:
            return -(-(low + kept - begin) // RECORD.size)
        end = low
    return 0


def fingerprint(stem: Path) -> tuple[int, int]:
    """What changes when the rank with the files ``stem`` issues or completes something: count and checksum.

    Of completions only those among the last records are seen.

    Raises:
        TraceError: the file cannot be read.
    """
    tail = read_tail(stem.with_name(stem.name + RECORDS_SUFFIX), _WATCHED_RECORDS)
    return tail.total, zlib.crc32(tail.data)


def _calls(data: bytes, events: Events) -> list[Call]:
    signatures = {number: _what(row) for number, row in events.interned("signature").items()}
    sites = {number: row.get("call_site") for number, row in events.interned("site").items()}
    purposes = {number: row.get("purpose") for number, row in events.interned("tag").items()}
    threads = {number: row.get("name") for number, row in events.interned("thread").items()}
    at = _FIELDS
    calls = []
    for record in RECORD.iter_unpack(data):
        what = signatures.get(record[at["signature"]])
        if record[at["commit"]] != COMMIT or what is None or record[at["layer"]] >= len(LAYERS):
            continue
        calls.append(
            Call(
                what=what,
                pg_seq=record[at["pg_seq"]],
                site=sites.get(record[at["call_site"]]),
                purpose=purposes.get(record[at["tag"]]),
                step=record[at["step"]],
                thread=threads.get(record[at["thread"]]),
                layer=LAYERS[record[at["layer"]]],
                raised=record[at["status"]] == _RAISED,
                issue_ns=record[at["issue_ns"]],
                return_ns=record[at["return_ns"]],
                wait_begin_ns=record[at["wait_begin_ns"]],
                wait_end_ns=record[at["wait_end_ns"]],
                device_end_ns=record[at["device_end_ns"]],
            )
        )
    return calls


def _what(row: Mapping[str, Any]) -> What | None:
    try:
        return What(
            op=row["op"],
            pg=row["pg"],
            is_p2p=row["is_p2p"],
            payload_bytes=row["payload_bytes"],
            dtype=row["dtype"],
            reduce_op=row["reduce_op"],
            peer=row["peer"],
            device=row["device"],
            is_async=row["is_async"],
        )
    except KeyError:
        return None


def _groups(rows: Iterable[Mapping[str, Any]]) -> dict[str, GroupFacts]:
    found = {}
    for row in rows:
        try:
            facts = GroupFacts(row["pg"], row.get("group_desc"), parse_ranks(row["group_ranks"]))
        except (KeyError, ValueError, AttributeError):
            continue
        found[facts.pg] = facts
    return found

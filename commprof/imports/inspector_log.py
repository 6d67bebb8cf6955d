"""Parser for one log of NCCL's Inspector plugin: operations with their context, and the counts of dropped ones.

The parser covers format versions 4.0 to 4.4 and follows the source of the plugin. 4.0: every operation has its own
header and metadata. 4.1 puts a record ``dump_stats`` before the operations of each dump, with the numbers of operations
that follow and that were dropped. 4.2 adds algorithm and protocol. From 4.3 on, in the logs with ``proxy_records``, and
4.4, only ``dump_stats`` has header and metadata, which apply to the operations that follow.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

OPERATIONS: Final = ("coll_perf", "p2p_perf")
_STATS: Final = "dump_stats"
_PROXY: Final = "proxy_trace"
_BODIES: Final = (*OPERATIONS, _STATS, _PROXY)
# What a dump says of itself: the records that follow it, by the name of their body.
_PROMISES: Final = {"coll_perf": "coll_records", "p2p_perf": "p2p_records"}


class Origin(NamedTuple):
    """One rank of one communicator in one process."""

    host: str
    pid: Any
    comm: str
    comm_rank: Any


class Dropped(NamedTuple):
    """Operations that were overwritten before the plugin wrote them."""

    collectives: int
    messages: int


@dataclass(slots=True)
class InspectorLog:
    """The content of one log file.

    Attributes:
        entries: the operations, each with ``header`` and ``metadata``.
        dropped: by communicator and process; empty for version 4.0, which does not count.
        versions: of the format, as written.
        absent: operations that a dump announces and the file does not have.
        orphans: operations whose header and metadata the file does not have.
        damaged: places that are no whole record.
    """

    entries: list[Mapping[str, Any]] = field(default_factory=list)
    dropped: dict[Origin, Dropped] = field(default_factory=dict)
    versions: set[str] = field(default_factory=set)
    absent: int = 0
    orphans: int = 0
    damaged: int = 0


def parse_log(text: str) -> InspectorLog | None:
    """The content of ``text``; None if it has no record of the Inspector."""
    if not any(f'"{body}"' in text for body in _BODIES):
        return None
    log, context = InspectorLog(), _Context()
    for record in _records(text):
        body = next((name for name in _BODIES if isinstance(record, dict) and name in record), None)
        if body is None:
            log.damaged += 1
            context.forget()
        elif body == _STATS:
            log.absent += context.end()
            _begin(log, context, record)
        else:
            _add(log, context, record, body)
    log.absent += context.end()
    return log if log.versions or log.orphans else None


@dataclass(slots=True)
class _Context:
    """The dump to which records without a header belong, and how many of its records are still expected."""

    header: Mapping[str, Any] | None = None
    metadata: Mapping[str, Any] | None = None
    due: Counter[str] = field(default_factory=Counter)

    def forget(self) -> None:
        """Forget the owner of the records that follow: an unreadable record may have begun the next dump."""
        self.header = self.metadata = None

    def end(self) -> int:
        """End the dump; the number of its records that are missing."""
        absent = sum(self.due.values())
        self.forget()
        self.due = Counter()
        return absent


def _begin(log: InspectorLog, context: _Context, record: Mapping[str, Any]) -> None:
    """Add the first record of a dump."""
    header, metadata, stats = record.get("header"), record.get("metadata"), record[_STATS]
    if not (isinstance(header, dict) and isinstance(metadata, dict) and isinstance(stats, dict)):
        log.damaged += 1
        context.forget()
        return
    context.header, context.metadata = header, metadata
    context.due = Counter({body: whole_number(stats.get(name)) for body, name in _PROMISES.items()})
    log.versions.add(_version(metadata))
    origin = origin_of(header, metadata)
    so_far = log.dropped.get(origin, Dropped(0, 0))
    totals = (whole_number(stats.get(f"{kind}_dropped_total")) for kind in ("coll", "p2p"))
    log.dropped[origin] = Dropped(*map(max, so_far, totals))


def _add(log: InspectorLog, context: _Context, record: Mapping[str, Any], body: str) -> None:
    """Add an operation; proxy traces are not read."""
    header, metadata = record.get("header"), record.get("metadata")
    if body == _PROXY:
        if isinstance(metadata, dict):
            log.versions.add(_version(metadata))
        return
    expected = context.due[body] > 0
    context.due[body] -= expected
    if header is None and metadata is None and expected:
        header, metadata = context.header, context.metadata
    if not (isinstance(header, dict) and isinstance(metadata, dict)):
        log.orphans += 1
        return
    log.versions.add(_version(metadata))
    log.entries.append({**record, "header": header, "metadata": metadata})


def origin_of(header: Mapping[str, Any], metadata: Mapping[str, Any]) -> Origin:
    """The process and communicator of a record."""
    return Origin(
        str(metadata.get("hostname") or ""), metadata.get("pid"), str(header.get("id")), header.get("rank")
    )


def whole_number(value: Any) -> int:
    """``value`` as a count; 0 if it is not a positive integer."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def _version(metadata: Mapping[str, Any]) -> str:
    return str(metadata.get("inspector_output_format_version") or "")


def _records(text: str) -> Iterator[Any]:
    """The JSON objects in ``text``, in order; None for a damaged one."""
    decoder = json.JSONDecoder()
    place = 0
    while (place := text.find("{", place)) >= 0:
        try:
            value, place = decoder.raw_decode(text, place)
        except (ValueError, RecursionError):
            value = None
            end = text.find("\n", place)
            place = len(text) if end < 0 else end + 1
        yield value

"""Parses one log of NCCL's Inspector plugin: the operations with their context, and the counts of dropped operations.

The parser covers format versions 4.0 to 4.4 and follows the source of the plugin. In 4.0 every operation has its own
header and metadata. 4.1 adds a record ``dump_stats`` before the operations of each dump. This record has the numbers
of operations that follow and of operations that were dropped. 4.2 adds algorithm and protocol. In logs of 4.3 with
``proxy_records``, and in 4.4, only ``dump_stats`` has header and metadata. They apply to the operations that follow.
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
# For each body of a record, the key of ``dump_stats`` with the number of such records in the dump.
_PROMISES: Final = {"coll_perf": "coll_records", "p2p_perf": "p2p_records"}


class Origin(NamedTuple):
    """The origin of a record: one rank of one communicator in one process."""

    host: str
    pid: Any
    comm: str
    comm_rank: Any


class Dropped(NamedTuple):
    """The numbers of operations that were overwritten before the plugin wrote them."""

    collectives: int
    messages: int


@dataclass(slots=True)
class InspectorLog:
    """The content of one log file.

    Attributes:
        entries: The operations, each with ``header`` and ``metadata``.
        dropped: The numbers of dropped operations by origin. Empty for version 4.0, which does not count them.
        versions: The versions of the format, as written in the log.
        absent: The number of operations that a dump announces and that the file does not contain.
        orphans: The number of operations whose header and metadata are not in the file.
        damaged: The number of incomplete or damaged records.
    """

    entries: list[Mapping[str, Any]] = field(default_factory=list)
    dropped: dict[Origin, Dropped] = field(default_factory=dict)
    versions: set[str] = field(default_factory=set)
    absent: int = 0
    orphans: int = 0
    damaged: int = 0


def parse_log(text: str) -> InspectorLog | None:
    """Return the content of ``text``; None if ``text`` has no record of the Inspector."""
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
    """The current dump, which records without a header belong to, and the numbers of records that it still expects."""

    header: Mapping[str, Any] | None = None
    metadata: Mapping[str, Any] | None = None
    due: Counter[str] = field(default_factory=Counter)

    def forget(self) -> None:
        """Forget the header and metadata, because an unreadable record may have been the start of the next dump."""
        self.header = self.metadata = None

    def end(self) -> int:
        """End the dump, and return the number of its missing records."""
        absent = sum(self.due.values())
        self.forget()
        self.due = Counter()
        return absent


def _begin(log: InspectorLog, context: _Context, record: Mapping[str, Any]) -> None:
    """Add the first record of a dump, ``dump_stats``."""
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
    """Add an operation. Of a proxy trace, only the version is read."""
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
    """Return the process and communicator of a record."""
    return Origin(
        str(metadata.get("hostname") or ""), metadata.get("pid"), str(header.get("id")), header.get("rank")
    )


def whole_number(value: Any) -> int:
    """Return ``value`` if it is a positive integer, 0 otherwise."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def _version(metadata: Mapping[str, Any]) -> str:
    return str(metadata.get("inspector_output_format_version") or "")


def _records(text: str) -> Iterator[Any]:
    """Yield the JSON objects in ``text`` in order, and None for a damaged object."""
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

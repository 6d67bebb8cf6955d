"""Checks that the counter readings of each host cover its processes from before their start to their end."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from commprof.trace.manifest import KILLED, RUNNING

_TIMES: Final = ("issue_ns", "return_ns", "wait_end_ns")
_IDENTITY: Final = ("rank", "attempt", "pid")


class _Run(Protocol):
    """The members of a run that this module uses. ``commprof.trace.reader.Run`` implements them."""

    @property
    def manifest(self) -> Any: ...

    @property
    def health(self) -> Any: ...

    def table(self, name: str) -> pa.Table: ...

    def parts(self, name: str, columns: Sequence[str] | None = None) -> Iterator[pa.Table]: ...


class _Span(NamedTuple):
    """The first and last known time of a process, on the monotonic clock of its host."""

    rank: int
    begin_ns: int
    end_ns: int
    ended: bool  # whether the process is known to have issued nothing after ``end_ns``


def uncovered(run: _Run) -> dict[str, str]:
    """Return, by host, a clause that states which part of the run the interface readings do not cover.

    Hosts whose readings cover the whole run are left out, and so are hosts whose processes recorded no clock. The
    result is empty if no host has readings.
    """
    readings = _readings(run.table("wire"))
    if not readings:
        return {}
    clauses = {}
    for host, spans in sorted(_spans(run).items()):
        clause = _left_out(readings.get(host, ()), spans, run.health.state)
        if clause is not None:
            clauses[host] = clause
    return clauses


def _left_out(times: Sequence[int], spans: Sequence[_Span], state: str) -> str | None:
    if len(times) < 2:
        return "its counters were read only once" if times else "its counters were not read"
    first = min(spans, key=lambda span: span.begin_ns)
    if times[0] > first.begin_ns:
        return f"its first reading was taken {_seconds(times[0] - first.begin_ns)} after rank {first.rank} had begun"
    if state == RUNNING:
        return None
    last = max(spans, key=lambda span: span.end_ns)
    if times[-1] < last.end_ns:
        what = "had ended" if last.ended else "had issued its last collective"
        return (
            f"its last reading was taken {_seconds(last.end_ns - times[-1])} before rank {last.rank} {what}"
        )
    unended = [span for span in spans if not span.ended]
    if state == KILLED and unended:
        last = max(unended, key=lambda span: span.end_ns)
        after = _seconds(times[-1] - last.end_ns)
        return (
            f"rank {last.rank} was killed or exited without closing its recording, and the last reading was taken "
            f"{after} after its last record: bytes that moved after this reading are not counted"
        )
    return None


def _readings(wire: pa.Table) -> dict[str, list[int]]:
    """Return the times of the interface readings in ns, in ascending order, by host."""
    rows = wire.filter(pc.equal(wire["kind"], "interface")).group_by(["host", "time_ns"]).aggregate([])
    readings: dict[str, list[int]] = defaultdict(list)
    for row in rows.sort_by("time_ns").to_pylist():
        readings[row["host"]].append(row["time_ns"])
    return readings


def _spans(run: _Run) -> dict[str, list[_Span]]:
    """Return the spans of the processes by host.

    A process of an attempt before the last one counts as ended at the last time that it recorded.
    """
    entries = {tuple(entry[name] for name in _IDENTITY): entry for entry in run.manifest.ranks}
    latest = max((entry["attempt"] for entry in entries.values()), default=0)
    clocks = run.table("clocks").group_by([*_IDENTITY, "host"])
    rows = clocks.aggregate([("monotonic_ns", "min"), ("monotonic_ns", "max")]).to_pylist()
    keys = {tuple(row[name] for name in _IDENTITY) for row in rows}
    unended = {key for key in keys if not entries.get(key, {}).get("ended")}
    records = _last_records(run) if unended else {}
    spans: dict[str, list[_Span]] = defaultdict(list)
    for row in rows:
        key = tuple(row[name] for name in _IDENTITY)
        end = max(row["monotonic_ns_max"], records.get(key, 0) if key in unended else 0)
        ended = key not in unended or row["attempt"] < latest
        spans[row["host"]].append(_Span(row["rank"], row["monotonic_ns_min"], end, ended))
    return spans


def _last_records(run: _Run) -> Mapping[Any, int]:
    """Return the last time in the records of each process, in ns, by rank, attempt and pid."""
    last: dict[Any, int] = {}
    for part in run.parts("collectives", (*_IDENTITY, *_TIMES)):
        sums = part.group_by(list(_IDENTITY)).aggregate([(name, "max") for name in _TIMES])
        for row in sums.to_pylist():
            key = tuple(row[name] for name in _IDENTITY)
            last[key] = max(last.get(key, 0), *(row[f"{name}_max"] or 0 for name in _TIMES))
    return last


def _seconds(nanoseconds: int) -> str:
    return f"{nanoseconds / 1e9:.3g} s"

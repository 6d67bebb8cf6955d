"""A rank's two binary files as the tables of the schema."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa

from commprof.errors import TraceError
from commprof.schema import (
    COLLECTIVES,
    COMMIT,
    LAYERS,
    PHASES,
    RECORD,
    RECORD_FIELDS,
    STATUSES,
    Source,
    Status,
)
from commprof.trace.events import Events, read_events
from commprof.trace.layout import (
    EVENTS_SUFFIX,
    RECORDS_SUFFIX,
    RankFile,
    parse_header,
    parse_stem,
    parse_totals,
)
from commprof.trace.steps import StepTable, build_steps
from commprof.trace.tables import arrow_schema, conform, table_from_rows

_NUMPY_CODES: Final = {"q": "<i8", "I": "<u4", "i": "<i4", "B": "u1"}
RECORD_DTYPE: Final = np.dtype([(item.name, _NUMPY_CODES[item.code]) for item in RECORD_FIELDS])
assert RECORD_DTYPE.itemsize == RECORD.size

_NOT_P2P_ASYNC: Final = frozenset({"send", "recv", "send_object_list", "recv_object_list"})
_TIMES: Final = (
    "return_ns",
    "wait_begin_ns",
    "wait_end_ns",
    "device_begin_ns",
    "device_end_ns",
    "exposed_ns",
)


class RankTrace(NamedTuple):
    """What one rank recorded: its tables by name, and the entry of the manifest that sums it up."""

    identity: RankFile
    tables: dict[str, pa.Table]
    entry: dict[str, Any]
    begin: dict[str, Any]
    config: dict[str, Any] | None


def read_rank(stem: Path) -> RankTrace:
    """Decode ``<stem>.records`` and ``<stem>.events``.

    Raises:
        TraceError: the name is no rank file's, or the records file is damaged beyond its tail.
        SchemaError: another version wrote it.
    """
    identity = parse_stem(stem.name)
    if identity is None:
        raise TraceError(f"{stem.name} is not the name of a rank's file (rank-00000-0-<pid>)")
    events = read_events(stem.with_name(stem.name + EVENTS_SUFFIX))
    first_seq, totals, raw = _read_records(stem.with_name(stem.name + RECORDS_SUFFIX))
    return decode(identity, first_seq, raw, events, totals)


def _read_records(path: Path) -> tuple[int, dict[str, Any] | None, np.ndarray[Any, Any]]:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return 0, None, np.empty(0, RECORD_DTYPE)
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror}") from None
    header = parse_header(data, path)
    count = max(0, len(data) - header.header_bytes) // RECORD.size
    raw = np.frombuffer(data, RECORD_DTYPE, count, min(header.header_bytes, len(data)))
    return header.first_seq, parse_totals(data, header.header_bytes), raw


def decode(
    identity: RankFile,
    first_seq: int,
    raw: np.ndarray[Any, Any],
    events: Events,
    totals: Mapping[str, Any] | None,
) -> RankTrace:
    """The tables of one rank from its raw records, its events, and its totals (None when it did not end in order)."""
    signatures = _valid_signatures(events)
    whole = raw["commit"] == COMMIT
    whole &= raw["phase"] < len(PHASES)
    whole &= raw["layer"] < len(LAYERS)
    whole &= raw["status"] < len(STATUSES)
    whole &= np.isin(raw["signature"], np.fromiter(signatures, np.uint32, len(signatures)))
    used = _used(raw, whole)
    slots = np.flatnonzero(whole)
    records = _with_waits(raw[slots])
    step_table = build_steps(identity, events)
    groups = _groups(identity, events)
    collectives = _collectives(identity, first_seq + slots, records, signatures, groups, events, step_table)
    same = {"rank": identity.rank, "attempt": identity.attempt, "pid": identity.pid}
    tables = {
        "collectives": collectives,
        "groups": _side_table("groups", groups.values(), same),
        "steps": _side_table("steps", step_table.rows, same),
        "metrics": _side_table("metrics", [_metric(row, step_table) for row in events.rows["metrics"]], same),
        "parameters": _side_table("parameters", events.rows["parameters"], {}),
        "buckets": _side_table("buckets", events.rows["buckets"], same),
        "flight": _side_table("flight", events.rows["flight"], same),
        "clocks": _side_table(
            "clocks", events.rows["clock"], {**same, "host": (events.last("begin") or {}).get("host", "")}
        ),
    }
    entry = _entry(identity, events, totals, tables, records, used - len(records))
    return RankTrace(identity, tables, entry, events.last("begin") or {}, events.last("config"))


def _with_waits(records: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """A call that is not asynchronous waits as soon as it has returned; the recorder keeps only the end of that wait."""
    at_once = (records["wait_end_ns"] != 0) & (records["wait_begin_ns"] == 0)
    records["wait_begin_ns"][at_once] = records["return_ns"][at_once]
    return records


def _used(raw: np.ndarray[Any, Any], whole: np.ndarray[Any, Any]) -> int:
    """Slots up to the last one that holds anything: those among them that are not whole are torn."""
    words = raw.view(np.uint8).reshape(len(raw), RECORD.size) if len(raw) else np.empty((0, 1), np.uint8)
    last_whole = int(np.flatnonzero(whole)[-1]) + 1 if whole.any() else 0
    touched = np.flatnonzero(words[last_whole:].any(axis=1))
    return last_whole + (int(touched[-1]) + 1 if len(touched) else 0)


def _valid_signatures(events: Events) -> dict[int, dict[str, Any]]:
    wanted = [
        column.name
        for column in COLLECTIVES.columns
        if column.source is Source.SIGNATURE and column.name != "api"
    ]
    return {
        number: row
        for number, row in events.interned("signature").items()
        if 0 < number < 1 << 32 and all(name in row for name in wanted)
    }


def _groups(identity: RankFile, events: Events) -> dict[str, dict[str, Any]]:
    groups = {str(row.get("pg")): {**row, "unseen": 0} for row in events.rows["group"]}
    for row in events.rows["unseen"]:
        if row.get("pg") in groups and isinstance(row.get("unseen"), int):
            groups[row["pg"]]["unseen"] = row["unseen"]
    return groups


def _metric(row: Mapping[str, Any], steps: StepTable) -> dict[str, Any]:
    step = row.get("step")
    if isinstance(step, int):
        step = steps.void.get(step, step)
    try:
        value = float(row.get("value", "nan"))  # not-a-number and infinity come as text
    except (TypeError, ValueError):
        value = float("nan")
    return {**row, "step": step, "value": value}


def _side_table(name: str, rows: Iterable[Mapping[str, Any]], same: Mapping[str, Any]) -> pa.Table:
    """Rows as a table; a row that does not fit (a program may publish anything) is left out."""
    complete = [{**row, **same} for row in rows]
    try:
        return table_from_rows(name, complete)
    except TraceError:
        pass
    kept = []
    for row in complete:
        try:
            table_from_rows(name, [row])
        except TraceError:
            continue
        kept.append(row)
    return table_from_rows(name, kept)


class _Lookup:
    """Columns of interned rows, spread over the records by their numbers."""

    def __init__(self, rows: Mapping[int, Mapping[str, Any]], numbers: np.ndarray[Any, Any]) -> None:
        used, self._index = np.unique(numbers, return_inverse=True)
        self._rows: Sequence[Mapping[str, Any]] = [rows.get(int(number), {}) for number in used]

    def column(self, name: str, kind: Any) -> pa.Array:
        """Column ``name`` of every record; null where the row does not have it, or holds something else."""
        values = [row.get(name) for row in self._rows]
        try:
            distinct = pa.array(values, kind)
        except (pa.ArrowException, TypeError, ValueError, OverflowError):
            distinct = pa.array([_fit(value, kind) for value in values], kind)
        return distinct.take(pa.array(self._index))


def _fit(value: Any, kind: Any) -> Any:
    try:
        return pa.scalar(value, kind).as_py()
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        return None


def _collectives(
    identity: RankFile,
    seq: np.ndarray[Any, Any],
    records: np.ndarray[Any, Any],
    signatures: Mapping[int, Mapping[str, Any]],
    groups: Mapping[str, Mapping[str, Any]],
    events: Events,
    steps: StepTable,
) -> pa.Table:
    schema = arrow_schema("collectives")
    signature = _Lookup(signatures, records["signature"])
    tag = _Lookup(events.interned("tag"), records["tag"])
    site = _Lookup(events.interned("site"), records["call_site"])
    thread = _Lookup(events.interned("thread"), records["thread"])
    by_group = {number: groups.get(str(row["pg"]), {}) for number, row in signatures.items()}
    group = _Lookup(by_group, records["signature"])
    sources: dict[Source, Callable[[str, Any], pa.Array]] = {
        Source.SIGNATURE: signature.column,
        Source.TAG: tag.column,
        Source.GROUP: group.column,
    }
    columns: dict[str, pa.Array] = {}
    for column in COLLECTIVES.columns:
        if column.source in sources:
            columns[column.name] = sources[column.source](column.name, schema.field(column.name).type)
    n = len(records)
    for name in ("rank", "attempt", "pid"):
        columns[name] = pa.array(np.full(n, getattr(identity, name), np.int32))
    columns["seq"] = pa.array(seq.astype(np.int64))
    columns["step"] = pa.array(steps.relabel(records["step"]))
    for name in ("micro_step", "pg_seq", "issue_ns"):
        columns[name] = pa.array(records[name])
    columns["phase"] = _named(PHASES, records["phase"])
    columns["layer"] = _named(LAYERS, records["layer"])
    columns["status"] = _named(STATUSES, _status(records))
    columns["captured"] = pa.array(records["captured"] != 0)
    columns["coalesce_id"] = _nullable(records["coalesce_id"])
    columns["replays"] = _nullable(records["replays"])
    for name in _TIMES:
        columns[name] = _nullable(records[name])
    columns["exposed_ns"] = _exposed(records, columns["device"])
    columns["api"] = site.column("api", pa.string())
    columns["call_site"] = site.column("call_site", pa.string())
    columns["thread"] = thread.column("name", pa.string())
    columns["is_async"] = _is_async(columns["is_async"], columns["is_p2p"], columns["api"])
    _fill_group(columns)
    return conform("collectives", pa.table({name: columns[name] for name in schema.names}))


def _fill_group(columns: dict[str, pa.Array]) -> None:
    """A group whose line was lost: its ranks are not known, and no column of it may be null."""
    for name, value in (("group_ranks", ""), ("group_size", 0), ("group_rank", -1)):
        columns[name] = columns[name].fill_null(value)


def _named(names: Sequence[str], codes: np.ndarray[Any, Any]) -> pa.Array:
    return pa.array(list(names), pa.string()).take(pa.array(codes))


def _nullable(values: np.ndarray[Any, Any]) -> pa.Array:
    return pa.array(values, mask=values == 0)


def _status(records: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """A record is packed as incomplete; its return time is what completes it."""
    incomplete, ok = STATUSES.index(Status.INCOMPLETE), STATUSES.index(Status.OK)
    status = records["status"].copy()
    status[(status == incomplete) & (records["return_ns"] != 0)] = ok
    return status


def _exposed(records: np.ndarray[Any, Any], device: pa.Array) -> pa.Array:
    """As recorded; else, for tensors of the CPU, the time spent in wait. A host's wait says nothing about a device."""
    recorded = records["exposed_ns"]
    on_cpu = (
        np.array([value in (None, "cpu") for value in device.to_pylist()], bool)
        if len(records)
        else np.empty(0, bool)
    )
    waited = (records["wait_end_ns"] != 0) & on_cpu & (recorded == 0)
    values = np.where(waited, records["wait_end_ns"] - records["wait_begin_ns"], recorded)
    return pa.array(values, mask=~waited & (recorded == 0))


def _is_async(is_async: pa.Array, is_p2p: pa.Array, api: pa.Array) -> pa.Array:
    """send and recv wait by themselves, isend and irecv do not: the ProcessGroup method is the same."""
    values = [
        bool(a) and not (p and name in _NOT_P2P_ASYNC)
        for a, p, name in zip(is_async.to_pylist(), is_p2p.to_pylist(), api.to_pylist(), strict=True)
    ]
    return pa.array(values, pa.bool_())


def _entry(
    identity: RankFile,
    events: Events,
    totals: Mapping[str, Any] | None,
    tables: Mapping[str, pa.Table],
    records: np.ndarray[Any, Any],
    torn: int,
) -> dict[str, Any]:
    begin = events.last("begin") or {}
    counted = {name: _count(totals, name) for name in ("lost", "faults", "recorder_ns")}
    status = _status(records)
    return {
        "rank": identity.rank,
        "attempt": identity.attempt,
        "pid": identity.pid,
        "part": identity.part,
        "host": begin.get("host"),
        "world_size": begin.get("world_size"),
        "records": len(records),
        "lost": counted["lost"] or 0,
        "torn": torn,
        "torn_events": events.torn,
        "unseen": sum(tables["groups"].column("unseen").to_pylist()),
        "raised": int((status == STATUSES.index(Status.RAISED)).sum()),
        "incomplete": int((status == STATUSES.index(Status.INCOMPLETE)).sum()),
        "faults": counted["faults"] or 0,
        "recorder_ns": counted["recorder_ns"],
        "stopped_reason": (totals or {}).get("stopped_reason"),
        "ended": totals is not None,
        "notes": [str(row["text"]) for row in events.rows["note"] if "text" in row],
    }


def _count(totals: Mapping[str, Any] | None, name: str) -> int | None:
    value = (totals or {}).get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else None

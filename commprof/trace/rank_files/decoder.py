"""Decodes the two binary files of a rank into the tables of the schema."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa

from commprof.errors import TraceError
from commprof.schema import COLLECTIVES, OPS, Source
from commprof.trace.rank_files.aggregates import recorded_part, step_rows, sums_of
from commprof.trace.rank_files.columns import CollectiveColumns, encoded_schema
from commprof.trace.rank_files.engines import engines_of
from commprof.trace.rank_files.events import Events, read_events
from commprof.trace.rank_files.expert_load_rows import load_rows
from commprof.trace.rank_files.layout import EVENTS_SUFFIX, RECORDS_SUFFIX, RankFile, parse_stem
from commprof.trace.rank_files.outside_rows import fits, fitted, is_signature, whole_number, world_size
from commprof.trace.rank_files.records import Records, Tally, Window
from commprof.trace.rank_files.splits import SplitSignature
from commprof.trace.rank_files.steps import StepTable, build_steps
from commprof.trace.tables import conform

_IDENTITY: Final = ("rank", "attempt", "pid")
_COUNTED: Final = ("lost", "faults")
_OP: Final = re.compile(r"[a-z][a-z0-9_]{,40}")  # a plausible name of an operation of a later version


@dataclass(frozen=True, slots=True)
class RankTrace:
    """The decoded recording of one rank.

    Attributes:
        identity: The rank, attempt, pid and part of the files.
        tables: The tables of the rank by name, without ``collectives``, which may be large.
        entry: The entry of the manifest that summarizes the recording.
        begin: The ``begin`` line of the events file, which describes the process.
        config: The last ``config`` line, with the config that the program published.
        outside: The phase (evaluation or checkpoint) by the step that it followed.
        engines: The engines that the program published if there are several. See
            :mod:`commprof.trace.rank_files.engines`.
    """

    identity: RankFile
    tables: dict[str, pa.Table]
    entry: dict[str, Any]
    begin: dict[str, Any]
    config: dict[str, Any] | None
    engines: list[dict[str, Any]]
    outside: dict[int, str]
    _records: Records
    _columns: CollectiveColumns

    def parts(self) -> Iterator[pa.Table]:
        """Yield the rows of ``collectives`` in issue order, in parts, with dictionary-encoded texts.

        The method can be called repeatedly.

        Raises:
            TraceError: The file can no longer be read.
        """
        return self._columns.tables(self._records.parts())

    def collectives(self) -> pa.Table:
        """Return all rows of ``collectives``."""
        return conform("collectives", pa.concat_tables([encoded_schema().empty_table(), *self.parts()]))


def read_rank(stem: Path, elsewhere: Mapping[int, str] | None = None) -> RankTrace:
    """Decode ``<stem>.records`` and ``<stem>.events``.

    Args:
        stem: The path of the two files without their suffix.
        elsewhere: The phase (evaluation or checkpoint) of other ranks, by the step that it followed.

    Raises:
        TraceError: The name is not the name of a rank file, the files belong to a different rank, the records file is
            damaged before its tail, or one file is missing and the other one is not usable alone.
        SchemaError: An incompatible version wrote the files.
    """
    identity = parse_stem(stem.name)
    if identity is None:
        raise TraceError(f"{stem.name} is not the name of a rank's file (rank-00000-0-<pid>)")
    events, signatures, records = _opened(stem, identity)
    # The rank may have ended after its events were read. In this case both files are read again.
    if _lacks_end(events, records):
        events, signatures, records = _opened(stem, identity)
    tally = records.count()
    _check_pair(stem, events, signatures, records, tally)
    step_table = _step_table(events, elsewhere or {}, records)
    groups = _groups(events)
    known_groups = _known_groups(groups)
    columns = CollectiveColumns(
        identity,
        signatures,
        events.interned("tag"),
        events.interned("site"),
        events.interned("thread"),
        known_groups,
        step_table,
        records.raised,
    )
    tables, left_out = _side_tables(identity, events, groups, known_groups, step_table)
    left_out += len(events.interned("signature")) - len(signatures)
    entry = _entry(identity, events, records.totals, tables, tally, left_out)
    entry["cut"] = _cut(stem, events, records, tally)
    config = events.last("config")
    begin = events.last("begin") or {}
    return RankTrace(
        identity, tables, entry, begin, config, engines_of(events), step_table.outside, records, columns
    )


def _opened(stem: Path, identity: RankFile) -> tuple[Events, dict[int, Mapping[str, Any]], Records]:
    """Return the events of a rank, its valid signatures, and its records."""
    path = stem.with_name(stem.name + EVENTS_SUFFIX)
    events = read_events(path)
    _check_owner(path, identity, events)
    signatures = _signatures(events)
    numbers = np.fromiter(signatures, np.uint32, len(signatures))
    return (
        events,
        signatures,
        Records(stem.with_name(stem.name + RECORDS_SUFFIX), identity[:3], numbers),
    )


def _lacks_end(events: Events, records: Records) -> bool:
    """Return whether the records file is closed but the events file lacks its end line, which is written first."""
    totals = records.totals
    return totals is not None and not totals.get("stopped_reason") and events.last("end") is None


def _check_pair(
    stem: Path, events: Events, signatures: Mapping[int, Any], records: Records, tally: Tally
) -> None:
    """Raise an error if a file that the other file needs is missing, or if an operation is unknown to this version."""
    used = tally.records + tally.torn
    if used and events.last("begin") is None:
        raise TraceError(
            f"{stem.name}{EVENTS_SUFFIX} is missing or damaged, and says what the {used:,} records in "
            f"{stem.name}{RECORDS_SUFFIX} are: copy it again from where the run was recorded"
        )
    for number, row in events.interned("signature").items():
        op = None if number in signatures else row.get("op")
        if not isinstance(op, str) or op in OPS or not _OP.fullmatch(op):
            continue
        raise TraceError(
            f"{stem.name}{EVENTS_SUFFIX} names the operation {op!r}, which this version of commprof does not have; "
            "install the version that recorded it"
        )
    if events.last("end") is not None and not records.path.exists():
        raise TraceError(
            f"{stem.name}{RECORDS_SUFFIX} is missing, which the rank closed when it ended: copy it again from where the run "
            "was recorded"
        )


def _cut(stem: Path, events: Events, records: Records, tally: Tally) -> list[str]:
    """Return the names of the rank's files that lack a last part that the rank had written."""
    written_records = whole_number((records.totals or {}).get("records")) or 0
    are_cut = {
        RECORDS_SUFFIX: written_records > tally.records + tally.torn,
        EVENTS_SUFFIX: _lacks_end(events, records),
    }
    return [f"{stem.name}{suffix}" for suffix, is_cut in are_cut.items() if is_cut]


def _signatures(events: Events) -> dict[int, Mapping[str, Any]]:
    """Return the valid signatures of known groups, by number. A row that several signatures share is checked once."""
    judged: dict[int, bool] = {}
    valid_rows = {}
    groups = _known_groups(_groups(events))
    for number, row in events.interned("signature").items():
        if str(row.get("pg")) not in groups:  # Wire bytes cannot be modeled without the size of the group.
            continue
        shared = row.like if isinstance(row, SplitSignature) else row
        is_whole = judged.get(id(shared))
        if is_whole is None:
            is_whole = judged[id(shared)] = is_signature(shared)
        if is_whole:
            valid_rows[number] = row
    return valid_rows


def _step_table(events: Events, elsewhere: Mapping[int, str], records: Records) -> StepTable:
    """Return the steps of the rank. If the end of a collective is needed, the records are read once for all windows."""
    asked: list[Window] = []

    def ask(start: int, stop: int | None) -> int | None:
        asked.append((start, stop))
        return None

    table = build_steps(events, elsewhere, ask)
    if not asked:
        return table
    ends = records.last_ends(asked)
    return build_steps(events, elsewhere, lambda start, stop: ends.get((start, stop)))


def _check_owner(path: Path, identity: RankFile, events: Events) -> None:
    begin = events.last("begin") or {}
    stated_owner = begin.get("rank", identity.rank), begin.get("attempt", identity.attempt)
    if stated_owner != (identity.rank, identity.attempt):
        raise TraceError(
            f"{path} has the events of rank {stated_owner[0]} (attempt {stated_owner[1]}), but the name of another "
            "rank's file: restore the original file names"
        )


def _side_tables(
    identity: RankFile,
    events: Events,
    groups: Mapping[str, Mapping[str, Any]],
    known_groups: Mapping[str, Mapping[str, Any]],
    steps: StepTable,
) -> tuple[dict[str, pa.Table], int]:
    """Return all tables except ``collectives``, and the number of rows that did not fit the tables."""
    same = dict(zip(_IDENTITY, identity, strict=False))
    here = {**same, "host": str((events.last("begin") or {}).get("host") or "")}
    rows: dict[str, Iterable[Mapping[str, Any]]] = {
        "groups": ({**row, **same, "host": here["host"] or None} for row in groups.values()),
        "steps": ({**row, **same} for row in step_rows(events, steps)),
        "outside_steps": ({**row, **same} for row in steps.outside_rows),
        "metrics": ({**_metric(row, steps), **same} for row in events.rows["metrics"]),
        "parameters": events.rows["parameters"],
        "expert_layers": ({**row, **same} for row in events.rows["expert_layers"]),
        "wrappers": ({**row, **same} for row in events.rows["wrappers"]),
        "wrapper_passes": ({**row, **same} for row in events.rows["wrapper_passes"]),
        "buckets": ({**row, **same} for row in events.rows["buckets"]),
        "stalls": ({**row, **same} for row in events.rows["stalls"]),
        "flight": ({**row, **same} for row in events.rows["flight"]),
        "clocks": ({**row, **here} for row in events.rows["clock"]),
        "clock_offsets": ({**row, **here} for row in events.rows["clock_offset"]),
        "aggregates": ({**row, **same} for row in sums_of(events, known_groups, steps)),
    }
    fitted_tables = {name: fitted(name, rows_of_table) for name, rows_of_table in rows.items()}
    fitted_tables["expert_loads"] = load_rows(events, steps, same)
    tables = {name: fit.table for name, fit in fitted_tables.items()}
    return tables, sum(fit.left_out for fit in fitted_tables.values())


def _groups(events: Events) -> dict[str, dict[str, Any]]:
    groups = {str(row.get("pg")): {**row, "unseen": 0} for row in events.rows["group"]}
    for row in events.rows["unseen"]:
        name, unseen = str(row.get("pg")), whole_number(row.get("unseen"))
        if name in groups and unseen is not None:
            groups[name]["unseen"] = unseen
    return groups


def _known_groups(groups: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Return the groups whose lines are undamaged, so that their ranks and size are known."""
    columns = [
        column for column in COLLECTIVES.columns if column.source is Source.GROUP and column.since == 1
    ]
    return {
        name: row
        for name, row in groups.items()
        if row.get("group_ranks") and row.get("group_size") and all(fits(c, row.get(c.name)) for c in columns)
    }


def _metric(row: Mapping[str, Any], steps: StepTable) -> dict[str, Any]:
    step = row.get("step")
    if isinstance(step, int):
        step = steps.void.get(step, step)
    try:
        value = float(row.get("value", "nan"))  # NaN and infinity are stored as text.
    except (TypeError, ValueError, OverflowError):
        value = float("nan")
    return {**row, "step": step, "value": value}


def _entry(
    identity: RankFile,
    events: Events,
    totals: Mapping[str, Any] | None,
    tables: Mapping[str, pa.Table],
    tally: Tally,
    left_out: int,
) -> dict[str, Any]:
    begin = events.last("begin") or {}
    written_totals = totals or {}
    reason, host = written_totals.get("stopped_reason"), begin.get("host")
    return {
        **identity._asdict(),
        "host": host if isinstance(host, str) else None,
        "world_size": world_size(begin.get("world_size")),
        **tally._asdict(),
        **{name: whole_number(written_totals.get(name)) or 0 for name in _COUNTED},
        "torn_events": events.torn + left_out,
        "unseen": sum(tables["groups"].column("unseen").to_pylist()),
        "recorder_ns": whole_number(written_totals.get("recorder_ns")),
        "stopped_reason": None if reason is None else str(reason),
        "summed": sum(tables["aggregates"].column("calls").to_pylist()),
        **recorded_part(events),
        "ended": totals is not None,
        "notes": [str(row["text"]) for row in events.rows["note"] if "text" in row],
    }

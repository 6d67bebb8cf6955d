"""Details of one record: its bucket, its NCCL lines, and the records of the same collective on the other ranks."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from commprof.align.ranks.collectives import matchable, same_collective
from commprof.align.ranks.rank_arrivals import NEEDED
from commprof.analysis.browse.record_pages import SELECTED
from commprof.analysis.columns.answers import PARTNERS
from commprof.analysis.columns.frames import from_arrow
from commprof.analysis.relations.sql_engine import ask
from commprof.analysis.storage.index import Index
from commprof.analysis.storage.record_spans import KIND_COLUMNS
from commprof.analysis.stragglers.arrivals import aligned
from commprof.schema import TABLES
from commprof.trace.reader import Run

_FEWEST_SCANNED: Final = 20_000  # tables with more rows are queried in their files
MOST_PARTNERS: Final = 200_000  # maximum number of records that are searched for partners of a record


class Record(NamedTuple):
    """One record and its related rows.

    Attributes:
        row: The values of the record by column, as in :func:`commprof.analysis.api.records_page`.
        bucket: The row of the buckets table for the record, or None if the record has no bucket.
        lines: The rows of the matches table for the record. These are its NCCL lines.
        partners: The records of the same collective or message on every rank, in order of rank (answers.PARTNERS).
    """

    row: dict[str, Any]
    bucket: dict[str, Any] | None
    lines: pd.DataFrame
    partners: pd.DataFrame


def record(index: Index, rank: int, seq: int, attempt: int | None, pid: int | None) -> Record | None:
    """Return one record with its related rows (see :func:`commprof.analysis.api.record`)."""
    clause, values = "r.rank = ? and r.seq = ?", [rank, seq]
    for name, value in (("attempt", attempt), ("pid", pid)):
        if value is not None:
            clause += f" and r.{name} = ?"
            values.append(value)
    records = index.ask(
        f"select {SELECTED} from records r join kinds k using (kind) where {clause} "
        "order by r.attempt desc, r.begin_ns desc limit 1",
        values,
    )
    if not len(records):
        return None
    row = records.to_pylist()[0]
    own = {name: row[name] for name in ("rank", "attempt", "pid")}
    run = index.opened()
    bucket = None
    if row["bucket"] is not None:
        key = own | {name: row[name] for name in ("step", "micro_step", "bucket")}
        buckets = _where_equal(run, "buckets", key).to_pylist()
        bucket = buckets[0] if buckets else None
    lines = _where_equal(
        run,
        "matches",
        {"rank": row["rank"], "attempt": row["attempt"], "record_pid": row["pid"], "seq": row["seq"]},
    )
    return Record(row, bucket, from_arrow(lines, TABLES["matches"].columns), _partners(index, row))


def _where_equal(run: Run, table: str, values: dict[str, int]) -> pa.Table:
    """Return the rows of ``table`` that have these ``values``. A large table is queried in its files."""
    return ask(
        "rows_where",
        {"given": run.scan(table, _FEWEST_SCANNED)},
        columns=", ".join(TABLES[table].names),
        condition=" and ".join(f"{name} = {int(value)}" for name, value in values.items()),
    )


def _partners(index: Index, row: dict[str, Any]) -> pd.DataFrame:
    """Return the records of the same collective or message as ``row`` (:func:`same_collective`)."""
    kinds = index.ask(
        "select kind from kinds where pg = ? and group_ranks = ? and is_p2p = ?"
        + ("" if row["is_p2p"] else " and op = ?"),
        [row["pg"], row["group_ranks"], row["is_p2p"], *([] if row["is_p2p"] else [row["op"]])],
    )["kind"].to_pylist()
    clause = f"r.kind in (select unnest([{', '.join(map(str, kinds))}])) and r.attempt = ?"
    values: list[Any] = [row["attempt"]]
    if row["is_p2p"]:
        clause += " and ((r.rank = ? and k.peer = ?) or (r.rank = ? and k.peer = ?))"
        values += [row["rank"], row["peer"], row["peer"], row["rank"]]
    else:
        clause += " and r.pg_seq = ?"
        values.append(row["pg_seq"])
    names = ", ".join(
        f"{'k' if name in KIND_COLUMNS else 'r'}.{name}"
        for name in dict.fromkeys((*NEEDED, "begin_ns", "end_ns"))
    )
    candidates = index.ask(
        f"select {names} from records r join kinds k using (kind) where {clause} limit {MOST_PARTNERS}",
        values,
    )
    candidates = matchable(candidates)
    same = same_collective(candidates)
    mine = pc.and_(
        pc.and_(pc.equal(candidates["rank"], row["rank"]), pc.equal(candidates["pid"], row["pid"])),
        pc.equal(candidates["seq"], row["seq"]),
    ).to_numpy(zero_copy_only=False)
    chosen = candidates.filter(pa.array(same == same[mine][0])) if mine.any() else candidates.slice(0, 0)
    chosen = chosen.sort_by([("rank", "ascending"), ("issue_ns", "ascending")])
    begins = chosen["begin_ns"]
    first = pc.min(begins)
    late = pc.subtract(begins, first) if len(chosen) else begins
    # `chosen` contains the records of one collective, sorted by rank.
    arrived = aligned(index.opened())(chosen)
    for name in ("own_delay_ns", "inherited_ns"):
        chosen = chosen.append_column(name, arrived[name])
    return from_arrow(chosen.append_column("lateness_ns", late), PARTNERS.columns)

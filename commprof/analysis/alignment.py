"""A run beside its NCCL log, as ``commprof align`` kept it: what matches, where they part, and NCCL's rings and trees."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa

from commprof.analysis.detailed_answers import ALIGNED, ALIGNMENT_COUNTS, DIVERGENCES, TOPOLOGY
from commprof.analysis.engine import ask
from commprof.analysis.frames import from_arrow, from_rows
from commprof.trace.reader import Run
from commprof.trace.tables import empty_table

_OF: Final = ["rank", "pg"]


class Alignment(NamedTuple):
    """What an alignment found: see :func:`commprof.analysis.api.alignment`."""

    counts: pd.DataFrame
    divergences: pd.DataFrame
    rows: pd.DataFrame


def alignment(run: Run) -> Alignment:
    """Counts, first divergences, and every record beside its line."""
    rows = aligned(run)
    return Alignment(_counts(rows), _divergences(rows), rows)


def aligned(run: Run) -> pd.DataFrame:
    """Records beside lines, by rank and group in the order of the log, which is that of issue; records without a line stand
    after the record before them, lines without a record after the line before them.
    """
    tables = {name: run.table(name) for name in ("matches", "comm_matches", "nccl_ops")}
    records = run.scan("collectives") if len(tables["matches"]) else empty_table("collectives")
    found = from_arrow(
        ask("aligned", tables | {"collectives": records}),
        [column for column in ALIGNED.columns if column.name != "position"],
    )
    found = pd.DataFrame(found.iloc[_in_order(found)]).reset_index(drop=True)
    positions = found.groupby(_OF, dropna=False).cumcount().astype("int64")
    found.insert(2, "position", positions)
    return found


def _in_order(found: pd.DataFrame) -> Any:
    """The order of the rows: by rank, group, and place in the log."""
    count = len(found)
    rank = found["rank"].fillna(2**31).to_numpy(np.int64)
    group = pd.factorize(found["pg"].fillna(""), sort=True)[0]
    attempt = found["attempt"].fillna(2**31 - 1).to_numpy(np.int64)
    seq = found["seq"].fillna(2**62).to_numpy(np.int64)
    part = found["part"].fillna(0).to_numpy(np.int64)
    # The files of a rank in the order in which its records were issued.
    began = found.assign(first=attempt * 2.0**62 + seq).groupby("file")["first"].transform("min").fillna(0.0)
    files = pd.factorize(began.to_numpy() + 0.0, sort=True)[0]
    line = found["line"].fillna(-1).to_numpy(np.int64)
    # Places in the log as 1, 2, 3 ...; 0 for none.
    keys = np.where(line < 0, -1, files * (1 << 40) + line)
    place = np.unique(np.append(keys, -1), return_inverse=True)[1][:-1]
    of_record = found["seq"].notna().to_numpy()
    order = np.lexsort((part, seq, attempt, ~of_record, group, rank))
    # A record without a line takes the place of the last line before it, in its rank and group.
    starts = np.ones(count, bool)
    starts[1:] = (rank[order][1:] != rank[order][:-1]) | (group[order][1:] != group[order][:-1])
    offset = np.cumsum(starts) * (count + 2)
    filled = np.maximum.accumulate(place[order] + offset) - offset if count else place
    seated = place.copy()
    seated[order] = np.where(of_record[order], filled, place[order])
    behind = np.where(of_record, np.where(line < 0, 1, 0), 2)
    return np.lexsort((part, seq, attempt, behind, seated, group, rank))


def _counts(rows: pd.DataFrame) -> pd.DataFrame:
    sizes = rows.groupby([*_OF, "op", "state"], dropna=False).size().reset_index(name="lines")
    return from_rows(_plain(sizes), ALIGNMENT_COUNTS.columns)


def _divergences(rows: pd.DataFrame) -> pd.DataFrame:
    apart = rows[rows["state"] != "matched"].drop_duplicates(_OF)
    named = apart.assign(matched_before=apart["position"])
    return from_rows(_plain(named[list(DIVERGENCES.names)]), DIVERGENCES.columns)


def _plain(frame: pd.DataFrame) -> list[dict[str, Any]]:
    rows: list[dict[Any, Any]] = frame.to_dict("records")
    return [{str(name): None if pd.isna(value) else value for name, value in row.items()} for row in rows]


def topology(run: Run) -> pd.DataFrame:
    """The rings and trees of every communicator of the log: one row per channel and pair of ranks that it joins."""
    names = _communicators(run.table("nccl_communicators"), run.table("comm_matches"))
    edges: dict[tuple[Any, ...], None] = {}
    for row in run.table("nccl_rings").to_pylist():
        for first, second in _ring(row):
            edges[(*_named(names, row), "ring", row["channel"], first, second)] = None
    for row in run.table("nccl_trees").to_pylist():
        for first, second in _tree(row):
            edges[(*_named(names, row), "tree", row["tree"], first, second)] = None
    columns = TOPOLOGY.names
    rows = sorted(edges, key=lambda edge: tuple(str(part) if i < 3 else part for i, part in enumerate(edge)))
    return from_rows((dict(zip(columns, edge, strict=True)) for edge in rows), TOPOLOGY.columns)


def _ring(row: dict[str, Any]) -> list[tuple[int, int]]:
    order = [int(part) for part in (row["ranks"] or "").split()]
    if order:
        return list(zip(order, [*order[1:], order[0]], strict=True))
    pairs = [(row["rank"], row["next"]), (row["previous"], row["rank"])]
    return [(first, second) for first, second in pairs if first is not None and second is not None]


def _tree(row: dict[str, Any]) -> list[tuple[int, int]]:
    below = [(row["rank"], int(part)) for part in (row["children"] or "").split()]
    above = [] if row["parent"] is None else [(row["parent"], row["rank"])]
    return above + below


def _communicators(
    communicators: pa.Table, matched: pa.Table
) -> dict[tuple[Any, ...], tuple[str, str | None]]:
    """The name of each communicator, equal on all its ranks where the log tells its commId, and its process group."""
    groups = {_key(row): row["pg"] for row in matched.to_pylist()}
    return {
        _key(row): (row["comm_id"] or f"{row['comm']} ({row['host']}:{row['pid']})", groups.get(_key(row)))
        for row in communicators.to_pylist()
    }


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["host"], row["pid"], row["comm"], row["comm_epoch"]


def _named(
    names: dict[tuple[Any, ...], tuple[str, str | None]], row: dict[str, Any]
) -> tuple[str, str | None]:
    return names.get(_key(row), (row["comm"] or f"not known ({row['host']}:{row['pid']})", None))

"""The stored alignment of a run with its NCCL log: counts, divergences, rows, and the rings and trees of NCCL."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import pandas as pd
import pyarrow as pa

from commprof.analysis.browse.aligned_rows import AlignedRows
from commprof.analysis.columns.detailed_answers import ALIGNED, ALIGNMENT_COUNTS, DIVERGENCES, TOPOLOGY
from commprof.analysis.columns.frames import from_arrow, from_rows
from commprof.trace.reader import Run

_AS_SHOWN: Final = {"matched_before": "position"}


class Alignment(NamedTuple):
    """The result of an alignment (see :func:`commprof.analysis.api.alignment`)."""

    counts: pd.DataFrame
    divergences: pd.DataFrame
    rows: pd.DataFrame


class AlignmentSummary(NamedTuple):
    """An alignment without its rows (see :func:`commprof.analysis.api.alignment_summary`)."""

    counts: pd.DataFrame
    divergences: pd.DataFrame


class AlignmentWindow(NamedTuple):
    """Some rows of one rank and group, in order.

    Attributes:
        rows: The rows of the window, with the columns of the rows of :class:`Alignment`.
        total: The number of rows of the rank and group in any state.
        earlier: The position ``at`` of the window before this window, or None if there is none.
        later: The position ``at`` of the window after this window, or None if there is none.
    """

    rows: pd.DataFrame
    total: int
    earlier: int | None
    later: int | None


def alignment(run: Run) -> Alignment:
    """Return the counts, the first divergences, and every record with its line."""
    return Alignment(*summary(run), from_arrow(AlignedRows(run).every(), ALIGNED.columns))


def summary(run: Run) -> AlignmentSummary:
    """Return the counts and the first divergences."""
    matches = run.scan("matches")
    if isinstance(matches, pa.Table) and not len(matches):  # the engine takes 0.1 s to count no rows
        return AlignmentSummary(from_rows([], ALIGNMENT_COUNTS.columns), from_rows([], DIVERGENCES.columns))
    rows = AlignedRows(run)
    first = rows.first_apart()
    named = {name: first[_AS_SHOWN.get(name, name)] for name in DIVERGENCES.names}
    return AlignmentSummary(
        from_arrow(rows.counts(), ALIGNMENT_COUNTS.columns), from_arrow(pa.table(named), DIVERGENCES.columns)
    )


def window(
    run: Run, rank: int | None, pg: str | None, state: str | None, at: int, before: int, limit: int
) -> AlignmentWindow:
    """Return up to ``limit`` rows. The first row is ``before`` rows before position ``at``."""
    rows = AlignedRows(run)
    order = rows.order(rank, pg)
    positions = order.of_state(state)
    begin = max(0, min(int(positions.searchsorted(at)) - before, len(positions) - 1))
    places = positions[begin : begin + limit]
    chosen = pa.table(
        {
            "number": pa.array(order.numbers[places]),
            "rank": pa.array([rank] * len(places), pa.int32()),
            "pg": pa.array([pg] * len(places), pa.string()),
            "position": pa.array(places),
        }
    )
    shown = from_arrow(rows.shown(chosen), ALIGNED.columns)
    earlier = int(positions[max(0, begin - limit + before)]) if begin > 0 else None
    later = int(positions[begin + limit]) if begin + limit < len(positions) else None
    return AlignmentWindow(shown, len(order.numbers), earlier, later)


def place(run: Run, rank: int, attempt: int, pid: int, seq: int) -> tuple[int | None, str | None, int] | None:
    """Return the rank, group and position of a record in the alignment, or None if the alignment lacks the record."""
    return AlignedRows(run).place(rank, attempt, pid, seq)


def topology(run: Run) -> pd.DataFrame:
    """Return the rings and trees of every communicator in the log, one row per channel and pair of connected ranks."""
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
    """Return the name and the process group of each communicator.

    The name is the commId if the log contains it, because the commId is equal on all ranks.
    """
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

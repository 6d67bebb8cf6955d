"""The all_to_alls of each training step: the bytes that each rank receives from the others, and their imbalance."""

from __future__ import annotations

from typing import Any, Final

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from commprof.analysis.columns.byte_columns import BETWEEN_HOSTS
from commprof.analysis.columns.expert_answers import EXCHANGE_IMBALANCE
from commprof.analysis.columns.frames import from_rows
from commprof.analysis.traffic.matrix import UNTAGGED, matrix
from commprof.schema import Op, Purpose, parse_ranks

COLUMNS: Final = ("step", "op", "purpose", "group_ranks", "sender")


def among_experts(operations: pa.Table, layers: pa.Table) -> pa.Table:
    """Return the ``operations`` with purpose activation among ranks that share experts.

    Args:
        layers: The table with the column expert_ranks, which lists the ranks that share experts.
    """
    sharing = {frozenset(parse_ranks(text)) for text in layers["expert_ranks"].unique().to_pylist()}
    texts = operations["group_ranks"].unique().to_pylist()
    chosen = pa.array([text for text in texts if frozenset(parse_ranks(text)) in sharing], pa.string())
    in_group = pc.is_in(operations["group_ranks"].cast(pa.string()), chosen)
    return operations.filter(pc.and_(in_group, pc.equal(operations["purpose"], str(Purpose.ACTIVATION))))


def exchange_imbalance(
    operations: pa.Table, groups: pa.Table, purpose: str | None, has_splits: bool = True
) -> pd.DataFrame:
    """Return the imbalance of all_to_alls: see :func:`commprof.analysis.api.exchange_imbalance`.

    Args:
        operations: The operations, summed by the columns of :func:`commprof.analysis.traffic.matrix.columns`.
        groups: The table ``groups``.
        has_splits: Whether the operations are from records. Sums do not distinguish equal splits from unequal
            splits.
    """
    chosen = pc.and_(pc.equal(operations["op"], Op.ALL_TO_ALL.value), pc.greater_equal(operations["step"], 0))
    frame = operations.select(COLUMNS).filter(chosen).to_pandas()
    if purpose is not None:
        frame = frame[frame["purpose"].isna() if purpose == UNTAGGED else frame["purpose"] == purpose]
    if frame.empty:
        return from_rows([], EXCHANGE_IMBALANCE.columns)
    members = {text: parse_ranks(text) for text in frame["group_ranks"].unique()}
    ranks = {
        step: sorted({rank for text in texts.unique() for rank in members[text]})
        for step, texts in frame.groupby("step")["group_ranks"]
    }
    unplaced = set(frame.loc[frame["sender"] == -1, "step"])
    cells = matrix(operations, groups, ("step",), op=Op.ALL_TO_ALL, purpose=purpose)
    by_step = dict(tuple(cells.groupby("step")))
    rows = (
        _row(int(step), ranks[step], by_step.get(step, cells.iloc[:0]), not has_splits or step in unplaced)
        for step in sorted(ranks)
    )
    return from_rows(rows, EXCHANGE_IMBALANCE.columns)


def _row(step: int, ranks: list[int], cells: pd.DataFrame, is_unplaced: bool) -> dict[str, Any]:
    received = cells.groupby("receiver")["wire_bytes"].sum().reindex(ranks, fill_value=0.0)
    total = float(received.sum())
    row = {
        "step": step,
        "ranks": len(ranks),
        "wire_bytes": total,
        BETWEEN_HOSTS: float(cells[BETWEEN_HOSTS].sum(skipna=False)) if len(cells) else 0.0,
    }
    if is_unplaced or not total:
        return row
    return row | {
        "received_bytes": total / len(ranks),
        "most_received_bytes": float(received.max()),
        "imbalance": float(received.max()) * len(ranks) / total,
        "rank": ranks[int(received.to_numpy().argmax())],
    }

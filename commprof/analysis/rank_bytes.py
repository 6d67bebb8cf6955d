"""What each rank sends and receives in a training step, by setting: rooted operations load ranks unevenly. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

import pandas as pd
import pyarrow as pa

from commprof.analysis.frames import from_rows
from commprof.analysis.matrix import matrix
from commprof.analysis.setting_answers import RANK_BYTES


class RankTotals(NamedTuple):
    """What the ranks of one run sent and received in its ``steps`` training steps.

    ``unplaced``: bytes of which it is not known between whom they went.
    """

    label: str
    steps: int
    sent: dict[int, float]
    received: dict[int, float]
    unplaced: float


def rank_totals(label: str, times: pd.DataFrame, operations: pa.Table) -> RankTotals:
    """The sums of each rank over the steps from 0 to the last that is whole, by the model of ``matrix.py``."""
    whole = times[times["duration_ns"].notna()]
    if whole.empty:
        return RankTotals(label, 0, {}, {}, 0.0)
    last = int(whole["step"].max())
    cells = matrix(operations, steps=(0, last))
    sent = cells.groupby("sender")["wire_bytes"].sum()
    received = cells.groupby("receiver")["wire_bytes"].sum()
    return RankTotals(
        label,
        int((times["step"] <= last).sum()),
        {int(rank): float(value) for rank, value in sent.items()},  # type: ignore[call-overload]
        {int(rank): float(value) for rank, value in received.items()},  # type: ignore[call-overload]
        float(cells.attrs["unplaced_bytes"]),
    )


def rank_bytes(totals: Sequence[RankTotals]) -> pd.DataFrame:
    """One row per setting and rank (:data:`setting_answers.RANK_BYTES`); repeats count by their steps.

    ``frame.attrs["reasons"]`` has, by label, why the ranks of a setting cannot be told.
    """
    of_label: dict[str, list[RankTotals]] = defaultdict(list)
    for one in totals:
        of_label[one.label].append(one)
    rows, reasons = [], {}
    for label, parts in of_label.items():
        steps = sum(part.steps for part in parts)
        unplaced = sum(part.unplaced for part in parts)
        if unplaced:
            reasons[label] = (
                "the roots of its operations were not kept, so it is not known which rank sends what"
            )
            continue
        ranks = sorted({rank for part in parts for rank in (*part.sent, *part.received)})
        sent = [sum(part.sent.get(rank, 0.0) for part in parts) for rank in ranks]
        received = [sum(part.received.get(rank, 0.0) for part in parts) for rank in ranks]
        for rank, out, into in zip(ranks, sent, received, strict=True):
            rows.append(
                {
                    "label": label,
                    "rank": rank,
                    "sent_bytes_per_step": out / steps,
                    "received_bytes_per_step": into / steps,
                    "sent_of_mean": out / fmean(sent) if any(sent) else None,
                    "received_of_mean": into / fmean(received) if any(received) else None,
                }
            )
    frame = from_rows(rows, RANK_BYTES.columns)
    frame.attrs["reasons"] = reasons
    return frame

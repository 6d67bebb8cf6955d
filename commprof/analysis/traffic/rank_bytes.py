"""Compute the bytes that each rank sends and receives per training step, by setting.

Rooted operations load the ranks unevenly. The functions are pure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, Final, NamedTuple

import pandas as pd
import pyarrow as pa

from commprof.analysis.columns.byte_columns import BETWEEN_HOSTS
from commprof.analysis.columns.frames import from_rows
from commprof.analysis.columns.setting_answers import RANK_BYTES
from commprof.analysis.relations.sql_engine import ask
from commprof.analysis.time.training_steps import StepTotals
from commprof.analysis.traffic.matrix import matrix

NO_ROOTS: Final = "the roots of its operations were not kept, so it is not known which rank sends what"


class Directions(NamedTuple):
    """The bytes of a step by rank.

    ``unplaced`` contains the bytes whose sender and receiver are not known.
    """

    sent: Mapping[int, float]
    received: Mapping[int, float]
    unplaced: float


class RankTotals(NamedTuple):
    """The bytes that the ranks of one run send and receive in a step.

    Attributes:
        steps: The number of steps, by which repeats are weighted.
        issued: The bytes by the model of the operations as issued.
        between_hosts: The part of ``issued`` between ranks on different hosts. NaN if a host is not known.
        executed: The bytes of the operations that the backend runs. None if they are not known.
    """

    label: str
    steps: int
    issued: Directions
    between_hosts: Directions
    executed: Directions | None


def rank_totals(label: str, totals: StepTotals, operations: pa.Table, groups: pa.Table) -> RankTotals:
    """Return what each rank sends and receives in a step of ``totals``, by the models of ``matrix.py``."""
    if not totals.steps or totals.weights is None:
        return RankTotals(label, 0, Directions({}, {}, 0.0), Directions({}, {}, 0.0), None)
    weighted = ask("weighted_operations", {"operations": operations, "weights": totals.weights})
    cells = matrix(weighted, groups)
    executed = None
    if cells.attrs["executed_reason"] is None:
        executed = _directions(cells, "executed_wire_bytes", cells.attrs["executed_unplaced_bytes"])
    issued = _directions(cells, "wire_bytes", cells.attrs["unplaced_bytes"])
    between = _directions(cells, BETWEEN_HOSTS, cells.attrs["unplaced_bytes"])
    return RankTotals(label, totals.steps, issued, between, executed)


def _directions(cells: pd.DataFrame, measure: str, unplaced: float) -> Directions:
    sums: dict[str, dict[int, float]] = {"sender": {}, "receiver": {}}
    for side, by_rank in sums.items():
        for rank, value in zip(cells[side].tolist(), cells[measure].tolist(), strict=True):
            by_rank[rank] = by_rank.get(rank, 0.0) + value
    return Directions(sums["sender"], sums["receiver"], unplaced)


def rank_bytes(totals: Sequence[RankTotals]) -> pd.DataFrame:
    """Return one row per setting and rank (:data:`setting_answers.RANK_BYTES`).

    Repeats are weighted by their steps. ``frame.attrs["reasons"]`` contains, by label, the reason why the
    bytes by rank of a setting are not known.
    """
    of_label: dict[str, list[RankTotals]] = defaultdict(list)
    for one in totals:
        of_label[one.label].append(one)
    rows, reasons = [], {}
    for label, repeats in of_label.items():
        if any(part.issued.unplaced for part in repeats):
            reasons[label] = NO_ROOTS
            continue
        issued = [(part.issued, part.steps) for part in repeats if part.steps]
        executed = [
            (part.executed, part.steps) for part in repeats if part.steps and part.executed is not None
        ]
        columns = _columns(issued, "")
        between = _means([(part.between_hosts, part.steps) for part in repeats if part.steps])
        columns |= {f"{direction}_{BETWEEN_HOSTS}_per_step": means for direction, means in between.items()}
        if len(executed) == len(issued) and not any(each.unplaced for each, _ in executed):
            columns |= _columns(executed, "executed_")
        ranks = sorted({rank for by_rank in columns.values() for rank in by_rank})
        rows += [
            {"label": label, "rank": rank} | {name: by_rank[rank] for name, by_rank in columns.items()}
            for rank in ranks
        ]
    frame = from_rows(rows, RANK_BYTES.columns)
    frame.attrs["reasons"] = reasons
    return frame


def _columns(
    weighted_totals: Sequence[tuple[Directions, int]], prefix: str
) -> dict[str, Mapping[int, float | None]]:
    """Return the columns of one model by rank.

    The columns are the mean over the steps of all repeats, and the ratio of this mean to the mean of the
    ranks.
    """
    columns: dict[str, Mapping[int, Any]] = {}
    for direction, means in _means(weighted_totals).items():
        mean = fmean(means.values()) if means else 0.0
        columns[f"{prefix}{direction}_bytes_per_step"] = means
        columns[f"{prefix}{direction}_of_mean"] = {
            rank: value / mean if mean else None for rank, value in means.items()
        }
    return columns


def _means(weighted_totals: Sequence[tuple[Directions, int]]) -> dict[str, dict[int, float]]:
    """Return the bytes that each rank sends and receives in a step, by direction.

    The values are means over the steps of all repeats.
    """
    steps = sum(count for _, count in weighted_totals)
    ranks = sorted({rank for part, _ in weighted_totals for rank in (*part.sent, *part.received)})
    return {
        direction: {
            rank: sum(getattr(part, direction).get(rank, 0.0) * count for part, count in weighted_totals)
            / steps
            for rank in ranks
        }
        for direction in ("sent", "received")
    }

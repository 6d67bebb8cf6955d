"""Compute the idle share of the first pipeline stage in a step, as measured and as the schedule predicts it."""

from __future__ import annotations

from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

_MEASURED, _EXPECTED = "pipeline_bubble", "pipeline_bubble_expected"


class IdleShares(NamedTuple):
    """Shares of a step that the first pipeline stage is idle.

    They are None if the run has no pipeline or if its runtime does not publish them.
    """

    measured: float | None
    expected: float | None


def idle_shares(metrics: pa.Table) -> IdleShares:
    """Return the medians on rank 0 over the steps after the first. The stage of rank 0 begins and ends every step.

    Args:
        metrics: The metrics of the run. ``pipeline_bubble`` is the measured share, and
            ``pipeline_bubble_expected`` is the share that the schedule predicts.
    """
    of_rank_0 = metrics.filter(pc.equal(metrics["rank"], 0))
    return IdleShares(_median(of_rank_0, _MEASURED), _median(of_rank_0, _EXPECTED))


def _median(metrics: pa.Table, name: str) -> float | None:
    chosen = metrics.filter(pc.equal(metrics["name"], name))
    if not chosen.num_rows:
        return None
    later = chosen.filter(pc.greater(chosen["step"], pc.min(chosen["step"])))
    values = later if later.num_rows else chosen
    median = pc.quantile(values["value"], q=0.5)[0].as_py()
    return None if median is None else float(median)

"""One-off traffic of a run, and beside it what comes back in each step: the traffic that the report shows. Pure."""

from __future__ import annotations

from typing import Any, Final

import pandas as pd

from commprof.analysis.detailed_answers import ONE_OFFS
from commprof.analysis.frames import from_rows
from commprof.analysis.steady import EXECUTED, Steady, steady

KEY: Final = ("purpose", "op", "intended_op", "group_desc", "group_ranks")
BY: Final = ("attempt", "step", "group_size", *KEY)  # of the traffic that these questions ask for
_MEANS: Final = ("records", "host_ns", EXECUTED)


def steady_traffic(traffic: pd.DataFrame, times: pd.DataFrame) -> Steady:
    """What of ``traffic`` comes back in each training step, and what does not (:mod:`commprof.analysis.steady`).

    Args:
        traffic: :func:`commprof.analysis.api.traffic` by :data:`BY` at least.
        times: columns attempt, step and duration_ns of the training steps.
    """
    ended = times.loc[times["duration_ns"].notna(), ["attempt", "step"]]
    whole = sorted((int(attempt), int(step)) for attempt, step in ended.itertuples(index=False))
    return steady(_plain(traffic[traffic["step"] >= 0]), (*KEY, "group_size"), whole, _MEANS)


def one_offs(traffic: pd.DataFrame, times: pd.DataFrame) -> pd.DataFrame:
    """The one-off traffic as a frame, step by step: see :func:`commprof.analysis.api.one_offs`."""
    rows = [
        row | {name: round(row[name]) for name in ("collectives", "payload_bytes")}
        for row in steady_traffic(traffic, times).one_offs
    ]
    rows.sort(key=lambda row: (row["attempt"], row["step"], *(str(row[name] or "~") for name in KEY)))
    return from_rows(rows, ONE_OFFS.columns)


def _plain(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows of ``frame`` with None for what is null."""
    return [
        {str(name): None if pd.isna(value) else value for name, value in row.items()}
        for row in frame.to_dict("records")
    ]

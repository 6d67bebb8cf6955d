"""One-off traffic: traffic of single training steps that does not recur in the other steps. Pure."""

from __future__ import annotations

from typing import Any, Final

import pandas as pd

from commprof.analysis.columns.detailed_answers import ONE_OFFS
from commprof.analysis.columns.frames import from_rows
from commprof.analysis.traffic.steady_steps import TRAFFIC_KEY, steady_traffic

BY: Final = ("attempt", "step", "group_size", *TRAFFIC_KEY)  # the columns of the traffic that are needed


def one_offs(traffic: pd.DataFrame, times: pd.DataFrame) -> pd.DataFrame:
    """Return the one-off traffic by step: see :func:`commprof.analysis.api.one_offs`."""
    rows = [
        row | {name: round(row[name]) for name in ("collectives", "payload_bytes")}
        for row in steady_traffic(_plain(traffic), _plain(times)).one_offs
    ]
    rows.sort(key=lambda row: (row["attempt"], row["step"], *(str(row[name] or "~") for name in TRAFFIC_KEY)))
    return from_rows(rows, ONE_OFFS.columns)


def _plain(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the rows of ``frame`` with None for null."""
    columns = {
        str(name): [
            None if is_null else value for value, is_null in zip(column.tolist(), column.isna(), strict=True)
        ]
        for name, column in frame.items()
    }
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]

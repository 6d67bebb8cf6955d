"""The resources of a run by step: memory, processor use, and the communication share of the step time. Pure."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from statistics import fmean
from typing import Final

import pandas as pd

from commprof.analysis.columns.frames import from_rows
from commprof.analysis.columns.setting_answers import RESOURCE_USE

GPU_UTILISATION: Final = "gpu_utilization_percent"  # a reading of the sampler nvml


def resource_use(times: pd.DataFrame, samples: pd.DataFrame) -> pd.DataFrame:
    """Return one row per training step (:data:`setting_answers.RESOURCE_USE`).

    Args:
        times: The step times (:data:`answers.STEP_TIMES`).
        samples: The table ``samples``. GPU samples are used only if they come from one host, because the times of the
            steps are on the clock of that host.
    """
    readings = samples[samples["name"] == GPU_UTILISATION].sort_values("time_ns")
    moments, values = readings["time_ns"].tolist(), readings["value"].astype(float).tolist()
    if readings["host"].nunique() > 1:
        moments, values = [], []
    rows = []
    for step in times.to_dict("records"):
        duration = _number(step["duration_ns"])
        first = bisect_left(moments, step["begin_ns"])
        end = _number(step["end_ns"])
        inside = values[first : bisect_right(moments, end)] if end is not None else []
        rows.append(
            {
                "attempt": step["attempt"],
                "step": step["step"],
                "duration_ns": duration,
                "rss_bytes": _number(step["rss_bytes"]),
                "device_bytes": _number(step["device_bytes"]),
                "cores": _ratio(step["cpu_ns"], duration),
                "gpu_share": fmean(inside) / 100 if inside else None,
                "communication_share": _ratio(step["exposed_ns"], duration),
                "communication_share_low": _ratio(step["exposed_low_ns"], duration),
                "communication_share_high": _ratio(step["exposed_high_ns"], duration),
            }
        )
    return from_rows(rows, RESOURCE_USE.columns)


def _number(value: object) -> int | None:
    return None if value is None or pd.isna(value) else int(value)  # type: ignore[call-overload]


def _ratio(part: object, denominator: int | None) -> float | None:
    numerator = _number(part)
    return None if numerator is None or not denominator else numerator / denominator

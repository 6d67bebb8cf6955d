"""Memory, exposed communication and samples per second of each setting. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median, stdev

import pandas as pd

from commprof.analysis.columns.frames import from_rows
from commprof.analysis.columns.setting_answers import RESOURCES
from commprof.analysis.compare.comparison import Measured, by_label
from commprof.analysis.time.exposure import EXPOSED, medians
from commprof.quantiles import t_quantile


def resources(runs: Sequence[Measured]) -> pd.DataFrame:
    """Return one row per setting (:data:`setting_answers.RESOURCES`)."""
    rows = []
    for label, repeats in by_label(runs).items():
        used = [run.usage for run in repeats]
        center, low, high = _over_mean_time([median(one.rates) for one in used if one.rates])
        sources = {one.rates_from for one in used if one.rates_from}
        rows.append(
            {
                "label": label,
                "rss_bytes": _median([value for one in used for value in one.rss]),
                "rss_peak_bytes": max(
                    (one.rss_peak for one in used if one.rss_peak is not None), default=None
                ),
                "device_bytes": _median([value for one in used for value in one.device]),
                "device_peak_bytes": max(
                    (one.device_peak for one in used if one.device_peak is not None), default=None
                ),
                "samples_per_second": center,
                "samples_low": low,
                "samples_high": high,
                "samples_from": ", ".join(sorted(sources)) or None,
                **_exposed([one.exposed for one in used if one.exposed is not None]),
            }
        )
    return from_rows(rows, RESOURCES.columns)


def _over_mean_time(rates: Sequence[float]) -> tuple[float | None, float | None, float | None]:
    """Return the reciprocal of the mean time per sample, and its 95 % interval, from the ``rates`` of repeats.

    The step time of a setting is the mean over its repeats. A mean of rates would contradict this step time if the
    repeats differ much.
    """
    if not rates or min(rates) <= 0:
        return (0.0 if rates else None), None, None
    times = [1 / rate for rate in rates]
    mean = fmean(times)
    if len(times) < 2:
        return 1 / mean, None, None
    reach = t_quantile(len(times) - 1) * stdev(times) / len(times) ** 0.5
    return 1 / mean, 1 / (mean + reach), 1 / (mean - reach) if reach < mean else None


def _exposed(steps: Sequence[pd.DataFrame]) -> dict[str, float | None]:
    """Return the exposed time per step over the warm steps of all repeats, by the rule of :func:`exposure.medians`."""
    return medians(pd.concat(steps, ignore_index=True), EXPOSED) if steps else {}


def _median(values: Sequence[int]) -> int | None:
    return round(median(values)) if values else None

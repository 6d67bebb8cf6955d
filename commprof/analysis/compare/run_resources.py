"""Resources of one run: memory, exposed communication, and samples per second. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import pandas as pd

from commprof.analysis.time.exposure import EXPOSED
from commprof.analysis.time.warm_steps import warm_steps

METRIC: Final = "metric"
CONFIG: Final = "config"


class Usage(NamedTuple):
    """The resources of one run, with one value for each step after the first if the value is known.

    ``rss`` and ``device`` are memory in bytes. ``rates`` are samples per second, and ``rates_from`` is the source of
    the number of samples.
    """

    rss: Sequence[int]
    rss_peak: int | None
    device: Sequence[int]
    device_peak: int | None
    rates: Sequence[float]
    rates_from: str | None
    exposed: pd.DataFrame | None = None  # exposure of the warm steps, and their durations


def usage(times: pd.DataFrame, config: Mapping[str, Any] | None, world_size: int | None) -> Usage:
    """Return the resources of the steps of a run, from its step times (:data:`answers.STEP_TIMES`).

    The number of samples is the metric ``samples`` of the program, or else the batch size of its configuration.
    """
    first = times.groupby("attempt")["step"].transform("min")
    later = times[times["step"] > first]
    later = later if len(later) else times
    timed = times[(times["step"] > first) & (times["duration_ns"].fillna(0) > 0)]
    published = timed[timed["samples"].notna()]
    batch = batch_size(config, world_size)
    rates: list[float] = []
    source = None
    if len(published):
        samples = [float(value) for value in published["samples"]]
        rates, source = _rates(samples, published["duration_ns"]), METRIC
    elif batch is not None and len(timed):
        rates, source = _rates([float(batch)] * len(timed), timed["duration_ns"]), CONFIG
    return Usage(
        rss=_integers(later["rss_bytes"]),
        rss_peak=max(_integers(times["rss_bytes"]), default=None),
        device=_integers(later["device_bytes"]),
        device_peak=max(_integers(times["device_bytes"]), default=None),
        rates=rates,
        rates_from=source,
        exposed=warm_steps(times)[["duration_ns", *EXPOSED]],
    )


def batch_size(config: Mapping[str, Any] | None, world_size: int | None) -> int | None:
    """Return the samples per training step of all ranks, by DeepSpeed's configuration keys.

    The result is None if the configuration lacks the keys.

    >>> batch_size({"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}, 3)
    24
    """
    config = config or {}
    total = config.get("train_batch_size")
    if _is_count(total):
        return int(total)  # type: ignore[arg-type]  # a count is an integer
    micro, accumulation_steps = (
        config.get("train_micro_batch_size_per_gpu"),
        config.get("gradient_accumulation_steps", 1),
    )
    if not (_is_count(micro) and _is_count(accumulation_steps) and world_size):
        return None
    return int(micro) * int(accumulation_steps) * world_size  # type: ignore[arg-type]


def _rates(samples: Sequence[float], durations: pd.Series[Any]) -> list[float]:
    return [1e9 * count / int(duration) for count, duration in zip(samples, durations, strict=True)]


def _integers(values: pd.Series[Any]) -> list[int]:
    return [int(value) for value in values.dropna()]


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0

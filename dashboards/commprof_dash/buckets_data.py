"""The frames of the Buckets page: cached calls to commprof.analysis.api."""

from __future__ import annotations

from typing import Final

import pandas as pd

from commprof.analysis import api
from commprof_dash.charts.series import series_name
from commprof_dash.data import Runs

NOT_RECORDED: Final = "not recorded"


def flushes(runs: Runs, name: str) -> pd.DataFrame:
    """Every bucket of a run: see ``api.bucket_flushes``."""
    frame: pd.DataFrame = runs.of_run("bucket_flushes", name, api.bucket_flushes)
    return _labelled(frame)


def means(runs: Runs, name: str) -> pd.DataFrame:
    """The buckets of a mean step: see ``api.bucket_means``."""
    frame: pd.DataFrame = runs.of_run("bucket_means", name, api.bucket_means)
    return _labelled(frame)


def content(runs: Runs, name: str, step: int, bucket: int, micro_step: int) -> api.BucketContent | None:
    """What a bucket holds: see ``api.bucket_content``; of the last attempt that has it."""
    found: api.BucketContent | None = runs.of_run(
        f"bucket {step} {micro_step} {bucket}",
        name,
        lambda path: api.bucket_content(path, step, bucket, micro_step),
    )
    return found


def _labelled(frame: pd.DataFrame) -> pd.DataFrame:
    """With ``label``, the bucket's number, and its micro-batch where there are several; and ``series``."""
    several = frame["micro_step"].nunique() > 1
    labels = [
        f"{micro}.{bucket}" if several else f"{bucket}"
        for micro, bucket in zip(frame["micro_step"].tolist(), frame["bucket"].tolist(), strict=True)
    ]
    pairs = list(zip(frame["op"].tolist(), frame["intended_op"].tolist(), strict=True))
    names = {pair: NOT_RECORDED if pd.isna(pair[0]) else series_name(*pair) for pair in set(pairs)}
    series = [names[pair] for pair in pairs]
    return frame.assign(
        label=pd.Series(labels, index=frame.index, dtype="str"),
        series=pd.Series(series, index=frame.index, dtype="str"),
    )

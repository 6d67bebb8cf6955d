"""The frames of the Buckets page: cached calls to commprof.analysis.api."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import pandas as pd

from commprof.analysis import api
from commprof.schema import parse_ranks
from commprof_dash.charts.series import series_name
from commprof_dash.data import Runs

NOT_RECORDED: Final = "not recorded"


class Shown(NamedTuple):
    """What the page shows: ``of_steps``, see ``api.bucket_steps``; ``frame``, one row per bucket of ``step`` and group.

    ``of_step``: the buckets of the step together, by why they were sent; of a mean step see ``api.buckets_per_step``.

    ``step`` is None where ``frame`` has the buckets of a mean step. ``groups``: the ranks that reduce buckets together, as
    text, one after the other where they are several. ``only_sums``: the run has no records, so none of a bucket.
    """

    of_steps: pd.DataFrame
    step: int | None
    frame: pd.DataFrame
    of_step: pd.DataFrame
    only_sums: bool

    @property
    def groups(self) -> list[str]:
        """In the order of their lowest ranks; those of which nothing is known are :data:`NOT_RECORDED`."""
        return list(dict.fromkeys(self.frame["group_ranks"].fillna(NOT_RECORDED)))

    def of_group(self, group: str) -> pd.DataFrame:
        """The buckets of one of :attr:`groups`."""
        return self.frame[self.frame["group_ranks"].fillna(NOT_RECORDED) == group]


class Chosen(NamedTuple):
    """One bucket: its step, and what it holds."""

    step: int
    content: api.BucketContent


def shown(runs: Runs, name: str, wanted: str | None) -> Shown:
    """The buckets of the step ``wanted``, or of a mean step where the run has no such step.

    Of a step that was done again after a restart, the last time.
    """
    step = int(wanted) if wanted is not None and re.fullmatch(r"-1|\d{1,9}", wanted) else None

    def answer(path: Path) -> Shown:
        run = api.open_run(path)
        of_steps = api.bucket_steps(run)
        only_sums = run.health.summed > 0 and not run.health.records
        known = of_steps["step"]
        at = step if step is not None and (known == step).any() else None
        if at is None:
            means = api.bucket_means(run)
            if len(means) or not len(known):
                return Shown(of_steps, None, _labelled(means), api.buckets_per_step(run), only_sums)
            at = int(known.iloc[-1])  # all of them came before the first step
        return Shown(of_steps, at, _of_step(run, at), of_steps[known == at], only_sums)

    view: Shown = runs.of_run(f"buckets {step}", name, answer)
    return view


def group_with(groups: Sequence[str], wanted: str | None) -> str:
    """That of ``groups`` which has the first rank of ``wanted``, ranks as text or the name of a group; else the first."""
    if wanted in groups:
        return str(wanted)
    first = re.match(r"\d{1,9}", wanted or "")
    if first is not None:
        for group in groups:
            if group != NOT_RECORDED and int(first[0]) in parse_ranks(group):
                return group
    return groups[0]


def chosen(runs: Runs, name: str, bucket: pd.Series[Any], step: int | None) -> Chosen | None:
    """What a bucket holds (``api.bucket_content``): in ``step``, or in the last step that has it.

    Args:
        bucket: its row of what :func:`shown` gives.
    """
    number, micro_step = int(bucket["bucket"]), int(bucket["micro_step"])
    group = None if pd.isna(bucket["group_ranks"]) else str(bucket["group_ranks"])

    def answer(path: Path) -> Chosen | None:
        run, at = api.open_run(path), step
        if at is None:
            rows = api.bucket_flushes(run, micro_step=micro_step, bucket=number, group_ranks=group)
            at = int(rows["step"].iloc[-1])
        content = api.bucket_content(run, at, number, micro_step, group_ranks=group)
        return None if content is None else Chosen(at, content)

    bucket_content: Chosen | None = runs.of_run(f"bucket {step} {micro_step} {number} {group}", name, answer)
    return bucket_content


def _of_step(run: api.Run, step: int) -> pd.DataFrame:
    frame = api.bucket_flushes(run, step)
    return _labelled(frame.drop_duplicates(["micro_step", "bucket", "group_ranks"], keep="last"))


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

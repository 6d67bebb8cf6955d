"""Provides the frames of the page Buckets through cached calls to commprof.analysis.api."""

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
    """The data of the page.

    Attributes:
        of_steps: The result of ``api.bucket_steps``.
        step: The step of ``frame``; None if ``frame`` contains the buckets of a mean step.
        frame: One row per bucket and group of ranks.
        of_step: The buckets of the step, summed by the reason why they were sent. For a mean step, see
            ``api.buckets_per_step``.
        only_sums: Whether the run has only sums and no records, so that nothing is known of single buckets.
    """

    of_steps: pd.DataFrame
    step: int | None
    frame: pd.DataFrame
    of_step: pd.DataFrame
    only_sums: bool

    @property
    def groups(self) -> list[str]:
        """The groups of ranks that reduce buckets together, as text, in the order of their lowest ranks.

        Unknown groups are :data:`NOT_RECORDED`.
        """
        return list(dict.fromkeys(self.frame["group_ranks"].fillna(NOT_RECORDED)))

    def of_group(self, group: str) -> pd.DataFrame:
        """Return the buckets of one of :attr:`groups`."""
        return self.frame[self.frame["group_ranks"].fillna(NOT_RECORDED) == group]


class Chosen(NamedTuple):
    """One bucket: its step, and its content."""

    step: int
    content: api.BucketContent


def shown(runs: Runs, name: str, wanted: str | None) -> Shown:
    """Return the buckets of the step ``wanted``, or of a mean step if the run has no such step.

    If a step was repeated after a restart, only its last attempt counts.
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
            at = int(known.iloc[-1])  # all buckets were sent before the first step
        return Shown(of_steps, at, _of_step(run, at), of_steps[known == at], only_sums)

    view: Shown = runs.of_run(f"buckets {step}", name, answer)
    return view


def group_with(groups: Sequence[str], wanted: str | None) -> str:
    """Return the group that contains the first rank of ``wanted``, or else the first group.

    ``wanted`` is a text of ranks or the name of a group.
    """
    if wanted in groups:
        return str(wanted)
    first = re.match(r"\d{1,9}", wanted or "")
    if first is not None:
        for group in groups:
            if group != NOT_RECORDED and int(first[0]) in parse_ranks(group):
                return group
    return groups[0]


def chosen(runs: Runs, name: str, bucket: pd.Series[Any], step: int | None) -> Chosen | None:
    """Return the content of a bucket (``api.bucket_content``) in ``step``, or in the last step that has the bucket.

    Args:
        bucket: The row of the bucket in the result of :func:`shown`.
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
    """Return ``frame`` with the columns ``label`` and ``series``.

    The label is the bucket's number, after the number of the micro-batch if there are several micro-batches.
    """
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

"""Computes the data of one run's traffic figures: answers of the library, summed by step and by purpose."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import pandas as pd

from commprof.analysis import api
from commprof.schema import Op, Phase
from commprof_dash.charts.series import with_series
from commprof_dash.measures import MEASURES

# A browser draws this number of bars without delay. More steps are drawn as means of neighboring steps.
_MOST_BARS: Final = 240
_BEFORE: Final = "before the first step"
_NAMED_OUTSIDE: Final = (Phase.EVALUATION, Phase.CHECKPOINT)
_MEASURE_COLUMNS: Final = [measure.column for measure in MEASURES.values()]


def by_step(run: api.AnyRun) -> pd.DataFrame:
    """Return the traffic per training step.

    The columns are step, steps (the number of steps that a row is the mean of), series, and each measure per
    step. If a step was repeated after a restart, only its last attempt counts.
    """
    frame = _of_a_rank(run, ("attempt", "step", "op", "intended_op"))
    frame = frame[frame["step"] >= 0]
    frame = frame[frame["attempt"] == frame.groupby("step")["attempt"].transform("max")]
    begin, end = (int(frame["step"].min()), int(frame["step"].max()) + 1) if len(frame) else (0, 0)
    each = max(1, -(-(end - begin) // _MOST_BARS))
    frame = with_series(frame[frame["op"] != Op.BARRIER])
    first = begin + (frame["step"] - begin) // each * each
    sums = frame.assign(step=first).groupby(["step", "series"], as_index=False)[_MEASURE_COLUMNS].sum()
    counted = sums["step"].map(lambda first: min(each, end - first)).astype("int64")
    means = {f"{column}_per_step": sums[column] / counted for column in _MEASURE_COLUMNS}
    return sums[["step", "series"]].assign(steps=counted, **means)


def by_purpose(run: api.AnyRun) -> pd.DataFrame:
    """Return the mean traffic of a training step.

    The columns are purpose, phase, op, intended_op, series, and each measure per step.
    """
    frame = with_series(as_executed(api.traffic_by_setting([run]), "_per_step"))
    return frame.assign(purpose=frame["purpose"].fillna("untagged").astype("str"))


def outside_steps(run: api.AnyRun) -> pd.DataFrame:
    """Return the traffic outside of all training steps: when, purpose, series and the total of each measure."""
    frame = _of_a_rank(run, ("step", "after_step", "phase", "purpose", "op", "intended_op"))
    frame = with_series(frame[frame["step"] < 0])
    after = frame["phase"].where(frame["phase"].isin(_NAMED_OUTSIDE), "after the last step")
    frame = frame.assign(
        when=after.where(frame["after_step"].notna(), _BEFORE).astype("str"),
        purpose=frame["purpose"].fillna("untagged").astype("str"),
    )
    sums = frame.groupby(["when", "purpose", "series"], as_index=False)[_MEASURE_COLUMNS].sum()
    return sums.sort_values("when", key=lambda when: when != _BEFORE, kind="stable", ignore_index=True)


def one_offs(run: api.AnyRun) -> pd.DataFrame:
    """Return the one-off traffic: step, when, purpose, series and the total of each measure."""
    opened = run if isinstance(run, api.Run) else api.open_run(Path(run))
    frame = with_series(_job_mean(api.one_offs(opened), opened))
    frame = frame[frame["op"] != Op.BARRIER].assign(
        when=[f"step {step}" for step in frame["step"]],
        purpose=frame["purpose"].fillna("untagged").astype("str"),
    )
    return frame.groupby(["step", "when", "purpose", "series"], as_index=False)[_MEASURE_COLUMNS].sum()


def _of_a_rank(run: api.AnyRun, by: Sequence[str]) -> pd.DataFrame:
    """Return ``api.traffic`` by ``by`` and the group size, with wire bytes as defined by :data:`measures.WIRE`.

    All ranks of a group send a collective, but one rank sends a message.
    """
    opened = run if isinstance(run, api.Run) else api.open_run(Path(run))
    frame = api.traffic(opened, by=(*by, "group_size"))
    return _job_mean(frame, opened)


def _job_mean(frame: pd.DataFrame, run: api.Run) -> pd.DataFrame:
    """Return ``frame`` with the wire bytes of the executed operations, averaged over all ranks of the job."""
    senders = frame["group_size"].where(frame["op"] != Op.SEND, 1)
    ranks = run.manifest.world_size or frame["group_size"].max()
    frame = as_executed(frame)
    return frame.assign(wire_bytes=frame["wire_bytes"] * (senders / ranks))


def as_executed(frame: pd.DataFrame, suffix: str = "") -> pd.DataFrame:
    """Return ``frame`` with the wire bytes of the executed operations, or of the issued ones if these are unknown.

    The wire bytes of the issued operations are in the new column ``issued_wire_bytes``, with ``suffix``.
    """
    issued = frame[f"wire_bytes{suffix}"]
    wire = frame[f"executed_wire_bytes{suffix}"].astype("Float64").fillna(issued.astype("Float64"))
    columns = {f"issued_wire_bytes{suffix}": issued, f"wire_bytes{suffix}": wire.astype(issued.dtype)}
    return frame.assign(**columns)


def compared(runs: Sequence[api.AnyRun]) -> api.Comparison:
    """Return the comparison of the runs, with the wire bytes of the executed operations."""
    comparison = api.compare_both(runs)
    settings, traffic, groups = (
        as_executed(frame, "_per_step")
        for frame in (comparison.settings, comparison.traffic, comparison.groups)
    )
    return comparison._replace(settings=settings, traffic=traffic, groups=groups)


def groups(run: api.AnyRun) -> pd.DataFrame:
    """Return one row per process group.

    The columns are pg, group_desc, group_ranks, group_size, backend, unseen (summed over its ranks), and ranks.
    """
    frame = api.table(run, "groups")
    keys = ["pg", "group_desc", "group_ranks", "group_size", "backend"]
    return frame.groupby(keys, as_index=False, dropna=False).agg(
        unseen=("unseen", "sum"), ranks=("rank", "nunique")
    )

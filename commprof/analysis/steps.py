"""Training steps: when they ran, how long they took, what they sent together."""

from __future__ import annotations

from typing import Final, NamedTuple

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from commprof.analysis.answers import STEP_TIMES, STEP_TOTALS
from commprof.analysis.engine import ask
from commprof.analysis.frames import from_arrow

COLUMNS: Final = ("attempt", "step", "op")  # of the operations that step_times asks for


def step_times(steps: pa.Table, exposure: pa.Table, operations: pa.Table) -> pd.DataFrame:
    """:func:`answer` as a frame."""
    return as_frame(answer(steps, exposure, operations))


def as_frame(answer: pa.Table) -> pd.DataFrame:
    """An :func:`answer` as a frame, with the declared columns."""
    return from_arrow(answer, STEP_TIMES.columns)


def answer(steps: pa.Table, exposure: pa.Table, operations: pa.Table) -> pa.Table:
    """One row per training step and attempt (``queries/step_times.sql``); initialisation is not a step.

    Args:
        exposure: :func:`commprof.analysis.exposure.answer` by attempt and step.
    """
    return ask("step_times", {"steps": steps, "exposure": exposure, "operations": operations})


def durations_after_first(times: pd.DataFrame) -> list[int]:
    """Step durations in ns, without the first step of each attempt (it warms up) and without those that never ended."""
    later = times["step"] > times.groupby("attempt")["step"].transform("min")
    return [int(value) for value in times.loc[later, "duration_ns"].dropna()]


def final_loss(times: pd.DataFrame) -> float | None:
    """Loss of the last step that has one, of the last attempt that has any."""
    losses = times["loss"].dropna()
    return None if losses.empty else float(losses.iloc[-1])


class StepTotals(NamedTuple):
    """What ``steps`` whole training steps sent together.

    ``totals`` has a row for each op, intended_op, purpose, and name and size of the group: how many groups, and their
    collectives, payload_bytes and wire_bytes; the last are those of a rank of the job, the mean over all of them.
    """

    steps: int
    totals: pd.DataFrame


def step_totals(
    steps: pa.Table, operations: pa.Table, times: pd.DataFrame, world_size: int | None
) -> StepTotals:
    """Sums over the whole training steps (``queries/step_totals.sql``), for means of a step.

    A step that a killed run was in is left out; the first step is not, since it sends what every other does.

    Args:
        world_size: ranks of the job; None: as many as the largest group has.
    """
    ranks = world_size or pc.max(operations["group_size"]).as_py() or 1
    answer = ask("step_totals", {"steps": steps, "operations": operations}, world_size=str(int(ranks)))
    return StepTotals(int(times["duration_ns"].notna().sum()), from_arrow(answer, STEP_TOTALS.columns))

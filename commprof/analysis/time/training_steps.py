"""Training steps: their times and durations, and sums of the traffic that they sent."""

from __future__ import annotations

from math import ceil
from typing import Final, NamedTuple

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from commprof.analysis.columns.answers import STEP_TIMES, STEP_TOTALS
from commprof.analysis.columns.frames import from_arrow, from_rows
from commprof.analysis.relations.sql_engine import ask, evaluate
from commprof.analysis.traffic.steady_steps import BESIDE, COUNTED, Steady, Step, steady

COLUMNS: Final = ("attempt", "step", "op")  # columns of the operations that step_times needs


def step_times(steps: pa.Table, exposure: pa.Table, operations: pa.Table) -> pd.DataFrame:
    """Return the result of :func:`answer` as a DataFrame."""
    return as_frame(answer(steps, exposure, operations))


def as_frame(answer: pa.Table) -> pd.DataFrame:
    """Convert the result of :func:`answer` to a DataFrame with the declared columns."""
    return from_arrow(answer, STEP_TIMES.columns)


def answer(steps: pa.Table, exposure: pa.Table, operations: pa.Table) -> pa.Table:
    """Return one row per training step and attempt (``queries/step_times.sql``). Initialization is not a step.

    Args:
        exposure: The result of :func:`commprof.analysis.time.exposure.answer` by attempt and step.
    """
    return answer_of_sums(evaluate("step_sums", {"steps": steps}), exposure, operations)


def answer_of_sums(sums: pa.Table, exposure: pa.Table, operations: pa.Table) -> pa.Table:
    """Return the result of :func:`answer` from rows of the relation step_sums."""
    return ask("step_times", {"step_sums": sums, "exposure": exposure, "operations": operations})


def durations_after_first(times: pd.DataFrame) -> list[int]:
    """Return step durations in ns.

    The first step of each attempt (warm-up) and steps that did not end are excluded.
    """
    later = times["step"] > times.groupby("attempt")["step"].transform("min")
    return [int(value) for value in times.loc[later, "duration_ns"].dropna()]


def final_loss(times: pd.DataFrame) -> float | None:
    """Return the loss of the last step that has a loss, in the last attempt that has one, or None."""
    losses = times["loss"].dropna()
    return None if losses.empty else float(losses.iloc[-1])


class StepTotals(NamedTuple):
    """The traffic that ``steps`` training steps sent together, without one-offs (``steady_steps``).

    ``totals`` has one row for each op, intended_op, purpose, and name and size of the group. A row contains
    the number of groups and their collectives, payload_bytes and wire_bytes. The wire_bytes are means over
    the ranks of the job. The values divided by ``steps`` are the values of one step. They are not rounded: a
    mean of 3.5 collectives over two warm steps is 10.5 in three steps.

    ``weights`` contains the weight of the traffic of each step in the mean step, by attempt, step and the
    columns above.
    """

    steps: int
    totals: pd.DataFrame
    weights: pa.Table | None = None


_KEY: Final = ("op", "intended_op", "purpose", "group_desc", "group_size")
_WEIGHTS: Final = pa.schema(
    [
        *((name, pa.int32()) for name in ("attempt", "step", "group_size")),
        *((name, pa.string()) for name in _KEY if name != "group_size"),
        ("weight", pa.float64()),
    ]
)


def whole_steps(times: pd.DataFrame) -> list[Step]:
    """Return the attempt and number of the training steps that ended."""
    ended = times.loc[times["duration_ns"].notna(), ["attempt", "step"]]
    return [(int(attempt), int(step)) for attempt, step in ended.itertuples(index=False)]


def step_totals(
    steps: pa.Table, operations: pa.Table, times: pd.DataFrame, world_size: int | None
) -> StepTotals:
    """Return sums over the training steps that ended (``queries/step_totals.sql``), for means of a step.

    The unfinished step of a killed run and one-off traffic are excluded.

    Args:
        world_size: The number of ranks of the job. None: the number of ranks of the largest group.
    """
    ranks = world_size or pc.max(operations["group_size"]).as_py() or 1
    rows = ask(
        "step_totals", {"steps": steps, "operations": operations}, world_size=str(int(ranks))
    ).to_pylist()
    ended_steps = whole_steps(times)
    judged = steady(rows, _KEY, ended_steps, ("groups", *BESIDE))
    totals = [
        {**row, "groups": ceil(row["groups"])}
        | {name: None if row[name] is None else row[name] * len(ended_steps) for name in (*COUNTED, *BESIDE)}
        for row in judged.per_step
    ]
    totals.sort(key=lambda row: tuple((row[name] is None, row[name]) for name in _KEY))
    return StepTotals(len(ended_steps), from_rows(totals, STEP_TOTALS.columns), _weights(judged))


def _weights(judged: Steady) -> pa.Table:
    rows = [
        {name: row[name] for name in _KEY} | {"attempt": attempt, "step": step, "weight": weight}
        for row, weights in zip(judged.per_step, judged.weights, strict=True)
        for (attempt, step), weight in weights.items()
    ]
    return pa.table(
        {field.name: pa.array([row[field.name] for row in rows], field.type) for field in _WEIGHTS}
    )

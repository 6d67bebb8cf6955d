"""Compute exposed and overlapped communication.

Both are lengths of time on each rank, in which every moment counts once: see
:mod:`commprof.analysis.time.stalls`. Only this module defines the values of a training step
(:func:`per_step`). These values are medians over the warm steps of means over the ranks. The exposed share is
relative to the median duration of the same steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

import pandas as pd
import pyarrow as pa

from commprof.analysis.columns.answers import EXPOSURE, EXPOSURE_BY, EXPOSURE_PER_STEP
from commprof.analysis.columns.frames import from_arrow, from_rows
from commprof.analysis.relations.sql_engine import ask
from commprof.analysis.time.stalls import stall_times, training_parts
from commprof.analysis.time.warm_steps import warm_steps
from commprof.errors import UsageError
from commprof.trace.reader import Scan

_COUNTS = ("records", "timed", "sampled", "unwaited", "bounded")
EXPOSED = ("exposed_ns", "exposed_low_ns", "exposed_high_ns")
_OVERLAPPED = ("overlapped_ns", "overlapped_at_most_ns")
# The duration of a step may differ between the values of these columns.
_OF_DURATIONS = ("attempt", "rank", "step")


def exposure(
    collectives: pa.Table | Scan,
    steps: pa.Table,
    by: Sequence[str],
    stalls: pa.Table,
    outside_steps: pa.Table,
) -> pd.DataFrame:
    """Return the result of :func:`answer` as a DataFrame."""
    rows = answer(collectives, steps, by, stalls, outside_steps=outside_steps)
    return as_frame(rows, tuple(dict.fromkeys(by)))


def as_frame(answer: pa.Table, by: Sequence[str]) -> pd.DataFrame:
    """Convert the result of :func:`answer` to a DataFrame with the declared columns."""
    return from_arrow(answer, (*(EXPOSURE_BY[name] for name in by), *EXPOSURE.columns))


def counts(collectives: pa.Table | Scan, by: Sequence[str], stalls: pa.Table) -> pa.Table:
    """Return how many records of each rank have which times, by the columns ``by``.

    The query is ``queries/exposure_counts.sql``.
    """
    tables = {"collectives": collectives, "stalls": stalls}
    return ask("exposure_counts", tables, by=_listed(by), of_row=_listed(by, "c."))


def answer(
    collectives: pa.Table | Scan,
    steps: pa.Table,
    by: Sequence[str],
    stalls: pa.Table,
    stall_rows: pa.Table | None = None,
    counted: pa.Table | None = None,
    participating: pa.Table | None = None,
    outside_steps: pa.Table | None = None,
) -> pa.Table:
    """Return exposed and overlapped time for each combination of the columns ``by``, or one row without any.

    Args:
        stalls: The intervals in which C++ waited.
        stall_rows: The rows of :func:`stall_times` by these columns, if they are known.
        counted: The result of :func:`counts` by at least these columns, if it is known.
        participating: The number of ranks that take part in each combination without the step, if it is
            known.
        outside_steps: The checkpoints within steps. They are not used if ``stall_rows`` is passed.

    Raises:
        UsageError: A column of ``by`` cannot be grouped by.
    """
    by = tuple(dict.fromkeys(by))
    for name in by:
        if name not in EXPOSURE_BY:
            near = get_close_matches(name, EXPOSURE_BY, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise UsageError(
                f"exposure cannot be grouped by {name!r}: {hint}choose from {', '.join(EXPOSURE_BY)}"
            )
    # SQL has no parameter for a list of columns, so each clause that depends on ``by`` is inserted as text. The ranks
    # that take part in a combination are counted over all steps, so the step is in no partition.
    lasting = [name for name in by if name in _OF_DURATIONS]
    per_rank = "rank" in by
    partition = [name for name in by if name != "step"]
    # An index contains some of these tables. The others are computed from the records.
    if counted is None:
        counted = counts(collectives, by, stalls)
    if stall_rows is None:
        parts = steps if outside_steps is None else training_parts(steps, outside_steps)
        stall_rows = stall_times(collectives, parts, by, stalls)
    if participating is None:
        participating = ask("exposure_ranks", {"counts": counted}, partition=_listed(partition))
    return ask(
        "exposure",
        {
            "stall_times": stall_rows,
            "counts": counted,
            "participating": participating,
            "steps": steps,
        },
        by=_listed(by),
        of_row=_listed(by, "c."),
        partition=_listed(partition),
        same_partition=" and ".join(f"p.{name} is not distinct from s.{name}" for name in partition)
        or "1 = 1",
        group_by=f"group by {', '.join(by)}" if by else "",
        order_by=f"order by {', '.join(f'c.{name}' for name in by)}" if by else "",
        per_rank="rank," if per_rank else "",
        and_rank="and d.rank = s.rank" if per_rank else "",
        of_duration=_listed(lasting),
        group_by_duration=f"group by {', '.join(lasting)}" if lasting else "",
        on_duration=" and ".join(f"l.{name} = c.{name}" for name in lasting) or "1 = 1",
    )


def _listed(names: Sequence[str], table: str = "") -> str:
    return "".join(f"{table}{name}, " for name in names)


def per_step(by_purpose: pd.DataFrame, by_step: pd.DataFrame, times: pd.DataFrame) -> pd.DataFrame:
    """Return exposed and overlapped time of a training step by purpose, with the total in the last row.

    Args:
        by_purpose: The exposure by attempt, step and purpose.
        by_step: The exposure by attempt and step.
        times: The training steps (:data:`answers.STEP_TIMES`).
    """
    steps = warm_steps(times)
    if not len(steps):
        return from_rows([], EXPOSURE_PER_STEP.columns)
    every = steps[["attempt", "step", "duration_ns", *EXPOSED]].merge(
        by_step.drop(columns=list(EXPOSED)), on=["attempt", "step"], how="left"
    )
    rows = []
    for purpose, part in by_purpose.groupby("purpose", dropna=False):
        joined = every[["attempt", "step", "duration_ns"]].merge(part, on=["attempt", "step"], how="left")
        if joined["records"].notna().any():
            rows.append(_typical(None if pd.isna(purpose) else str(purpose), _over_ranks(joined, every)))
    # Among equal values, rows without a purpose come last.
    rows.sort(key=lambda row: (-(row["exposed_low_ns"] or 0), row["purpose"] or "~"))
    return from_rows([*rows, _typical("all", every)], EXPOSURE_PER_STEP.columns)


def _over_ranks(part: pd.DataFrame, by_step: pd.DataFrame) -> pd.DataFrame:
    """Return ``part`` with means over all ranks of ``by_step`` instead of the participating ranks.

    No value of a purpose can then exceed the value of the whole step.
    """
    factor = part["ranks"].astype(float) / by_step["ranks"].astype(float)
    means = {name: part[name].astype(float) * factor for name in (*EXPOSED, *_OVERLAPPED)}
    return part.assign(**{name: values.mask(part["records"].isna(), 0.0) for name, values in means.items()})


def _typical(purpose: str | None, part: pd.DataFrame) -> dict[str, Any]:
    """Return a row of :func:`per_step`, from the values of one purpose or of all purposes in each warm step."""
    idle = part["records"].isna()
    part = part.assign(**{name: part[name].astype(float).mask(idle, 0.0) for name in _OVERLAPPED})
    row: dict[str, Any] = {"purpose": purpose, "steps": len(part)}
    row |= {name: int(part[name].fillna(0).sum()) for name in _COUNTS}
    row |= medians(part, (*EXPOSED, *_OVERLAPPED))
    if not row["records"]:  # nothing was issued, or only sums are stored
        row |= dict.fromkeys(_OVERLAPPED)
    return row


def medians(steps: pd.DataFrame, names: Sequence[str]) -> dict[str, Any]:
    """Return the medians over ``steps`` of the columns ``names`` and of the duration, and the exposed share.

    A column that is null in any step has no median. A lower bound that is null counts as 0 if it is known in
    some step.
    """
    row: dict[str, Any] = {"step_ns": _median(steps["duration_ns"])}
    for name in names:
        known = steps[name].notna()
        lower = name == "exposed_low_ns" and known.any()
        row[name] = _median(steps[name].fillna(0)) if lower or (len(steps) and known.all()) else None
    return row | {"exposed_share": share(row["exposed_ns"], row["step_ns"])}


def _median(values: pd.Series[Any]) -> int | None:
    return round(float(values.astype(float).median())) if len(values) else None


def share(exposed_ns: float | None, step_ns: float | None) -> float | None:
    """Return exposed time as a share of its step, or None if one of the two times is not known.

    >>> share(25, 100), share(None, 100), share(25, 0)
    (0.25, None, None)
    """
    return None if exposed_ns is None or not step_ns else float(exposed_ns) / float(step_ns)

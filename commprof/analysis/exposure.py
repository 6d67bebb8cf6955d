"""What collectives cost the program in time (exposed), and what they hid behind its work (overlapped).

Both are lengths of time on each rank, in which every moment counts once: see :mod:`commprof.analysis.standstill`.
"""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

import pandas as pd
import pyarrow as pa

from commprof.analysis.answers import EXPOSURE, EXPOSURE_BY, EXPOSURE_PER_STEP
from commprof.analysis.engine import ask
from commprof.analysis.frames import from_arrow, from_rows
from commprof.analysis.standstill import standstill
from commprof.errors import UsageError
from commprof.trace.reader import Scan

_OF_DURATIONS = ("attempt", "rank", "step")  # a step lasts differently long by these


def exposure(collectives: pa.Table | Scan, steps: pa.Table, by: Sequence[str]) -> pd.DataFrame:
    """:func:`answer` as a frame."""
    return as_frame(answer(collectives, steps, by), tuple(dict.fromkeys(by)))


def as_frame(answer: pa.Table, by: Sequence[str]) -> pd.DataFrame:
    """An :func:`answer` as a frame, with the declared columns."""
    return from_arrow(answer, (*(EXPOSURE_BY[name] for name in by), *EXPOSURE.columns))


def counts(collectives: pa.Table | Scan, by: Sequence[str]) -> pa.Table:
    """What the records of each rank know of their times, by the columns ``by`` (``queries/exposure_counts.sql``)."""
    return ask("exposure_counts", {"collectives": collectives}, by=_listed(by))


def answer(
    collectives: pa.Table | Scan,
    steps: pa.Table,
    by: Sequence[str],
    standing: pa.Table | None = None,
    counted: pa.Table | None = None,
) -> pa.Table:
    """Exposed and overlapped time for each combination of the columns ``by``; without any, one row.

    Args:
        standing: what :func:`standstill` says by these columns, where that is known.
        counted: :func:`counts` by these columns at least, where they are known.

    Raises:
        UsageError: a column of ``by`` cannot be grouped by.
    """
    by = tuple(dict.fromkeys(by))
    for name in by:
        if name not in EXPOSURE_BY:
            near = get_close_matches(name, EXPOSURE_BY, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise UsageError(
                f"exposure cannot be grouped by {name!r}: {hint}choose from {', '.join(EXPOSURE_BY)}"
            )
    lasting = [name for name in by if name in _OF_DURATIONS]
    per_rank = "rank" in by
    return ask(
        "exposure",
        {
            "standstill": standstill(collectives, steps, by) if standing is None else standing,
            "counts": counts(collectives, by) if counted is None else counted,
            "steps": steps,
        },
        by=_listed(by),
        of_row=_listed(by, "c."),
        partition=_listed([name for name in by if name != "step"]),
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


def per_step(by_purpose: pd.DataFrame, whole: pd.DataFrame) -> pd.DataFrame:
    """What a training step typically stands still for, by purpose and, in the last row, altogether.

    Args:
        by_purpose: exposure by attempt, step and purpose.
        whole: exposure by attempt and step.

    Steps that did not end, and the first of each attempt where there are others, are left out: it warms up.
    """
    ended = whole[(whole["step"] >= 0).fillna(False) & whole["step_ns"].notna()]
    later = ended[ended["step"] > ended.groupby("attempt")["step"].transform("min")]
    steps = later if len(later) else ended
    keys = steps[["attempt", "step"]]
    rows = []
    for purpose, part in by_purpose.groupby("purpose", dropna=False):
        named = None if pd.isna(purpose) else str(purpose)
        found = keys.merge(part, on=["attempt", "step"], how="left")
        if found["records"].notna().any():
            rows.append(_typical(named, found, steps))
    rows.sort(
        key=lambda row: (-(row["exposed_ns"] or 0), row["purpose"] or "~")
    )  # what has no purpose comes last
    if len(steps):
        rows.append(_typical("all", steps, steps))
    return from_rows(rows, EXPOSURE_PER_STEP.columns)


def _typical(purpose: str | None, part: pd.DataFrame, steps: pd.DataFrame) -> dict[str, Any]:
    counts = {name: int(part[name].fillna(0).sum()) for name in ("records", "timed", "sampled", "unwaited")}
    row: dict[str, Any] = {"purpose": purpose, "steps": len(steps), **counts}
    for name in ("exposed_ns", "overlapped_ns"):
        known = part[name].notna().any()
        row[name] = round(float(part[name].fillna(0).astype(float).median())) if known else None
    total = float(steps["step_ns"].astype(float).sum())
    spent = float(part["exposed_ns"].fillna(0).astype(float).sum())
    row["exposed_share"] = spent / total if total and row["exposed_ns"] is not None else None
    return row

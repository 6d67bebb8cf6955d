"""Arrivals: when each rank came to each collective, on one clock, and which rank the others wait for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from commprof.align.arrivals import arrivals as align
from commprof.align.reference_clock import ReferenceClock
from commprof.analysis.answers import ARRIVALS
from commprof.analysis.frames import from_arrow
from commprof.analysis.units import format_ns
from commprof.trace.reader import Run

# A rank that stands out is named when the others stood still for it for this part of the time at least.
_WORTH_SAYING: Final = 0.01


def arrivals(collectives: pa.Table, clocks: pa.Table, offsets: pa.Table, one_host: bool) -> pa.Table:
    """One row per record that can have partners (:func:`commprof.align.arrivals.arrivals`).

    ``one_host``: processes that left no clock count as sharing one.
    """
    return align(collectives, ReferenceClock(clocks.to_pylist(), offsets.to_pylist(), one_host))


def reference_clock(run: Run) -> ReferenceClock:
    """The clock of ``run``: of one host, processes that left no clock count as sharing one."""
    return ReferenceClock(
        run.table("clocks").to_pylist(),
        run.table("clock_offsets").to_pylist(),
        one_host=len(run.manifest.hosts) < 2,
    )


def aligned(run: Run, also: Sequence[str] = ()) -> Callable[[pa.Table], pa.Table]:
    """From records of ``run`` (whole collectives) to their arrivals (:func:`commprof.align.arrivals.arrivals`)."""
    clock = reference_clock(run)
    return lambda records: align(records, clock, also)


def arrivals_frame(arrived: pa.Table) -> pd.DataFrame:
    """:func:`arrivals` as a frame."""
    return from_arrow(arrived, ARRIVALS.columns)


def statement(frame: pd.DataFrame, span_ns: int, unknown: int) -> str | None:
    """What the stragglers of a run mean, in one or two sentences; None where there is nothing to say.

    Args:
        frame: one row per rank.
        span_ns: the time from the first arrival to the last.
        unknown: collectives whose ranks have clocks that were never compared.
    """
    if frame.empty:
        return _incomparable(unknown)
    cost = frame["others_waited_ns"].fillna(frame["lead_ns"])
    late = frame[frame["stands_out"] & (cost >= _WORTH_SAYING * span_ns)]
    sentences = [_sentence(row) for _, row in late.sort_values("lead_ns", ascending=False).iterrows()]
    if not sentences and int(frame["within_bound"].sum()) * 2 > int(frame["collectives"].max()):
        bound = format_ns(float(frame["error_ns"].max()))
        sentences.append(
            f"No rank is distinguishable: in most collectives the last rank came within what the clocks of the hosts may "
            f"be wrong by ({bound})."
        )
    incomparable = _incomparable(unknown)
    return " ".join([*sentences, *([incomparable] if incomparable else [])]) or None


def _sentence(row: pd.Series) -> str:
    share = 100 * row["last"] / row["collectives"]
    error = f", to within {format_ns(float(row['error_ns']))}" if row["error_ns"] else ""
    came = f"Rank {row['rank']} was the last to come to {share:.0f} % of {row['collectives']:,} collectives{error}"
    if pd.isna(row["others_waited_ns"]):
        missing = format_ns(float(row["lead_ns"]))
        return f"{came}; it alone was missing for {missing} in all, and whether the others stood still was not seen."
    waited = f"{format_ns(float(row['others_waited_ns']))} in all"
    if not pd.isna(row["others_waited_per_step_ns"]):
        waited = f"{format_ns(float(row['others_waited_per_step_ns']))} a step"
    return f"{came}; the others stood still {waited} for it."


def _incomparable(unknown: int) -> str | None:
    if not unknown:
        return None
    return (
        f"In {unknown:,} collectives it cannot be told who was last: the clocks of their hosts were never compared "
        "(rank 0 was not recorded, could not be reached, or the job ended first)."
    )


def incomparable(arrived: pa.Table) -> int:
    """Collectives of several recorded ranks whose times could not be compared."""
    unknown = pc.is_null(arrived["lateness_ns"])
    if not pc.any(unknown).as_py():
        return 0
    several = pc.and_(pc.greater(arrived["members"], 1), unknown)
    return int(pc.count_distinct(arrived["collective"].filter(several)).as_py())

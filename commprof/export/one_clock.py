"""The operations of a run on one clock, each with its end, and which of other ranks are the same collective."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa

from commprof.align.collectives import matchable, same_collective
from commprof.align.reference_clock import ReferenceClock
from commprof.analysis.api import Run

_ENDS: Final = ("return_ns", "wait_end_ns", "device_end_ns")
NO_PARTNER: Final = -1


class Operations(NamedTuple):
    """Rows of ``collectives`` in order of rank and issue, with what an export adds to each."""

    rows: list[dict[str, Any]]
    shift_ns: np.ndarray[Any, Any]  # to be added to a row's times
    collective: np.ndarray[Any, Any]  # number of the collective or message, NO_PARTNER for none
    unknown_clocks: int  # rows whose clock was never compared with the reference


def operations(run: Run) -> Operations:
    """All records of ``run``. Of hosts whose clocks were never compared the times stay their own."""
    table = run.table("collectives").sort_by(
        [("rank", "ascending"), ("attempt", "ascending"), ("pid", "ascending"), ("seq", "ascending")]
    )
    clock = ReferenceClock(
        run.table("clocks").to_pylist(),
        run.table("clock_offsets").to_pylist(),
        one_host=len(run.manifest.hosts) < 2,
    )
    if not len(table):
        return Operations([], np.zeros(0, np.int64), np.zeros(0, np.int64), 0)
    readings = clock.readings(table)
    one_clock = len(np.unique(readings.clock)) == 1
    shift = np.zeros(len(table), np.int64) if one_clock else np.where(readings.known, readings.offset_ns, 0)
    numbered = table.append_column("row", pa.array(np.arange(len(table))))
    partners = matchable(numbered)
    collective = np.full(len(table), NO_PARTNER, np.int64)
    collective[partners["row"].to_numpy()] = same_collective(partners)
    unknown = 0 if one_clock else int((~readings.known).sum())
    return Operations(table.to_pylist(), shift, collective, unknown)


def end_of(row: Mapping[str, Any]) -> int:
    """When the last that is known of an operation happened: its call returned, its wait ended, or the device was done."""
    return max(int(row[name]) for name in ("issue_ns", *_ENDS) if row[name] is not None)

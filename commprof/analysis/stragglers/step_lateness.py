"""Sum arrivals by training step: the lateness of each rank and how long the others waited for it."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from commprof.analysis.columns.detailed_answers import LATENESS_OF_STEPS
from commprof.analysis.columns.dictionary_encoding import among
from commprof.analysis.columns.frames import from_arrow
from commprof.analysis.stragglers.late_ranks import Waits
from commprof.analysis.stragglers.rank_lateness import ALL_FOR_ALL

Numbers = npt.NDArray[np.int64]

_MOST_RANGES: Final = 250  # the most ranges of steps in the answer, because a chart cannot show more
_KEY: Final = ("attempt", "step", "rank")
_COUNTS: Final = ("collectives", "last", "expected_last")


class StepLateness:
    """Collects arrivals, one partition after another."""

    def __init__(self) -> None:
        self._sums: list[pa.Table] = []

    def add(self, arrived: pa.Table) -> None:
        """Add arrivals."""
        several = pc.and_(pc.greater(arrived["members"], 1), arrived["lateness_ns"].is_valid())
        rows = arrived.filter(pc.and_(several, pc.greater_equal(arrived["step"], 0)))
        counted = rows["is_last"].is_valid().to_numpy() & among(rows["op"], ALL_FOR_ALL)
        last = counted & _flags(rows["is_last"]) & _flags(rows["certain"])
        lateness = pc.if_else(rows["is_p2p"], pa.scalar(None, pa.int64()), rows["lateness_ns"])
        table = pa.table(
            {
                **{name: rows[name].cast(pa.int64()) for name in _KEY},
                "lateness_ns": lateness,
                "collectives": counted.astype(np.int64),
                "last": last.astype(np.int64),
                "expected_last": counted / np.maximum(rows["members"].to_numpy(), 1),
            }
        )
        self._sums.append(_summed(table, _COUNTS))

    def answer(self, warm: set[int], waits: Waits) -> pd.DataFrame:
        """Return one row per rank and step, or per rank and range of steps (LATENESS_OF_STEPS).

        Args:
            warm: The steps without warm-up, on which the verdict is based, each with its attempt as one
                number.
            waits: The waits of other ranks for each rank.
        """
        names = LATENESS_OF_STEPS.names
        waits = Waits(*(each[np.isin(waits.code, _array(warm))] for each in waits))
        of_waits = pa.table(
            {
                "attempt": waits.code >> 32,
                "step": waits.code & 0xFFFFFFFF,
                "rank": waits.rank,
                **dict(zip(names[-3:], waits[2:], strict=True)),
            }
        )
        every = _summed(
            pa.concat_tables([*self._sums, of_waits], promote_options="default"), (*_COUNTS, *names[-3:])
        )
        codes = (every["attempt"].to_numpy() << 32) + every["step"].to_numpy()
        steps, place = np.unique(codes, return_inverse=True)
        is_warm = np.isin(steps, _array(warm))
        ranges = _ranges(steps, is_warm)
        firsts = np.flatnonzero(np.diff(ranges, prepend=-1))
        added = (
            every.append_column("range", pa.array(ranges[place]))
            .group_by(["range", "rank"])
            .aggregate([("lateness_ns", "mean"), *((name, "sum") for name in (*_COUNTS, *names[-3:]))])
        )
        added = added.sort_by([("range", "ascending"), ("rank", "ascending")])
        of_range = added["range"].to_numpy()
        first = steps[firsts][of_range]
        return from_arrow(
            pa.table(
                {
                    "rank": added["rank"],
                    "attempt": first >> 32,
                    "step": first & 0xFFFFFFFF,
                    "steps": np.bincount(ranges, minlength=1)[of_range] if len(steps) else first,
                    "is_warm": is_warm[firsts][of_range],
                    "lateness_ns": pc.cast(pc.round(added["lateness_ns_mean"]), pa.int64()),
                    **{name: added[f"{name}_sum"] for name in (*_COUNTS, *names[-3:])},
                }
            ),
            LATENESS_OF_STEPS.columns,
        )


def _summed(rows: pa.Table, sums: tuple[str, ...]) -> pa.Table:
    """Return the largest lateness and the ``sums`` of each rank and step."""
    added = rows.group_by(list(_KEY)).aggregate([("lateness_ns", "max"), *((name, "sum") for name in sums)])
    columns = [*_KEY, "lateness_ns_max", *(f"{name}_sum" for name in sums)]
    named = added.select(columns).rename_columns([*_KEY, "lateness_ns", *sums])
    for name in sums:
        place = named.column_names.index(name)
        named = named.set_column(place, name, pc.fill_null(named[name], pa.scalar(0, named[name].type)))
    return named


def _ranges(steps: Numbers, is_warm: npt.NDArray[np.bool_]) -> Numbers:
    """Return the number of the range of each of ``steps``.

    A range contains consecutive steps of one attempt. The ranges are just long enough that the answer has few
    enough ranges.
    """
    if not len(steps):
        return np.zeros(0, np.int64)
    width = -(-len(steps) // _MOST_RANGES)
    kinds = np.cumsum(
        np.diff(steps >> 32, prepend=steps[0] >> 32).astype(bool) | np.diff(is_warm, prepend=is_warm[0])
    )
    begins = np.flatnonzero(np.diff(kinds, prepend=-1))
    within = np.arange(len(steps)) - begins[np.searchsorted(begins, np.arange(len(steps)), "right") - 1]
    numbers: Numbers = np.cumsum(within % width == 0) - 1
    return numbers


def _array(steps: set[int]) -> Numbers:
    return np.fromiter(steps, np.int64, len(steps))


def _flags(values: pa.ChunkedArray) -> npt.NDArray[np.bool_]:
    flags: npt.NDArray[np.bool_] = pc.fill_null(values, False).to_numpy()
    return flags

"""Sum the arrivals of each rank: its lateness, how often it arrives last, and the causes of its waits.

The sums are not computed in SQL. Quantiles need every lateness value of a rank. Sorting the values of one
rank at a time takes a fraction of the time and memory of aggregates over all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from commprof.align.ranks.rank_arrivals import CAUSES
from commprof.align.sequences.group_ids import placed_by
from commprof.analysis.columns.answers import STRAGGLERS
from commprof.analysis.columns.detailed_answers import LATENESS, WAITING_CAUSES
from commprof.analysis.columns.dictionary_encoding import among, ranked
from commprof.analysis.columns.frames import from_rows
from commprof.analysis.stragglers.rank_values import RankValues, quantile
from commprof.schema import Op

Numbers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

# The root of a broadcast waits for no rank. A late sender of a message is not necessarily slow, so messages are
# excluded.
ALL_FOR_ALL: Final = (Op.ALL_REDUCE, Op.REDUCE_SCATTER, Op.ALL_GATHER, Op.ALL_TO_ALL, Op.BARRIER)
_QUANTILES: Final = {"p5_ns": 0.05, "p25_ns": 0.25, "median_ns": 0.5, "p75_ns": 0.75, "p95_ns": 0.95}
_MEASURED: Final = ("lateness_ns", "lateness_error_ns", "error_ns")
_TIMES: Final = ("waiting_ns", "launch_ns", "transfer_ns")  # in the order of CAUSES


def last_ones(arrived: pa.Table) -> Numbers:
    """Return the row indices of the last ranks, in collectives in which every rank waits for every other rank."""
    return np.flatnonzero(
        pc.fill_null(arrived["is_last"], False).to_numpy() & among(arrived["op"], ALL_FOR_ALL)
    )


class RankLateness:
    """Collects arrivals, one partition after another, and answers over all of them. Must be closed.

    The sums of each rank stay in memory. The values that are needed for medians and other quantiles are in a
    file.
    """

    def __init__(self) -> None:
        self._sums: list[pa.Table] = []
        self._steps: set[int] = set()
        self._values = RankValues(_MEASURED)

    def close(self) -> None:
        """Close the file."""
        self._values.close()

    def add(self, arrived: pa.Table) -> None:
        """Add arrivals."""
        encoded = pc.dictionary_encode(arrived["rank"].combine_chunks())
        part = _Part(arrived, encoded)
        several = (arrived["members"].to_numpy() > 1) & arrived["lateness_ns"].is_valid().to_numpy()
        # Count only collectives in which every rank waits for every other rank and that all ranks recorded.
        counted = arrived["is_last"].is_valid().to_numpy() & among(arrived["op"], ALL_FOR_ALL)
        last_ones = np.flatnonzero(counted & part.flags("is_last"))
        self._see_steps(arrived, last_ones)
        self._sums.append(
            pa.table(
                {
                    "rank": encoded.dictionary,
                    **_of_counted(part, np.flatnonzero(counted)),
                    **_of_last(part, last_ones),
                    **_of_causes(part, np.flatnonzero(several)),
                }
            )
        )
        for is_counted, kind in ((True, counted), (False, several & ~counted)):
            rows = np.flatnonzero(kind)
            rows = rows[placed_by(part.rank[rows])]
            values = [part.numbers(name)[rows] for name in _MEASURED]
            self._values.add(is_counted, encoded.dictionary.to_pylist(), part.count(rows).tolist(), values)

    def _see_steps(self, arrived: pa.Table, rows: Numbers) -> None:
        attempt, step = (arrived[name].to_numpy()[rows].astype(np.int64) for name in ("attempt", "step"))
        inside = step >= 0
        self._steps.update(np.unique((attempt[inside] << 32) + step[inside]).tolist())

    def _ranks(self) -> Iterator[dict[str, Any]]:
        """Yield the sums of each rank, in order of rank."""
        if self._sums:
            every = pa.concat_tables(self._sums)
            names = [name for name in every.column_names if name != "rank"]
            added = every.group_by("rank").aggregate([(name, "sum") for name in names])
            yield from (
                added.select(["rank", *(f"{name}_sum" for name in names)])
                .rename_columns(["rank", *names])
                .sort_by("rank")
                .to_pylist()
            )

    def stragglers(self) -> pd.DataFrame:
        """Return how often each rank arrived last and how long the others waited for it (answers.STRAGGLERS).

        A rank stands out if two conditions are true. The rank was last in at least 1.5 times as many
        collectives as expected among equal ranks. The count is also above chance (three standard deviations).
        """
        rows = []
        for sums in self._ranks():
            if not sums["collectives"]:
                continue
            lateness, error = (
                self._values.of(sums["rank"], name, (True,)) for name in ("lateness_ns", "error_ns")
            )
            last, expected = sums["last"], sums["expected_last"]
            waited, in_steps = (_waited(sums, where) for where in ("", "_in_steps"))
            chance = expected + 3 * math.sqrt(sums["expected_variance"])
            rows.append(
                sums
                | {
                    "mean_lateness_ns": _rounded(sums["lateness_ns"] / sums["collectives"]),
                    "median_lateness_ns": _rounded(quantile(np.sort(lateness), 0.5)),
                    "error_ns": _rounded(quantile(np.sort(error), 0.5)),
                    "others_waited_ns": waited,
                    "others_waited_per_step_ns": _rounded(in_steps / len(self._steps))
                    if self._steps and in_steps is not None
                    else None,
                    "others_waited_own_ns": _if_known(sums, "own_waited"),
                    "others_waited_inherited_ns": _if_known(sums, "inherited_waited"),
                    "stands_out": last > chance and last >= 1.5 * expected,
                }
            )
        return from_rows(rows, STRAGGLERS.columns)

    def lateness(self) -> pd.DataFrame:
        """Return quantiles of the lateness of each rank, over the collectives of several ranks (LATENESS)."""
        rows = []
        for sums in self._ranks():
            of_rank = (self._values.of(sums["rank"], name) for name in ("lateness_ns", "lateness_error_ns"))
            lateness, error = map(np.sort, of_rank)
            if len(lateness):
                quantiles_ns = {name: round(quantile(lateness, share)) for name, share in _QUANTILES.items()}
                quantiles_ns |= {"highest_ns": int(lateness[-1]), "error_ns": round(quantile(error, 0.5))}
                rows.append({"rank": sums["rank"], "collectives": len(lateness), **quantiles_ns})
        return from_rows(rows, LATENESS.columns)

    def causes(self) -> pd.DataFrame:
        """Return the causes of the waits of each rank, beyond the clock error (WAITING_CAUSES).

        There is one row per rank and cause, even if the rank has no wait with this cause.
        """
        return from_rows(
            (
                {
                    "rank": sums["rank"],
                    "cause": cause,
                    "collectives": sums[cause],
                    "of_collectives": sums["compared"],
                    "time_ns": sums[f"{cause}_ns"],
                }
                for sums in self._ranks()
                if sums["compared"]
                for cause in CAUSES
            ),
            WAITING_CAUSES.columns,
        )


class _Part:
    """The arrivals of one partition, with methods that sum rows by rank."""

    def __init__(self, arrived: pa.Table, ranks: pa.DictionaryArray) -> None:
        self._arrived = arrived
        self.rank = ranks.indices.to_numpy()
        self.ranks = len(ranks.dictionary)

    def numbers(self, name: str) -> Numbers:
        """Return a column in which null is replaced by 0."""
        numbers: Numbers = pc.fill_null(self._arrived[name], 0).to_numpy()
        return numbers

    def flags(self, name: str) -> npt.NDArray[np.bool_]:
        """Return a column of flags in which null is replaced by false."""
        flags: npt.NDArray[np.bool_] = pc.fill_null(self._arrived[name], False).to_numpy()
        return flags

    def known(self, name: str) -> npt.NDArray[np.bool_]:
        """Return which rows of a column are not null."""
        known: npt.NDArray[np.bool_] = self._arrived[name].is_valid().to_numpy()
        return known

    def cause(self) -> Numbers:
        """Return the index of the cause of each row in CAUSES, or -1 for a row without a cause."""
        encoded = ranked(self._arrived["cause"])
        numbers = pc.index_in(encoded.dictionary, pa.array(CAUSES)).take(encoded.indices)
        causes: Numbers = pc.fill_null(numbers, -1).to_numpy()
        return causes

    def count(self, rows: Numbers) -> Numbers:
        """Return the number of ``rows`` of each rank."""
        return np.bincount(self.rank[rows], minlength=self.ranks)

    def sum(self, rows: Numbers, values: npt.NDArray[Any]) -> Floats:
        """Return the sum of ``values`` by rank, with one value for each of ``rows``. Exact below 2**53."""
        return np.bincount(self.rank[rows], weights=values, minlength=self.ranks).astype(np.float64)


def _of_counted(part: _Part, rows: Numbers) -> Mapping[str, npt.NDArray[Any]]:
    members = part.numbers("members")[rows]
    return {
        "collectives": part.count(rows),
        "expected_last": part.sum(rows, 1 / members),
        "expected_variance": part.sum(rows, (members - 1) / members / members),
        "lateness_ns": part.sum(rows, part.numbers("lateness_ns")[rows]),
    }


def _of_last(part: _Part, rows: Numbers) -> Mapping[str, npt.NDArray[Any]]:
    """Return sums over the last ranks. Costs are summed only if it is certain which rank was last.

    The sums ``timed`` count the collectives with recorded waits.
    """
    certain = rows[part.flags("certain")[rows]]
    sums = {
        "last": part.count(certain),
        "within_bound": part.count(rows) - part.count(certain),
        "lead_ns": part.sum(certain, part.numbers("lead_ns")[certain]).astype(np.int64),
        **_of_own(part, certain),
    }
    waited, known = part.numbers("others_waited_ns"), part.known("others_waited_ns")
    in_steps = certain[part.numbers("step")[certain] >= 0]
    for where, some in (("", certain), ("_in_steps", in_steps)):
        sums |= {
            f"last{where}": part.count(some),
            f"timed{where}": part.count(some[known[some]]),
            f"waited{where}": part.sum(some, waited[some]).astype(np.int64),
        }
    return sums


def _of_own(part: _Part, certain: Numbers) -> Mapping[str, npt.NDArray[Any]]:
    """Return how long the others waited for the own delay and for the inherited delay of each rank.

    Only collectives in which both parts are known are summed.
    """
    split = certain[part.known("others_waited_own_ns")[certain]]
    own, waited = (part.numbers(name)[split] for name in ("others_waited_own_ns", "others_waited_ns"))
    return {
        "told": part.count(split),
        "own_waited": part.sum(split, own).astype(np.int64),
        "inherited_waited": part.sum(split, waited - own).astype(np.int64),
    }


def _of_causes(part: _Part, rows: Numbers) -> Mapping[str, npt.NDArray[Any]]:
    cause = part.cause()[rows]
    sums = {"compared": part.count(rows)}
    for number, (name, times) in enumerate(zip(CAUSES, _TIMES, strict=True)):
        some = rows[cause == number]
        sums[name] = part.count(some)
        sums[f"{name}_ns"] = part.sum(some, part.numbers(times)[some]).astype(np.int64)
    return sums


def _waited(sums: Mapping[str, Any], where: str) -> int | None:
    """Return how long the other ranks waited for a rank.

    The value is null if the rank was last but none of the waits were recorded. The value is 0 for a rank that
    was never last.
    """
    return sums[f"waited{where}"] if sums[f"timed{where}"] or not sums[f"last{where}"] else None


def _if_known(sums: Mapping[str, Any], name: str) -> int | None:
    """Return the sum ``name``, or null if the rank was last and no cause is known for its collectives."""
    return sums[name] if sums["told"] or not sums["last"] else None


def _rounded(value: float) -> int:
    """Return ``value`` rounded half up."""
    return math.floor(value + 0.5)

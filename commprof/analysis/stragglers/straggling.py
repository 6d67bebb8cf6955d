"""Find the stragglers of a run: collect arrivals, one partition after another, and answer over all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from typing import Any, Final, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from commprof.analysis.columns.defaults import MOST_LATE
from commprof.analysis.stragglers import arrivals
from commprof.analysis.stragglers.arrival_spread import late_collectives, worst
from commprof.analysis.stragglers.late_ranks import LastRanks, Waits
from commprof.analysis.stragglers.late_roots import RootedCollectives
from commprof.analysis.stragglers.late_verdict import verdict
from commprof.analysis.stragglers.rank_lateness import RankLateness, last_ones
from commprof.analysis.stragglers.slow_paths import Paths
from commprof.analysis.stragglers.step_lateness import StepLateness

# The lowest ratio of the cost of a rank to its own waiting for the other rank. Of two equal ranks, one seldom costs so
# much more.
_MORE_THAN_WAITED: Final = 4


class Straggling(NamedTuple):
    """The answer about stragglers in five tables: see :func:`commprof.analysis.api.straggling`."""

    ranks: pd.DataFrame
    lateness: pd.DataFrame
    causes: pd.DataFrame
    collectives: pd.DataFrame
    steps: pd.DataFrame


class Collector:
    """Collects arrivals, one partition after another, and answers over all of them. Must be closed.

    Args:
        limit: The highest number of individual collectives in the answer.
        hosts: The host of each rank.
    """

    def __init__(self, limit: int = MOST_LATE, hosts: Mapping[int, str] | None = None) -> None:
        self._limit = limit
        self._ranks, self._steps = RankLateness(), StepLateness()
        self._last_ranks, self._rooted, self._paths = LastRanks(), RootedCollectives(), Paths(hosts or {})
        self._late: pa.Table | None = None
        self._first: int | None = None
        self._last: int | None = None
        self._unknown = 0

    def close(self) -> None:
        """Close the files of the collector."""
        self._ranks.close()

    def add(self, arrived: pa.Table) -> None:
        """Add the arrivals of one partition. The numbers of its collectives must be unique in the run."""
        ends = pc.min_max(arrived["arrived_ns"]).as_py()
        if ends["min"] is not None:
            self._first = ends["min"] if self._first is None else min(self._first, ends["min"])
            self._last = ends["max"] if self._last is None else max(self._last, ends["max"])
        self._unknown += arrivals.incomparable(arrived)
        late = worst(arrived, self._limit)
        candidates = [late] if self._late is None else [self._late, late]
        self._late = worst(pa.concat_tables([_plain(each) for each in candidates]), self._limit)
        self._ranks.add(arrived)
        self._steps.add(arrived)
        self._last_ranks.add(arrived, last_ones(arrived))
        self._rooted.add(arrived)
        self._paths.add(arrived)

    def answer(self, span_ns: int | None = None, share: float = 1.0) -> Straggling:
        """Return the answer over all partitions that were added.

        Args:
            span_ns: The time in ns that the partitions span. Default: from the first arrival to the last.
            share: The share of the collectives of this time that was added.
        """
        if self._late is None:
            raise ValueError("no part was taken")
        span = 0 if self._first is None or self._last is None else int(self._last - self._first)
        span = round((span if span_ns is None else span_ns) * share)
        ranks = self._ranks.stragglers()
        findings = self._last_ranks.findings(span, 0.5 if self._rooted else 0.0, share)
        if span_ns is not None:
            # The first late step of a sample is not necessarily the first late step of the run.
            findings = findings._replace(late=[late._replace(since=None) for late in findings.late])
        steps = self._last_ranks.steps
        rooted = self._rooted.late(span, steps)
        if len(ranks) == 2:
            # If rooted collectives block one of two ranks, only the other rank can arrive last by its own delay. The
            # waiting of this other rank for the first rank is then as much evidence as its cost.
            costs = self._rooted.costs(steps)
            waited = {rank: sum(costs.values()) - costs.get(rank, 0) for rank in ranks["rank"]}
            findings = findings._replace(
                late=[late for late in findings.late if late.cost_ns >= _MORE_THAN_WAITED * waited[late.rank]]
            )
        late = [each.rank for each in findings.late]
        roots = [each.rank for each in rooted if each.rank not in late]
        both = zip(findings.waits, self._rooted.waits(steps, roots), strict=True)
        of_steps = self._steps.answer(findings.warm, Waits(*(np.concatenate(each) for each in both)))
        warm = _without_warm_up(ranks, of_steps)
        late_verdict = verdict(ranks, warm, findings, rooted, self._paths, span, self._unknown)
        ranks.attrs.update(late_verdict._asdict())
        since = [[each.rank, each.since] for each in findings.late if each.since is not None]
        if since:
            ranks.attrs["since"] = since
        return Straggling(
            ranks,
            self._ranks.lateness(),
            self._ranks.causes(),
            late_collectives(self._late, self._limit),
            of_steps,
        )


def _without_warm_up(ranks: pd.DataFrame, of_steps: pd.DataFrame) -> pd.DataFrame:
    """Return ``ranks`` with the counts of warm steps. A rank without warm steps keeps its counts."""
    counts = of_steps[of_steps["is_warm"]].groupby("rank")[["collectives", "last"]].sum()
    counts = counts[counts["collectives"] > 0]
    return ranks.assign(
        **{
            name: ranks["rank"].map(counts[name]).fillna(ranks[name]).astype("int64")
            for name in ("collectives", "last")
        }
    )


def straggling(
    partitions: Iterable[pa.Table],
    align: Callable[[pa.Table], pa.Table],
    limit: int,
    hosts: Mapping[int, str] | None = None,
    span_ns: int | None = None,
    share: float = 1.0,
) -> Straggling:
    """Return the stragglers in ``partitions`` of the records of a run.

    Args:
        partitions: The partitions, each with all records of its collectives.
        align: A function from records to arrivals.
        limit: The highest number of individual collectives in the answer.
        hosts: The host of each rank.
        span_ns: The time in ns that the partitions span. Default: from the first arrival to the last.
        share: The share of the collectives of this time that ``partitions`` contain.
    """
    with closing(Collector(limit, hosts)) as collector:
        for number, arrived in enumerate(map(align, partitions)):
            collector.add(apart(arrived, number))
        return collector.answer(span_ns, share)


def apart(arrived: pa.Table, part: int) -> pa.Table:
    """Return ``arrived`` with collective numbers that are unique in the run."""
    if not part:
        return arrived
    place = arrived.column_names.index("collective")
    moved: Any = pc.add(arrived["collective"], pa.scalar(part << 40, pa.int64()))
    return arrived.set_column(place, "collective", moved)


def _plain(rows: pa.Table) -> pa.Table:
    """Return ``rows`` with dictionary-encoded texts as plain texts, so that tables can be concatenated."""
    for place, field in enumerate(rows.schema):
        if pa.types.is_dictionary(field.type):
            rows = rows.set_column(place, field.name, rows.column(place).cast(pa.string()))
    return rows

"""A run as an object for notebooks: its methods return pandas frames."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import duckdb
import pandas as pd

from commprof.analysis import api
from commprof.analysis.relations.evaluation import RunViews
from commprof.ledger.levels import Verdict
from commprof.trace.reader import Run


class OpenedRun:
    """One opened run. Tables are read on demand and cached.

    ::

        run = commprof.open("traces/train-20260101-120000")
        run.traffic(by=["op", "purpose"])
        run.query("select op, sum(payload_bytes) from collectives group by op")

    Args:
        path: A run directory, or ``latest``.
    """

    def __init__(self, path: Path | str) -> None:
        self.run: Run = api.open_run(path)
        self._views: RunViews | None = None  # created on demand, because most questions need no connection

    def __repr__(self) -> str:
        health = self.run.health
        counts = f"{health.ranks_recorded} ranks, {health.records:,} records"
        return f"<commprof run {self.run.path.name}: {health.state}, {counts}>"

    @property
    def path(self) -> Path:
        """The run directory."""
        return self.run.path

    @property
    def notes(self) -> tuple[str, ...]:
        """The sentences that state which data of the run is missing."""
        return tuple(self.run.health.notes)

    def overview(self) -> dict[str, Any]:
        """Return the overview of the run (see :func:`commprof.analysis.api.overview`)."""
        return api.overview(self.run)

    def traffic(self, by: Sequence[str] = api.TRAFFIC_BY) -> pd.DataFrame:
        """Return the traffic of the run (see :func:`commprof.analysis.api.traffic`)."""
        return api.traffic(self.run, by)

    def traffic_by_group(self) -> pd.DataFrame:
        """Return traffic per training step by kind of group (see :func:`commprof.analysis.api.traffic_by_group`)."""
        return api.traffic_by_group([self.run])

    def traffic_by_setting(self) -> pd.DataFrame:
        """Return traffic per training step (see :func:`commprof.analysis.api.traffic_by_setting`)."""
        return api.traffic_by_setting([self.run])

    def step_times(self) -> pd.DataFrame:
        """Return the times of the training steps (see :func:`commprof.analysis.api.step_times`)."""
        return api.step_times(self.run)

    def exposure(self, by: Sequence[str] = ("step",)) -> pd.DataFrame:
        """Return exposed and overlapped communication (see :func:`commprof.analysis.api.exposure`)."""
        return api.exposure(self.run, by)

    def exposure_per_step(self) -> pd.DataFrame:
        """Return exposed and overlapped time per step (see :func:`commprof.analysis.api.exposure_per_step`)."""
        return api.exposure_per_step(self.run)

    def several_trainings(self) -> str | None:
        """Return the successive trainings as a sentence (see :func:`commprof.analysis.api.several_trainings`)."""
        return api.several_trainings(self.run)

    def one_offs(self) -> pd.DataFrame:
        """Return one-off traffic (see :func:`commprof.analysis.api.one_offs`)."""
        return api.one_offs(self.run)

    def untagged(self) -> pd.DataFrame:
        """Return the call sites of collectives without a purpose (see :func:`commprof.analysis.api.untagged`)."""
        return api.untagged(self.run)

    def algorithms(self) -> pd.DataFrame:
        """Return the algorithms and protocols that NCCL chose (see :func:`commprof.analysis.api.algorithms`)."""
        return api.algorithms(self.run)

    def resource_use(self) -> pd.DataFrame:
        """Return the resources of each training step (see :func:`commprof.analysis.api.resource_use`)."""
        return api.resource_use(self.run)

    def arrivals(self, steps: tuple[int, int] | None = None) -> pd.DataFrame:
        """Return the arrivals of the ranks at each collective (see :func:`commprof.analysis.api.arrivals`)."""
        return api.arrivals(self.run, steps)

    def arrivals_parts(self, steps: tuple[int, int] | None = None) -> Iterator[pd.DataFrame]:
        """Yield the arrivals by partition (see :func:`commprof.analysis.api.arrivals_parts`)."""
        return api.arrivals_parts(self.run, steps)

    def stragglers(self) -> pd.DataFrame:
        """Return how often each rank arrives last (see :func:`commprof.analysis.api.stragglers`)."""
        return api.stragglers(self.run)

    def sampled_stragglers(self) -> pd.DataFrame | None:
        """Return stragglers from a sample of steps (see :func:`commprof.analysis.api.sampled_stragglers`)."""
        return api.sampled_stragglers(self.run)

    def straggling(self, limit: int = api.MOST_LATE, first_step: bool = True) -> api.Straggling:
        """Return all straggler answers (see :func:`commprof.analysis.api.straggling`)."""
        return api.straggling(self.run, limit, first_step)

    def bandwidth(
        self, calibration: api.AnyCalibration | None = None, steps: tuple[int, int] | None = None
    ) -> pd.DataFrame:
        """Return bandwidths by operation, group and size (see :func:`commprof.analysis.api.bandwidth`)."""
        return api.bandwidth(self.run, calibration, steps)

    def bandwidth_times(
        self, calibration: api.AnyCalibration | None = None, steps: tuple[int, int] | None = None
    ) -> pd.DataFrame:
        """Return the bandwidth of each collective (see :func:`commprof.analysis.api.bandwidth_times`)."""
        return api.bandwidth_times(self.run, calibration, steps)

    def matrix(
        self,
        by: Sequence[str] = (),
        steps: tuple[int, int] | None = None,
        op: str | None = None,
        purpose: str | None = None,
        most_ranks: int | None = None,
    ) -> pd.DataFrame:
        """Return the bytes between each pair of ranks (see :func:`commprof.analysis.api.matrix`)."""
        return api.matrix(self.run, by, steps, op, purpose, most_ranks)

    def owners(self, steps: tuple[int, int] | None = None) -> pd.DataFrame:
        """Return the bytes of reduces by owner (see :func:`commprof.analysis.api.owners`)."""
        return api.owners(self.run, steps)

    def experts(self) -> pd.DataFrame:
        """Return the load of each expert (see :func:`commprof.analysis.api.experts`)."""
        return api.experts(self.run)

    def expert_ranks(self) -> pd.DataFrame:
        """Return the load of the experts of each rank (see :func:`commprof.analysis.api.expert_ranks`)."""
        return api.expert_ranks(self.run)

    def expert_imbalance(self) -> pd.DataFrame:
        """Return the load imbalance of the experts (see :func:`commprof.analysis.api.expert_imbalance`)."""
        return api.expert_imbalance(self.run)

    def expert_summary(self) -> api.ExpertSummary | None:
        """Return a summary of the experts (see :func:`commprof.analysis.api.expert_summary`)."""
        return api.expert_summary(self.run)

    def exchange_imbalance(self, purpose: str | None = None, of_experts: bool = False) -> pd.DataFrame:
        """Return the imbalance of all_to_alls (see :func:`commprof.analysis.api.exchange_imbalance`)."""
        return api.exchange_imbalance(self.run, purpose, of_experts)

    def buckets(
        self,
        step: int | None = None,
        micro_step: int | None = None,
        bucket: int | None = None,
        group_ranks: str | None = None,
    ) -> pd.DataFrame:
        """Return the gradient buckets (see :func:`commprof.analysis.api.bucket_flushes`)."""
        return api.bucket_flushes(self.run, step, micro_step, bucket, group_ranks)

    def bucket_steps(self) -> pd.DataFrame:
        """Return the sums of the buckets of each step (see :func:`commprof.analysis.api.bucket_steps`)."""
        return api.bucket_steps(self.run)

    def buckets_per_step(self) -> pd.DataFrame:
        """Return the buckets per training step (see :func:`commprof.analysis.api.buckets_per_step`)."""
        return api.buckets_per_step(self.run)

    def bucket_means(self) -> pd.DataFrame:
        """Return the buckets of a mean training step (see :func:`commprof.analysis.api.bucket_means`)."""
        return api.bucket_means(self.run)

    def bucket(
        self,
        step: int,
        bucket: int,
        micro_step: int = 0,
        attempt: int | None = None,
        group_ranks: str | None = None,
    ) -> api.BucketContent | None:
        """Return the content of one bucket (see :func:`commprof.analysis.api.bucket_content`)."""
        return api.bucket_content(self.run, step, bucket, micro_step, attempt, group_ranks)

    def alignment(self) -> api.Alignment:
        """Return the alignment with the NCCL log (see :func:`commprof.analysis.api.alignment`)."""
        return api.alignment(self.run)

    def alignment_summary(self) -> api.AlignmentSummary:
        """Return the alignment without its rows (see :func:`commprof.analysis.api.alignment_summary`)."""
        return api.alignment_summary(self.run)

    def alignment_window(
        self,
        rank: int | None,
        pg: str | None,
        state: str | None = None,
        at: int = 0,
        before: int = 0,
        limit: int = 40,
    ) -> api.AlignmentWindow:
        """Return some rows of the alignment (see :func:`commprof.analysis.api.alignment_window`)."""
        return api.alignment_window(self.run, rank, pg, state, at, before, limit)

    def alignment_place(
        self, rank: int, attempt: int, pid: int, seq: int
    ) -> tuple[int | None, str | None, int] | None:
        """Return the position of a record in the alignment (see :func:`commprof.analysis.api.alignment_place`)."""
        return api.alignment_place(self.run, rank, attempt, pid, seq)

    def topology(self) -> pd.DataFrame:
        """Return the rings and trees of NCCL (see :func:`commprof.analysis.api.topology`)."""
        return api.topology(self.run)

    def moved(self) -> pd.DataFrame:
        """Return the moved bytes (see :func:`commprof.analysis.api.moved`)."""
        return api.moved(self.run)

    def requested(self) -> pd.DataFrame:
        """Return the requested traffic (see :func:`commprof.analysis.api.requested`)."""
        return api.requested(self.run)

    def verify(self) -> Verdict:
        """Return the ledger of the run (see :func:`commprof.analysis.api.verify`)."""
        return api.verify(self.run)

    def compare(self, *others: OpenedRun | Path | str) -> pd.DataFrame:
        """Return the comparison of this run with ``others`` (see :func:`commprof.analysis.api.compare`)."""
        return api.compare(self._beside(others))

    def comparison(self, *others: OpenedRun | Path | str) -> api.Comparison:
        """Return all answers of this comparison of runs (see :func:`commprof.analysis.api.compare_both`)."""
        return api.compare_both(self._beside(others))

    def reduction_levels(self, *others: OpenedRun | Path | str) -> pd.DataFrame:
        """Return the gradient reduction of the runs (see :func:`commprof.analysis.api.reduction_levels`)."""
        return api.reduction_levels(self._beside(others))

    def traffic_levels(self, *others: OpenedRun | Path | str) -> pd.DataFrame:
        """Return the traffic of the runs at the four levels (see :func:`commprof.analysis.api.traffic_levels`)."""
        return api.traffic_levels(self._beside(others))

    def settings(self, *others: OpenedRun | Path | str) -> pd.DataFrame:
        """Return the settings in which the runs differ (see :func:`commprof.analysis.api.settings`)."""
        return api.settings(self._beside(others))

    def _beside(self, others: Sequence[OpenedRun | Path | str]) -> list[api.AnyRun]:
        return [self.run, *(each.run if isinstance(each, OpenedRun) else each for each in others)]

    def index(self, progress: Callable[[int, int], None] | None = None) -> dict[str, Any]:
        """Build and write the index of the run (see :func:`commprof.analysis.api.index`).

        If there is no index, ``timeline``, ``step_window``, ``warm_window``, ``records`` and ``record`` build it.
        """
        return api.index(self.run, progress)

    def timeline(
        self,
        begin_ns: int | None = None,
        end_ns: int | None = None,
        pixels: int = 1200,
        ranks: Sequence[int] | None = None,
        most_bars: int = api.MOST_BARS,
    ) -> api.Timeline:
        """Return the timeline of a window of time (see :func:`commprof.analysis.api.timeline`)."""
        return api.timeline(self.run, begin_ns, end_ns, pixels, ranks, most_bars)

    def step_window(self, step: int) -> tuple[int, int] | None:
        """Return begin and end of a training step (see :func:`commprof.analysis.api.step_window`)."""
        return api.step_window(self.run, step)

    def warm_window(self, steps: int = 3) -> tuple[int, int] | None:
        """Return begin and end of some warm steps (see :func:`commprof.analysis.api.warm_window`)."""
        return api.warm_window(self.run, steps)

    def records(
        self,
        filters: Sequence[api.Filter] = (),
        sort: str | None = None,
        offset: int = 0,
        limit: int = 100,
    ) -> api.RecordsPage:
        """Return a page of records (see :func:`commprof.analysis.api.records_page`)."""
        return api.records_page(self.run, filters, sort, offset, limit)

    def record(
        self, rank: int, seq: int, attempt: int | None = None, pid: int | None = None
    ) -> api.Record | None:
        """Return one record with its related rows (see :func:`commprof.analysis.api.record`)."""
        return api.record(self.run, rank, seq, attempt, pid)

    def table(self, name: str) -> pd.DataFrame:
        """Return one table of the schema (see :func:`commprof.analysis.api.table`)."""
        return api.table(self.run, name)

    def relation(self, name: str, by: Sequence[str] | None = None) -> duckdb.DuckDBPyRelation:
        """Return a table of ``docs/schema.md`` or a relation of ``docs/relations.md``, evaluated on demand.

        ``.df()`` converts the result to pandas, ``.pl()`` to polars, and ``.arrow()`` to Arrow. ``.filter()``,
        ``.aggregate()`` and other methods refine it.

        Args:
            by: The columns to sum by, for a relation that can be summed. Default: all columns.

        Raises:
            UsageError: There is no table or relation of this name, or no such column.
        """
        if self._views is None:
            self._views = RunViews(self.run)
        return self._views.relation(name, by)

    def query(self, sql: str) -> pd.DataFrame:
        """Return the answer to one SELECT statement (see :func:`commprof.analysis.api.query`)."""
        return api.query(self.run, sql)

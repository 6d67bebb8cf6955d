"""A run as an object, for notebooks: every question about it is a method that returns a pandas frame."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from commprof.analysis import api
from commprof.ledger.levels import Verdict
from commprof.trace.reader import Run


class OpenedRun:
    """One run. Tables are read when they are asked for and kept.

    ::

        run = commprof.open("traces/train-20260101-120000")
        run.traffic(by=["op", "purpose"])
        run.query("select op, sum(payload_bytes) from collectives group by op")

    Args:
        path: a run directory, or ``latest``.
    """

    def __init__(self, path: Path | str) -> None:
        self.run: Run = api.open_run(path)

    def __repr__(self) -> str:
        health = self.run.health
        held = f"{health.ranks_recorded} ranks, {health.records:,} records"
        return f"<commprof run {self.run.path.name}: {health.state}, {held}>"

    @property
    def path(self) -> Path:
        """The run directory."""
        return self.run.path

    @property
    def notes(self) -> tuple[str, ...]:
        """What is missing in the run, in sentences."""
        return tuple(self.run.health.notes)

    def overview(self) -> dict[str, Any]:
        """See :func:`commprof.analysis.api.overview`."""
        return api.overview(self.run)

    def traffic(self, by: Sequence[str] = api.TRAFFIC_BY) -> pd.DataFrame:
        """See :func:`commprof.analysis.api.traffic`."""
        return api.traffic(self.run, by)

    def step_times(self) -> pd.DataFrame:
        """See :func:`commprof.analysis.api.step_times`."""
        return api.step_times(self.run)

    def exposure(self, by: Sequence[str] = ("step",)) -> pd.DataFrame:
        """See :func:`commprof.analysis.api.exposure`."""
        return api.exposure(self.run, by)

    def arrivals(self) -> pd.DataFrame:
        """See :func:`commprof.analysis.api.arrivals`."""
        return api.arrivals(self.run)

    def stragglers(self) -> pd.DataFrame:
        """See :func:`commprof.analysis.api.stragglers`."""
        return api.stragglers(self.run)

    def bandwidth(self, calibration: Path | str | None = None) -> pd.DataFrame:
        """See :func:`commprof.analysis.api.bandwidth`."""
        return api.bandwidth(self.run, calibration)

    def matrix(self, by: Sequence[str] = (), steps: tuple[int, int] | None = None) -> pd.DataFrame:
        """See :func:`commprof.analysis.api.matrix`."""
        return api.matrix(self.run, by, steps)

    def owners(self, steps: tuple[int, int] | None = None) -> pd.DataFrame:
        """See :func:`commprof.analysis.api.owners`."""
        return api.owners(self.run, steps)

    def buckets(self) -> pd.DataFrame:
        """See :func:`commprof.analysis.api.bucket_flushes`."""
        return api.bucket_flushes(self.run)

    def alignment(self) -> api.Alignment:
        """See :func:`commprof.analysis.api.alignment`."""
        return api.alignment(self.run)

    def moved(self) -> pd.DataFrame:
        """See :func:`commprof.analysis.api.moved`."""
        return api.moved(self.run)

    def requested(self) -> pd.DataFrame:
        """See :func:`commprof.analysis.api.requested`."""
        return api.requested(self.run)

    def verify(self) -> Verdict:
        """See :func:`commprof.analysis.api.verify`."""
        return api.verify(self.run)

    def compare(self, *others: OpenedRun | Path | str) -> pd.DataFrame:
        """This run beside others: see :func:`commprof.analysis.api.compare`."""
        return api.compare(
            [self.run, *(each.run if isinstance(each, OpenedRun) else each for each in others)]
        )

    def table(self, name: str) -> pd.DataFrame:
        """See :func:`commprof.analysis.api.table`."""
        return api.table(self.run, name)

    def query(self, sql: str) -> pd.DataFrame:
        """See :func:`commprof.analysis.api.query`."""
        return api.query(self.run, sql)

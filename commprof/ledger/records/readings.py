"""Assigns each collective to the readings of its host's counters around it: by time, not by the step of its record.

Where a runtime says that a step has ended, what the program sends afterwards belongs to the next step. The reading of the
step comes later and includes it. Steps of several attempts have the same numbers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from commprof.ledger.records.row_index import Numbers, combinations, numbers_of

BEFORE_ALL: Final = -(1 << 31)  # no step: attempts before the last, which are between no two readings
COLUMNS: Final = ("attempt", "rank", "issue_ns", "return_ns", "wait_end_ns")


class StepReadings:
    """When the counters of each host were read at steps in the last attempt, and for which steps.

    Attributes:
        wire: the ``wire`` table, where readings of attempts before the last have no step.
        attempts: how many there were.
        last: the number of the last of them.
    """

    def __init__(self, wire: pa.Table, clocks: pa.Table, hosts: Mapping[int, str]) -> None:
        """Take in the readings.

        Args:
            wire: the ``wire`` table.
            clocks: the ``clocks`` table, which says when the processes of each host began.
            hosts: the host of every rank in the last attempt.
        """
        attempts = set(clocks["attempt"].to_pylist())
        self.attempts = max(len(attempts), 1)
        self.last = max(attempts, default=0)
        self._hosts = hosts
        self.wire = wire if len(attempts) < 2 else _of_attempt(wire, clocks, self.last)
        self._readings = _by_host(self.wire)

    def steps(self, part: pa.Table) -> Numbers:
        """Of each record of ``part`` the step of the first reading of its host after it.

        A record that was under way during a reading belongs to its own step, as far as its times allow. Of hosts
        without two readings at steps the step stays what the record says.

        Args:
            part: records, with :data:`COLUMNS` and ``step``, this being the last one before what is outside of steps.
        """
        own, _ = numbers_of(part, "step")
        reading_steps = own.copy()
        issued, _ = numbers_of(part, "issue_ns")
        ended = issued
        for name in ("return_ns", "wait_end_ns"):
            ended = np.maximum(ended, numbers_of(part, name)[0])  # 0 where it is not known
        for (attempt, rank), places in combinations(part, ["attempt", "rank"]):
            if attempt != self.last:
                reading_steps[places] = BEFORE_ALL
            elif (readings := self._readings.get(self._hosts.get(rank, ""))) is not None:
                times, steps = readings
                first = np.searchsorted(times, issued[places])
                last = np.searchsorted(times, ended[places])
                labels = np.append(steps, steps[-1] + 1)
                reading_steps[places] = np.clip(own[places], labels[first], labels[last])
                reading_steps[places] = np.where(first == last, labels[first], reading_steps[places])
        return reading_steps


def _of_attempt(wire: pa.Table, clocks: pa.Table, attempt: int) -> pa.Table:
    """``wire`` without the steps of readings before the processes of ``attempt`` began."""
    began: dict[str, int] = {}
    for row in clocks.filter(pc.equal(clocks["attempt"], attempt)).to_pylist():
        began[row["host"]] = min(began.get(row["host"], row["monotonic_ns"]), row["monotonic_ns"])
    steps = [
        None if row["host"] not in began or row["time_ns"] < began[row["host"]] else row["step"]
        for row in wire.select(["host", "time_ns", "step"]).to_pylist()
    ]
    place = wire.column_names.index("step")
    return wire.set_column(place, wire.schema.field("step"), pa.array(steps, wire.schema.field("step").type))


def _by_host(wire: pa.Table) -> dict[str, tuple[Numbers, Numbers]]:
    """Host -> times and steps of its readings at steps, where there are two; repeated steps keep the highest number."""
    taken: dict[str, dict[int, int]] = defaultdict(dict)
    rows: list[dict[str, Any]] = wire.select(["host", "kind", "time_ns", "step"]).to_pylist()
    for row in rows:
        if row["kind"] == "interface" and row["step"] is not None:
            taken[row["host"]][row["time_ns"]] = row["step"]
    readings = {}
    for host, at in taken.items():
        if len(at) > 1:
            times = np.array(sorted(at), np.int64)
            steps = np.array([at[time] for time in times.tolist()], np.int64)
            readings[host] = times, np.maximum.accumulate(steps)
    return readings

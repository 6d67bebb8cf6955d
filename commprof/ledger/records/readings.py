"""Assigns each collective to the counter readings of its host before and after it, by time and not by recorded step.

When a runtime reports the end of a step, the program's later messages belong to the next step. The reading for the step
is taken later and includes these messages. Steps of several attempts have the same numbers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from commprof.ledger.records.row_index import Numbers, combinations, numbers_of

BEFORE_ALL: Final = -(1 << 31)  # the step of records of earlier attempts, which are not between two readings
COLUMNS: Final = ("attempt", "rank", "issue_ns", "return_ns", "wait_end_ns")


class StepReadings:
    """The times and steps of the counter readings that each host took at steps in the last attempt.

    Attributes:
        wire: The ``wire`` table, where readings of attempts before the last one have no step.
        attempts: The number of attempts.
        last: The number of the last attempt.
    """

    def __init__(self, wire: pa.Table, clocks: pa.Table, hosts: Mapping[int, str]) -> None:
        """Prepare the readings.

        Args:
            wire: The ``wire`` table.
            clocks: The ``clocks`` table, with the start times of the processes of each host.
            hosts: The host of every rank in the last attempt.
        """
        attempts = set(clocks["attempt"].to_pylist())
        self.attempts = max(len(attempts), 1)
        self.last = max(attempts, default=0)
        self._hosts = hosts
        self.wire = wire if len(attempts) < 2 else _of_attempt(wire, clocks, self.last)
        self._readings = _by_host(self.wire)

    def steps(self, part: pa.Table) -> Numbers:
        """Return for each record of ``part`` the step of the first reading of its host after the record.

        A record that was in progress during a reading belongs to its recorded step, as far as its times allow. If a
        host does not have two readings at steps, its records keep the recorded step.

        Args:
            part: Records with the columns :data:`COLUMNS` and ``step``. For a record outside of steps, ``step`` must be
                the step before.
        """
        own, _ = numbers_of(part, "step")
        reading_steps = own.copy()
        issued, _ = numbers_of(part, "issue_ns")
        ended = issued
        for name in ("return_ns", "wait_end_ns"):
            ended = np.maximum(ended, numbers_of(part, name)[0])  # 0 if the time is not known
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
    """Return ``wire``, where readings before the start of the processes of ``attempt`` have no step."""
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
    """Return the times and steps of the readings at steps of each host with at least two such readings.

    If a step number is lower than an earlier one, the higher number is kept.
    """
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

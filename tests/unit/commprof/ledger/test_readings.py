"""Test how a collective is assigned to the interval between two readings of a host's counters.

The assignment uses the times of the collective in the last attempt.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from commprof.ledger.records import movement
from commprof.ledger.records.readings import BEFORE_ALL, StepReadings
from commprof.ledger.records.sendings import Sendings
from commprof.trace.tables import arrow_schema

HOSTS = {0: "a", 1: "b"}


def wire(*readings):
    """Return readings of (host, time, step) with constant counters."""
    rows = [
        {"host": host, "device": "eth0", "kind": "interface", "time_ns": time, "step": step}
        | {"sent_bytes": 0, "received_bytes": 0, "sent_packets": 0, "resent_segments": 0}
        for host, time, step in readings
    ]
    return pa.Table.from_pylist(rows, schema=arrow_schema("wire"))


def clocks(*began):
    """Return processes of (host, attempt, start time)."""
    rows = [{"host": host, "attempt": attempt, "monotonic_ns": time} for host, attempt, time in began]
    schema = pa.schema([arrow_schema("clocks").field(name) for name in ("host", "attempt", "monotonic_ns")])
    return pa.Table.from_pylist(rows, schema=schema)


def records(*rows):
    """Return records of (attempt, rank, step, issue, return, end of the wait)."""
    names = ("attempt", "rank", "step", "issue_ns", "return_ns", "wait_end_ns")
    schema = pa.schema([(name, pa.int64()) for name in names])
    return pa.Table.from_pylist([dict(zip(names, row, strict=True)) for row in rows], schema=schema)


def test_what_follows_the_end_of_a_step_is_in_the_reading_of_that_step():
    """The runtime has already reported the end of the step, so the record belongs to the next step."""
    readings = StepReadings(
        wire(*((host, 100 * (step + 2), step) for host in "ab" for step in (-1, 0, 1))),
        clocks(("a", 0, 0), ("b", 0, 0)),
        HOSTS,
    )
    part = records((0, 0, 0, 110, 120, None), (0, 0, 1, 190, 195, None), (0, 1, 2, 290, 295, None))
    assert readings.steps(part).tolist() == [0, 0, 1]


def test_what_is_under_way_at_a_reading_stays_in_its_own_step():
    readings = StepReadings(wire(("a", 100, -1), ("a", 200, 0), ("a", 300, 1)), clocks(("a", 0, 0)), HOSTS)
    part = records(
        # The record belongs to step 0, since another rank began the collective before the reading.
        (0, 0, 0, 90, 110, None),
        (0, 0, 1, 190, 191, 210),
        (0, 0, 0, 190, 191, 210),
        (0, 0, 5, 190, 191, 210),
        (0, 0, 1, 290, 310, None),
        (0, 0, 2, 310, 320, None),  # The record is after the last reading.
        (0, 0, 0, 10, 20, None),  # The record is before the first reading.
    )
    assert readings.steps(part).tolist() == [0, 1, 0, 1, 1, 2, -1]


def test_only_the_last_attempt_lies_between_readings_at_steps():
    given = wire(("a", 100, -1), ("a", 200, 0), ("a", 300, 1), ("a", 600, -1), ("a", 700, 0))
    readings = StepReadings(given, clocks(("a", 0, 50), ("a", 1, 500)), HOSTS)
    part = records((0, 0, 0, 110, 120, None), (1, 0, 0, 610, 620, None))
    assert readings.steps(part).tolist() == [BEFORE_ALL, 0]
    assert readings.wire["step"].to_pylist() == [None, None, None, -1, 0]


def test_steps_that_are_numbered_anew_count_on():
    given = wire(("a", 100, -1), ("a", 200, 3), ("a", 300, -1), ("a", 400, 7))
    readings = StepReadings(given, clocks(("a", 0, 0)), HOSTS)
    part = records((0, 0, -1, 210, 220, None), (0, 0, 4, 310, 320, None))
    assert readings.steps(part).tolist() == [3, 7]


def test_a_host_without_readings_at_steps_goes_by_the_steps_of_the_records():
    readings = StepReadings(wire(("a", 100, None), ("a", 200, None)), clocks(("a", 0, 0)), HOSTS)
    part = records((0, 0, 4, 110, 120, None), (0, 1, 5, 110, 120, None))
    assert np.array_equal(readings.steps(part), [4, 5])


def test_a_run_of_several_attempts_is_not_compared_as_a_whole():
    given = wire(*((host, time, None) for host in "ab" for time in (1, 900)))
    rows = movement.moved(given, Sendings(), HOSTS, {}, attempts=2).hosts
    assert [row.expected_bytes for row in rows] == [None, None]
    assert all("2 attempts" in str(row.reason) for row in rows)

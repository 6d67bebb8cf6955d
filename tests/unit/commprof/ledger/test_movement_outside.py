"""Test the moved level of a planted run on two hosts.

The run has an evaluation between two steps that have readings.
"""

from __future__ import annotations

import pyarrow as pa

from commprof.ledger.records import movement
from commprof.ledger.records.backends import Call
from commprof.ledger.records.sendings import Sending, Sendings

SIZE = 10_000_000
HOSTS = {0: "a", 1: "b"}
# Each of two ranks sends the complete payload once.
REDUCED = Sending(Call("gloo", "all_reduce", SIZE, 2), (0, 1))


def planted():
    sent = Sendings()
    for step in range(4):
        sent.add(step, REDUCED, 1)
    sent.add(1, REDUCED, 5, is_outside=True)
    sent.add(-1, REDUCED, 7, is_outside=True)  # This traffic is before the first reading.
    return sent


def readings(sizes):
    rows = [
        {
            "host": host,
            "device": "eth0",
            "kind": "interface",
            "time_ns": 1000 * (step + 2),
            "sent_bytes": size,
            "received_bytes": size,
            "step": step,
            "sent_packets": 0,
            "resent_segments": 0,
        }
        for host in ("a", "b")
        for step, size in zip(range(-1, 4), sizes, strict=True)
    ]
    return pa.Table.from_pylist(rows)


def test_an_evaluation_between_two_steps_is_what_the_counters_saw_too():
    # The values are multiples of SIZE. The reading of step 1 includes the evaluation.
    of_steps = [0, 1, 7, 8, 9]
    for row in movement.moved(readings([count * SIZE for count in of_steps]), planted(), HOSTS, {}).hosts:
        assert (row.steps, row.expected_bytes, row.outside_bytes) == (4, 9 * SIZE, 5 * SIZE)
        assert not movement.is_long(row) and not movement.is_short(row)


def test_a_message_without_a_record_is_still_found():
    more = [0, SIZE, 7 * SIZE, 8 * SIZE, 9 * SIZE * 103 // 100]
    rows = movement.moved(readings(more), planted(), HOSTS, {}).hosts
    assert [movement.is_long(row) for row in rows] == [True, True]

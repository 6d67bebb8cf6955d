"""The recorder's small parts: clocks, counters, optimizer cycles, call sites, the steps that were none."""

from __future__ import annotations

import itertools

import pytest

from commprof.recorder.callsite import CallSites
from commprof.recorder.clocks import read_clocks
from commprof.recorder.counters import InterfaceCounters, parse_net_dev
from commprof.recorder.steps import OptimizerCycle
from commprof.trace.events import Events
from commprof.trace.layout import RankFile
from commprof.trace.steps import build_steps


def test_the_tightest_reading_of_both_clocks_is_kept():
    monotonic = iter([0, 100, 1000, 1010, 2000, 2400])
    realtime = iter([7, 8, 9])
    pair = read_clocks(lambda: next(monotonic), lambda: next(realtime), tries=3)
    assert pair == (1005, 8, 10)


NET_DEV = """Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier compressed
    lo: 1111 2 0 0 0 0 0 0 2222 4 0 0 0 0 0 0
  eth0:3333 5 0 0 0 0 0 0 4444 6 0 0 0 0 0 0
broken: 1 2
"""


def test_interface_counters(tmp_path):
    assert parse_net_dev(NET_DEV) == [("lo", 2222, 1111), ("eth0", 4444, 3333)]
    source = tmp_path / "dev"
    source.write_text(NET_DEV)
    rows = InterfaceCounters(source, "node7", lambda: 55).read()
    assert rows[1] == {
        "host": "node7",
        "device": "eth0",
        "kind": "interface",
        "time_ns": 55,
        "sent_bytes": 4444,
        "received_bytes": 3333,
    }
    assert InterfaceCounters(tmp_path / "absent").read() == []
    assert any(row["device"] == "lo" for row in InterfaceCounters().read())


@pytest.mark.parametrize(
    ("order", "ends"),
    [
        ("aaaa", [True, True, True, True]),
        ("abababab", [True, False, False, True, False, True, False, True]),
        ("aabaab", [True, True, False, True, True, False]),
    ],
)
def test_the_cycle_of_optimizers_is_learned(order, ends):
    cycle = OptimizerCycle()
    found = [cycle.ends_with(ord(name)) for name in order]
    if (
        order == "aabaab"
    ):  # no fixed cycle: every step boundary is at the step of some optimizer, never two at once
        assert found[0] and any(found[1:])
    else:
        assert found == ends


def boundaries(*rows):
    events = Events()
    clock = itertools.count(100, 100)
    for step, micro, automatic in rows:
        events.rows["step"].append(
            {"step": step, "micro_step": micro, "automatic": automatic, "time_ns": next(clock), "cpu_ns": 1}
        )
    return build_steps(RankFile(0, 0, 1, 1), events)


def test_steps_that_the_program_names_replace_those_found_by_themselves():
    table = boundaries((0, 0, True), (5, 0, False), (5, 1, False), (6, 0, False), (None, 0, False))
    assert [(row["step"], row["begin_ns"], row["end_ns"], row["micro_steps"]) for row in table.rows] == [
        (5, 200, 400, 2),
        (6, 400, 500, 1),
    ]
    assert table.void == {0: -1}


def test_what_follows_the_last_optimizer_step_is_no_step():
    table = boundaries((0, 0, True), (1, 0, True), (2, 0, True), (None, 0, False))
    assert [row["step"] for row in table.rows] == [0, 1]
    assert table.void == {2: 1}  # its collectives count in the step that had just ended


def test_no_steps_at_all():
    assert boundaries().rows == [] and boundaries((None, 0, False)).rows == []


def test_a_call_site_is_interned_once_per_place():
    import sys

    written = []
    sites = CallSites(lambda row: written.append(row) or len(written))

    def here():
        return sites.find(sys._getframe())

    numbers = [here() for _ in range(3)] + [here()]
    assert numbers == [1, 1, 1, 1]  # the frame of ``here`` itself is the program's
    assert written[0]["call_site"].endswith("here") and "test_recorder_parts.py:" in written[0]["call_site"]
    assert written[0]["api"] is None
    assert sites.find(None) == 2 and written[1] == {"call_site": None, "api": None}


def test_a_counter_is_read_without_being_used():
    from commprof.trace.writer import count_of

    counter = itertools.count(0, 104)
    assert [next(counter), count_of(counter), count_of(counter), next(counter)] == [0, 104, 104, 104]
    assert count_of(itertools.count()) == 0

"""Test the observers of a group: which calls they see, in which order, and that they see the waits."""

from __future__ import annotations

import inspect

import pytest
import torch

from commprof import hooks
from support.ranks import run_ranks
from zero_runtime import comm
from zero_runtime.comm import COLLECTIVES, MESSAGES, DataParallelGroup
from zero_runtime.experimental.topology_aware.watch import Spent
from zero_runtime.groups.comm_log import LOG
from zero_runtime.groups.logged import MessageLogger
from zero_runtime.groups.timed import Timer
from zero_runtime.training.clock import Clock, Part

ALL = frozenset({*COLLECTIVES, *MESSAGES, "sum_rows"})


class Witness:
    """Writes down the calls that it sees, and when the calls return."""

    def __init__(self, name, seen, methods=ALL):
        self.name, self.seen, self.methods = name, seen, methods

    def observe(self, call, issue):
        self.seen.append((self.name, "begins", call))
        try:
            return issue()
        finally:
            self.seen.append((self.name, "ends", call))


def issue_everything(group, why):
    """Call every method of ``group``, which has one member.

    Returns:
        The name and the result of each method.
    """
    numbers, room = torch.ones(2), torch.zeros(2)
    calls = {
        "all_reduce": lambda: group.all_reduce(numbers, why=why),
        "reduce": lambda: group.reduce(numbers, 0, why),
        "broadcast": lambda: group.broadcast(numbers, 0, why=why),
        "all_gather_single": lambda: group.all_gather_single(room, numbers, why=why),
        "start_all_gather": lambda: group.start_all_gather(room, numbers, why=why),
        "start_all_reduce": lambda: group.start_all_reduce(numbers, why=why),
        "barrier": lambda: group.barrier(why),
        "all_gather": lambda: group.all_gather([room], numbers, why=why),
        "reduce_scatter": lambda: group.reduce_scatter(room, [numbers], why=why),
        "reduce_scatter_single": lambda: group.reduce_scatter_single(room, numbers, why=why),
        "all_to_all_single": lambda: group.all_to_all_single(room, numbers, [2], why=why),
        "sum_rows": lambda: group.sum_rows(room, numbers, [2], why=why),
    }
    for name, call in calls.items():
        yield name, call()
        assert numbers.eq(1).all()


def seen_by_two(rank, world):
    seen = []
    group, why = DataParallelGroup(), hooks.tag("gradient_reduce", bucket=7)
    group.observe(Witness("inner", seen, ALL - {"barrier"}))
    group.observe(Witness("outer", seen))
    outcomes = []
    for name, returned in issue_everything(group, why):
        names = [(observer, moment, call.method) for observer, moment, call in seen]
        for _, _, call in seen:
            assert call.why is why
            method = getattr(DataParallelGroup, call.method)
            assert {"self", *call.arguments} == set(inspect.signature(method).parameters)
        outcomes.append((name, names, type(returned).__name__))
        seen.clear()
    return outcomes


def test_the_observer_added_last_sees_a_call_first():
    (outcomes,) = run_ranks(1, seen_by_two)

    def nested(method, inside=()):
        return [
            ("outer", "begins", method),
            ("inner", "begins", method),
            *inside,
            ("inner", "ends", method),
            ("outer", "ends", method),
        ]

    for name, seen, returned in outcomes:
        if name == "barrier":  # The inner observer does not observe this method.
            assert seen == [("outer", "begins", name), ("outer", "ends", name)]
        elif name == "sum_rows":  # sum_rows issues an all_to_all_single.
            assert (seen, returned) == (nested(name, nested("all_to_all_single")), "tuple")
        else:
            assert seen == nested(name)
        if name.startswith("start"):
            assert returned == "Work"
    assert {name for name, *_ in outcomes} == ALL - set(MESSAGES)


def messages(rank, world):
    seen = []
    group = DataParallelGroup()
    group.observe(Witness("w", seen))
    tensor = torch.full((2,), float(rank))
    if rank == 0:
        group.send(tensor, 1)
        group.start_send(tensor, 1).wait()
    else:
        group.receive(tensor, 0)
        group.start_receive(tensor, 0).wait()
    return tensor.tolist(), [call.method for _, moment, call in seen if moment == "begins"]


def test_messages_between_two_members_are_observed():
    assert run_ranks(2, messages) == [
        ([0.0, 0.0], ["send", "start_send"]),
        ([0.0, 0.0], ["receive", "start_receive"]),
    ]


def observed_waits(rank, world):
    group, clock, spent = DataParallelGroup(), Clock(True), Spent()
    for observer in (Timer(clock), MessageLogger(group), spent):
        group.observe(observer)
    LOG.reset()
    LOG.configure(enabled=True, prof_all=True)
    work = group.start_all_reduce(torch.ones(4), why=hooks.tag("gradient_norm"))
    started, counted = clock.read(), spent.ns
    work.wait()
    LOG.configure(enabled=False)
    return (
        list(started),
        list(clock.read()),
        counted > 0,
        spent.ns > counted,
        LOG.get_operation_summary("all_reduce"),
    )


def test_starting_and_waiting_are_both_timed_and_counted():
    (outcome,) = run_ranks(1, observed_waits)
    started, waited, counts_the_start, counts_the_wait, logged = outcome
    assert started == waited == [Part("between", "gradient_norm")]
    assert counts_the_start and counts_the_wait
    assert [(size, figures["count"]) for size, figures in logged.items()] == [(16, 1)]


@pytest.mark.parametrize("observer", [Timer(Clock(False)), Spent()])
def test_a_sum_of_rows_is_observed_once_as_the_collective_that_it_issues(observer):
    assert "sum_rows" not in observer.methods and "all_to_all_single" in observer.methods


def test_a_wait_looks_for_what_still_exists_only(monkeypatch):
    """A contract that ended used to leave a reference, and every later wait visited all references."""
    monkeypatch.setattr(comm, "_lookouts", [])

    class Watcher:
        looks = 0

        def look(self) -> None:
            self.looks += 1

    for _ in range(3):
        watcher = Watcher()
        comm.watch_waits(watcher.look)
    comm.look()
    assert watcher.looks == 1
    assert len(comm._lookouts) == 1

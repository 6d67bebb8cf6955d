"""Test the detection of late ranks from the time that each rank spent on its own work."""

from __future__ import annotations

import torch

from zero_runtime.experimental.topology_aware import watch as watching
from zero_runtime.experimental.topology_aware.slow_ranks import StepTimes, late, lateness
from zero_runtime.experimental.topology_aware.watch import Spent, Watch

MS = 1_000_000


def step(own, world=0, axes=()):
    return StepTimes(own + world + sum(axes), world, tuple(axes))


def test_a_rank_is_late_by_what_it_works_longer_than_the_median():
    times = [step(10, 90), step(12, 88), step(60, 40), step(11, 89)]
    assert lateness(times) == [-1, 1, 49, 0]
    (found,) = late(times, (), 0.4)
    assert (found.ranks, found.axis, found.excess_ns, found.step_ns) == ((2,), None, 49, 100)
    assert late(times, (), 0.5) == []


def test_of_two_ranks_one_is_late():
    assert [each.ranks for each in late([step(10, 40), step(50, 0)], (), 0.5)] == [(1,)]


def test_a_slow_link_shows_in_its_group_though_a_late_rank_waits_nowhere():
    # Axis 0 of a 2 x 2 grid has the groups of ranks 0 and 2, and of ranks 1 and 3. The links of the first
    # group are slow.
    times = [step(10, 0, (60, 5)), step(10, 0, (20, 45)), step(10, 0, (62, 5)), step(10, 0, (21, 44))]
    (found,) = late(times, (2, 2), 0.3)
    assert (found.ranks, found.axis, found.excess_ns) == ((0, 2), 0, 40)
    # A rank that arrives late at its group makes the others wait, but takes no longer itself.
    times = [step(10, 0, (60, 5)), step(10, 0, (20, 45)), step(50, 0, (20, 5)), step(10, 0, (21, 44))]
    assert [(each.ranks, each.axis) for each in late(times, (2, 2), 0.3)] == [((2,), None)]


class Ranks:
    """A group in which the rows of the other ranks are given in advance."""

    rank, world_size, device = 0, 3, torch.device("cpu")

    def __init__(self, others):
        self.others = others

    def all_gather_single(self, output, piece, why):
        assert why.purpose == "metric"
        output.copy_(torch.cat([piece, *(torch.tensor(each) for each in self.others)]))


def test_rank_0_says_once_who_is_late_and_once_that_it_no_longer_is(monkeypatch, capsys):
    now = [0]
    monkeypatch.setattr(watching.time, "perf_counter_ns", lambda: now[0])
    group = Ranks([])
    world = Spent()
    watch = Watch(group, 0.25, world)
    lines = []
    for number, slowest in enumerate([90, 10, 90, 90, 10], 1):
        now[0] += 100 * MS
        world.ns = 90 * MS  # The time of this rank.
        group.others = [[100 * MS, 88 * MS], [100 * MS, (100 - slowest) * MS]]
        watch.see_step(number)
        lines.append(capsys.readouterr().err.strip())
    assert lines == [
        "",  # The first step only starts the measurement.
        "",
        "zero_runtime: rank 2 delays the others by 78.0 ms of a step of 100.0 ms "
        "(78 %, slow_node_tolerance is 25 %), step 3",
        "",
        "zero_runtime: rank 2 is no longer late, step 5",
    ]

"""Looks for slow ranks and links while the training goes on (``communication.slow_node_tolerance``).

After each step the ranks tell each other how long they were in collectives: one all_gather of a few integers. Times are the
host's; on an accelerator, whose collectives the host does not wait for, they show how far its work is behind only where
the program waits for the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, Final

import torch

from commprof import hooks
from zero_runtime import log
from zero_runtime.comm import COLLECTIVES, DataParallelGroup
from zero_runtime.experimental.topology_aware.lateness import Late, StepTimes, late, lateness

_TELL: Final = hooks.tag("metric")


class Spent:
    """Time that this rank was in the collectives of one group.

    Attributes:
        ns: since it was last set to 0.
    """

    def __init__(self) -> None:
        self.ns = 0

    def count(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Call ``function`` and count the time."""
        begin = time.perf_counter_ns()
        try:
            return function(*arguments, **options)
        finally:
            self.ns += time.perf_counter_ns() - begin


class CountedWork:
    """A collective under way, waiting for which is counted."""

    def __init__(self, work: Any, spent: Spent) -> None:
        self._work = work
        self._spent = spent

    def wait(self, *arguments: Any) -> Any:
        """Wait for it."""
        return self._spent.count(self._work.wait, *arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def count_time(group: DataParallelGroup) -> Spent:
    """Have the time in the collectives of ``group`` counted from now on."""
    spent = Spent()
    for name in COLLECTIVES:
        setattr(group, name, _counted(getattr(group, name), spent))
    return spent


def _counted(method: Callable[..., Any], spent: Spent) -> Callable[..., Any]:
    @wraps(method)
    def call(*arguments: Any, **options: Any) -> Any:
        work = spent.count(method, *arguments, **options)
        return work if work is None else CountedWork(work, spent)

    return call


class Watch:
    """Tells rank 0's log who becomes late, and who no longer is.

    Args:
        group: all ranks.
        tolerance: a fraction of a step's time.
        world: time in the collectives of all ranks.
        axes: in those along each axis.
        sizes: ranks along each axis.
    """

    def __init__(
        self,
        group: DataParallelGroup,
        tolerance: float,
        world: Spent,
        axes: Sequence[Spent] = (),
        sizes: Sequence[int] = (),
    ) -> None:
        self._group = group
        self._tolerance = tolerance
        self._spent = (world, *axes)
        self._sizes = tuple(sizes)
        self._began: int | None = None
        self._late: dict[tuple[tuple[int, ...], int | None], Late] = {}

    def see_step(self, step: int) -> None:
        """A step has ended, of number ``step``; the first one only begins the counting."""
        if self._group.world_size == 1:
            return
        now = time.perf_counter_ns()
        began, self._began = self._began, now
        mine = [0 if began is None else now - began, *(each.ns for each in self._spent)]
        if began is not None:
            self._compare(self._gathered_times(mine), step)
        self._began = time.perf_counter_ns()
        for each in self._spent:
            each.ns = 0

    def _gathered_times(self, mine: Sequence[int]) -> list[StepTimes]:
        own = torch.tensor(mine, dtype=torch.int64, device=self._group.device)
        everybody = own.new_empty(self._group.world_size * len(mine))
        self._group.all_gather_single(everybody, own, why=_TELL)
        rows = everybody.view(-1, len(mine)).tolist()
        return [StepTimes(total, world, tuple(axes)) for total, world, *axes in rows]

    def _compare(self, times: Sequence[StepTimes], step: int) -> None:
        hooks.metric("lateness_ms", lateness(times)[self._group.rank] / 1e6)
        now_late = {(each.ranks, each.axis): each for each in late(times, self._sizes, self._tolerance)}
        if self._group.rank == 0:
            for key, each in now_late.items():
                if key not in self._late:
                    self._say(f"{each.sentence(self._tolerance)}, step {step}")
            for ranks, axis in self._late.keys() - now_late.keys():
                who = (
                    f"rank {ranks[0]} is"
                    if axis is None
                    else f"the links of axis {axis} among ranks {ranks} are"
                )
                self._say(f"{who} in time again, step {step}")
        self._late = now_late

    @staticmethod
    def _say(sentence: str) -> None:
        log.warning(sentence)

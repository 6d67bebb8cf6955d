"""The watch for stragglers and slow links during training (``communication.slow_node_tolerance``).

After each step the ranks exchange the times that they spent in collectives, with one all_gather of a few
integers. These times are host times. On an accelerator the host does not wait for collectives. There the
times show a delay only if the program waits for the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from commprof import hooks
from zero_runtime import log
from zero_runtime.comm import COLLECTIVES, Call, DataParallelGroup
from zero_runtime.experimental.topology_aware.slow_ranks import Late, StepTimes, late, lateness

_TELL: Final = hooks.tag("metric")


class Spent:
    """A counter of the time that this rank spends in the collectives of one group.

    Attributes:
        ns: The time in ns since the counter was last set to 0.
        methods: The observed methods (see :class:`zero_runtime.comm.Observer`).
    """

    methods: Final = frozenset(COLLECTIVES)

    def __init__(self) -> None:
        self.ns = 0

    def observe(self, call: Call, issue: Callable[[], Any]) -> Any:
        """Issue ``call`` and count its time; see :class:`zero_runtime.comm.Observer`."""
        work = self.count(issue)
        return work if work is None else CountedWork(work, self)

    def count(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call ``function``, count its time, and return its result."""
        begin = time.perf_counter_ns()
        try:
            return function(*arguments)
        finally:
            self.ns += time.perf_counter_ns() - begin


class CountedWork:
    """A work handle that counts the time of its ``wait``."""

    def __init__(self, work: Any, spent: Spent) -> None:
        self._work = work
        self._spent = spent

    def wait(self, *arguments: Any) -> Any:
        """Wait for the work, and count the time."""
        return self._spent.count(self._work.wait, *arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


class Watch:
    """The watch, which logs on rank 0 when a rank or a link becomes late, and when it is no longer late.

    Args:
        group: The group of all ranks.
        tolerance: The tolerance, as a fraction of the time of a step.
        world: The time in the collectives of all ranks.
        axes: The time in the collectives along each axis.
        sizes: The number of ranks along each axis.
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
        """Compare the times of step ``step``, which has ended. The first call only starts the measurement."""
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
                self._say(f"{who} no longer late, step {step}")
        self._late = now_late

    @staticmethod
    def _say(sentence: str) -> None:
        log.warning(sentence)

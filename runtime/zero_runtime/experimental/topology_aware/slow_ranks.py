"""Detection of stragglers and slow links from the times of every rank in a step.

Ranks leave a collective together. So the differences of their own times until the next collective are the
differences of their arrivals at the next collective. The time of a step that a rank spends *outside* of
collectives thus measures the lateness of the rank, without a common clock.

Consider the times that the ranks of an axis group spend in the group's collectives. The smallest of these
times includes no waiting for other ranks, so it is the time of the links.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median_low
from typing import NamedTuple

from zero_runtime.experimental.topology_aware.sizes import axis_groups


class StepTimes(NamedTuple):
    """The times of one rank in a step, in ns.

    Attributes:
        total: The time from the end of the previous step to the end of this step.
        world: The time in collectives of all ranks.
        axes: The time in the collectives of the rank's group along each axis.
    """

    total: int
    world: int
    axes: tuple[int, ...] = ()

    @property
    def own(self) -> int:
        """The time outside of collectives."""
        return self.total - self.world - sum(self.axes)


class Late(NamedTuple):
    """A straggler, or a group with slow links, whose excess is above the tolerance.

    Attributes:
        ranks: The straggler, or the ranks of a group whose links are slow.
        axis: The axis of the links, or None for a straggler.
        excess_ns: For a straggler, its time above the median rank. For links, the time above the median of
            the other groups.
        step_ns: The time of the complete step.
    """

    ranks: tuple[int, ...]
    axis: int | None
    excess_ns: int
    step_ns: int

    def sentence(self, tolerance: float) -> str:
        """Return the text of the warning about this straggler or these links."""
        share = f"{self.excess_ns / 1e6:.1f} ms of a step of {self.step_ns / 1e6:.1f} ms"
        limit = f"{100 * self.excess_ns / self.step_ns:.0f} %, slow_node_tolerance is {100 * tolerance:g} %"
        if self.axis is None:
            return f"rank {self.ranks[0]} delays the others by {share} ({limit})"
        among = ", ".join(map(str, self.ranks))
        return f"the links of axis {self.axis} among ranks {among} take {share} longer than the others' ({limit})"


def lateness(times: Sequence[StepTimes]) -> list[int]:
    """Return the lateness of each rank in ns, relative to the (lower) median rank.

    Ranks that are earlier than the median rank have negative values.
    """
    middle = median_low([each.own for each in times])
    return [each.own - middle for each in times]


def late(times: Sequence[StepTimes], sizes: Sequence[int], tolerance: float) -> list[Late]:
    """Return the stragglers and slow links that cost more than ``tolerance`` of the step.

    Args:
        times: The times of each rank.
        sizes: The number of ranks along each axis. ``times`` have the same number of axes, or no axes.
        tolerance: The tolerance, as a fraction of the longest step time of a rank.
    """
    step = max(1, *(each.total for each in times))
    late_ones = [
        Late((rank,), None, excess, step)
        for rank, excess in enumerate(lateness(times))
        if excess > tolerance * step
    ]
    for axis in range(len(times[0].axes)):
        groups = axis_groups(sizes, axis)
        spent = [min(times[rank].axes[axis] for rank in group) for group in groups]
        for number, group in enumerate(groups):
            others = spent[:number] + spent[number + 1 :]
            excess = spent[number] - median_low(others) if others else 0
            if excess > tolerance * step:
                late_ones.append(Late(group, axis, excess, step))
    return late_ones

"""Which ranks and links keep the others waiting, from what every rank spent on its own in a step. Pure.

Ranks leave a collective together, so between two of them whoever works longer comes later to the next one by the
difference: the time of a step that a rank was *not* in collectives is how late it comes, without any clock that ranks
share. Of a group along an axis, the least time that one of its ranks was in the group's collectives is the time without
waiting for each other: what the links took.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median_low
from typing import NamedTuple

from zero_runtime.experimental.topology_aware.sizes import axis_groups


class StepTimes(NamedTuple):
    """A step of one rank, in ns.

    Attributes:
        whole: from the end of the step before to the end of this one.
        world: of that, within collectives of all ranks.
        axes: within those of its group along each axis.
    """

    total: int
    world: int
    axes: tuple[int, ...] = ()

    @property
    def own(self) -> int:
        """Outside of collectives."""
        return self.total - self.world - sum(self.axes)


class Late(NamedTuple):
    """Somebody who kept others waiting for more than was tolerated.

    Attributes:
        ranks: one that came late, or the ranks of a group whose links were slow.
        axis: of the links; None for a rank.
        excess_ns: how much longer it took than the median of the others.
        step_ns: of the whole step.
    """

    ranks: tuple[int, ...]
    axis: int | None
    excess_ns: int
    step_ns: int

    def sentence(self, tolerance: float) -> str:
        """What to say of it."""
        share = f"{self.excess_ns / 1e6:.1f} ms of a step of {self.step_ns / 1e6:.1f} ms"
        limit = f"{100 * self.excess_ns / self.step_ns:.0f} %, slow_node_tolerance is {100 * tolerance:g} %"
        if self.axis is None:
            return f"rank {self.ranks[0]} keeps the others waiting for {share} ({limit})"
        among = ", ".join(map(str, self.ranks))
        return f"the links of axis {self.axis} among ranks {among} take {share} longer than the others' ({limit})"


def lateness(times: Sequence[StepTimes]) -> list[int]:
    """For each rank by how much, in ns, it comes later than the (lower) median rank; negative where it comes earlier."""
    middle = median_low([each.own for each in times])
    return [each.own - middle for each in times]


def late(times: Sequence[StepTimes], sizes: Sequence[int], tolerance: float) -> list[Late]:
    """Who kept others waiting for more than ``tolerance`` of the step.

    Args:
        times: of each rank.
        sizes: ranks along each axis; ``times`` know as many axes, or none.
        tolerance: a fraction of the step, which is as long as the longest rank's.
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

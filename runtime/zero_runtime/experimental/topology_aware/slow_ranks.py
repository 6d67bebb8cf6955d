"""Detection of stragglers and slow links from the times of every rank in a step. Pure.

Ranks leave a collective together, so the difference of their own times until the next one is the difference of their
arrivals there. So the time of a step that a rank is *not* in collectives measures its lateness, without a common clock. The
least time that a rank of an axis group is in the group's collectives includes no waiting for other ranks: it is the time of
the links.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median_low
from typing import NamedTuple

from zero_runtime.experimental.topology_aware.sizes import axis_groups


class StepTimes(NamedTuple):
    """A step of one rank, in ns.

    Attributes:
        total: from the end of the step before to the end of this step.
        world: the part within collectives of all ranks.
        axes: the parts within the collectives of its group along each axis.
    """

    total: int
    world: int
    axes: tuple[int, ...] = ()

    @property
    def own(self) -> int:
        """The time outside of collectives."""
        return self.total - self.world - sum(self.axes)


class Late(NamedTuple):
    """A straggler, or a group with slow links, above the tolerance.

    Attributes:
        ranks: the straggler, or the ranks of a group whose links are slow.
        axis: of the links; None for a straggler.
        excess_ns: time above the median of the others.
        step_ns: time of the whole step.
    """

    ranks: tuple[int, ...]
    axis: int | None
    excess_ns: int
    step_ns: int

    def sentence(self, tolerance: float) -> str:
        """The warning about it."""
        share = f"{self.excess_ns / 1e6:.1f} ms of a step of {self.step_ns / 1e6:.1f} ms"
        limit = f"{100 * self.excess_ns / self.step_ns:.0f} %, slow_node_tolerance is {100 * tolerance:g} %"
        if self.axis is None:
            return f"rank {self.ranks[0]} delays the others by {share} ({limit})"
        among = ", ".join(map(str, self.ranks))
        return f"the links of axis {self.axis} among ranks {among} take {share} longer than the others' ({limit})"


def lateness(times: Sequence[StepTimes]) -> list[int]:
    """The lateness of each rank in ns against the (lower) median rank; negative for earlier ranks."""
    middle = median_low([each.own for each in times])
    return [each.own - middle for each in times]


def late(times: Sequence[StepTimes], sizes: Sequence[int], tolerance: float) -> list[Late]:
    """The stragglers and slow links that cost more than ``tolerance`` of the step.

    Args:
        times: of each rank.
        sizes: ranks along each axis; ``times`` have the same number of axes, or none.
        tolerance: a fraction of the step; the longest step of a rank counts.
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

"""A grid of ranks with named axes, and the process groups along the axes.

The last axis changes fastest from rank to rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Final

from zero_runtime import comm
from zero_runtime.comm import DataParallelGroup
from zero_runtime.errors import ConfigError, UsageError

PIPE: Final = "pipe"
DATA: Final = "data"
SEQUENCE: Final = "sequence"
MODEL: Final = "model"


@dataclass(frozen=True, slots=True)
class ProcessTopology:
    """The mapping between ranks and places in a grid. Pure arithmetic.

    Attributes:
        axes: The names of the axes, slowest first.
        sizes: The number of ranks along each axis.

    Raises:
        ConfigError: The numbers of axes and sizes differ, an axis is named twice, or a size is not positive.
    """

    axes: tuple[str, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.axes) != len(self.sizes):
            raise ConfigError(
                f"axes {list(self.axes)} and sizes {list(self.sizes)} must have the same length"
            )
        if len(set(self.axes)) < len(self.axes):
            raise ConfigError(f"axes {list(self.axes)} must differ in their names")
        if any(size < 1 for size in self.sizes):
            raise ConfigError(f"axes of {list(self.sizes)} ranks: each must have at least 1")

    @classmethod
    def of(cls, **sizes: int) -> ProcessTopology:
        """Return the topology of the given axes, slowest first: ``ProcessTopology.of(pipe=2, data=4)``."""
        return cls(tuple(sizes), tuple(sizes.values()))

    def widened(self, *axes: str) -> ProcessTopology:
        """Return the same topology with missing ``axes`` added.

        The added axes are one rank wide, so that the place of no rank changes.
        """
        missing = tuple(axis for axis in axes if axis not in self.axes)
        return ProcessTopology(self.axes + missing, self.sizes + (1,) * len(missing))

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return prod(self.sizes)

    def size(self, axis: str) -> int:
        """Return the number of ranks along ``axis``; 1 for a missing axis."""
        return self.sizes[self.axes.index(axis)] if axis in self.axes else 1

    def rank(self, **place: int) -> int:
        """Return the rank at a place. All axes must be given.

        Raises:
            ConfigError: An axis is missing or unknown, or the place does not exist.
        """
        if set(place) != set(self.axes):
            raise ConfigError(
                f"rank() needs a value for every axis ({', '.join(self.axes)}), and got values for "
                f"{', '.join(place) or 'none'}; to select by some of the axes, call ranks()"
            )
        number = 0
        for axis, size in zip(self.axes, self.sizes, strict=True):
            if not 0 <= place[axis] < size:
                shown = ", ".join(f"{each}={place[each]}" for each in self.axes)
                raise ConfigError(f"there is no place {shown} among {self} ranks")
            number = number * size + place[axis]
        return number

    def place(self, rank: int) -> dict[str, int]:
        """Return the place of ``rank``: its number along each axis.

        Raises:
            ConfigError: The rank does not exist.
        """
        if not 0 <= rank < self.world_size:
            raise ConfigError(f"rank {rank} is not one of the {self.world_size} of this topology")
        place = {}
        for axis, size in zip(reversed(self.axes), reversed(self.sizes), strict=True):
            rank, place[axis] = divmod(rank, size)
        return {axis: place[axis] for axis in self.axes}

    def ranks(self, **part: int) -> list[int]:
        """Return the ranks whose places have the given values, in order; all ranks if there are no values.

        Raises:
            ConfigError: An axis does not exist.
        """
        unknown = set(part) - set(self.axes)
        if unknown:
            raise ConfigError(
                f"there is no axis {', '.join(sorted(unknown))}; there are {', '.join(self.axes)}"
            )
        ranges = [
            [number for number in range(size) if part.get(axis, number) == number]
            for axis, size in zip(self.axes, self.sizes, strict=True)
        ]
        places = (dict(zip(self.axes, place, strict=True)) for place in product(*ranges))
        return [self.rank(**place) for place in places]

    def lines(self, *axes: str) -> list[list[int]]:
        """Return the lists of ranks that differ only in ``axes``, each in order. A missing axis is one rank wide."""
        others = [axis for axis in self.axes if axis not in axes]
        places = product(*(range(self.size(axis)) for axis in others))
        return [self.ranks(**dict(zip(others, place, strict=True))) for place in places]

    def line(self, rank: int, *axes: str) -> list[int]:
        """Return the ranks that differ from ``rank`` only in ``axes``, in order. The list includes ``rank``."""
        place = self.place(rank)
        return self.ranks(**{axis: place[axis] for axis in self.axes if axis not in axes})

    def check(self, world_size: int) -> None:
        """Check that the grid contains all ranks.

        Raises:
            ConfigError: The product of the sizes is not ``world_size``.
        """
        if self.world_size != world_size:
            shown = ", ".join(f"{axis}={size}" for axis, size in zip(self.axes, self.sizes, strict=True))
            raise ConfigError(
                f"the topology {shown} has {self.world_size} places, and there are {world_size} ranks; they must be equal"
            )

    def __str__(self) -> str:
        return " x ".join(map(str, self.sizes))


class ProcessGrid:
    """The process groups along the axes of a topology. Each group is named after its axis, also in traces.

    Every rank creates the same groups in the same order, including the groups that do not contain the rank.
    Therefore all ranks must construct the grid at the same point of their program, with the same arguments.
    Groups of one rank are created too.

    Args:
        topology: The places of all ranks.
        joined: Groups along several axes, such as ("pipe", "model"), which is named "pipe+model". Axes that the
            topology does not have are omitted. If one axis remains, the group of this axis is used.

    Raises:
        ConfigError: The number of ranks in the topology is not the world size.
        UsageError: torch.distributed is not initialized.
    """

    def __init__(self, topology: ProcessTopology, joined: Sequence[Sequence[str]] = ()) -> None:
        if not comm.is_initialized():
            raise UsageError(
                "torch.distributed is not initialized; call zero_runtime.init_distributed() first"
            )
        topology.check(comm.get_world_size())
        self.topology = topology
        self.rank = comm.get_rank()
        self.place: Mapping[str, int] = topology.place(self.rank)
        self._groups: dict[tuple[str, ...], DataParallelGroup] = {}
        for axes in [*((axis,) for axis in topology.axes), *map(tuple, joined)]:
            self._make(self._present(axes))

    def _present(self, axes: Sequence[str]) -> tuple[str, ...]:
        return tuple(axis for axis in self.topology.axes if axis in axes)

    def _make(self, axes: tuple[str, ...]) -> None:
        if not axes or axes in self._groups:
            return
        for ranks in self.topology.lines(*axes):
            group = comm.new_group(ranks, "+".join(axes))
            if self.rank in ranks:
                self._groups[axes] = DataParallelGroup(group)

    def group(self, *axes: str) -> DataParallelGroup:
        """Return the group of the ranks that differ from this rank only in ``axes``, including this rank.

        Raises:
            UsageError: The grid was constructed without this group.
        """
        group = self._groups.get(self._present(axes))
        if group is None:
            existing = ", ".join("+".join(each) for each in self._groups)
            raise UsageError(f"the grid has no group along {'+'.join(axes)}; it has {existing}")
        return group

    def along(self, axis: str) -> int:
        """Return the number of this rank along ``axis``; 0 for a missing axis."""
        return self.place.get(axis, 0)

    def size(self, axis: str) -> int:
        """Return the number of ranks along ``axis``; 1 for a missing axis."""
        return self.topology.size(axis)

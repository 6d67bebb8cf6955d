"""``deepspeed.runtime.pipe.topology``: a grid of ranks with named axes. The last coordinate varies fastest."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Collection, Sequence
from math import prod
from typing import Any

from zero_runtime.deepspeed_names.ranks import comm_functions
from zero_runtime.errors import ConfigError, UsageError
from zero_runtime.groups import process_grid
from zero_runtime.groups.process_grid import DATA, MODEL, PIPE


class ProcessTopology:
    """The mapping between ranks and coordinates.

    Args:
        axes: The names of the axes, from the slowest to the fastest.
        dims: The number of ranks along each axis.
    """

    def __init__(self, axes: Sequence[str], dims: Sequence[int]) -> None:
        self.grid = process_grid.ProcessTopology(tuple(axes), tuple(dims))
        self.axes = list(axes)
        self.dims = list(dims)
        make: Any = namedtuple
        self.ProcessCoord: Callable[..., Any] = make("ProcessCoord", self.axes)
        self.mapping = {
            self.ProcessCoord(**self.grid.place(rank)): rank for rank in range(self.grid.world_size)
        }

    def world_size(self) -> int:
        """Return the number of ranks."""
        return self.grid.world_size

    def get_axis_names(self) -> list[str]:
        """Return the names of the axes, from the slowest to the fastest."""
        return self.axes

    def get_dim(self, axis: str) -> int:
        """Return the number of ranks along ``axis``; 0 if there is no such axis."""
        return self.grid.size(axis) if axis in self.axes else 0

    def get_rank(self, **coord_kwargs: int) -> int:
        """Return the rank with the given coordinates along all axes.

        Raises:
            ConfigError: An axis is missing or unknown, or there is no rank with these coordinates.
        """
        return self.grid.rank(**coord_kwargs)

    def get_coord(self, rank: int) -> Any:
        """Return the coordinates of ``rank``, as a named tuple with one field for each axis.

        Raises:
            ConfigError: There is no such rank.
        """
        return self.ProcessCoord(**self.grid.place(rank))

    def get_rank_repr(
        self,
        rank: int,
        omit_axes: Collection[str] = (DATA, PIPE),
        inner_sep: str = "_",
        outer_sep: str = "-",
    ) -> str:
        """Return the coordinates of ``rank`` as text for file names, such as ``model_00``."""
        place = self.get_coord(rank)
        shown = [axis for axis in self.axes if axis not in omit_axes]
        return outer_sep.join(f"{axis}{inner_sep}{getattr(place, axis):02d}" for axis in shown)

    def filter_match(self, **filter_kwargs: int) -> list[int]:
        """Return the ranks that have the given coordinates, in order."""
        return self.grid.ranks(**filter_kwargs)

    def get_axis_list(self, axis: str, idx: int) -> list[int]:
        """Return the ranks with coordinate ``idx`` along ``axis``, in order."""
        return self.filter_match(**{axis: idx})

    def get_axis_comm_lists(self, axis: str) -> list[list[int]]:
        """Return the groups of ranks that differ only along ``axis``; an empty list if there is no such axis."""
        return self.grid.lines(axis) if axis in self.axes else []

    def __str__(self) -> str:
        return str(self.mapping)


class PipeDataParallelTopology(ProcessTopology):
    """A topology with the axes pipe (the stages of a pipeline) and data (the replicas of each stage)."""

    def __init__(self, num_pp: int, num_dp: int) -> None:
        super().__init__([PIPE, DATA], [num_pp, num_dp])


class PipeModelDataParallelTopology(ProcessTopology):
    """A topology with the axes pipe, data and model (tensor-parallel)."""

    def __init__(self, num_pp: int, num_mp: int, num_dp: int) -> None:
        super().__init__([PIPE, DATA, MODEL], [num_pp, num_dp, num_mp])


class PipelineParallelGrid:
    """The process groups along each axis of a topology. Every rank must construct it.

    Args:
        topology: The topology of the ranks. By default, the prime factors of the number of ranks are assigned
            alternately to stages and replicas.
        process_group: Ignored. The grid always consists of all ranks.

    Raises:
        UsageError: The number of ranks of the topology is not the number of all ranks.
    """

    def __init__(self, topology: ProcessTopology | None = None, process_group: Any = None) -> None:
        self.global_rank = comm_functions.get_rank()
        self.world_size = comm_functions.get_world_size()
        self._topology = topology if topology is not None else _default_topology(self.world_size)
        if not self._is_grid_valid():
            raise UsageError(
                f"the topology has {self._topology.world_size()} places, and there are {self.world_size} ranks; they must "
                "be equal"
            )
        self.data_parallel_size = max(self._topology.get_dim(DATA), 1)
        self.pipe_parallel_size = max(self._topology.get_dim(PIPE), 1)
        self.model_parallel_size = max(self._topology.get_dim(MODEL), 1)
        self.slice_parallel_size = self.model_parallel_size
        self.stage_id = self.get_stage_id()
        self.data_parallel_id = self.get_data_parallel_id()
        self.is_first_stage = self.stage_id == 0
        self.is_last_stage = self.stage_id == self.pipe_parallel_size - 1
        places = self._topology.grid.widened(PIPE, DATA, MODEL)
        groups = process_grid.ProcessGrid(places, joined=[(PIPE, MODEL)])
        replica, self.ds_model_proc_group = self._joined(groups, PIPE, MODEL)
        self.ds_model_world_size = len(replica)
        self.ds_model_rank = replica.index(self.global_rank)
        self.dp_groups = places.lines(DATA)
        self.dp_group, self.dp_proc_group = self._joined(groups, DATA)
        self.pipe_groups = places.lines(PIPE)
        self.pp_group, self.pp_proc_group = self._joined(groups, PIPE)
        self.p2p_groups = self._neighbours()
        self.slice_group, self.slice_proc_group = self._joined(groups, MODEL)

    @staticmethod
    def _joined(groups: process_grid.ProcessGrid, *axes: str) -> tuple[list[int], Any]:
        """Return the ranks of this process's group along ``axes``, and the group itself."""
        group = groups.group(*axes)
        return list(group.global_ranks), group.group

    def _neighbours(self) -> list[list[int]]:
        """Return a pair for each rank: the rank and the rank of the next stage.

        The stage after the last stage is the first stage.
        """
        following: dict[int, int] = {}
        for ranks in self.pipe_groups:
            following.update(zip(ranks, [*ranks[1:], ranks[0]], strict=True))
        return [[rank, following[rank]] for rank in sorted(following)]

    def _is_grid_valid(self) -> bool:
        return self._topology.world_size() == self.world_size

    def _along(self, axis: str) -> int:
        return int(getattr(self._topology.get_coord(self.global_rank), axis, 0))

    def topology(self) -> ProcessTopology:
        """Return the topology of the grid."""
        return self._topology

    def stage_to_global(self, stage_id: int, **kwargs: int) -> int:
        """Return the rank of stage ``stage_id`` that has the same coordinates as this rank along all other axes.

        ``kwargs`` can replace the coordinates along these axes.
        """
        place = self._topology.get_coord(self.global_rank)._replace(**{PIPE: stage_id, **kwargs})
        return self._topology.get_rank(**place._asdict())

    def get_stage_id(self) -> int:
        """Return the stage of this rank."""
        return self._along(PIPE)

    def get_data_parallel_id(self) -> int:
        """Return the number of the replica of this rank."""
        return self._along(DATA)

    def get_slice_parallel_rank(self) -> int:
        """Return the coordinate of this rank along the model axis."""
        return self._along(MODEL)

    def get_data_parallel_group_ranks(self) -> list[int]:
        """Return the ranks that have the same stage and the same coordinate along the model axis as this rank."""
        return self.dp_group

    def get_global_rank(self) -> int:
        """Return the global rank of this process."""
        return self.global_rank

    def get_pipe_parallel_rank(self) -> int:
        """Return the stage of this rank."""
        return self.stage_id

    def get_pipeline_model_parallel_rank(self) -> int:
        """Return the stage of this rank."""
        return self.stage_id

    def get_pipe_parallel_world_size(self) -> int:
        """Return the number of stages."""
        return self.pipe_parallel_size

    def get_pipeline_model_parallel_world_size(self) -> int:
        """Return the number of stages."""
        return self.pipe_parallel_size

    def get_pipe_parallel_group(self) -> Any:
        """Return the group of all stages of this replica."""
        return self.pp_proc_group

    def get_data_parallel_rank(self) -> int:
        """Return the number of the replica of this rank."""
        return self.data_parallel_id

    def get_data_parallel_world_size(self) -> int:
        """Return the number of replicas."""
        return self.data_parallel_size

    def get_data_parallel_group(self) -> Any:
        """Return the group of all replicas of this stage."""
        return self.dp_proc_group

    def get_model_parallel_rank(self) -> int:
        """Return the rank of this process within its replica."""
        return self.ds_model_rank

    def get_model_parallel_world_size(self) -> int:
        """Return the number of ranks of a replica."""
        return self.ds_model_world_size

    def get_model_parallel_group(self) -> Any:
        """Return the group of all ranks of this replica."""
        return self.ds_model_proc_group

    def get_tensor_model_parallel_rank(self) -> int:
        """Return the coordinate of this rank along the model axis."""
        return self.get_slice_parallel_rank()

    def get_slice_parallel_world_size(self) -> int:
        """Return the number of tensor-parallel ranks."""
        return self.slice_parallel_size

    def get_tensor_model_parallel_world_size(self) -> int:
        """Return the number of tensor-parallel ranks."""
        return self.slice_parallel_size

    def get_slice_parallel_group(self) -> Any:
        """Return the tensor-parallel group of this stage of this replica."""
        return self.slice_proc_group


def _default_topology(world_size: int) -> ProcessTopology:
    factors = prime_factors(world_size)
    return PipeDataParallelTopology(num_pp=prod(factors[0::2]), num_dp=prod(factors[1::2]))


def prime_factors(number: int) -> list[int]:
    """Return the prime factors of ``number``, smallest first; an empty list for 1.

    Raises:
        ConfigError: ``number`` is not positive.
    """
    if number <= 0:
        raise ConfigError(f"prime factors need a positive number; found {number}")
    factors = []
    divisor = 2
    while divisor * divisor <= number:
        while number % divisor == 0:
            factors.append(divisor)
            number //= divisor
        divisor += 1
    return [*factors, number] if number > 1 else factors

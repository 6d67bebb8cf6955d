"""The grid of a pipeline's ranks: stages, replicas, and the process groups along each axis."""

from __future__ import annotations

from typing import Any, Final

import torch

from zero_runtime.comm import DataParallelGroup, ProcessGroup
from zero_runtime.errors import ConfigError
from zero_runtime.groups.process_grid import DATA, MODEL, PIPE, SEQUENCE, ProcessGrid, ProcessTopology

_MODEL_PARTS: Final = (PIPE, MODEL)
_REPLICAS: Final = (DATA, SEQUENCE)


class PipelineGrid:
    """The position of this rank among stages and replicas, with the methods of Megatron's model-parallel unit.

    Args:
        topology: The axes of all ranks. The axes ``data`` and ``pipe`` are added if they are missing.

    Attributes:
        processes: The groups along each axis.
        stage: The stage of this rank.
        num_stages: The number of stages.
    """

    def __init__(self, topology: ProcessTopology) -> None:
        self.processes = ProcessGrid(topology.widened(PIPE, DATA), joined=[_REPLICAS, _MODEL_PARTS])
        self.stage = self.processes.along(PIPE)
        self.num_stages = self.processes.size(PIPE)

    @property
    def topology(self) -> ProcessTopology:
        """The axes of all ranks."""
        return self.processes.topology

    @property
    def pipe(self) -> DataParallelGroup:
        """All stages of this replica, in order."""
        return self.processes.group(PIPE)

    @property
    def data(self) -> DataParallelGroup:
        """All replicas of this stage."""
        return self.processes.group(DATA)

    @property
    def model(self) -> DataParallelGroup:
        """All ranks of this replica."""
        return self.processes.group(*_MODEL_PARTS)

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return self.pipe.device

    @property
    def is_first(self) -> bool:
        """Whether this rank's stage is the first."""
        return not self.stage

    @property
    def is_last(self) -> bool:
        """Whether this rank's stage is the last."""
        return self.stage == self.num_stages - 1

    def stage_to_global(self, stage_id: int, **place: int) -> int:
        """Return the rank of stage ``stage_id`` that has this rank's coordinates on the other axes.

        Coordinates in ``place`` replace those of this rank.
        """
        return self.topology.rank(**{**self.processes.place, PIPE: stage_id, **place})

    def get_global_rank(self) -> int:
        """Return the number of this rank in the job."""
        return self.processes.rank

    def get_stage_id(self) -> int:
        """Return the stage of this rank."""
        return self.stage

    get_pipe_parallel_rank = get_pipeline_model_parallel_rank = get_stage_id

    def get_pipe_parallel_world_size(self) -> int:
        """Return the number of stages."""
        return self.num_stages

    get_pipeline_model_parallel_world_size = get_pipe_parallel_world_size

    def get_pipe_parallel_group(self) -> ProcessGroup | None:
        """Return the process group of the stages of this replica."""
        return self.pipe.group

    def get_data_parallel_id(self) -> int:
        """Return the number of this rank's replica."""
        return self.processes.along(DATA)

    get_data_parallel_rank = get_data_parallel_id

    def get_data_parallel_world_size(self) -> int:
        """Return the number of replicas."""
        return self.processes.size(DATA)

    def get_data_parallel_group(self) -> ProcessGroup | None:
        """Return the process group of the replicas of this stage."""
        return self.data.group

    def get_data_parallel_group_ranks(self) -> list[int]:
        """Return the ranks of the replicas of this stage."""
        return list(self.data.global_ranks)

    def get_model_parallel_rank(self) -> int:
        """Return the number of this rank among the ranks of its replica."""
        return self.model.rank

    def get_model_parallel_world_size(self) -> int:
        """Return the number of ranks of a replica."""
        return self.model.world_size

    def get_model_parallel_group(self) -> ProcessGroup | None:
        """Return the process group of the ranks of this replica."""
        return self.model.group

    def get_slice_parallel_rank(self) -> int:
        """Return the number of this rank among the tensor-parallel ranks of its stage."""
        return self.processes.along(MODEL)

    get_tensor_model_parallel_rank = get_slice_parallel_rank

    def get_slice_parallel_world_size(self) -> int:
        """Return the number of tensor-parallel ranks."""
        return self.processes.size(MODEL)

    get_tensor_model_parallel_world_size = get_slice_parallel_world_size

    # Attributes with the same values, under DeepSpeed's names.
    global_rank = property(get_global_rank)
    stage_id = property(get_stage_id)
    data_parallel_id = property(get_data_parallel_id)
    pipe_parallel_size = property(get_pipe_parallel_world_size)
    data_parallel_size = property(get_data_parallel_world_size)
    slice_parallel_size = model_parallel_size = property(get_slice_parallel_world_size)


def topology_of(grid: Any) -> ProcessTopology:
    """Return the topology that a script passes.

    Args:
        grid: A topology from ``zero_runtime.groups.process_grid`` or ``deepspeed.runtime.pipe.topology``.

    Raises:
        ConfigError: ``grid`` is not a topology, or it has no axis ``pipe``.
    """
    topology = getattr(grid, "grid", grid)
    if not isinstance(topology, ProcessTopology):
        raise ConfigError(f"topology is a {type(grid).__name__}; expected a ProcessTopology")
    if PIPE not in topology.axes:
        raise ConfigError(f"the topology has the axes {', '.join(topology.axes)}; expected one called {PIPE}")
    return topology


def topology_for(stages: int, world_size: int) -> ProcessTopology:
    """Return the topology of ``stages`` pipeline stages with as many replicas as ``world_size`` allows.

    Raises:
        ConfigError: The number of stages does not divide the number of ranks.
    """
    if stages < 1 or world_size % stages:
        raise ConfigError(
            f"{stages} pipeline stages do not divide {world_size} ranks; use a number of stages that does, or start "
            f"{'a multiple of ' + str(stages) if stages > 0 else 'other'} ranks"
        )
    return ProcessTopology.of(pipe=stages, data=world_size // stages)

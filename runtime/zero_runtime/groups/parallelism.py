"""The axes of parallelism of a training.

Along an axis, ranks have different samples, or different parts of a sequence or of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from zero_runtime import comm
from zero_runtime.activation_checkpointing.model_parallel import model_parallel
from zero_runtime.comm import DataParallelGroup
from zero_runtime.configuration.blocks.parallel_block import ParallelConfig
from zero_runtime.errors import ConfigError
from zero_runtime.experts.expert_groups import ExpertRanks
from zero_runtime.groups.process_grid import DATA, MODEL, PIPE, SEQUENCE, ProcessGrid, ProcessTopology

_MODEL_NAMES = ("get_tensor_model_parallel", "get_slice_parallel", "get_model_parallel")


class ModelRanks(NamedTuple):
    """The ranks among which one model is partitioned.

    Attributes:
        group: The process group of these ranks.
        is_first: Whether this rank counts the parameters that are replicated along the model axis in sums over
            the group.
    """

    group: DataParallelGroup
    is_first: bool

    def counts(self, parameter: torch.Tensor) -> bool:
        """Return whether this rank counts ``parameter`` in a sum over the group that counts each element once.

        The tested attributes are those by which Megatron and DeepSpeed mark partitioned parameters and
        parameters that pipeline stages share.
        """
        if getattr(parameter, "ds_pipe_replicated", False):
            return False
        return self.is_first or is_cut(parameter)


def is_cut(parameter: torch.Tensor) -> bool:
    """Return whether ``parameter`` is partitioned along the model axis."""
    return bool(
        getattr(parameter, "tensor_model_parallel", False) or getattr(parameter, "model_parallel", False)
    )


class Parallelism(NamedTuple):
    """The position of this process in the axes of a training.

    Attributes:
        data: torch's process group of the ranks that have the same parameters. Gradients are reduced in this
            group. None for all ranks.
        replicas: The number of groups of ranks with different samples, by which gradients are divided.
        replica: The number of this process among the replicas.
        model: The ranks among which one model is partitioned; None if each rank has the whole model.
        grid: The groups by axis; None if there is only one axis, or if an ``mpu`` provides the groups.
        mpu: The script's ``mpu``, or None.
        experts: The groups of the model's experts, by name; empty without experts.
    """

    data: Any
    replicas: int
    replica: int
    model: ModelRanks | None = None
    grid: ProcessGrid | None = None
    mpu: Any = None
    experts: Mapping[str, ExpertRanks] = MappingProxyType({})

    @property
    def sequence_size(self) -> int:
        """The number of ranks that share the sequences of one batch."""
        return 1 if self.grid is None else self.grid.size(SEQUENCE)

    @property
    def stages(self) -> int:
        """The number of pipeline stages."""
        return 1 if self.grid is None else self.grid.size(PIPE)

    @property
    def tensor_group(self) -> DataParallelGroup | None:
        """The tensor-parallel ranks; None if there is only one."""
        if self.mpu is not None and self.grid is None:
            return None if self.model is None else model_parallel(self.mpu).group
        if self.grid is None or self.grid.size(MODEL) == 1:
            return None
        return self.grid.group(MODEL)

    def model_sizes(self) -> dict[str, int]:
        """Return the number of ranks along each axis that divides the model, under the names of a checkpoint."""
        return {axis: size for axis, size in self.sizes().items() if axis in (PIPE, MODEL) and size > 1}

    def sizes(self) -> dict[str, int]:
        """Return the number of ranks along each axis, for the record of a run."""
        if self.grid is None:
            return {DATA: self.replicas, MODEL: 1 if self.model is None else self.model.group.world_size}
        return dict(zip(self.grid.topology.axes, self.grid.topology.sizes, strict=True))

    def described(self) -> dict[str, Any]:
        """Return the axes for the record of a run, and whether a script defines the groups.

        A script's groups may contain any ranks.
        """
        own = {"groups": "script"} if self.grid is None and self.mpu is not None else {}
        return {"topology": self.sizes(), **own}


def data_parallel() -> Parallelism:
    """Return pure data parallelism over all ranks.

    Before torch.distributed is initialized, the only rank is this process.
    """
    if not comm.is_initialized():
        return Parallelism(None, 1, 0)
    return Parallelism(None, comm.get_world_size(), comm.get_rank())


def along_axes(*, stages: int = 1, sequence: int = 1, slices: int = 1, replicas: int = 1) -> Parallelism:
    """Create the groups along the axes pipe, data, sequence and model. All ranks must call this function.

    Args:
        stages: The number of pipeline stages.
        sequence: The number of ranks that share the sequences of a batch.
        slices: The number of tensor-parallel ranks.
        replicas: The number of data-parallel ranks.

    Raises:
        ConfigError: The product of the sizes is not the number of ranks.
    """
    if stages == sequence == slices == 1:
        return data_parallel()
    grid = ProcessGrid(
        ProcessTopology.of(pipe=stages, data=replicas, sequence=sequence, model=slices),
        joined=[(DATA, SEQUENCE), (PIPE, MODEL)],
    )
    return of_grid(grid)


def of_grid(grid: ProcessGrid) -> Parallelism:
    """Return the parallelism of a grid with the axes pipe, data, sequence and model.

    Missing axes are one rank wide.

    Raises:
        UsageError: The grid was constructed without a required group, such as "pipe+model".
    """
    model = None
    if grid.size(PIPE) * grid.size(MODEL) > 1:
        model = ModelRanks(_group(grid, PIPE, MODEL), grid.along(MODEL) == 0)
    return Parallelism(_group(grid, DATA, SEQUENCE).group, grid.size(DATA), grid.along(DATA), model, grid)


def _group(grid: ProcessGrid, *axes: str) -> DataParallelGroup:
    """Return the group along ``axes``. The grid may lack axes that are one rank wide."""
    wide = [axis for axis in axes if grid.size(axis) > 1]
    present = [axis for axis in axes if axis in grid.topology.axes]
    return grid.group(*wide) if len(wide) == 1 else grid.group(*present)


def of_mpu(mpu: Any) -> Parallelism:
    """Return the parallelism of a script's ``mpu``: a :class:`ProcessGrid`, or an object with Megatron's methods.

    The object needs ``get_data_parallel_group``, ``_world_size`` and ``_rank``. If the model is partitioned, it
    also needs the same three methods of ``get_model_parallel``. ``get_tensor_model_parallel_rank`` returns the
    tensor-parallel rank.

    Raises:
        ConfigError: A method is missing, or the methods contradict each other.
    """
    if isinstance(mpu, ProcessGrid):
        return of_grid(mpu)._replace(mpu=mpu)
    methods = {
        name: getattr(mpu, f"get_{name}", None)
        for name in ("data_parallel_group", "data_parallel_world_size", "data_parallel_rank")
    }
    missing = [f"get_{name}" for name, method in methods.items() if not callable(method)]
    if missing:
        raise ConfigError(
            f"mpu is a {type(mpu).__name__} without {', '.join(missing)}; expected a zero_runtime.ProcessGrid, or an object "
            "with these methods and those of get_model_parallel"
        )
    answers = {name: method() for name, method in methods.items() if method is not None}
    data = DataParallelGroup(answers["data_parallel_group"])
    replicas, replica = int(answers["data_parallel_world_size"]), int(answers["data_parallel_rank"])
    if (data.world_size, data.rank) != (replicas, replica):
        raise ConfigError(
            f"mpu says that this is rank {replica} of {replicas} data-parallel ranks, but it is rank {data.rank} of the "
            f"{data.world_size} ranks of get_data_parallel_group()"
        )
    return Parallelism(data.group, replicas, replica, _model_ranks(mpu, replicas), None, mpu)


def _model_ranks(mpu: Any, replicas: int) -> ModelRanks | None:
    size = getattr(mpu, "get_model_parallel_world_size", None)
    model_size = int(size()) if callable(size) else 1
    if model_size * replicas != comm.get_world_size():
        raise ConfigError(
            f"mpu says that there are {replicas} data-parallel and {model_size} model-parallel ranks, which makes "
            f"{model_size * replicas}, and there are {comm.get_world_size()} ranks; they must be equal"
        )
    if model_size == 1:
        return None
    prefix = next(each for each in _MODEL_NAMES if callable(getattr(mpu, f"{each}_rank", None)))
    return ModelRanks(
        DataParallelGroup(mpu.get_model_parallel_group()), int(getattr(mpu, f"{prefix}_rank")()) == 0
    )


def with_mesh(config: Mapping[str, Any], sizes: Any) -> dict[str, Any]:
    """Return ``config`` with the sizes of ``mesh_param``: (data-parallel ranks, sequence-parallel ranks).

    Raises:
        ConfigError: ``sizes`` is not a pair of positive numbers, or the configuration has different sizes.
    """
    pair = tuple(sizes) if isinstance(sizes, tuple | list) else ()
    if len(pair) != 2 or not all(isinstance(each, int) and each > 0 for each in pair):
        raise ConfigError(
            f"mesh_param is {sizes!r}; expected two positive numbers, of data-parallel and of sequence-parallel ranks, that "
            "multiply to the number of ranks"
        )
    merged = dict(config)
    for name, size in zip(("data_parallel_size", "sequence_parallel_size"), pair, strict=True):
        if merged.setdefault(name, size) != size:
            raise ConfigError(
                f"mesh_param is {pair}, and {name} in the configuration is {merged[name]}; keep one"
            )
    return merged


class Shared(NamedTuple):
    """The axes of parallelism before any group is created.

    Attributes:
        stages: The number of ranks of one model, divided by the tensor- and sequence-parallel ranks.
        parallelism: A function that creates the groups. All ranks must call it.
    """

    stages: int
    parallelism: Callable[[], Parallelism]


def share(config: ParallelConfig, mpu: Any, stages: int = 1) -> Shared:
    """Return the axes from the configuration or from a script's ``mpu``. Nothing is sent.

    Args:
        config: The parallel keys of the configuration.
        mpu: See :func:`of_mpu`; None if there is no ``mpu``.
        stages: The number of pipeline stages, if there is no ``mpu``.

    Raises:
        ConfigError: The product of the axes is not the number of ranks, or ``mpu`` and the configuration contradict
            each other.
    """
    world = comm.get_world_size()
    if mpu is None:
        replicas = config.replicas(world, stages)
        sizes = {"stages": stages, "sequence": config.sequence_parallel_size, "slices": config.tp_size}
        return Shared(stages, lambda: along_axes(**sizes, replicas=replicas))
    parallelism = of_mpu(mpu)
    configured = {"tp_size": config.tp_size, "sequence_parallel_size": config.sequence_parallel_size}
    tensor = parallelism.tensor_group
    actual = {
        "tp_size": 1 if tensor is None else tensor.world_size,
        "sequence_parallel_size": parallelism.sequence_size,
    }
    for name, size in configured.items():
        if size > 1 and size != actual[name]:
            raise ConfigError(
                f"{name} is {size}, and mpu has {actual[name]} such ranks; make them equal, or leave {name} out"
            )
    return Shared(
        world // parallelism.replicas // (config.tp_size * config.sequence_parallel_size), lambda: parallelism
    )


_current: list[Parallelism] = []


def use(parallelism: Parallelism) -> None:
    """Make ``parallelism`` the value of :func:`current`."""
    _current[:] = [parallelism]


def current() -> Parallelism | None:
    """Return the parallelism of the training that was initialized last; None before the first."""
    return _current[0] if _current else None


def stage_text(parameter: torch.Tensor) -> str | None:
    """Return the pipeline stage that has ``parameter`` on this rank, for the record of a run; None without stages.

    A plus sign means that other stages have an equal copy.
    """
    parallelism = current()
    if parallelism is None or parallelism.grid is None or parallelism.stages == 1:
        return None
    return f"{parallelism.grid.along(PIPE)}{'+' if hasattr(parameter, 'ds_pipe_replicated') else ''}"

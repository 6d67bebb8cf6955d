"""How the ranks of a training share its work: which have other samples, which other parts of a sequence or of the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from zero_runtime import comm
from zero_runtime.activation_checkpointing.model_parallel import model_parallel
from zero_runtime.comm import DataParallelGroup
from zero_runtime.configuration.parallel import ParallelConfig
from zero_runtime.errors import ConfigError
from zero_runtime.groups.topology import DATA, MODEL, PIPE, SEQUENCE, ProcessGrid, ProcessTopology

_MODEL_NAMES = ("get_tensor_model_parallel", "get_slice_parallel", "get_model_parallel")


class ModelRanks(NamedTuple):
    """The ranks that hold one model together, each another part of it.

    Attributes:
        group: they.
        is_first: whether what all ranks of the model axis hold alike is counted here, in sums over the group.
    """

    group: DataParallelGroup
    is_first: bool

    def counts(self, parameter: torch.Tensor) -> bool:
        """Whether this rank counts ``parameter`` in a sum over the group, where each element must be counted once.

        The attributes are those that Megatron and DeepSpeed give parameters that are cut, and those that stages share.
        """
        if getattr(parameter, "ds_pipe_replicated", False):
            return False
        return self.is_first or is_cut(parameter)


def is_cut(parameter: torch.Tensor) -> bool:
    """Whether each rank of the model axis holds another part of ``parameter``."""
    return bool(
        getattr(parameter, "tensor_model_parallel", False) or getattr(parameter, "model_parallel", False)
    )


class Parallelism(NamedTuple):
    """This process among the ranks of a training.

    Attributes:
        data: torch's group of the ranks that hold the same parameters, over which gradients are reduced; None for all.
        replicas: how many of them have other samples: gradients are divided by that.
        replica: this process's number among those.
        model: the ranks that hold one model together; None where each holds all of it.
        grid: the groups by axis; None where there is only one axis, or where an ``mpu`` has them.
        mpu: the script's, or None.
    """

    data: Any
    replicas: int
    replica: int
    model: ModelRanks | None = None
    grid: ProcessGrid | None = None
    mpu: Any = None

    @property
    def sequence_size(self) -> int:
        """Ranks that share the sequences of one batch."""
        return 1 if self.grid is None else self.grid.size(SEQUENCE)

    @property
    def stages(self) -> int:
        """Stages of a pipeline."""
        return 1 if self.grid is None else self.grid.size(PIPE)

    @property
    def tensor_group(self) -> DataParallelGroup | None:
        """The ranks that share each tensor; None where this is the only one."""
        if self.mpu is not None and self.grid is None:
            return None if self.model is None else model_parallel(self.mpu).group
        if self.grid is None or self.grid.size(MODEL) == 1:
            return None
        return self.grid.group(MODEL)

    def model_sizes(self) -> dict[str, int]:
        """Ranks along each axis that cuts the model, as a checkpoint names them."""
        return {axis: size for axis, size in self.sizes().items() if axis in (PIPE, MODEL) and size > 1}

    def sizes(self) -> dict[str, int]:
        """Ranks along each axis; for the record of a run."""
        if self.grid is None:
            return {DATA: self.replicas, MODEL: 1 if self.model is None else self.model.group.world_size}
        return dict(zip(self.grid.topology.axes, self.grid.topology.sizes, strict=True))

    def described(self) -> dict[str, Any]:
        """The axes for the record of a run, and whether the groups are those of a script, which may be any ranks."""
        own = {"groups": "script"} if self.grid is None and self.mpu is not None else {}
        return {"topology": self.sizes(), **own}


def data_parallel() -> Parallelism:
    """All ranks hold the whole model, and have samples of their own; this process alone where there are no ranks yet."""
    if not comm.is_initialized():
        return Parallelism(None, 1, 0)
    return Parallelism(None, comm.get_world_size(), comm.get_rank())


def along_axes(*, stages: int = 1, sequence: int = 1, slices: int = 1, replicas: int = 1) -> Parallelism:
    """Groups along the axes pipe, data, sequence and model. All ranks must call it.

    Args:
        stages: of a pipeline.
        sequence: ranks that share the sequences of a batch.
        slices: ranks that share each tensor.
        replicas: of all that.

    Raises:
        ConfigError: they do not multiply to the number of ranks.
    """
    if stages == sequence == slices == 1:
        return data_parallel()
    grid = ProcessGrid(
        ProcessTopology.of(pipe=stages, data=replicas, sequence=sequence, model=slices),
        joined=[(DATA, SEQUENCE), (PIPE, MODEL)],
    )
    return of_grid(grid)


def of_grid(grid: ProcessGrid) -> Parallelism:
    """What a grid of the axes pipe, data, sequence and model says; axes that it lacks are one rank wide.

    Raises:
        UsageError: the grid was made without a group that is needed, such as "pipe+model".
    """
    model = None
    if grid.size(PIPE) * grid.size(MODEL) > 1:
        model = ModelRanks(_group(grid, PIPE, MODEL), grid.along(MODEL) == 0)
    return Parallelism(_group(grid, DATA, SEQUENCE).group, grid.size(DATA), grid.along(DATA), model, grid)


def _group(grid: ProcessGrid, *axes: str) -> DataParallelGroup:
    """The group along ``axes``, of which those that are one rank wide need not be named."""
    wide = [axis for axis in axes if grid.size(axis) > 1]
    present = [axis for axis in axes if axis in grid.topology.axes]
    return grid.group(*wide) if len(wide) == 1 else grid.group(*present)


def of_mpu(mpu: Any) -> Parallelism:
    """What a script's ``mpu`` says: a :class:`ProcessGrid`, or an object with Megatron's methods.

    Of those ``get_data_parallel_group`` and ``_world_size`` and ``_rank`` are needed, and the three of
    ``get_model_parallel`` too where the model is cut; ``get_tensor_model_parallel_rank`` says which slice this is.

    Raises:
        ConfigError: it lacks one of them, or they contradict each other.
    """
    if isinstance(mpu, ProcessGrid):
        return of_grid(mpu)._replace(mpu=mpu)
    asked = {
        name: getattr(mpu, f"get_{name}", None)
        for name in ("data_parallel_group", "data_parallel_world_size", "data_parallel_rank")
    }
    missing = [f"get_{name}" for name, method in asked.items() if not callable(method)]
    if missing:
        raise ConfigError(
            f"mpu is a {type(mpu).__name__} without {', '.join(missing)}; expected a zero_runtime.ProcessGrid, or an object "
            "with these methods and those of get_model_parallel"
        )
    said = {name: method() for name, method in asked.items() if method is not None}
    data = DataParallelGroup(said["data_parallel_group"])
    replicas, replica = int(said["data_parallel_world_size"]), int(said["data_parallel_rank"])
    if (data.world_size, data.rank) != (replicas, replica):
        raise ConfigError(
            f"mpu says that this is rank {replica} of {replicas} data-parallel ranks, but it is rank {data.rank} of the "
            f"{data.world_size} ranks of get_data_parallel_group()"
        )
    return Parallelism(data.group, replicas, replica, _model_ranks(mpu, replicas), None, mpu)


def _model_ranks(mpu: Any, replicas: int) -> ModelRanks | None:
    size = getattr(mpu, "get_model_parallel_world_size", None)
    pieces = int(size()) if callable(size) else 1
    if pieces * replicas != comm.get_world_size():
        raise ConfigError(
            f"mpu says that there are {replicas} data-parallel and {pieces} model-parallel ranks, which makes "
            f"{pieces * replicas}, and there are {comm.get_world_size()} ranks; they must be equal"
        )
    if pieces == 1:
        return None
    prefix = next(each for each in _MODEL_NAMES if callable(getattr(mpu, f"{each}_rank", None)))
    return ModelRanks(
        DataParallelGroup(mpu.get_model_parallel_group()), int(getattr(mpu, f"{prefix}_rank")()) == 0
    )


def with_mesh(given: Mapping[str, Any], sizes: Any) -> dict[str, Any]:
    """The configuration ``given`` with what ``mesh_param`` says: (data-parallel ranks, sequence-parallel ranks).

    Raises:
        ConfigError: it is not a pair of positive numbers, or the configuration says something else.
    """
    pair = tuple(sizes) if isinstance(sizes, tuple | list) else ()
    if len(pair) != 2 or not all(isinstance(each, int) and each > 0 for each in pair):
        raise ConfigError(
            f"mesh_param is {sizes!r}; expected two positive numbers, of data-parallel and of sequence-parallel ranks, that "
            "multiply to the number of ranks"
        )
    found = dict(given)
    for name, size in zip(("data_parallel_size", "sequence_parallel_size"), pair, strict=True):
        if found.setdefault(name, size) != size:
            raise ConfigError(
                f"mesh_param is {pair}, and {name} in the configuration is {found[name]}; keep one"
            )
    return found


class Shared(NamedTuple):
    """What is known of the axes before any group is made.

    Attributes:
        stages: ranks that share a model beyond those that the configuration names.
        parallelism: makes the groups; all ranks must call it.
    """

    stages: int
    parallelism: Callable[[], Parallelism]


def share(config: ParallelConfig, mpu: Any, stages: int = 1) -> Shared:
    """How the ranks share a training, by the configuration, or by a script's ``mpu``. Nothing is sent.

    Args:
        config: the parallel keys.
        mpu: as for :func:`of_mpu`; None without one.
        stages: of a pipeline, where there is no ``mpu``.

    Raises:
        ConfigError: the axes do not multiply to the number of ranks, or ``mpu`` and the configuration contradict each other.
    """
    world = comm.get_world_size()
    if mpu is None:
        replicas = config.replicas(world, stages)
        sizes = {"stages": stages, "sequence": config.sequence_parallel_size, "slices": config.tp_size}
        return Shared(stages, lambda: along_axes(**sizes, replicas=replicas))
    found = of_mpu(mpu)
    said = {"tp_size": config.tp_size, "sequence_parallel_size": config.sequence_parallel_size}
    tensor = found.tensor_group
    has = {
        "tp_size": 1 if tensor is None else tensor.world_size,
        "sequence_parallel_size": found.sequence_size,
    }
    for name, size in said.items():
        if size > 1 and size != has[name]:
            raise ConfigError(
                f"{name} is {size}, and mpu has {has[name]} such ranks; make them equal, or leave {name} out"
            )
    return Shared(world // found.replicas // (config.tp_size * config.sequence_parallel_size), lambda: found)


_current: list[Parallelism] = []


def use(parallelism: Parallelism) -> None:
    """Make ``parallelism`` the one that :func:`current` gives."""
    _current[:] = [parallelism]


def current() -> Parallelism | None:
    """How the ranks share the training that was initialised last; None before."""
    return _current[0] if _current else None


def stage_text(parameter: torch.Tensor) -> str | None:
    """The stage of the pipeline that has ``parameter`` on this rank, as the record of a run has it; None without stages.

    A plus says that other stages have a copy, which is kept equal.
    """
    found = current()
    if found is None or found.grid is None or found.stages == 1:
        return None
    return f"{found.grid.along(PIPE)}{'+' if hasattr(parameter, 'ds_pipe_replicated') else ''}"

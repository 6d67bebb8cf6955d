"""Loading of a checkpoint into an engine of any world size, ZeRO stage and layout.

All ranks first check everything that can fail. The engine changes only after these checks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from zero_runtime import log
from zero_runtime.checkpoint.deepspeed.checkpoint import Known, open_folder
from zero_runtime.checkpoint.deepspeed.folder import is_exported
from zero_runtime.checkpoint.files import random_state
from zero_runtime.checkpoint.files.checkpoint_manifest import FILE_NAME, LATEST_UNIVERSAL, read_latest
from zero_runtime.checkpoint.files.checkpoint_reader import Checkpoint
from zero_runtime.checkpoint.opened import OpenCheckpoint
from zero_runtime.checkpoint.ranks import save_agreement
from zero_runtime.checkpoint.training import (
    Training,
    aliases,
    buffers,
    everywhere,
    extra_states,
    parameters,
    whole_shape,
)
from zero_runtime.comm import DataParallelGroup
from zero_runtime.errors import CheckpointError
from zero_runtime.optimizer_step.fragments import IMPLEMENTATION
from zero_runtime.sharding.gather_schedule.residency import residency_of
from zero_runtime.sharding.shards import shard_of

# Optimizers whose states have the same meaning.
_ALIKE: Final = (frozenset({"Adam", "AdamW"}),)
# These options are not loaded. They select how an update is computed, and which of the classes above computes it.
_OF_THE_ENGINE: Final = (*IMPLEMENTATION, "decoupled_weight_decay")


Opener = Callable[[Path, Mapping[str, torch.dtype]], OpenCheckpoint]


class Wanted(NamedTuple):
    """The parts of a checkpoint to load: the arguments of ``engine.load_checkpoint``.

    Attributes:
        strict: Whether the model must have exactly the parameters and buffers that were saved.
        optimizer_states: Whether to load the optimizer's state, the options of its param groups, the loss scale
            and random states.
        scheduler_states: Whether to load the state of the learning-rate schedule.
        module_only: Whether to load only parameters and buffers.
        from_fp32: Whether to fill fp32 masters with the saved fp32 values. False rounds these values to the
            model's dtype.
        custom: A function that loads parameters and buffers instead of the default. It is called with ``src``,
            the state dict, and ``dst``, the model.
        universal: Whether to prefer the DeepSpeed universal folder that was written last, if no tag is given.
    """

    strict: bool = True
    optimizer_states: bool = True
    scheduler_states: bool = True
    module_only: bool = False
    from_fp32: bool = True
    custom: Callable[..., Any] | None = None
    universal: bool = False


class Loaded(NamedTuple):
    """The result of loading: the directory, the client state and the counters.

    The counters are None with ``module_only`` and for checkpoints that contain only weights.
    """

    directory: Path
    client_state: dict[str, Any]
    counters: dict[str, int] | None


class Others(NamedTuple):
    """The other parts of a model whose ranks save one checkpoint each.

    Attributes:
        group: The group of the ranks that load the other parts.
        counters: The counters that every part must have.
    """

    group: DataParallelGroup
    counters: Mapping[str, int]


def load(
    training: Training,
    load_dir: Path,
    tag: str | None,
    wanted: Wanted,
    others: Others | None = None,
    opener: Opener | None = None,
) -> Loaded | None:
    """Load a checkpoint into ``training``. All ranks must call this function.

    Args:
        training: The parts of the engine to load into.
        load_dir: The directory of checkpoints.
        tag: The tag of the checkpoint. None for the checkpoint that was saved last.
        wanted: The parts of the checkpoint to load.
        others: The other parts, if this checkpoint is one of several.
        opener: A function that opens the checkpoint. None to recognize the format by the files.

    Returns:
        The result, or None if ``tag`` is None and no checkpoint has been saved in ``load_dir``.

    Raises:
        CheckpointError: A rank fails. Every rank raises the error. The engine is unchanged, unless a file
            became unreadable after the checks.
    """
    group = training.group
    doing = f"loading {load_dir if tag is None else load_dir / tag}"
    training.settle()
    checkpoint, error = save_agreement.attempt(lambda: _open(training, load_dir, tag, wanted, others, opener))
    try:
        _agree(group, checkpoint, error, doing)
    except CheckpointError as failure:
        if others is None:
            raise
        error = failure
    if others is not None:
        save_agreement.agree(others.group, error, doing)
    if checkpoint is None:
        return None
    residency = residency_of(training.module)
    if residency is not None:
        residency.release_all()
    loaded, error = save_agreement.attempt(lambda: _restore(training, checkpoint, wanted))
    save_agreement.agree(group, error, doing)
    if residency is not None:
        residency.parameters_changed()
    return loaded


def _agree(
    group: DataParallelGroup, checkpoint: OpenCheckpoint | None, error: Exception | None, doing: str
) -> None:
    """Check that all ranks have opened the same checkpoint. Raise CheckpointError on every rank otherwise."""
    if not save_agreement.agree_on(group, error, 0 if checkpoint is None else _identity(checkpoint), doing):
        raise CheckpointError(
            f"{doing} failed: the ranks find different checkpoints there (rank {group.rank}: "
            f"{'none' if checkpoint is None else checkpoint.directory}); load one that all of them see, and name its tag"
        )


def _open(
    training: Training,
    load_dir: Path,
    tag: str | None,
    wanted: Wanted,
    others: Others | None,
    opener: Opener | None,
) -> OpenCheckpoint | None:
    """Open the checkpoint, check that it fits ``training``, and verify this rank's share of its files."""
    directory = _directory(load_dir, tag, wanted.universal)
    if directory is None:
        if training.group.rank == 0:
            missing = load_dir / "latest" if load_dir.exists() else load_dir
            end = "; name a tag to load one" if load_dir.exists() else ""
            log.warning(f"{missing} does not exist, so nothing was loaded{end}")
        return None
    dtypes = {name: each.dtype for name, each in parameters(training).items()}
    rounding = {} if wanted.from_fp32 else dtypes
    checkpoint = None if opener is None else opener(directory, rounding)
    if checkpoint is None and not (directory / FILE_NAME).is_file():
        module_suffices = wanted.module_only or not wanted.optimizer_states
        checkpoint = open_folder(directory, rounding, _known(training), module_suffices)
    if checkpoint is None:
        checkpoint = Checkpoint(directory, rounding)
    if others is not None and checkpoint.manifest.counters != others.counters:
        raise CheckpointError(
            f"{directory} is of step {checkpoint.manifest.counters.get('global_steps')}, and the other parts are of step "
            f"{others.counters.get('global_steps')}: a save was cut off; load the tag before it"
        )
    _check_fits(training, checkpoint, wanted)
    files = len(checkpoint.manifest.files)
    checkpoint.verify(range(training.group.rank, files, training.group.world_size))
    return checkpoint


def _directory(load_dir: Path, tag: str | None, universal: bool) -> Path | None:
    """Return the directory of ``tag``, or of the tag that was saved last. Return None if there is no tag."""
    if tag is None:
        tag = read_latest(load_dir, LATEST_UNIVERSAL) if universal else None
        tag = tag or read_latest(load_dir) or read_latest(load_dir, LATEST_UNIVERSAL)
    if tag is not None:
        return load_dir / tag
    if (load_dir / FILE_NAME).is_file():
        here = load_dir.absolute()
        raise CheckpointError(
            f"{load_dir} is a checkpoint itself; expected the directory that holds it: "
            f"load_checkpoint({str(here.parent)!r}, tag={here.name!r})"
        )
    return load_dir if is_exported(load_dir) else None


def _known(training: Training) -> Known:
    """Return the facts about the model that are needed to read a checkpoint without parameter names."""
    groups: dict[int, list[str]] = {}
    for name, (_, number) in training.trained.items():
        groups.setdefault(number, []).append(name)
    inner = None if training.optimizer is None else training.optimizer.optimizer
    count = 0 if inner is None else len(training.optimizer.param_groups)
    return Known(
        tuple(tuple(groups.get(number, ())) for number in range(count)),
        frozenset(name for name in parameters(training) if name not in training.trained),
        frozenset(buffers(training.module)),
        aliases(training.module),
        None if inner is None else type(inner).__name__,
    )


def _identity(checkpoint: OpenCheckpoint) -> int:
    """Return a number that differs between checkpoints: a hash of the checksums of their files."""
    crc = 1
    for each in checkpoint.manifest.files:
        crc = (crc * 31 + each.crc32) % (1 << 61)
    return crc + 1


def _check_fits(training: Training, checkpoint: OpenCheckpoint, wanted: Wanted) -> None:
    model = parameters(training)
    where = checkpoint.directory
    if wanted.custom is None:
        for name, parameter in model.items():
            if checkpoint.has(name):
                saved_shape = checkpoint.parameters[checkpoint.name_of(name)].shape
                if saved_shape != whole_shape(parameter):
                    raise CheckpointError(
                        f"parameter {name!r} has shape {whole_shape(parameter)} in the model and {saved_shape} in "
                        f"{where}; load it "
                        "into the model that was saved, or with custom_load_fn"
                    )
        if wanted.strict:
            _check_names(training, checkpoint)
    saved_by = checkpoint.manifest.optimizer
    if training.optimizer is None or wanted.module_only or not wanted.optimizer_states or saved_by is None:
        return
    kind = type(training.optimizer.optimizer).__name__
    if kind != saved_by and not any({kind, saved_by} <= alike for alike in _ALIKE):
        raise CheckpointError(
            f"{where} holds the optimizer state of {saved_by}, and the engine has {kind}; use the same optimizer, or "
            "pass load_optimizer_states=False"
        )


def _check_names(training: Training, checkpoint: OpenCheckpoint) -> None:
    manifest = checkpoint.manifest
    saved_names = {*checkpoint.parameters, *manifest.buffers, *manifest.aliases}
    aliased = {checkpoint.name_of(name) for name in manifest.aliases}
    model_names = {*everywhere(training), *buffers(training.module)}
    missing = sorted(model_names - saved_names - set(manifest.excluded))
    stored_names = {checkpoint.name_of(name) for name in model_names}
    unexpected = sorted(
        name for name in {*checkpoint.parameters, *manifest.buffers} - aliased if name not in stored_names
    )
    unexpected += sorted(name for name in aliased if name not in stored_names)
    if missing or unexpected:
        differences = [
            f"{what} {', '.join(map(repr, names[:5]))}{' and others' if len(names) > 5 else ''}"
            for what, names in (("it lacks", missing), ("the model lacks", unexpected))
            if names
        ]
        raise CheckpointError(
            f"{checkpoint.directory} is of another model: {'; '.join(differences)}; pass load_module_strict=False to "
            "load what "
            "both have"
        )


@torch.no_grad()
def _restore(training: Training, checkpoint: OpenCheckpoint, wanted: Wanted) -> Loaded:
    manifest = checkpoint.manifest
    if wanted.custom is None:
        _restore_module(training, checkpoint)
    else:
        _restore_by(wanted.custom, training, checkpoint)
    optimizer = training.optimizer
    states = wanted.optimizer_states and not wanted.module_only
    if optimizer is not None and wanted.custom is None:
        optimizer.load_fragments(checkpoint, states and manifest.optimizer is not None)
    if states:
        if optimizer is not None and manifest.optimizer is not None:
            _restore_options(training, checkpoint)
        scale = checkpoint.decode(manifest.loss_scale)
        if scale is not None and hasattr(training.loss_scale, "load_state_dict"):
            training.loss_scale.load_state_dict(scale)
        if len(manifest.files) == training.group.world_size:
            random_state.restore(checkpoint.random_states(training.group.rank), training.group.device)
    _restore_residuals(training, checkpoint if states else None)
    if wanted.scheduler_states and not wanted.module_only and training.scheduler is not None:
        state = checkpoint.decode(manifest.lr_scheduler)
        if state is not None:
            training.scheduler.load_state_dict(state)
    client_state = checkpoint.decode(manifest.client_state)
    counters = None if wanted.module_only or not manifest.counters else dict(manifest.counters)
    return Loaded(checkpoint.directory, client_state, counters)


def _restore_residuals(training: Training, checkpoint: OpenCheckpoint | None) -> None:
    """Load the residuals of gradient compression.

    Without a checkpoint, set them to zero, because the weights have changed.
    """
    if training.residuals is None:
        return
    saved_by = 0 if checkpoint is None else len(checkpoint.manifest.files)
    group = training.group
    read = checkpoint.residuals if checkpoint is not None else _no_residuals
    layout = checkpoint.residual_layout if checkpoint is not None else None
    training.residuals.load(read, group.rank, group.world_size, saved_by, layout, group.device)


def _no_residuals(rank: int) -> dict[str, torch.Tensor]:
    return {}


def _restore_module(training: Training, checkpoint: OpenCheckpoint) -> None:
    """Fill the parameters, this rank's shards of sharded parameters, and the buffers."""
    optimizer = training.optimizer
    masters = set() if optimizer is None else {id(each.tensor) for each in optimizer.masters_with_parts()}
    for name, parameter in parameters(training).items():
        if not checkpoint.has(name) or id(parameter) in masters:
            continue
        shard = shard_of(parameter)
        if shard is not None:
            start = shard.group.rank * shard.slice_numel
            numel = max(0, min(shard.slice_numel, shard.numel - start))
            with shard.lent() as shard_values:
                checkpoint.read_value(name, start, shard_values.narrow(0, 0, numel))
        elif parameter.is_contiguous():
            checkpoint.read_value(name, 0, parameter.detach().view(-1))
        else:
            flat = torch.empty(parameter.numel(), dtype=parameter.dtype, device=parameter.device)
            checkpoint.read_value(name, 0, flat)
            parameter.copy_(flat.view(parameter.shape))
    rank = training.group.rank if len(checkpoint.manifest.files) == training.group.world_size else 0
    saved_names = {*checkpoint.manifest.buffers, *checkpoint.manifest.aliases}
    for name, buffer in buffers(training.module).items():
        if name in saved_names:
            saved = checkpoint.buffer(name, rank)
            if saved.shape != buffer.shape:
                raise CheckpointError(
                    f"buffer {name!r} has shape {tuple(buffer.shape)} in the model and {tuple(saved.shape)} in "
                    f"{checkpoint.directory}; load it into the model that was saved"
                )
            buffer.copy_(saved)
    extra = checkpoint.decode(checkpoint.manifest.extra_state)
    for name, child in extra_states(training.module):
        if name in extra:
            child.set_extra_state(extra[name])


def _restore_by(custom: Callable[..., Any], training: Training, checkpoint: OpenCheckpoint) -> None:
    """Let the script's function load a state dict, and then copy the masters from the model.

    The state dict is complete, in the model's dtypes.
    """
    from zero_runtime.checkpoint.consolidation import state_dict

    if any(shard_of(parameter) is not None for parameter in training.module.parameters()):
        raise CheckpointError(
            "custom_load_fn needs whole parameters, and stage 3 shards them; load without it, or at another stage"
        )
    custom(src=state_dict(checkpoint, fp32=False), dst=training.module)
    if training.optimizer is not None:
        training.optimizer.load_fragments(_Whole(parameters(training)), states=False)


class _Whole:
    """The parameters of the model itself, as the source of masters."""

    def __init__(self, named: Mapping[str, torch.nn.Parameter]) -> None:
        self._named = named

    def has(self, name: str) -> bool:
        return name in self._named

    def read_master(self, name: str, start: int, target: torch.Tensor) -> None:
        target.copy_(self._named[name].detach().reshape(-1).narrow(0, start, target.numel()))


def _restore_options(training: Training, checkpoint: OpenCheckpoint) -> None:
    """Restore the options of each param group.

    An option whose saved values differ within the group is left unchanged.
    """
    saved = checkpoint.decode(checkpoint.manifest.param_groups)
    members: dict[int, set[int]] = {}
    for name, (_, number) in training.trained.items():
        if checkpoint.has(name):
            before = checkpoint.parameters[checkpoint.name_of(name)].group
            if before is not None:
                members.setdefault(number, set()).add(before)
    for number, befores in members.items():
        first, *others = [saved[before] for before in sorted(befores)]
        group = training.optimizer.param_groups[number]
        for option, value in first.items():
            alike = all(option in other and _same(other[option], value) for other in others)
            if option not in _OF_THE_ENGINE and alike:
                _put(group, option, value)


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor) or isinstance(second, torch.Tensor):
        return torch.equal(torch.as_tensor(first), torch.as_tensor(second))
    return bool(first == second)


def _put(group: dict[str, Any], option: str, value: Any) -> None:
    current = group.get(option)
    if isinstance(current, torch.Tensor) and isinstance(value, torch.Tensor | float | int):
        current.fill_(float(value))
    else:
        group[option] = value

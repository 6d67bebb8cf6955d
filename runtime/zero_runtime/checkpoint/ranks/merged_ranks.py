"""One checkpoint that is merged from the checkpoints of pipeline stages and tensor-parallel ranks.

Parameters are named by the number of their layer in the complete model, so names do not depend on the stage. A
stage that loads reads its parameters by name, and this module finds the checkpoint that contains each
parameter.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from zero_runtime.checkpoint.files.checkpoint_manifest import PARTS, Manifest, ParameterFacts
from zero_runtime.checkpoint.files.checkpoint_reader import Checkpoint
from zero_runtime.checkpoint.opened import OpenCheckpoint
from zero_runtime.checkpoint.ranks.merged_slices import SlicedCheckpoint
from zero_runtime.checkpoint.ranks.parts_file import Parts, read_parts
from zero_runtime.checkpoint.ranks.split_ranks import PartedCheckpoint
from zero_runtime.errors import CheckpointError
from zero_runtime.groups.process_grid import MODEL, PIPE
from zero_runtime.optimizer_step.fragments import NumberTensor, Scalar
from zero_runtime.tensor_parallel.cuts import Cut


class JoinedCheckpoint(PartedCheckpoint):
    """Several checkpoints of different parameters, read as one checkpoint.

    Args:
        directory: The directory that contains the checkpoints.
        checkpoints: The checkpoints of the parts. A parameter that is in several of them is read from the
            first.
        names: The names of the parameters, buffers and aliases to load. None for all.
    """

    def __init__(
        self, directory: Path, checkpoints: Sequence[OpenCheckpoint], names: Collection[str] | None = None
    ) -> None:
        super().__init__(directory, checkpoints)
        self.manifest = _joined(directory, [checkpoint.manifest for checkpoint in checkpoints], names)
        self._part_of: dict[str, OpenCheckpoint] = {}
        for checkpoint in reversed(checkpoints):
            manifest = checkpoint.manifest
            self._part_of.update(
                dict.fromkeys((*manifest.parameters, *manifest.buffers, *manifest.aliases), checkpoint)
            )

    def decode(self, value: Any) -> Any:
        """Return a value of the manifest as it was passed to ``save``.

        This is the value of the first part, or the merged values of all parts.
        """
        if not isinstance(value, tuple):
            return self._checkpoints[0].decode(value)
        decoded = [
            checkpoint.decode(encoded) for checkpoint, encoded in zip(self._checkpoints, value, strict=True)
        ]
        if isinstance(decoded[0], list):
            return [each for values in decoded for each in values]
        return {name: state for states in reversed(decoded) for name, state in states.items()}

    def read_value(self, name: str, start: int, target: torch.Tensor) -> None:
        """Fill the 1-D ``target`` with the elements of parameter ``name`` that begin at ``start``."""
        self._part_of[name].read_value(name, start, target)

    def read_master(self, name: str, start: int, target: torch.Tensor) -> None:
        """Read the tensor that the optimizer updates, in the same way as ``read_value``."""
        self._part_of[name].read_master(name, start, target)

    def state_dtypes(self, name: str) -> Mapping[str, torch.dtype]:
        """Return the dtypes of the elementwise state tensors of parameter ``name``, by name of the state."""
        return self._part_of[name].state_dtypes(name)

    def read_state(self, state: str, name: str, start: int, target: torch.Tensor) -> None:
        """Fill the 1-D ``target`` with the elements of a state tensor of parameter ``name`` that begin at ``start``."""
        self._part_of[name].read_state(state, name, start, target)

    def scalars(self, name: str) -> Mapping[str, Scalar | NumberTensor]:
        """Return the state values of parameter ``name`` that are not tensors or have one element."""
        return self._part_of[name].scalars(name)

    def whole(self, name: str) -> Mapping[str, torch.Tensor]:
        """Return the state tensors of parameter ``name`` whose shapes differ from the parameter's shape."""
        return self._part_of[name].whole(name)

    def buffer(self, name: str, rank: int) -> torch.Tensor:
        """Return the buffer ``name`` as the first rank of its part saved it."""
        return self._part_of[name].buffer(name, 0)


def _joined(directory: Path, manifests: Sequence[Manifest], names: Collection[str] | None) -> Manifest:
    def selected(candidates: Iterable[str]) -> list[str]:
        return [name for name in dict.fromkeys(candidates) if names is None or name in names]

    # A part has only the param groups of its own parameters, so the numbers of the groups may differ between parts.
    is_alike = all(manifest.param_groups == manifests[0].param_groups for manifest in manifests)
    parameters: dict[str, ParameterFacts] = {}
    first_group = 0
    for manifest in manifests:
        for name, facts in manifest.parameters.items():
            group = facts.group if is_alike or facts.group is None else first_group + facts.group
            parameters.setdefault(name, dataclasses.replace(facts, group=group))
        first_group += len(manifest.param_groups)
    aliases = {name: each for manifest in reversed(manifests) for name, each in manifest.aliases.items()}
    return dataclasses.replace(
        manifests[0],
        tag=directory.absolute().name,
        param_groups=manifests[0].param_groups
        if is_alike
        else tuple(manifest.param_groups for manifest in manifests),
        parameters={name: parameters[name] for name in selected(parameters)},
        aliases={name: aliases[name] for name in selected(aliases)},
        buffers=selected(name for manifest in manifests for name in manifest.buffers),
        excluded=selected(name for manifest in manifests for name in manifest.excluded),
        files=tuple(each for manifest in manifests for each in manifest.files),
        extra_state=tuple(manifest.extra_state for manifest in manifests),
    )


def saved_axes(directory: Path) -> dict[str, int]:
    """Return the number of ranks along each axis that partitioned the model in ``directory``.

    Axes with one rank are left out, so the result is empty for a complete model.

    Raises:
        CheckpointError: The file ``parts.json`` cannot be read.
    """
    return _several(read_parts(directory))


def _several(parts: Parts | None) -> dict[str, int]:
    axes = {} if parts is None else parts.axes
    return {axis: int(size) for axis, size in axes.items() if int(size) > 1}


def saved_stages(directory: Path) -> int | None:
    """Return the number of pipeline stages that saved ``directory``.

    The result is 1 for a complete model, and None for a model that is also partitioned along other axes.

    Raises:
        CheckpointError: The file ``parts.json`` cannot be read.
    """
    axes = saved_axes(directory)
    return axes.get(PIPE, 1) if set(axes) <= {PIPE} else None


def open_stages(
    directory: Path,
    rounding: Mapping[str, torch.dtype] | None = None,
    names: Collection[str] | None = None,
    cuts: Mapping[str, Cut] | None = None,
) -> JoinedCheckpoint:
    """Open the checkpoints of all stages and tensor-parallel ranks in ``directory`` as one checkpoint.

    Args:
        directory: The directory of the checkpoint.
        rounding: The same as for :class:`~zero_runtime.checkpoint.opened.OpenCheckpoint`.
        names: The names of the parameters, buffers and aliases to load. None for all.
        cuts: The partition of each parameter in the current model. None if its parameters are complete.

    Raises:
        CheckpointError: A part is missing or damaged, is partitioned along another axis, or has a different
            step.
    """
    parts = read_parts(directory)
    axes = _several(parts)
    if set(axes) > {PIPE, MODEL}:
        raise CheckpointError(
            f"{directory} was saved by ranks along {axes}; expected {PIPE} and {MODEL} only, whose shards can be joined"
        )
    stages, shards_per_stage = axes.get(PIPE, 1), axes.get(MODEL, 1)
    if parts is None:
        checkpoint = Checkpoint(directory, rounding)
        return JoinedCheckpoint(directory, [SlicedCheckpoint(directory, [checkpoint], cuts or {})], names)
    checkpoints = [Checkpoint(directory / name, rounding) for name in parts.names(stages * shards_per_stage)]
    for checkpoint in checkpoints:
        if checkpoint.manifest.counters != parts.counters:
            raise CheckpointError(
                f"{checkpoint.directory} is of step {checkpoint.manifest.counters.get('global_steps')}, and "
                f"{directory / PARTS} of step {parts.counters.get('global_steps')}: a save was cut off; load the tag "
                "before it"
            )
    joined = [
        SlicedCheckpoint(
            directory, checkpoints[shards_per_stage * stage : shards_per_stage * (stage + 1)], cuts or {}
        )
        for stage in range(stages)
    ]
    return JoinedCheckpoint(directory, joined, names)

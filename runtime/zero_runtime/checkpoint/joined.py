"""The parts of a model that stages of a pipeline saved, and ranks that share tensors, as one checkpoint.

Parameters are named by the number of their layer in the whole model, so that a name says what it is whatever stage had it.
Which stage gets what on loading is its own affair: it asks for what it has, and this finds the part.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from zero_runtime.checkpoint.manifest import PARTS, Manifest, part_name
from zero_runtime.checkpoint.opened import OpenCheckpoint
from zero_runtime.checkpoint.parted import PartedCheckpoint
from zero_runtime.checkpoint.reader import Checkpoint
from zero_runtime.checkpoint.slices import SlicedCheckpoint
from zero_runtime.errors import CheckpointError
from zero_runtime.groups.topology import MODEL, PIPE
from zero_runtime.optimizer_step.fragments import NumberTensor, Scalar
from zero_runtime.tensor_parallel.cuts import Cut


class JoinedCheckpoint(PartedCheckpoint):
    """Several checkpoints of different parameters as one.

    Args:
        directory: that holds them.
        parts: the checkpoints. A parameter that several have is read from the first.
        names: of the parameters, buffers and aliases that are looked at; None for all.
    """

    def __init__(
        self, directory: Path, checkpoints: Sequence[OpenCheckpoint], names: Collection[str] | None = None
    ) -> None:
        super().__init__(directory, checkpoints)
        self.manifest = _joined([checkpoint.manifest for checkpoint in checkpoints], names)
        self._part_of: dict[str, OpenCheckpoint] = {}
        for checkpoint in reversed(checkpoints):
            manifest = checkpoint.manifest
            self._part_of.update(
                dict.fromkeys((*manifest.parameters, *manifest.buffers, *manifest.aliases), checkpoint)
            )

    def decode(self, value: Any) -> Any:
        """A value of the manifest as it was given to ``save``: the first part's, or that of each where each has its own."""
        if isinstance(value, tuple):
            decoded = [
                checkpoint.decode(encoded)
                for checkpoint, encoded in zip(self._checkpoints, value, strict=True)
            ]
            return {name: state for states in reversed(decoded) for name, state in states.items()}
        return self._checkpoints[0].decode(value)

    def read_value(self, name: str, start: int, target: torch.Tensor) -> None:
        """Fill the 1-D ``target`` with elements from ``start`` of parameter ``name``."""
        self._part_of[name].read_value(name, start, target)

    def read_master(self, name: str, start: int, target: torch.Tensor) -> None:
        """As ``read_value``, for the tensor that an optimizer updates."""
        self._part_of[name].read_master(name, start, target)

    def state_dtypes(self, name: str) -> Mapping[str, torch.dtype]:
        """The state tensors of parameter ``name`` that have an element for each of its own."""
        return self._part_of[name].state_dtypes(name)

    def read_state(self, state: str, name: str, start: int, target: torch.Tensor) -> None:
        """Fill the 1-D ``target`` with elements from ``start`` of a state tensor of parameter ``name``."""
        self._part_of[name].read_state(state, name, start, target)

    def scalars(self, name: str) -> Mapping[str, Scalar | NumberTensor]:
        """The state values of parameter ``name`` that are one number, or none."""
        return self._part_of[name].scalars(name)

    def whole(self, name: str) -> Mapping[str, torch.Tensor]:
        """The state tensors of parameter ``name`` of other shapes."""
        return self._part_of[name].whole(name)

    def buffer(self, name: str, rank: int) -> torch.Tensor:
        """A buffer, as the first rank of its part had it."""
        return self._part_of[name].buffer(name, 0)


def _joined(manifests: Sequence[Manifest], names: Collection[str] | None) -> Manifest:
    def selected(candidates: Iterable[str]) -> list[str]:
        return [name for name in dict.fromkeys(candidates) if names is None or name in names]

    parameters = {
        name: each for manifest in reversed(manifests) for name, each in manifest.parameters.items()
    }
    aliases = {name: each for manifest in reversed(manifests) for name, each in manifest.aliases.items()}
    return dataclasses.replace(
        manifests[0],
        parameters={name: parameters[name] for name in selected(parameters)},
        aliases={name: aliases[name] for name in selected(aliases)},
        buffers=selected(name for manifest in manifests for name in manifest.buffers),
        excluded=selected(name for manifest in manifests for name in manifest.excluded),
        files=tuple(each for manifest in manifests for each in manifest.files),
        extra_state=tuple(manifest.extra_state for manifest in manifests),
    )


def saved_axes(directory: Path) -> dict[str, int]:
    """Ranks along each axis that cut the model which saved ``directory``, where there are several; empty for a whole model.

    Raises:
        CheckpointError: its ``parts.json`` cannot be read.
    """
    content = _content(directory)
    axes = {} if content is None else content["axes"]
    return {axis: int(size) for axis, size in axes.items() if int(size) > 1}


def saved_stages(directory: Path) -> int | None:
    """How many stages of a pipeline saved ``directory``; 1 for a whole model, None where something else cuts it.

    Raises:
        CheckpointError: its ``parts.json`` cannot be read.
    """
    axes = saved_axes(directory)
    return axes.get(PIPE, 1) if set(axes) <= {PIPE} else None


def open_stages(
    directory: Path,
    rounding: Mapping[str, torch.dtype] | None = None,
    names: Collection[str] | None = None,
    cuts: Mapping[str, Cut] | None = None,
) -> JoinedCheckpoint:
    """The checkpoints of all parts in ``directory``, of stages and of slices, as one.

    Args:
        directory: of the checkpoint.
        rounding: as for :class:`~zero_runtime.checkpoint.opened.OpenCheckpoint`.
        names: of what is looked at; None for all.
        cuts: how the model at hand has its parameters cut; None where it has whole ones.

    Raises:
        CheckpointError: a part is missing or damaged, is cut along another axis, or is of another step.
    """
    axes, content = saved_axes(directory), _content(directory)
    if set(axes) > {PIPE, MODEL}:
        raise CheckpointError(f"{directory} was saved by ranks along {axes}, which are not put together")
    stages, shards_per_stage = axes.get(PIPE, 1), axes.get(MODEL, 1)
    if content is None:
        checkpoint = Checkpoint(directory, rounding)
        return JoinedCheckpoint(directory, [SlicedCheckpoint(directory, [checkpoint], cuts or {})], names)
    checkpoints = list(_open_parts(directory, stages * shards_per_stage, rounding))
    for checkpoint in checkpoints:
        if checkpoint.manifest.counters != content["counters"]:
            raise CheckpointError(
                f"{checkpoint.directory} is of step {checkpoint.manifest.counters.get('global_steps')}, and "
                f"{directory / PARTS} of step "
                f"{content['counters'].get('global_steps')}: a save was cut off; load the tag before it"
            )
    joined = [
        SlicedCheckpoint(
            directory, checkpoints[shards_per_stage * stage : shards_per_stage * (stage + 1)], cuts or {}
        )
        for stage in range(stages)
    ]
    return JoinedCheckpoint(directory, joined, names)


def _open_parts(
    directory: Path, count: int, rounding: Mapping[str, torch.dtype] | None
) -> Iterator[Checkpoint]:
    for number in range(count):
        yield Checkpoint(directory / part_name(number), rounding)


def _content(directory: Path) -> dict[str, Any] | None:
    path = directory / PARTS
    try:
        content = json.loads(path.read_bytes())
        dict(content["axes"]), dict(content["counters"])
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; load another tag") from None
    return dict(content)

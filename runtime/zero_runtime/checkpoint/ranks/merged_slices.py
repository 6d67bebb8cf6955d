"""One checkpoint that is merged from the checkpoints of tensor-parallel ranks.

A tensor and its optimizer state are joined from the shards of all ranks. They are then partitioned for the
current model, or stay complete.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from zero_runtime.checkpoint.files.checkpoint_manifest import ParameterFacts
from zero_runtime.checkpoint.files.checkpoint_reader import Checkpoint
from zero_runtime.checkpoint.opened import OpenCheckpoint
from zero_runtime.checkpoint.ranks.split_ranks import PartedCheckpoint
from zero_runtime.errors import CheckpointError
from zero_runtime.optimizer_step.fragments import NumberTensor, Scalar
from zero_runtime.tensor_parallel.cuts import Cut

# The number of joined tensors that are cached at a time: enough for the value and the states of one parameter.
_MOST_JOINED: Final = 4


class SlicedCheckpoint(PartedCheckpoint):
    """The checkpoints of all tensor-parallel ranks of a model or of one pipeline stage, read as one checkpoint.

    Args:
        directory: The directory that contains the checkpoints.
        checkpoints: The checkpoints in the order of the ranks.
        cuts: The partition of each parameter in the current model. Parameters without an entry are complete.

    Raises:
        CheckpointError: The saved partition of a parameter is not known.
    """

    def __init__(self, directory: Path, checkpoints: Sequence[Checkpoint], cuts: Mapping[str, Cut]) -> None:
        super().__init__(directory, checkpoints)
        self._cuts = cuts
        self._joined_tensors: dict[tuple[str, str], torch.Tensor] = {}
        first = checkpoints[0].manifest
        self._saved = {
            name: _cut(directory, name, facts, len(checkpoints)) for name, facts in first.parameters.items()
        }
        self.manifest = dataclasses.replace(
            first,
            parameters={name: self._facts(name, facts) for name, facts in first.parameters.items()},
            files=tuple(each for checkpoint in checkpoints for each in checkpoint.manifest.files),
        )

    def _facts(self, name: str, facts: ParameterFacts) -> ParameterFacts:
        saved, cut = self._saved[name], self._cuts.get(name)
        shape = facts.shape if saved is None else saved.whole_shape(facts.shape)
        if cut is not None and cut.whole_shape(cut.part_shape(shape)) == shape:
            shape = cut.part_shape(shape)
        return dataclasses.replace(facts, shape=shape, cut_dim=None, cut_sections=())

    def decode(self, value: Any) -> Any:
        """Return a value of the manifest as it was passed to ``save`` on the first rank."""
        return self._checkpoints[0].decode(value)

    def read_value(self, name: str, start: int, target: torch.Tensor) -> None:
        """Fill the 1-D ``target`` with the elements of parameter ``name`` that begin at ``start``."""
        self._fill("value", name, start, target)

    def read_master(self, name: str, start: int, target: torch.Tensor) -> None:
        """Read the tensor that the optimizer updates, in the same way as ``read_value``."""
        self._fill("master", name, start, target)

    def state_dtypes(self, name: str) -> Mapping[str, torch.dtype]:
        """Return the dtypes of the elementwise state tensors of parameter ``name``, by name of the state."""
        return self._checkpoints[0].state_dtypes(name)

    def read_state(self, state: str, name: str, start: int, target: torch.Tensor) -> None:
        """Fill the 1-D ``target`` with the elements of a state tensor of parameter ``name`` that begin at ``start``."""
        self._fill(f"state.{state}", name, start, target)

    def scalars(self, name: str) -> Mapping[str, Scalar | NumberTensor]:
        """Return the state values of parameter ``name`` that are not tensors or have one element."""
        return self._checkpoints[0].scalars(name)

    def whole(self, name: str) -> Mapping[str, torch.Tensor]:
        """Return the state tensors of parameter ``name`` whose shapes differ from the parameter's shape.

        Raises:
            CheckpointError: The parameter is partitioned, and these state tensors cannot be partitioned with
                it.
        """
        states = self._checkpoints[0].whole(name)
        stored_name = self.name_of(name)
        if states and (self._saved.get(stored_name) is not None or stored_name in self._cuts):
            raise CheckpointError(
                f"{self.directory}: the optimizer states {', '.join(states)} of {name!r} have another shape than "
                "the parameter, so they cannot be partitioned with it; load the checkpoint with the tp_size that "
                "saved it, or pass load_optimizer_states=False"
            )
        return states

    def buffer(self, name: str, rank: int) -> torch.Tensor:
        """Return the buffer ``name`` as the first rank saved it."""
        return self._checkpoints[0].buffer(name, 0)

    def _fill(self, kind: str, name: str, start: int, target: torch.Tensor) -> None:
        stored_name = self.name_of(name)
        if (kind, stored_name) not in self._joined_tensors:
            while len(self._joined_tensors) >= _MOST_JOINED:
                self._joined_tensors.pop(next(iter(self._joined_tensors)))
            self._joined_tensors[kind, stored_name] = self._at_hand(kind, stored_name)
        target.copy_(self._joined_tensors[kind, stored_name].narrow(0, start, target.numel()))

    def _at_hand(self, kind: str, name: str) -> torch.Tensor:
        """Return the elements of a tensor that the current model has, as a 1-D tensor."""
        shape = self._checkpoints[0].manifest.parameters[name].shape
        saved, cut = self._saved[name], self._cuts.get(name)
        shards = [
            self._shard(kind, name, checkpoint, shape)
            for checkpoint in (self._checkpoints if saved is not None else self._checkpoints[:1])
        ]
        tensor = shards[0] if saved is None else saved.joined(shards)
        values = tensor if cut is None else cut.part(tensor)
        return values.reshape(-1)

    def _shard(self, kind: str, name: str, checkpoint: OpenCheckpoint, shape: Sequence[int]) -> torch.Tensor:
        if kind.startswith("state."):
            state = kind.removeprefix("state.")
            shard = torch.empty(tuple(shape), dtype=checkpoint.state_dtypes(name)[state])
            checkpoint.read_state(state, name, 0, shard.view(-1))
            return shard
        wide = torch.promote_types(getattr(torch, checkpoint.manifest.parameters[name].dtype), torch.float32)
        shard = torch.empty(tuple(shape), dtype=wide)
        read = checkpoint.read_master if kind == "master" else checkpoint.read_value
        read(name, 0, shard.view(-1))
        return shard


def _cut(directory: Path, name: str, facts: ParameterFacts, ranks: int) -> Cut | None:
    if facts.cut_dim is None or ranks == 1:
        return None
    if not facts.cut_sections:
        raise CheckpointError(
            f"{directory}: parameter {name!r} was partitioned by the script, so it is not known how to join its "
            "shards; load it with the same number of ranks per model that saved it"
        )
    return Cut(facts.cut_dim, facts.cut_sections, 0, ranks)

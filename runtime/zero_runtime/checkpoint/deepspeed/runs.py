"""Runs: consecutive elements of one parameter with their share of the optimizer's state, whatever file they come from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from zero_runtime.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive elements of one parameter.

    Attributes:
        name: of the parameter.
        start: first element within the flattened parameter.
        value: the elements of what the optimizer updates, 1-D; None where only the model itself has them.
        state: its state tensors that have an element for each of these, cut alike.
        scalars: its state values that are one number.
        whole: its state tensors of other shapes.
    """

    name: str
    start: int
    value: torch.Tensor | None
    state: Mapping[str, torch.Tensor] = field(default_factory=dict)
    scalars: Mapping[str, Any] = field(default_factory=dict)
    whole: Mapping[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Flat:
    """What one rank holds of one flat group of parameters.

    Attributes:
        where: the file, for messages.
        master: what the optimizer updates, 1-D.
        state: the optimizer's state of it, by name.
    """

    where: str
    master: torch.Tensor
    state: Mapping[str, Any]

    def run(self, name: str, start: int, offset: int, numel: int) -> Run:
        """The run of ``numel`` elements from ``offset`` of this rank, which are those from ``start`` of a parameter.

        Raises:
            CheckpointError: a state tensor is too short for it.
        """
        state, scalars = {}, {}
        for key, value in self.state.items():
            one = isinstance(value, torch.Tensor) and value.numel() == 1 and value.shape != self.master.shape
            if one or not isinstance(value, torch.Tensor):
                scalars[key] = value
            elif value.numel() >= offset + numel:
                state[key] = value.reshape(-1).narrow(0, offset, numel)
            else:
                raise CheckpointError(
                    f"{self.where} has {value.numel()} elements of {key!r} where {name!r} needs {offset + numel}: the "
                    "optimizer's state is of another shape than the parameters, which is not read here; pass "
                    "load_optimizer_states=False"
                )
        return Run(name, start, self.master.narrow(0, offset, numel), state, scalars)


def end_to_end(
    names: Sequence[str], numels: Sequence[int], paddings: Sequence[int], ranks: Sequence[Flat]
) -> list[Run]:
    """The runs of parameters that lie one after the other in one flat vector, which is cut among the ranks.

    So it is at stages 1 and 2: every rank's piece is as long as the first one's; the last one's ends with padding, or
    without it.

    Args:
        names: of the parameters, in the order of the vector.
        numels: of each.
        paddings: after each, in elements.
        ranks: what each rank holds.

    Raises:
        CheckpointError: the vector is too short for the parameters.
    """
    runs = []
    offset = 0
    length = ranks[0].master.numel()
    for name, numel, padding in zip(names, numels, paddings, strict=True):
        covered = offset
        for number, flat in enumerate(ranks):
            begin = number * length
            low, high = max(offset, begin), min(offset + numel, begin + flat.master.numel())
            if low < high:
                runs.append(flat.run(name, low - offset, low - begin, high - low))
                covered = high
        if covered < offset + numel:
            held = sum(flat.master.numel() for flat in ranks)
            raise CheckpointError(
                f"the {len(ranks)} files of optimizer states hold {held} elements of the group of {name!r}, and it needs "
                f"{offset + numel} for that alone: {ranks[-1].where} is of another save; copy all files again, or load "
                "another tag"
            )
        offset += numel + padding
    return runs


def sliced(names: Sequence[str], numels: Sequence[int], ranks: Sequence[Flat]) -> list[Run]:
    """The runs of parameters each of which is cut among the ranks, its last slice padded: stage 3.

    Raises:
        CheckpointError: a rank holds another number of elements.
    """
    slices = [-(-numel // len(ranks)) for numel in numels]
    runs = []
    for number, flat in enumerate(ranks):
        if flat.master.numel() != sum(slices):
            raise CheckpointError(
                f"{flat.where} holds {flat.master.numel()} elements of the group of {names[0]!r}, where {sum(slices)} are "
                f"the slices of {len(ranks)} ranks: it is of another save, or was saved with parameters or optimizer "
                "states on NVMe; copy all files again, or load another tag"
            )
        offset = 0
        for name, numel, length in zip(names, numels, slices, strict=True):
            start = number * length
            held = min(length, numel - start)
            if held > 0:
                runs.append(flat.run(name, start, offset, held))
            offset += length
    return runs

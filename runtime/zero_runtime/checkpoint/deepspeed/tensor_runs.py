"""Runs, which are read from any of DeepSpeed's formats.

A run is a range of consecutive elements of one parameter, with the optimizer state of these elements.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from zero_runtime.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive elements of one parameter.

    Attributes:
        name: The name of the parameter.
        start: The first element within the flattened parameter.
        value: These elements of the master that the optimizer updates, 1-D. None if only the model itself has
            them.
        state: These elements of the elementwise state tensors.
        scalars: The state values that are one number.
        whole: The complete state tensors of other shapes.
    """

    name: str
    start: int
    value: torch.Tensor | None
    state: Mapping[str, torch.Tensor] = field(default_factory=dict)
    scalars: Mapping[str, Any] = field(default_factory=dict)
    whole: Mapping[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Flat:
    """One rank's shard of one flat group of parameters.

    Attributes:
        where: The path of the file, for messages.
        master: The elements that the optimizer updates, 1-D.
        state: The optimizer state of these elements, by name.
    """

    where: str
    master: torch.Tensor
    state: Mapping[str, Any]

    def run(
        self,
        name: str,
        start: int,
        offset: int,
        numel: int,
        place: int = 0,
        of_whole: frozenset[str] = frozenset(),
    ) -> Run:
        """Return the run of ``numel`` elements of a parameter that begin at ``start``.

        Args:
            name: The name of the parameter.
            start: The first element of the run within the parameter.
            offset: The first element within the master, and within each state tensor that is not in
                ``of_whole``.
            numel: The number of elements.
            place: The first element within the state tensors in ``of_whole``.
            of_whole: The names of the state tensors that contain complete parameters, for each parameter with a
                shard in this file.

        Raises:
            CheckpointError: A state tensor is too short for the run.
        """
        state, scalars = {}, {}
        for key, value in self.state.items():
            begin = place if key in of_whole else offset
            one = isinstance(value, torch.Tensor) and value.numel() == 1 and value.shape != self.master.shape
            if one or not isinstance(value, torch.Tensor):
                scalars[key] = value
            elif value.numel() >= begin + numel:
                state[key] = value.reshape(-1).narrow(0, begin, numel)
            else:
                raise CheckpointError(
                    f"{self.where} has {value.numel()} elements of {key!r} where {name!r} needs {begin + numel}: the "
                    "optimizer's state is of another shape than the parameters, which is not read here; pass "
                    "load_optimizer_states=False"
                )
        return Run(name, start, self.master.narrow(0, offset, numel), state, scalars)


class _Shard(NamedTuple):
    """One rank's shard of one parameter: ``numel`` elements that begin at ``start``, at ``offset`` of the master.

    ``place`` is the offset of these elements in a tensor that contains all parameters with a shard on this
    rank, complete and one after another.
    """

    parameter: int
    start: int
    offset: int
    numel: int
    place: int


def end_to_end(
    names: Sequence[str], numels: Sequence[int], paddings: Sequence[int], ranks: Sequence[Flat]
) -> list[Run]:
    """Return the runs of parameters in one flat vector that is partitioned among the ranks.

    The parameters are one after another in the vector. This is the layout of stages 1 and 2. The shard of every
    rank has the length of the first rank's shard. The last shard may end with padding.

    Args:
        names: The names of the parameters, in the order of the vector.
        numels: The number of elements of each parameter.
        paddings: The number of padding elements after each parameter.
        ranks: The shard of each rank.

    Raises:
        CheckpointError: The vector is too short for the parameters.
    """
    length = ranks[0].master.numel()
    shards_by_rank = [_shards(numels, paddings, number * length, each) for number, each in enumerate(ranks)]
    of_whole = _of_whole(numels, ranks, shards_by_rank)
    runs: list[list[Run]] = [[] for _ in names]
    for flat, shards in zip(ranks, shards_by_rank, strict=True):
        for each in shards:
            runs[each.parameter].append(
                flat.run(names[each.parameter], each.start, each.offset, each.numel, each.place, of_whole)
            )
    for name, numel, runs_of_parameter in zip(names, numels, runs, strict=True):
        if sum(each.value.numel() for each in runs_of_parameter if each.value is not None) < numel:
            held_by_all = sum(flat.master.numel() for flat in ranks)
            raise CheckpointError(
                f"the {len(ranks)} files of optimizer states hold {held_by_all} elements of the group of {name!r}, "
                f"too few for this parameter: {ranks[-1].where} is of another save; copy all files again, or load "
                "another tag"
            )
    return [each for runs_of_parameter in runs for each in runs_of_parameter]


def _shards(numels: Sequence[int], paddings: Sequence[int], begin: int, flat: Flat) -> list[_Shard]:
    """Return the shards of a rank whose master begins at element ``begin`` of the flat vector."""
    shards = []
    offset = place = 0
    for parameter, (numel, padding) in enumerate(zip(numels, paddings, strict=True)):
        low, high = max(offset, begin), min(offset + numel, begin + flat.master.numel())
        if low < high:
            start = low - offset
            shards.append(_Shard(parameter, start, low - begin, high - low, place + start))
            place += numel
        offset += numel + padding
    return shards


def _of_whole(
    numels: Sequence[int], ranks: Sequence[Flat], shards_by_rank: Sequence[Sequence[_Shard]]
) -> frozenset[str]:
    """Return the names of the state tensors that ranks keep for complete parameters, such as Muon's momentum.

    These tensors are recognized by their lengths. If the lengths on all ranks also equal those of the shards,
    both interpretations give the same elements.
    """
    holding = [number for number, shards in enumerate(shards_by_rank) if shards]
    wholes = [sum(numels[each.parameter] for each in shards_by_rank[number]) for number in holding]
    state_names = set()
    for key in {key for number in holding for key in ranks[number].state}:
        values = [ranks[number].state.get(key) for number in holding]
        lengths = [value.numel() if isinstance(value, torch.Tensor) else 0 for value in values]
        if lengths == wholes:
            state_names.add(key)
        elif lengths[0] == wholes[0] > ranks[holding[0]].master.numel():
            raise CheckpointError(
                f"{ranks[holding[-1]].where} has {lengths[-1]} elements of {key!r}; expected {wholes[-1]}, those of "
                f"its complete parameters, as {ranks[holding[0]].where} has them. The file was saved with "
                "elastic_checkpoint, or is of another save; save again without it, or pass "
                "load_optimizer_states=False"
            )
    return frozenset(state_names)


def partitioned(names: Sequence[str], numels: Sequence[int], ranks: Sequence[Flat]) -> list[Run]:
    """Return the runs of parameters that are partitioned separately, each with a padded last shard.

    This is the layout of stage 3.

    Raises:
        CheckpointError: A rank has a different number of elements.
    """
    shard_numels = [-(-numel // len(ranks)) for numel in numels]
    runs = []
    for number, flat in enumerate(ranks):
        if flat.master.numel() != sum(shard_numels):
            raise CheckpointError(
                f"{flat.where} holds {flat.master.numel()} elements of the group of {names[0]!r}; expected "
                f"{sum(shard_numels)}, the shard of one of {len(ranks)} ranks. The file is of another save, or was "
                "saved with parameters or optimizer states on NVMe; copy all files again, or load another tag"
            )
        offset = 0
        for name, numel, length in zip(names, numels, shard_numels, strict=True):
            start = number * length
            elements = min(length, numel - start)
            if elements > 0:
                runs.append(flat.run(name, start, offset, elements))
            offset += length
    return runs

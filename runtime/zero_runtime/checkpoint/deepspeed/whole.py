"""Reads the optimizer state of a checkpoint without ZeRO (stage 0). This state is stored by number, not by name.

The first state belongs to the first parameter that was passed to the optimizer, and so on. Only an engine with
the same model and param groups can load the state, because such an engine has the order of the parameters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from zero_runtime.checkpoint.deepspeed.experts import Experts, has_experts
from zero_runtime.checkpoint.deepspeed.flat_partitions import STATES, options_of
from zero_runtime.checkpoint.deepspeed.folder import Folder
from zero_runtime.checkpoint.deepspeed.tensor_runs import Flat, Run, end_to_end
from zero_runtime.checkpoint.deepspeed.torch_file import read_dict
from zero_runtime.errors import CheckpointError

_FLAT: Final = "fp32_groups_flat"
_LISTS: Final = "fp32_groups"


class WholeStates(NamedTuple):
    """The optimizer's state by name. See :class:`~zero_runtime.checkpoint.deepspeed.flat_partitions.Partitions`."""

    runs: list[Run]
    options: list[dict[str, Any]]


def read_whole(
    path: Path,
    optimizer: Mapping[str, Any],
    groups: Sequence[Sequence[str]],
    shapes: Mapping[str, Sequence[int]],
) -> WholeStates:
    """Return the optimizer's state, and its fp32 masters if the file has masters.

    Args:
        path: The path of the file, for messages.
        optimizer: The value of the key ``optimizer`` in the file: the state of a torch optimizer, or of a
            16-bit wrapper around a torch optimizer.
        groups: The names of the parameters of each param group, in the optimizer's order.
        shapes: The shapes of all parameters.

    Raises:
        CheckpointError: The state belongs to other parameters.
    """
    inner = optimizer.get(STATES, optimizer)
    try:
        state, param_groups = inner["state"], inner["param_groups"]
        steps = [_step(group, state) for group in param_groups]
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path} has no state of an optimizer under 'optimizer' ({error}); load another tag, or pass "
            "load_optimizer_states=False"
        ) from None
    if len(param_groups) != len(groups):
        raise CheckpointError(
            f"{path} has the optimizer state of {len(param_groups)} param groups, and the engine has {len(groups)}. "
            "The file names no parameters, so it loads only into the param groups that saved it; use the same param "
            "groups, or pass load_optimizer_states=False"
        )
    options = [options_of(group) for group in param_groups]
    runs: list[Run] = []
    for number, (group, names) in enumerate(zip(param_groups, groups, strict=True)):
        if _FLAT in optimizer:
            runs += _from_flat(path, number, optimizer[_FLAT][number], state, steps[number], names, shapes)
            continue
        indices = _indices(path, number, group["params"], state, names)
        masters: Sequence[torch.Tensor | None] = [None] * len(names)
        if _LISTS in optimizer:
            masters = optimizer[_LISTS][number]
        for name, index, master in zip(names, indices, masters, strict=True):
            runs.append(_run(path, name, state.get(index, {}), steps[number], master, shapes[name]))
    return WholeStates(runs, options)


def read_whole_of_experts(
    folder: Folder,
    known: Sequence[Sequence[str]],
    shapes: Mapping[str, Sequence[int]],
    experts: Experts,
) -> list[tuple[Sequence[Sequence[str]], WholeStates]]:
    """Return the optimizer's states of ranks that together have all experts.

    Each state is returned with the names of the parameters of its param groups.

    Args:
        folder: The files of the checkpoint.
        known: The names of the parameters of each param group of the loading engine.
        shapes: The shapes of all parameters.
        experts: The experts of the checkpoint.

    Raises:
        CheckpointError: A file is missing, or the state belongs to other parameters.
    """
    paths = folder.expert_optimizers
    missing = sorted(set(range(max(paths, default=0) + 1)) - set(paths))
    if missing:
        raise CheckpointError(
            f"{folder.directory} has no file expp_rank_{missing[0]}_mp_rank_00_optim_states.pt, which holds the optimizer's "
            "state of experts; copy all files of the checkpoint, or pass load_optimizer_states=False"
        )
    apart = experts.ranks // len(paths) if experts.data_first else 1
    by_rank: list[tuple[Sequence[Sequence[str]], WholeStates]] = []
    for place, path in sorted(paths.items()):
        optimizer = read_dict(path, "optimizer")["optimizer"]
        saved = optimizer.get(STATES, optimizer).get("param_groups", [])
        groups = [
            _names_on_rank(path, number, names, saved, experts, place * apart)
            for number, names in enumerate(known)
        ]
        states = read_whole(path, optimizer, groups, shapes)
        # Parameters that do not belong to experts are the same on all ranks, so place 0 is sufficient.
        if place:
            runs = [run for run in states.runs if has_experts([run.name])]
            states = states._replace(runs=runs)
            groups = [names if has_experts(names) else [] for names in groups]
        by_rank.append((groups, states))
    return by_rank


def _names_on_rank(
    path: Path,
    number: int,
    names: Sequence[str],
    saved: Sequence[Mapping[str, Any]],
    experts: Experts,
    rank: int,
) -> Sequence[str]:
    """Return the parameter names of param group ``number`` on ``rank``, one of the ranks that saved the checkpoint.

    ``names`` are the parameter names of this param group in the loading engine.
    """
    if not has_experts(names):
        return names
    name = str(saved[number].get("name", "")) if number < len(saved) else ""
    size = name.removeprefix("ep_size_")
    mixed = [each for each in names if not has_experts([each])]
    if not size.isdecimal() or experts.ranks % int(size) or mixed:
        raise CheckpointError(
            f"{path} has param group {number} with the name {name!r}, and the engine has experts there; expected a group of "
            "experts alone, ep_size_<n>, as split_params_into_different_moe_groups_for_optimizer makes it; make the param "
            "groups the same, or pass load_optimizer_states=False"
        )
    ep_size = int(size)
    place = experts.place(rank, ep_size)
    return [experts.name_of(each, ep_size, place) for each in experts.names_of_rank(names, ep_size)]


def _step(group: Mapping[str, Any], state: Mapping[int, Any]) -> Any:
    """Return the step count that DeepSpeed's own optimizers store for a group, or None if each parameter has its own.

    These optimizers store an integer, and increment it for only one parameter of the group.
    """
    counts = [state[index].get("step") for index in group["params"] if index in state]
    counts = [each for each in [group.get("step"), *counts] if isinstance(each, int)]
    return max(counts, default=None)


def _from_flat(
    path: Path,
    number: int,
    master: torch.Tensor,
    state: Mapping[int, Any],
    step: Any,
    names: Sequence[str],
    shapes: Mapping[str, Sequence[int]],
) -> list[Run]:
    numels = [math.prod(shapes[name]) for name in names]
    values = dict(state.get(number, {}))
    if values and step is not None:
        values["step"] = step
    if sum(numels) > master.numel():
        raise CheckpointError(
            f"{path} has {master.numel()} elements in param group {number}, and the engine {sum(numels)}: it is of other "
            "parameters; make the param groups the same, or pass load_optimizer_states=False"
        )
    return end_to_end(names, numels, [0] * len(names), [Flat(str(path), master.detach().reshape(-1), values)])


def _indices(
    path: Path, number: int, group_indices: Sequence[int], state: Mapping[int, Any], names: Sequence[str]
) -> Sequence[int]:
    """Return the numbers of ``names`` in the optimizer, which may also have received frozen parameters."""
    with_state = [index for index in group_indices if index in state]
    for indices in (group_indices, with_state):
        if len(indices) == len(names):
            return indices
    raise CheckpointError(
        f"{path} has the optimizer state of {len(with_state)} parameters in param group {number}, and the engine "
        f"trains {len(names)} there. The file names no parameters, so it loads only into the param groups that "
        "saved it; use the same param groups, or pass load_optimizer_states=False"
    )


def _run(
    path: Path,
    name: str,
    values: Mapping[str, Any],
    step: Any,
    master: torch.Tensor | None,
    shape: Sequence[int],
) -> Run:
    state, scalars, other_shapes = {}, {}, {}
    for key, value in values.items():
        if not isinstance(value, torch.Tensor) or (value.dim() == 0 and tuple(shape) != ()) or key == "step":
            scalars[key] = value
        elif tuple(value.shape) == tuple(shape):
            state[key] = value.reshape(-1)
        else:
            other_shapes[key] = value
    if any(value.numel() == math.prod(shape) for value in other_shapes.values()):
        raise CheckpointError(
            f"{path} has state tensors of shape {tuple(next(iter(other_shapes.values())).shape)} where parameter "
            f"{name!r} has "
            f"{tuple(shape)}: its parameters are in another order; use the param groups of the saved run, or pass "
            "load_optimizer_states=False"
        )
    if scalars.get("step") is not None and step is not None:
        scalars["step"] = step
    value = None if master is None else master.detach().reshape(-1)
    return Run(name, 0, value, state, scalars, other_shapes)

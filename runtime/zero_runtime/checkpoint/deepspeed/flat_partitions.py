"""ZeRO's files of optimizer states (stages 1 to 3).

There is one file for each rank, with the rank's shard of flat groups of parameters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from zero_runtime.checkpoint.deepspeed.experts import Experts, has_experts
from zero_runtime.checkpoint.deepspeed.folder import Folder
from zero_runtime.checkpoint.deepspeed.tensor_runs import Flat, Run, end_to_end, partitioned
from zero_runtime.checkpoint.deepspeed.torch_file import read_dict
from zero_runtime.errors import CheckpointError

STATES: Final = "optimizer_state_dict"
_SHARDED: Final = "fp32_flat_groups"
_PARTITIONED: Final = "single_partition_of_fp32_groups"


class Partitions(NamedTuple):
    """The contents of the files of optimizer states of all ranks.

    Attributes:
        runs: All elements of all parameters that were trained.
        groups: The number of the param group of each of these parameters.
        options: The options of the param groups.
        common: The other values in the file of rank 0, such as the loss scale and the stage.
        shapes: The shapes of the parameters, by name.
    """

    runs: list[Run]
    groups: dict[str, int]
    options: list[dict[str, Any]]
    common: Mapping[str, Any]
    shapes: Mapping[str, Sequence[int]]


def read_partitions(
    folder: Folder, shapes: Sequence[Mapping[str, Sequence[int]]] | None, experts: Experts
) -> Partitions:
    """Read the optimizer states of all ranks.

    Args:
        folder: The files of the checkpoint.
        shapes: The shapes of the parameters of rank 0, group by group, in their order in the flat groups. None
            if the model states lack them.
        experts: The experts of the checkpoint.

    Raises:
        CheckpointError: A file is missing, is damaged, or does not match the other files.
    """
    paths = _complete(folder)
    files = [read_dict(path, STATES) for path in paths]
    ranks = [_states(path, file) for path, file in zip(paths, files, strict=True)]
    _check_count(paths, ranks)
    if shapes is None:
        raise CheckpointError(
            f"{folder.models[0]} has no 'param_shapes', so it is not known which parameters {paths[0].name} holds; load it "
            "with DeepSpeed and save it again"
        )
    key = _SHARDED if _SHARDED in ranks[0] else _PARTITIONED
    flats = [_flats(path, rank, key) for path, rank in zip(paths, ranks, strict=True)]
    if len(flats[0]) != len(shapes):
        raise CheckpointError(
            f"{paths[0]} has {len(flats[0])} flat groups, and {folder.models[0]} names {len(shapes)}: they are of "
            "different saves; copy all files again, or load another tag"
        )
    options = [options_of(each) for each in _base(ranks[0], key)[1]] or [{} for _ in shapes]
    owners = list(range(len(shapes))) if key == _PARTITIONED else _owners(paths[0], _base(ranks[0], key)[1])
    runs: list[Run] = []
    groups: dict[str, int] = {}
    all_shapes: dict[str, Sequence[int]] = {}
    for number, (named, owner) in enumerate(zip(shapes, owners, strict=True)):
        if not named:
            continue
        numels = [math.prod(shape) for shape in named.values()]
        of_experts = has_experts(list(named))
        ep_size = len(paths) // _partitions(ranks[0], number, len(paths)) if of_experts else 1
        for place in range(ep_size):
            names = [experts.name_of(name, ep_size, place) for name in named]
            of_group = [flats[rank][number] for rank in experts.members(ep_size, place)]
            if key == _SHARDED:
                runs += partitioned(names, numels, of_group)
            else:
                paddings = _paddings(paths[0], ranks[0], number, len(names))
                runs += end_to_end(names, numels, paddings, of_group)
            groups.update(dict.fromkeys(names, owner))
            all_shapes.update(zip(names, named.values(), strict=True))
    return Partitions(runs, groups, options, ranks[0], all_shapes)


def _partitions(rank: Mapping[str, Any], number: int, ranks: int) -> int:
    """Return the number of ranks among which a flat group is partitioned.

    The number is smaller for experts, because the other ranks have different experts.
    """
    counts = rank.get("partition_count", ranks)
    return int(counts[number]) if isinstance(counts, list) and number < len(counts) else ranks


def _complete(folder: Folder) -> list[Path]:
    """Return the files of ranks 0, 1, ... without a gap."""
    by_rank = folder.optimizers
    if not by_rank:
        raise CheckpointError(
            f"{folder.directory} has model states and no file zero_pp_rank_0_mp_rank_00_optim_states.pt, which holds what "
            "the optimizer updates; copy all files of the checkpoint, or load another tag. Below stage 3, "
            "load_module_only=True takes the model's own weights"
        )
    missing = sorted(set(range(max(by_rank) + 1)) - set(by_rank))
    if missing:
        last = by_rank[max(by_rank)]
        missing_file = last.with_name(last.name.replace(f"pp_rank_{max(by_rank)}_", f"pp_rank_{missing[0]}_"))
        raise CheckpointError(
            f"{missing_file}, the optimizer states of rank {missing[0]}, is missing; copy the files of all ranks, or load "
            "another tag"
        )
    return [by_rank[rank] for rank in range(len(by_rank))]


def _states(path: Path, file: Mapping[str, Any]) -> Mapping[str, Any]:
    states = file[STATES]
    if not isinstance(states, dict) or not (_SHARDED in states or _PARTITIONED in states):
        raise CheckpointError(
            f"{path} has neither {_PARTITIONED!r} nor {_SHARDED!r}: it was not written by ZeRO of DeepSpeed 0.14 to "
            "0.19; load "
            "another tag"
        )
    return states


def _check_count(paths: Sequence[Path], ranks: Sequence[Mapping[str, Any]]) -> None:
    for path, rank in zip(paths, ranks, strict=True):
        partition_count = rank.get("partition_count", len(paths))
        expected = max(partition_count) if isinstance(partition_count, list) else partition_count
        if expected != len(paths):
            raise CheckpointError(
                f"{path} was saved by {expected} ranks, and there are files of {len(paths)}; copy the files of all ranks "
                "of one save into an empty directory, or load another tag"
            )


def _base(rank: Mapping[str, Any], key: str) -> tuple[Any, list[dict[str, Any]]]:
    """Return the state of the torch optimizer by flat group, and the optimizer's param groups."""
    base = rank[STATES if key == _SHARDED else "base_optimizer_state"]
    if isinstance(base, list):  # With elastic_checkpoint, the file has only the states, without padding.
        return dict(enumerate(base)), []
    return base["state"], base["param_groups"]


def _flats(path: Path, rank: Mapping[str, Any], key: str) -> list[Flat]:
    try:
        state, groups = _base(rank, key)
        steps = [group.get("step") for group in groups]
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path} has no state of an optimizer where DeepSpeed keeps it ({error}); load another tag"
        ) from None
    if "base_optimizer_state_step" in rank:
        steps = [rank["base_optimizer_state_step"]] * len(rank[key])
    flats = []
    for number, master in enumerate(rank[key]):
        if not isinstance(master, torch.Tensor):
            raise CheckpointError(
                f"{path} has no tensor for flat group {number}: it was saved with optimizer states on NVMe; save it from "
                "offload_optimizer.device none or cpu"
            )
        mine = dict(state.get(number, {}))
        if mine and number < len(steps) and steps[number] is not None:
            mine.setdefault("step", steps[number])
        flats.append(Flat(str(path), master.detach().reshape(-1), mine))
    return flats


def _owners(path: Path, groups: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the number of the param group of each flat group.

    Stage 3 may split one param group into several flat groups.
    """
    owners = {index: number for number, group in enumerate(groups) for index in group["params"]}
    if sorted(owners) != list(range(len(owners))):
        raise CheckpointError(f"{path} numbers its flat groups {sorted(owners)}; expected 0, 1, ...")
    return [owners[index] for index in range(len(owners))]


def _paddings(path: Path, rank: Mapping[str, Any], number: int, count: int) -> list[int]:
    """Return the number of padding elements after each parameter of a group (zero_optimization.parameter_alignment)."""
    paddings = rank.get("param_alignment_paddings")
    if paddings is None:
        return [0] * count
    if number >= len(paddings) or len(paddings[number]) != count:
        raise CheckpointError(
            f"the padding in {path} does not match its model states; the two files are of different saves"
        )
    return [int(each) for each in paddings[number]]


# Options of DeepSpeed's optimizers that torch's optimizers do not have, or that this runtime stores elsewhere.
_NO_OPTIONS: Final = ("params", "step", "bias_correction", "max_grad_norm", "freeze_step", "name")


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a param group that torch's optimizers have."""
    return {name: value for name, value in group.items() if name not in _NO_OPTIONS}

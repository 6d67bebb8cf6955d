"""Experts in DeepSpeed's checkpoints: one file of weights for each, and optimizer states that number them within a rank.

``layer_<l>_expert_<n>_mp_rank_00_model_states.pt`` has the weights of expert n of layer l. The other files name the experts
of one rank 0, 1, ...; here each gets its number within the layer, as in this runtime's checkpoints. The optimizer state of
experts is partitioned among the ranks with the same experts (stages 1 and 2), or in ``expp_rank_<r>_*`` (stage 0).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from zero_runtime.checkpoint.deepspeed.torch_file import read_dict
from zero_runtime.errors import CheckpointError

_NAME: Final = re.compile(r"(.*\.deepspeed_moe\.experts\.deepspeed_experts\.)(\d+)(\..*)")


class Experts(NamedTuple):
    """The experts of a checkpoint.

    Attributes:
        weights: of all experts, by name; empty without experts.
        totals: experts of each layer, by what their names begin with.
        ranks: data-parallel ranks that saved them.
        data_first: ``use_data_before_expert_parallelism``: ranks with the same experts are neighbors.
    """

    weights: Mapping[str, torch.Tensor]
    totals: Mapping[str, int]
    ranks: int
    data_first: bool

    def members(self, ep_size: int, place: int) -> list[int]:
        """The ranks that have the experts of place ``place`` of ``ep_size``, in the order of their partitions."""
        copies = self.ranks // ep_size
        if self.data_first:
            return list(range(place * copies, (place + 1) * copies))
        return list(range(place, self.ranks, ep_size))

    def place(self, rank: int, ep_size: int) -> int:
        """The place of ``rank`` in its group of expert-parallel ranks."""
        return rank // (self.ranks // ep_size) if self.data_first else rank % ep_size

    def name_of(self, name: str, ep_size: int, place: int) -> str:
        """``name`` of a parameter of the rank at ``place``, with the number of the expert within its layer."""
        match = _NAME.fullmatch(name)
        if match is None:
            return name
        local = self.totals[match[1]] // ep_size
        return f"{match[1]}{place * local + int(match[2])}{match[3]}"

    def names_of_rank(self, names: Sequence[str], ep_size: int) -> list[str]:
        """The names of a param group of a rank at place 0 of ``ep_size``, from those of a rank at any other ``ep_size``."""
        of_layers: dict[str, list[str]] = defaultdict(list)  # the rests of the names of one expert
        for name in names:
            match = _NAME.fullmatch(name)
            if match is not None and match[3] not in of_layers[match[1]]:
                of_layers[match[1]].append(match[3])
        return [
            f"{layer}{number}{rest}"
            for layer, rests in of_layers.items()
            for number in range(self.totals[layer] // ep_size)
            for rest in rests
        ]


def has_experts(names: Sequence[str]) -> bool:
    """Whether parameters of experts are among ``names``."""
    return any(_NAME.fullmatch(name) for name in names)


def read_experts(paths: Mapping[tuple[int, int], Path], first: Mapping[str, Any], ranks: int) -> Experts:
    """Read the weights of all experts.

    Args:
        paths: of the files, by layer and expert.
        first: the model states of rank 0.
        ranks: data-parallel ranks that saved the checkpoint.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    config = first.get("ds_config")
    data_first = isinstance(config, dict) and bool(config.get("use_data_before_expert_parallelism"))
    for layer, count in enumerate(first.get("num_experts") or []):
        missing = [number for number in range(int(count)) if (layer, number) not in paths]
        if missing:
            raise CheckpointError(
                f"expert {missing[0]} of layer {layer} has no file layer_{layer}_expert_{missing[0]}_mp_rank_00_"
                "model_states.pt; copy all files of the checkpoint, or load another tag"
            )
    weights: dict[str, torch.Tensor] = {}
    totals: dict[str, int] = {}
    for path in paths.values():
        for name, value in read_dict(path).items():
            match = _NAME.fullmatch(name)
            if match is None or not isinstance(value, torch.Tensor):
                raise CheckpointError(
                    f"{path} has {name!r}, which is no tensor of an expert of DeepSpeed's MoE layer; load another tag"
                )
            weights[name] = value
            totals[match[1]] = max(totals.get(match[1], 0), int(match[2]) + 1)
    return Experts(weights, totals, ranks, data_first)

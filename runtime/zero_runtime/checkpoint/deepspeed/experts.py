"""Experts in DeepSpeed's checkpoints: one file of weights for each expert, and optimizer states.

``layer_<l>_expert_<n>_mp_rank_00_model_states.pt`` has the weights of expert n of layer l. The other files
number the experts within one rank: 0, 1, ... Here each expert gets its number within the layer, as in this
runtime's checkpoints. At stages 1 and 2, the optimizer state of experts is partitioned among the ranks with the
same experts. At stage 0 it is in ``expp_rank_<r>_*``.
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
        weights: The weights of all experts, by name. Empty without experts.
        totals: The number of experts of each layer, by the prefix of their names.
        ranks: The number of data-parallel ranks that saved the experts.
        data_first: The value of ``use_data_before_expert_parallelism``. If true, ranks with the same experts
            are neighbors.
    """

    weights: Mapping[str, torch.Tensor]
    totals: Mapping[str, int]
    ranks: int
    data_first: bool

    def members(self, ep_size: int, place: int) -> list[int]:
        """Return the ranks that have the experts of ``place`` in groups of ``ep_size`` ranks.

        The ranks are in the order of their partitions.
        """
        copies = self.ranks // ep_size
        if self.data_first:
            return list(range(place * copies, (place + 1) * copies))
        return list(range(place, self.ranks, ep_size))

    def place(self, rank: int, ep_size: int) -> int:
        """Return the place of ``rank`` in its group of expert-parallel ranks."""
        return rank // (self.ranks // ep_size) if self.data_first else rank % ep_size

    def name_of(self, name: str, ep_size: int, place: int) -> str:
        """Return the name of a parameter with the number of the expert within its layer.

        ``name`` is the name of the parameter on the rank at ``place``. Names of other parameters do not change.
        """
        match = _NAME.fullmatch(name)
        if match is None:
            return name
        local = self.totals[match[1]] // ep_size
        return f"{match[1]}{place * local + int(match[2])}{match[3]}"

    def names_of_rank(self, names: Sequence[str], ep_size: int) -> list[str]:
        """Return the parameter names of a param group on a rank at place 0 of ``ep_size``.

        ``names`` are the parameter names of this param group on a rank at any other ``ep_size``.
        """
        # For each layer, the parts of the names of one expert's parameters that follow the number of the expert.
        of_layers: dict[str, list[str]] = defaultdict(list)
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
    """Return whether parameters of experts are among ``names``."""
    return any(_NAME.fullmatch(name) for name in names)


def read_experts(paths: Mapping[tuple[int, int], Path], first: Mapping[str, Any], ranks: int) -> Experts:
    """Read the weights of all experts.

    Args:
        paths: The paths of the files, by layer and number of the expert.
        first: The model states of rank 0.
        ranks: The number of data-parallel ranks that saved the checkpoint.

    Raises:
        CheckpointError: A file is missing or damaged.
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

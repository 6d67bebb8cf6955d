"""Preparation of layers of experts for training: their groups of ranks, and checks of the configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import torch

from commprof import hooks
from zero_runtime.comm import DataParallelGroup, ProcessGroup
from zero_runtime.config import RuntimeConfig
from zero_runtime.errors import ConfigError, UnsupportedError
from zero_runtime.experimental.one_bit import OneBitOptimizer
from zero_runtime.experts.expert_groups import ExpertRanks, create
from zero_runtime.experts.expert_parameters import check_groups
from zero_runtime.experts.layer import described, layers_of
from zero_runtime.groups.parallelism import Parallelism
from zero_runtime.optimizers import Lamb, Muon

_MODULE: Final = ".deepspeed_moe"


def install_experts(
    config: RuntimeConfig,
    module: torch.nn.Module,
    parallelism: Parallelism,
    observed: Callable[[ProcessGroup], DataParallelGroup],
) -> Mapping[str, ExpertRanks]:
    """Create the groups of ranks for the experts of ``module``, and pass the groups to its layers.

    All ranks must call this function.

    Returns:
        The groups by their names (:func:`zero_runtime.experts.expert_groups.group_name`); empty without
        experts.

    Raises:
        ConfigError, UnsupportedError: The configuration is not compatible with experts.
    """
    layers = layers_of(module)
    if not layers:
        return {}
    _check(config, parallelism, next(iter(layers)))
    groups = create(
        (layer.ep_size for layer in layers.values()), config.parallel.data_before_experts, observed
    )
    for name, layer in layers.items():
        layer.use_ranks(groups[layer.ep_group_name], name.removesuffix(_MODULE))
    if hooks.recording():
        hooks.describe_expert_layers(described(list(layers.values())))
    return groups


def check_optimizer(
    optimizer: torch.optim.Optimizer, names: Mapping[torch.nn.Parameter, str], sharded: bool
) -> None:
    """Raise an error if the optimizer cannot train experts, whose parameters differ between ranks.

    Args:
        optimizer: The optimizer of the model's parameters.
        names: The names of the parameters.
        sharded: Whether the state of the optimizer is sharded over ranks.

    Raises:
        ConfigError: The state is sharded, and experts are not in separate param groups.
        UnsupportedError: The optimizer requires the same parameters on all ranks.
    """
    if isinstance(optimizer, Lamb | Muon | OneBitOptimizer):
        raise UnsupportedError(
            f"the model has experts, which do not go together with the optimizer {type(optimizer).__name__} in this "
            "version; use an elementwise one, such as AdamW or SGD"
        )
    if sharded:
        check_groups(optimizer.param_groups, names)


def _check(config: RuntimeConfig, parallelism: Parallelism, name: str) -> None:
    zero = config.zero
    experts = f"the model has experts ({name})"
    if zero.stage.shards_parameters:
        raise ConfigError(
            f"{experts}, and zero_optimization.stage is 3; use stage 0, 1 or 2, as in DeepSpeed"
        )
    in_buckets = zero.stage.shards_optimizer and not config.accumulates_whole
    if in_buckets and zero.gradient_reduction == "all_reduce":
        # DeepSpeed refuses this configuration too. The exception is stage 1 without contiguous_gradients, where
        # DeepSpeed adds gradients of different experts.
        raise ConfigError(
            f"{experts}, and at stage {zero.stage.number} zero_optimization.reduce_scatter or contiguous_gradients is "
            "false, so that all ranks would sum the gradients of different experts; set both to true"
        )
    if parallelism.model is not None or parallelism.grid is not None:
        raise UnsupportedError(
            f"{experts}, which go together with data parallelism only in this version; leave tensor, sequence and pipeline "
            "parallelism out"
        )
    for present, key in (
        (config.gradient_compression is not None, "gradient_compression"),
        (bool(config.communication.bounded_delay), "communication.bounded_delay"),
        (zero.quantized_gradients, "zero_optimization.zero_quantized_gradients"),
        (zero.quantized_weights, "zero_optimization.zero_quantized_weights"),
        (zero.reduces_whole_in_buckets, "overlap_comm true and gradient_reduction all_reduce at stage 0"),
        (
            bool(zero.partitioned_types),
            "zero_optimization.zero_allowed_param_types or zero_force_param_types",
        ),
    ):
        if present:
            raise UnsupportedError(
                f"{experts}, which do not go together with {key} in this version; remove it"
            )

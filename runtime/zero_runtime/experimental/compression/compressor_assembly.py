"""Construction of a compressed reduction from the configuration."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import sqrt
from typing import NamedTuple

import torch

from zero_runtime import comm, log
from zero_runtime.comm import DataParallelGroup
from zero_runtime.configuration.blocks.compression_block import ONE_BIT, TOP_K, GradientCompression
from zero_runtime.errors import ConfigError
from zero_runtime.experimental.compression.codecs import Codec, OneBit, TopK, TwoBit
from zero_runtime.experimental.compression.compressed_exchange import Exchange
from zero_runtime.experimental.compression.compressed_reduction import CompressedReduction, PlainReduction
from zero_runtime.experimental.compression.host_groups import hosts_of
from zero_runtime.experimental.compression.local_gradients import LocalGradients, take_momentum
from zero_runtime.experimental.compression.residuals import Layout, Residuals
from zero_runtime.experimental.compression.signs import MeanOfSigns, WantedReduction
from zero_runtime.experimental.one_bit import OneBitOptimizer
from zero_runtime.gradient_reduction.reduction import Reduction
from zero_runtime.optimizers import UncorrectedAdam


class Trained(NamedTuple):
    """The values of a training that the compression of gradients uses.

    Attributes:
        optimizer: The optimizer of the gradients.
        clipping: The value of ``gradient_clipping``.
        group: The data-parallel ranks.
        steps: A function that returns the number of optimizer steps taken so far.
        scale: A function that returns the current loss scale.
    """

    optimizer: torch.optim.Optimizer
    clipping: float
    group: DataParallelGroup
    steps: Callable[[], int]
    scale: Callable[[], float]


def compressed(
    settings: GradientCompression, plain: Reduction, trained: Trained
) -> tuple[Reduction, Residuals | None]:
    """Return the configured reduction and its residuals; the residuals are None without error feedback.

    All ranks must call this function.

    Args:
        settings: The configuration of the compression.
        plain: The uncompressed reduction, as configured by the other keys.
        trained: The training.

    Raises:
        ConfigError: The ranks, the hosts or the optimizer do not fit the settings.
    """
    group, hosts = trained.group, None
    by_hosts = settings.hierarchical_compress and group.world_size > 1
    if by_hosts:
        hosts = hosts_of(group)
    places = 1 if hosts is None else hosts.inside.world_size
    layout = Layout(places, settings.two_phase and group.world_size // places > 2)
    residuals = None
    if settings.error_feedback:
        residuals = Residuals(layout, decay=settings.residual_decay, momentum=settings.momentum_correction)
    local = _local_gradients(settings, trained, residuals)
    uncompressed = PlainReduction(plain, local, residuals, trained.scale)
    if by_hosts and hosts is None:
        return uncompressed, residuals
    _warn_of_momentum(settings, trained)
    reduce = CompressedReduction(
        partial(_exchange, settings, trained.steps),
        uncompressed,
        lambda: trained.steps() >= settings.warmup_steps,
        local,
        residuals,
        trained.scale,
        hosts,
    )
    return reduce, residuals


def _local_gradients(
    settings: GradientCompression, trained: Trained, residuals: Residuals | None
) -> LocalGradients:
    group, limit = trained.group, 0.0
    if settings.clip_before_residual:
        if group.world_size < comm.get_world_size():
            raise ConfigError(
                "gradient_compression.clip_before_residual clips by the norm of the whole model on each rank, and here "
                f"{group.world_size} of {comm.get_world_size()} ranks hold the same parameters; set it to false, or leave "
                "tp_size, sequence_parallel_size and stages out"
            )
        limit = trained.clipping / sqrt(group.world_size)
    updated = [each for params in trained.optimizer.param_groups for each in params["params"]]
    numel = sum(each.numel() for each in updated if each.requires_grad)
    momentum = take_momentum(trained.optimizer) if settings.momentum_correction else None
    return LocalGradients(limit, numel, momentum, residuals, trained.steps)


def _warn_of_momentum(settings: GradientCompression, trained: Trained) -> None:
    """Warn if the optimizer applies momentum after decompression, to gradients that error feedback sends late."""
    if not settings.error_feedback or trained.group.rank or trained.group.world_size == 1:
        return
    optimizer, groups = trained.optimizer, trained.optimizer.param_groups
    if isinstance(optimizer, torch.optim.SGD) and any(each["momentum"] for each in groups):
        _warn_of_sgd(settings)
    is_adam = isinstance(optimizer, torch.optim.Adam | UncorrectedAdam)
    if is_adam and settings.algorithm == TOP_K and any(each["betas"][0] for each in groups):
        log.warning(
            f"gradient_compression: {type(optimizer).__name__} adds its first moment to gradients that error feedback "
            "sends late; with topk and 90 % fewer bytes, the measured loss after 1,000 steps was 7 % above the loss "
            "without compression; betas [0, 0.99] and clip_before_residual avoid this: set both (docs/compression.md)"
        )


def _warn_of_sgd(settings: GradientCompression) -> None:
    if settings.algorithm == ONE_BIT:
        log.warning(
            "gradient_compression: algorithm 1bit with the momentum of SGD is lossy: after 1,000 steps the "
            "best measured loss was 15 to 27 % above the loss without compression, at an eighth to a half of the "
            "learning rate, and at the same learning rate the training failed; set momentum to 0, which avoids this, or "
            "use topk with momentum_correction (docs/compression.md)"
        )
    elif not settings.momentum_correction:
        log.warning(
            "gradient_compression: SGD applies its momentum after decompression, to gradients that error feedback "
            "sends late; with topk and 90 % fewer bytes, the measured loss after 1,000 steps was 5 % above the "
            "loss without compression; momentum_correction and clip_before_residual avoid this: set both "
            "(docs/compression.md)"
        )


def by_signs(
    optimizer: OneBitOptimizer, plain: Reduction, module: torch.nn.Module, group: DataParallelGroup
) -> tuple[Reduction, Residuals]:
    """Connect a 1-bit ``optimizer`` to the other ranks, and return the reduction of its gradients and the residuals.

    Args:
        optimizer: The optimizer, which sends its own values instead of gradients.
        plain: The uncompressed reduction.
        module: The model. Parameters that are not in the model are named by their position.
        group: The data-parallel ranks.
    """
    residuals = Residuals(Layout(two_phases=group.world_size > 2), of_mean=True)
    names: dict[torch.Tensor, str] = {parameter: name for name, parameter in module.named_parameters()}
    for number, each in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(each["params"]):
            names.setdefault(parameter, f"param_groups[{number}][{index}]")
    optimizer.connect(MeanOfSigns(group, residuals), names)
    return WantedReduction(optimizer, plain), residuals


def _exchange(settings: GradientCompression, steps: Callable[[], int], dtype: torch.dtype) -> Exchange:
    codec: Codec
    if settings.algorithm == TOP_K:
        codec = TopK(settings.topk_ratio_of(steps()), dtype)
    else:
        codec = OneBit() if settings.algorithm == ONE_BIT else TwoBit()
    coded = settings.huffman_coding and settings.algorithm != ONE_BIT
    return Exchange(codec, coded, settings.two_phase)

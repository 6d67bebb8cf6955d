"""Construction of a compressed reduction from the configuration."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from zero_runtime.comm import DataParallelGroup
from zero_runtime.configuration.blocks.compression_block import ONE_BIT, TOP_K, GradientCompression
from zero_runtime.experimental.compression.codecs import Codec, OneBit, TopK, TwoBit
from zero_runtime.experimental.compression.compressed_exchange import Exchange
from zero_runtime.experimental.compression.compressed_reduction import CompressedReduction, PlainReduction
from zero_runtime.experimental.compression.hosts import hosts_of
from zero_runtime.experimental.compression.residuals import Layout, Residuals
from zero_runtime.experimental.compression.signs import MeanOfSigns, WantedReduction
from zero_runtime.experimental.one_bit import OneBitOptimizer
from zero_runtime.gradient_reduction.reduction import Reduction


def compressed(
    settings: GradientCompression,
    plain: Reduction,
    group: DataParallelGroup,
    steps: Callable[[], int],
    scale: Callable[[], float],
) -> tuple[Reduction, Residuals | None]:
    """The configured reduction and its residuals; the residuals are None without error feedback.

    All ranks must call it.

    Args:
        settings: how gradients are compressed.
        plain: the uncompressed reduction that the other keys configure.
        group: the data-parallel ranks.
        steps: optimizer steps taken so far.
        scale: the current loss scale.
    """
    hosts = None
    if settings.hierarchical_compress and group.world_size > 1:
        hosts = hosts_of(group)
        if hosts is None:
            return _on_one_host(settings, plain, scale)
    places = 1 if hosts is None else hosts.inside.world_size
    layout = Layout(places, settings.two_phase and group.world_size // places > 2)
    residuals = Residuals(layout) if settings.error_feedback else None
    reduce = CompressedReduction(
        partial(_exchange, settings),
        plain,
        lambda: steps() >= settings.warmup_steps,
        residuals,
        scale,
        hosts,
    )
    return reduce, residuals


def _on_one_host(
    settings: GradientCompression, plain: Reduction, scale: Callable[[], float]
) -> tuple[Reduction, Residuals | None]:
    if not settings.error_feedback:
        return plain, None
    residuals = Residuals()
    return PlainReduction(plain, residuals, scale), residuals


def by_signs(
    optimizer: OneBitOptimizer, plain: Reduction, module: torch.nn.Module, group: DataParallelGroup
) -> tuple[Reduction, Residuals]:
    """Connect a 1-bit ``optimizer`` to the other ranks. Returns the reduction of its gradients, and the residuals.

    Args:
        optimizer: sends its own values instead of gradients.
        plain: the reduction.
        module: the model; parameters outside it are named by their position.
        group: the data-parallel ranks.
    """
    residuals = Residuals(Layout(two_phases=group.world_size > 2), of_mean=True)
    names: dict[torch.Tensor, str] = {parameter: name for name, parameter in module.named_parameters()}
    for number, each in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(each["params"]):
            names.setdefault(parameter, f"param_groups[{number}][{index}]")
    optimizer.connect(MeanOfSigns(group, residuals), names)
    return WantedReduction(optimizer, plain), residuals


def _exchange(settings: GradientCompression, dtype: torch.dtype) -> Exchange:
    codec: Codec
    if settings.algorithm == TOP_K:
        codec = TopK(settings.topk_ratio, dtype)
    else:
        codec = OneBit() if settings.algorithm == ONE_BIT else TwoBit()
    coded = settings.huffman_coding and settings.algorithm != ONE_BIT
    return Exchange(codec, coded, settings.two_phase)

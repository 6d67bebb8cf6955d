"""Means over the ranks that are sent as signs, for 1-bit optimizers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from commprof import hooks
from zero_runtime.comm import DataParallelGroup
from zero_runtime.experimental.compression import two_phases
from zero_runtime.experimental.compression.codecs import OneBit
from zero_runtime.experimental.compression.compressed_exchange import Exchange
from zero_runtime.experimental.compression.residuals import Residuals
from zero_runtime.experimental.one_bit import OneBitOptimizer
from zero_runtime.gradient_reduction.gradient_buckets import Bucket, Entry
from zero_runtime.gradient_reduction.reduction import Finish, Reduction


class MeanOfSigns:
    """A :data:`zero_runtime.experimental.one_bit.Mean` that computes one sum for all tensors together.

    Two ranks exchange their signs. More than two ranks sum in two phases.

    Args:
        group: The data-parallel ranks.
        residuals: This rank's residuals.
    """

    def __init__(self, group: DataParallelGroup, residuals: Residuals) -> None:
        self._group = group
        self._residuals = residuals
        self._exchange = Exchange(OneBit())

    def __call__(self, names: Sequence[str], values: Sequence[torch.Tensor]) -> None:
        """Replace each of ``values`` by its mean over the ranks, as approximated by signs and residuals."""
        entries = [Entry(name, value.reshape(-1), ()) for name, value in zip(names, values, strict=True)]
        if self._group.world_size == 1:
            for value, entry in zip(values, entries, strict=True):
                self._residuals.hand_over(entry.gradient, [entry], 1.0)
                value.copy_(entry.gradient.view(value.shape))
            return
        flat = torch.cat([entry.gradient for entry in entries]).float()
        add_up = self._gathered if self._group.world_size == 2 else self._in_two_phases
        total = add_up(flat, entries).div_(self._group.world_size)
        for value, part in zip(values, total.split([value.numel() for value in values]), strict=True):
            value.copy_(part.view(value.shape))

    def _gathered(self, flat: torch.Tensor, entries: Sequence[Entry]) -> torch.Tensor:
        self._residuals.add_to(flat, entries, 0, 1.0)
        codec = self._exchange.codec
        payload = codec.encode(flat)
        total = torch.zeros_like(flat)
        codec.add(payload, total)
        self._residuals.keep(flat.sub_(total), entries, 0, 1.0)
        _, payloads = self._exchange.send(payload, flat.numel(), self._group, _why("all_reduce"))
        total.zero_()
        for each in payloads():
            codec.add(each, total)
        return total

    def _in_two_phases(self, flat: torch.Tensor, entries: Sequence[Entry]) -> torch.Tensor:
        shared = two_phases.Shared(flat, entries)
        _, total = two_phases.begin(shared, self._exchange.codec, self._residuals, self._group, _why)
        return total()


def _why(intended_op: str) -> hooks.tag:
    return hooks.tag("gradient_reduce", intended_op=intended_op)


class WantedReduction:
    """A reduction that sums gradients only if the optimizer needs mean gradients.

    See :data:`zero_runtime.gradient_reduction.reduction.Reduction`.

    Args:
        optimizer: The optimizer of the gradients.
        plain: The reduction that computes mean gradients.
    """

    def __init__(self, optimizer: OneBitOptimizer, plain: Reduction) -> None:
        self._optimizer = optimizer
        self._plain = plain

    def __call__(self, bucket: Bucket, group: DataParallelGroup) -> Finish | None:
        """Sum the bucket over the ranks if the optimizer needs mean gradients.

        Otherwise the bucket keeps the gradients of this rank.
        """
        return self._plain(bucket, group) if self._optimizer.wants_mean() else None

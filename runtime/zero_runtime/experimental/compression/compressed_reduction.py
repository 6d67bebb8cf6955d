"""The compressed reduction of gradient buckets (stages 0 to 2).

Every rank gathers the payloads of all ranks and sums them in rank order, in fp32. The sum is bitwise equal on
all ranks.

With ``hierarchical_compress`` only messages between hosts are compressed. First, each rank sums a share of
the bucket over the ranks of its host. Then it exchanges the share with the ranks at the same position on the
other hosts. Last, it gathers the other shares within its host.

Let n be the number of ranks, S the bytes of a bucket and C the bytes of a payload. Each rank sends (n-1) C,
while an all_reduce sends 2(n-1)/n S. The ratio n C / 2S grows with n. With ``two_phase`` a rank sends
2(n-1)/n C, and the ratio is C / S.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch.nn import functional

from commprof import hooks
from zero_runtime.comm import DataParallelGroup, sum_of_rows
from zero_runtime.experimental.compression import two_phases
from zero_runtime.experimental.compression.codecs import TopK
from zero_runtime.experimental.compression.compressed_exchange import Exchange
from zero_runtime.experimental.compression.host_groups import Hosts
from zero_runtime.experimental.compression.local_gradients import LocalGradients
from zero_runtime.experimental.compression.residuals import Residuals
from zero_runtime.gradient_reduction.gradient_buckets import Bucket
from zero_runtime.gradient_reduction.reduction import (
    ALL_TO_ALL,
    Finish,
    Reduction,
    after,
    default_implementation,
)


class CompressedReduction:
    """A :data:`zero_runtime.gradient_reduction.reduction.Reduction` that leaves the sum of the payloads on every rank.

    Args:
        exchange: A function that returns how buckets of a communication dtype are compressed and sent.
        plain: The reduction for the first steps, and for a single rank.
        is_warm: A function that returns whether the first steps are over.
        local: The operations on this rank's gradients before compression.
        residuals: This rank's residuals, or None without error feedback.
        scale: A function that returns the current loss scale.
        hosts: The groups within and across hosts, if only messages between hosts are compressed.
    """

    def __init__(
        self,
        exchange: Callable[[torch.dtype], Exchange],
        plain: PlainReduction,
        is_warm: Callable[[], bool],
        local: LocalGradients,
        residuals: Residuals | None,
        scale: Callable[[], float],
        hosts: Hosts | None = None,
    ) -> None:
        self._exchange = exchange
        self._plain = plain
        self._is_warm = is_warm
        self._local = local
        self._residuals = residuals
        self._scale = scale
        self._hosts = hosts

    def __call__(self, bucket: Bucket, group: DataParallelGroup) -> Finish | None:
        """Sum the bucket over the ranks."""
        if group.world_size == 1 or not self._is_warm():
            return self._plain(bucket, group)
        values = _contribution(bucket)
        self._local.prepare(values, bucket.entries, self._scale())
        if self._hosts is not None:
            self._between_hosts(bucket, values, self._hosts)
            return None
        return self._sum(bucket, values, 0, group, bucket.asynchronous, bucket.tensor.copy_)

    def _sum(
        self,
        bucket: Bucket,
        values: torch.Tensor,
        start: int,
        group: DataParallelGroup,
        asynchronous: bool,
        take: Callable[[torch.Tensor], object],
    ) -> Finish | None:
        """Sum ``values`` over ``group``, and pass the sum to ``take``.

        ``values`` are the elements of ``bucket`` from the position ``start``.
        """
        exchange = self._exchange(bucket.dtype)
        if exchange.two_phase and group.world_size > 2:
            shared = two_phases.Shared(values, bucket.entries, start, self._scale())
            work, sum_of = two_phases.begin(
                shared, exchange.codec, self._residuals, group, partial(_why, bucket), asynchronous
            )

            def take_sum() -> None:
                take(sum_of())

            return after([work], take_sum)
        if self._residuals is not None:
            self._residuals.add_to(values, bucket.entries, start, self._scale())
        payload = exchange.codec.encode(values)
        numel = values.numel()
        total = torch.zeros_like(values)
        if self._residuals is not None:
            exchange.codec.add(payload, total)
            self._residuals.keep(values.sub_(total), bucket.entries, start, self._scale())
            if isinstance(exchange.codec, TopK):
                self._local.mask(total, bucket.entries)
            total.zero_()
        why = bucket.why(intended_op="all_reduce")
        work, payloads = exchange.send(payload, numel, group, why, asynchronous)

        def finish() -> None:
            for each in payloads():
                exchange.codec.add(each, total)
            take(total)

        return after([work], finish)

    def _between_hosts(self, bucket: Bucket, values: torch.Tensor, hosts: Hosts) -> None:
        inside, numel = hosts.inside, values.numel()
        width = -(-numel // inside.world_size)
        rows = functional.pad(values, (0, width * inside.world_size - numel))
        share = _sum_of_rows(rows, width, bucket, inside)

        def take(total: torch.Tensor) -> None:
            inside.all_gather_single(rows, total, why=bucket.why(intended_op="all_reduce"))
            bucket.tensor.copy_(rows.narrow(0, 0, numel))

        self._sum(bucket, share, inside.rank * width, hosts.across, False, take)


class PlainReduction:
    """A :data:`zero_runtime.gradient_reduction.reduction.Reduction` that does not compress.

    It is used in the first steps, for a single rank, and if all ranks are on one host.

    Args:
        plain: The uncompressed reduction.
        local: The operations on this rank's gradients before the reduction.
        residuals: The residuals of an earlier training with compression, or None without error feedback.
        scale: A function that returns the current loss scale.
    """

    def __init__(
        self,
        plain: Reduction,
        local: LocalGradients,
        residuals: Residuals | None,
        scale: Callable[[], float],
    ) -> None:
        self._plain = plain
        self._local = local
        self._residuals = residuals
        self._scale = scale

    def __call__(self, bucket: Bucket, group: DataParallelGroup) -> Finish | None:
        """Sum the bucket and its residuals over the ranks."""
        scale = self._scale() / _factor(bucket)
        self._local.prepare(bucket.tensor, bucket.entries, scale)
        if self._residuals is not None:
            self._residuals.hand_over(bucket.tensor, bucket.entries, scale)
        return self._plain(bucket, group)


def _why(bucket: Bucket, intended_op: str) -> hooks.tag:
    return bucket.why(intended_op=intended_op)


def _sum_of_rows(rows: torch.Tensor, width: int, bucket: Bucket, group: DataParallelGroup) -> torch.Tensor:
    """Return the sum of this rank's row: row r of ``rows`` is summed on rank r of ``group``.

    Each row has ``width`` elements.
    """
    if default_implementation(group.backend) == ALL_TO_ALL:
        received = torch.empty_like(rows)
        why = bucket.why(intended_op="reduce_scatter")
        group.all_to_all_single(received, rows, [width] * group.world_size, why=why)
        return sum_of_rows(received.view(group.world_size, width))
    mine = rows.new_empty(width)
    group.reduce_scatter_single(mine, rows, why=bucket.why())
    return mine


def _contribution(bucket: Bucket) -> torch.Tensor:
    """Return the bucket in fp32 with all scaling applied. The sum of this value over the ranks is the result."""
    return bucket.tensor.to(torch.float32, copy=True).mul_(_factor(bucket))


def _factor(bucket: Bucket) -> float:
    scaling = bucket.scaling
    return scaling.factor_before * scaling.factor_after / (scaling.bucket_divisor * scaling.divisor)

"""The gradient reductions of stage 3, where every rank owns a shard of every parameter.

| bucket                                                        | issued                                    | sent        |
|---------------------------------------------------------------|-------------------------------------------|-------------|
| ``reduce_scatter``: any                                       | 1 reduce_scatter, or all_to_all and a sum | (n-1)/n S   |
| ``all_reduce``, where it fits the contiguous buffer, or the   | 1 all_reduce                              | 2(n-1)/n S  |
| config names ``gradient_reduction``                           |                                           |             |
| ``all_reduce``, otherwise                                     | as for ``reduce_scatter``                 | (n-1)/n S   |
| any, with ``zero_quantized_gradients``                        | 1 all_to_all of bytes, and a sum          | about S / 8 |

n is the number of ranks, and S is the number of bytes of the bucket. As in DeepSpeed 0.19.8, reduce_scatters
are issued even with ``reduce_scatter: false``. A native reduce_scatter takes equal rows. Row r has shard r of
each parameter, padded to ceil(numel / n) elements, in the order in which the parameters were created. An
all_to_all sends the shards without padding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch.nn import functional

from zero_runtime.comm import DataParallelGroup
from zero_runtime.errors import UsageError
from zero_runtime.experimental.compression.quantized_messages import scatter_quantized
from zero_runtime.gradient_reduction import reduction
from zero_runtime.gradient_reduction.gradient_buckets import Bucket
from zero_runtime.gradient_reduction.reduction import Finish, Scattered
from zero_runtime.groups.rank_agreement import same_as_first
from zero_runtime.sharding.shards import slice_numel

Send = Callable[[torch.Tensor, Bucket, DataParallelGroup], Scattered]


@dataclass(frozen=True, slots=True)
class ShardReduction:
    """A :data:`zero_runtime.gradient_reduction.reduction.Reduction` for buckets of whole gradients.

    Attributes:
        numbers: The number of each parameter by name, in the order of their creation.
        all_reduce_limit: The number of elements of the largest bucket that is reduced by all_reduce.
        implementation: The implementation of a reduce_scatter: ``native``, ``all_to_all``, or None for the
            default of the backend.
        quantized: whether all buckets are sent in 4 bits, by an all_to_all of bytes and a local sum.
        compares: Whether the ranks check before each bucket that the bucket has the same parameters on all
            ranks.
    """

    numbers: Mapping[str, int]
    all_reduce_limit: int
    implementation: str | None
    compares: bool = False
    quantized: bool = False

    def __call__(self, bucket: Bucket, group: DataParallelGroup) -> Finish | None:
        """Sum the bucket over the ranks. Afterwards this rank's shards in ``bucket.tensor`` are valid.

        Raises:
            UsageError: The bucket has different parameters on rank 0.
        """
        if self.compares:
            self._compare(bucket, group)
        quantize = self.quantized and group.world_size > 1
        if bucket.tensor.numel() <= self.all_reduce_limit and not quantize:
            return reduction.all_reduce(bucket, group)
        implementation = self.implementation or reduction.default_implementation(group.backend)
        if quantize:
            scattered = self._scatter(bucket, group, scatter_quantized)
        elif implementation == reduction.ALL_TO_ALL:
            scattered = reduction.reduce_scatter(bucket, group, implementation)
        else:
            scattered = self._scatter(bucket, group)
        if bucket.scaling.factor_after == 1.0:
            return scattered
        return reduction.then(scattered, lambda: _scale_own(bucket, group.rank))

    def _compare(self, bucket: Bucket, group: DataParallelGroup) -> None:
        names = [entry.name for entry in bucket.entries]
        if not same_as_first([self.numbers[name] for name in names], group):
            raise UsageError(
                f"gradient bucket {bucket.number} of rank {group.rank} holds {', '.join(names[:4])}..., that of rank 0 "
                "other parameters; every rank must run the same modules, or flag those that differ with "
                "set_z3_leaf_modules"
            )

    def _scatter(
        self, bucket: Bucket, group: DataParallelGroup, send: Send = reduction.scatter
    ) -> Finish | None:
        world = group.world_size
        if bucket.keeps_dtype:
            bucket.tensor = bucket.tensor.to(bucket.dtype)
        gradients = list(bucket.tensor.split([entry.gradient.numel() for entry in bucket.entries]))
        order = sorted(range(len(gradients)), key=lambda index: self.numbers[bucket.entries[index].name])
        rows = [_rows(gradients[index], world) for index in order]
        outgoing = (rows[0] if len(rows) == 1 else torch.cat(rows, dim=1)).to(bucket.dtype)
        # A single gradient without padding is the bucket's own memory. This memory may be written.
        if bucket.scaling.divisor != 1.0:
            outgoing.div_(bucket.scaling.divisor)
        if bucket.scaling.factor_before != 1.0:
            outgoing.mul_(bucket.scaling.factor_before)
        widths = [row.shape[1] for row in rows]
        work, sum_of = send(outgoing.view(-1), bucket, group)

        def finish() -> None:
            for index, mine in zip(order, sum_of().split(widths), strict=True):
                own = _own_shard(gradients[index], group.rank, mine.numel())
                own.copy_(mine.narrow(0, 0, own.numel()))

        return reduction.after([work], finish)


def _scale_own(bucket: Bucket, rank: int) -> None:
    for run in bucket.runs:
        if run.owner == rank:
            bucket.tensor.narrow(0, run.start, run.numel).mul_(bucket.scaling.factor_after)


def _own_shard(gradient: torch.Tensor, rank: int, width: int) -> torch.Tensor:
    """Return shard ``rank`` of a 1-D gradient without its padding: at most ``width`` elements."""
    start = min(rank * width, gradient.numel())
    return gradient.narrow(0, start, min(width, gradient.numel() - start))


def _rows(gradient: torch.Tensor, world_size: int) -> torch.Tensor:
    """Return the shards of a 1-D gradient as the rows of a matrix. The last rows are padded with zeros."""
    width = slice_numel(gradient.numel(), world_size)
    missing = width * world_size - gradient.numel()
    return (functional.pad(gradient, (0, missing)) if missing else gradient).view(world_size, width)

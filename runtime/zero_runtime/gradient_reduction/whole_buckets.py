"""Reduction of whole gradients in buckets, during the backward pass (stage 0).

The keys are ``gradient_reduction: all_reduce`` and ``overlap_comm: true``.

DeepSpeed sends all gradients of stage 0 in one message, after the backward pass. zero_runtime sends each bucket
as soon as its gradients are complete, as in torch's DDP. The contents and the order of the buckets depend only
on the model. Therefore all ranks issue the same collectives, even if parameters are unused on some of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from commprof import hooks
from zero_runtime.comm import DataParallelGroup
from zero_runtime.errors import UsageError
from zero_runtime.gradient_reduction.gradient_buckets import (
    END_OF_BACKWARD,
    FULL,
    OVERSIZED,
    Bucket,
    Entry,
    joined,
)
from zero_runtime.gradient_reduction.reducer import Policy
from zero_runtime.gradient_reduction.reduction import Finish
from zero_runtime.gradient_reduction.reduction_overlap import Overlap
from zero_runtime.gradient_reduction.whole_gradients import ReplicatedGradients


class BucketedGradients(ReplicatedGradients):
    """Reduces the parameters' own gradients in buckets, in reverse model order, in the last micro-batch of a step.

    A bucket is sent when all its gradients and all earlier buckets are ready. After the backward pass the
    remaining buckets are sent, with zeros for parameters without a gradient. Then each gradient is a view of
    its bucket.

    Args:
        names, parameters, dtypes, group, at_boundary: See :class:`ReplicatedGradients`.
        policy: The rules by which gradients are reduced. ``limit`` is the size of a bucket, in elements.
    """

    def __init__(
        self,
        names: Sequence[str],
        parameters: Sequence[torch.nn.Parameter],
        dtypes: Mapping[torch.nn.Parameter, torch.dtype],
        policy: Policy,
        group: DataParallelGroup,
        at_boundary: Callable[[], bool],
    ) -> None:
        super().__init__(names, parameters, dtypes, policy, group, at_boundary)
        self._buckets = partition(parameters, dtypes, policy.limit)
        self._bucket_of = {index: number for number, each in enumerate(self._buckets) for index in each}
        # No bucket waits for an earlier bucket to land. Each bucket has separate memory, which the gradients keep.
        self._overlap = Overlap(group.device, True, depth=max(1, len(self._buckets)))
        self._missing: list[set[int]] = []
        self._sent = 0
        self._results: list[tuple[torch.nn.Parameter, torch.Tensor]] = []
        self._handles = [
            parameter.register_post_accumulate_grad_hook(partial(self._on_gradient, index))
            for index, parameter in enumerate(parameters)
            if parameter.numel()
        ]
        self._restart()

    def begin_step(self) -> None:
        """Expect the gradients of every bucket again."""
        self._restart()

    def reduce_accumulated(self) -> None:
        """Send the remaining buckets, wait for all, and store the sums as the parameters' gradients."""
        while self._sent < len(self._buckets):
            self._send_next(END_OF_BACKWARD)
        self._overlap.land_all()
        for parameter, total in self._results:
            parameter.grad = total.view(parameter.shape)
        for parameter in self._parameters:
            if parameter.grad is None:  # the parameter has no elements
                parameter.grad = torch.zeros_like(parameter)
        self._restart()

    def close(self) -> None:
        """Remove the hooks. Afterwards gradients are reduced after the backward pass."""
        for handle in self._handles:
            handle.remove()

    def _restart(self) -> None:
        self._missing = [set(each) for each in self._buckets]
        self._sent = 0
        self._results = []

    def _on_gradient(self, index: int, parameter: torch.Tensor) -> None:
        if self._paused or not self._at_boundary():
            return
        number = self._bucket_of[index]
        if number < self._sent:
            raise UsageError(
                f"parameter {self._names[index]} got a second gradient in one backward pass, after bucket {number} with the "
                "first one was sent; set zero_optimization.overlap_comm to false, or use non-reentrant activation "
                "checkpointing"
            )
        self._missing[number].discard(index)
        while self._sent < len(self._buckets) and not self._missing[self._sent]:
            self._send_next(FULL)

    @torch.no_grad()
    def _send_next(self, reason: str) -> None:
        entries = []
        members = [self._parameters[index] for index in self._buckets[self._sent]]
        for index, parameter in zip(self._buckets[self._sent], members, strict=True):
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad = None
            entries.append(Entry(self._names[index], gradient.detach().reshape(-1), ()))
        tensor = joined([entry.gradient for entry in entries])
        # The entries become views of the bucket, so that the memory of the single gradients is freed immediately.
        parts = tensor.split([parameter.numel() for parameter in members])
        for entry, part in zip(entries, parts, strict=True):
            entry.gradient = part
        bucket = Bucket(
            self._sent,
            tensor,
            (),
            self._dtypes[members[0]],
            self._policy.limit,
            self._policy.scaling,
            tuple(entries),
            OVERSIZED if tensor.numel() > self._policy.limit else reason,
        )
        if hooks.recording():
            bucket.publish()
        self._sent += 1
        self._results.extend(zip(members, parts, strict=True))
        self._overlap.send(bucket, self._start)

    def _start(self, bucket: Bucket) -> Finish | None:
        return self._policy.reduce(bucket, self._group)


def partition(
    parameters: Sequence[torch.nn.Parameter], dtypes: Mapping[torch.nn.Parameter, torch.dtype], limit: int
) -> list[tuple[int, ...]]:
    """Return the parameter indices of each bucket of :class:`BucketedGradients`, in reverse model order.

    All gradients of a bucket have the same dtype and the same communication dtype. A bucket has at most
    ``limit`` elements, unless it has only one gradient. Buckets are in the order in which they become full. The
    last bucket of each dtype follows, in the order of their first gradients.
    """
    full: list[list[int]] = []
    filling: dict[tuple[torch.dtype, torch.dtype], tuple[list[int], int]] = {}
    for index in reversed(range(len(parameters))):
        parameter = parameters[index]
        numel = parameter.numel()
        if numel == 0:
            continue
        kind = parameter.dtype, dtypes[parameter]
        members, filled = filling.get(kind, ([], 0))
        if members and filled + numel > limit:
            full.append(members)
            members, filled = [], 0
        filling[kind] = [*members, index], filled + numel
    return [tuple(each) for each in (*full, *(members for members, _ in filling.values()))]

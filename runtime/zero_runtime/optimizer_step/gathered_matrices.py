"""Muon on sharded matrices (stage 3): the ranks gather gradients and momentum, and divide the work.

All ranks gather the gradients and momentum of as many matrices as fit a bucket. The ranks then process these
matrices in rounds of one matrix for each rank. In a round, each rank orthogonalizes its matrix, and sends the
update and the momentum to the other ranks. The messages are the same as in DeepSpeed 0.19.8.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from zero_runtime.comm import DataParallelGroup, Work
from zero_runtime.gradient_reduction.reducer import ParameterGroup
from zero_runtime.optimizers.muon import MOMENTUM, Muon, matrix_update
from zero_runtime.sharding.shards import shard_of, slice_numel


class GatheredMatrices:
    """Replaces the shards of the matrices' reduced gradients by shards of Muon's updates.

    Args:
        optimizer: The optimizer. Its state has the momentum, one element for each element of a master.
        groups: The sub-groups.
        masters: The flat shard of each sub-group on this rank.
        group: The group of the ranks that have the other shards.
        limit: The number of elements of the matrices that are gathered together. A larger matrix is gathered
            alone.
    """

    def __init__(
        self,
        optimizer: Muon,
        groups: Sequence[ParameterGroup],
        masters: Sequence[torch.Tensor],
        group: DataParallelGroup,
        limit: int,
    ) -> None:
        self._optimizer = optimizer
        self._groups = groups
        self._masters = masters
        self._group = group
        self._limit = limit

    def apply(self, reduced: Sequence[torch.Tensor], scale: float) -> Callable[[], None]:
        """Replace the gradients of matrices in ``reduced`` by Muon's updates, multiplied by ``scale``.

        Returns:
            A function that stores the new momentum in the optimizer. Do not call this function if the step is
            skipped.
        """
        renewed = {}
        for each, master, gradient in zip(self._groups, self._masters, reduced, strict=True):
            options = self._optimizer.param_groups[each.number]
            if not options["use_muon"]:
                continue
            before = self._optimizer.state[master].get(MOMENTUM)
            momentum = torch.zeros_like(master, requires_grad=False) if before is None else before.clone()
            for indices in _chunks(each.layout.numels, self._limit):
                self._update(each, indices, gradient, momentum, options, scale)
            renewed[master] = momentum

        def commit() -> None:
            for master, momentum in renewed.items():
                self._optimizer.state[master][MOMENTUM] = momentum

        return commit

    def _update(
        self,
        each: ParameterGroup,
        indices: Sequence[int],
        reduced: torch.Tensor,
        momentum: torch.Tensor,
        options: Mapping[str, Any],
        scale: float,
    ) -> None:
        gradients = self._gathered(each, indices, reduced)
        momenta = self._gathered(each, indices, momentum)
        for first in range(0, len(indices), self._group.world_size):
            mine, last = first + self._group.rank, first + self._group.world_size
            if mine < len(indices):
                gradient = gradients[mine].to(momentum.dtype) / scale
                update, latest = matrix_update(gradient, momenta[mine], options)
                gradients[mine].copy_(update)
                momenta[mine].copy_(latest)
            for finish in [self._share(gradients[first:last]), self._share(momenta[first:last])]:
                finish()
        for index, update, latest in zip(indices, gradients, momenta, strict=True):
            for owner, start, numel, offset in each.layout.shards(index):
                if owner == self._group.rank:
                    target = reduced.narrow(0, offset, numel)
                    target.copy_(update.reshape(-1).narrow(0, start, numel)).mul_(scale)
                    momentum.narrow(0, offset, numel).copy_(latest.reshape(-1).narrow(0, start, numel))

    def _gathered(
        self, each: ParameterGroup, indices: Sequence[int], flat: torch.Tensor
    ) -> list[torch.Tensor]:
        """Return the whole matrices ``indices`` of a sub-group. ``flat`` has the shards of this rank."""
        world = self._group.world_size
        widths = [slice_numel(each.layout.numels[index], world) for index in indices]
        begin = each.layout.offsets[indices[0]]
        own = flat.narrow(0, begin, sum(widths))
        gathered = own.view(1, -1)
        if world > 1:
            gathered = flat.new_empty(world, own.numel())
            self._group.all_gather_single(gathered.view(-1), own)
        return [
            rows.reshape(-1)[: each.layout.numels[index]].clone().view(_shape(each.parameters[index]))
            for index, rows in zip(indices, gathered.split(widths, dim=1), strict=True)
        ]

    def _share(self, tensors: list[torch.Tensor]) -> Callable[[], None]:
        """Start to send tensor r of ``tensors``, which rank r has computed, to all ranks.

        The last ranks may have no tensor.
        """
        world, rank = self._group.world_size, self._group.rank
        if len(tensors) == world and len({each.shape for each in tensors}) == 1:
            return _finish(self._group.all_gather(tensors, tensors[rank], asynchronous=True), [])
        largest = max(each.numel() for each in tensors)
        own = tensors[0].new_zeros(largest)
        if rank < len(tensors):
            own[: tensors[rank].numel()] = tensors[rank].reshape(-1)
        outputs = [torch.empty_like(own) for _ in range(world)]
        work = self._group.all_gather(outputs, own, asynchronous=True)
        return _finish(work, list(zip(tensors, outputs, strict=False)))


def _finish(work: Work | None, copies: list[tuple[torch.Tensor, torch.Tensor]]) -> Callable[[], None]:
    def finish() -> None:
        if work is not None:
            work.wait()
        for tensor, padded in copies:
            tensor.copy_(padded[: tensor.numel()].view(tensor.shape))

    return finish


def _chunks(numels: Sequence[int], limit: int) -> Iterator[list[int]]:
    """Yield lists of consecutive positions whose ``numels`` sum to at most ``limit``.

    A position whose ``numels`` entry is larger than ``limit`` forms a list of its own.
    """
    chunk: list[int] = []
    chunk_numel = 0
    for index, numel in enumerate(numels):
        if chunk and chunk_numel + numel > limit:
            yield chunk
            chunk, chunk_numel = [], 0
        chunk.append(index)
        chunk_numel += numel
    if chunk:
        yield chunk


def _shape(parameter: torch.nn.Parameter) -> torch.Size:
    shard = shard_of(parameter)
    return parameter.shape if shard is None else torch.Size(shard.shape)

"""Reduction of gradients to shards, bucket by bucket (stages 1 and 2).

:class:`ShardedGradients` and the classes of :mod:`zero_runtime.gradient_reduction.whole_gradients` have the
same methods. The methods are called in this order: ``begin_step``; ``finish_backward`` for each micro-batch;
``clear`` after the step. If the stage reduces during backward, hooks on the parameters add gradients before
``finish_backward``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch.utils.hooks import RemovableHandle

from zero_runtime.comm import DataParallelGroup
from zero_runtime.errors import UsageError
from zero_runtime.experts.expert_groups import ExpertRanks
from zero_runtime.gradient_reduction.clip import sharded_norm
from zero_runtime.gradient_reduction.flat_layout import GroupLayout, ShardRange
from zero_runtime.gradient_reduction.gradient_buckets import (
    Bucket,
    Bucketer,
    Entry,
    Flight,
    Scaling,
    parts_by_ranks,
)
from zero_runtime.gradient_reduction.reduction import Finish, Reduction, all_reduce, reduce_to_owner, then
from zero_runtime.gradient_reduction.reduction_overlap import DEPTH, Overlap
from zero_runtime.gradient_reduction.stages import Stage
from zero_runtime.sharding.shard_layout import ShardLayout


class ParameterGroup(NamedTuple):
    """Trainable parameters that the optimizer updates as one flat tensor, in the order of their param group.

    Attributes:
        number: The number of the param group. Stage 3 may divide a param group into several groups.
        names: The names of the parameters.
        parameters: the parameters, all of one dtype.
        layout: The partition into shards.
        experts: The groups of ranks, if these are parameters of experts.
    """

    number: int
    names: tuple[str, ...]
    parameters: tuple[torch.nn.Parameter, ...]
    layout: GroupLayout | ShardLayout
    experts: ExpertRanks | None = None

    @property
    def ranks(self) -> DataParallelGroup | None:
        """The ranks that store these parameters; None if all data-parallel ranks store them."""
        return None if self.experts is None else self.experts.data

    @property
    def flat_layout(self) -> GroupLayout:
        """The layout of stages 1 and 2, in which all parameters are in one flat buffer."""
        assert isinstance(self.layout, GroupLayout)
        return self.layout

    @property
    def numel(self) -> int:
        """The number of elements of all parameters, without padding."""
        return sum(self.layout.numels)


class Policy(NamedTuple):
    """The rules by which gradients are reduced.

    Attributes:
        stage: the ZeRO stage.
        reduce: The reduction of a full bucket.
        scaling: The factors and divisors of the gradients.
        limit: The largest number of elements of a bucket.
        contiguous: Whether gradients are copied into a buffer when they become ready.
        norm_dtype: The dtype in which the squared norms are summed over the ranks.
        overlap: Whether the reduction overlaps the backward pass.
    """

    stage: Stage
    reduce: Reduction
    scaling: Scaling
    limit: int
    contiguous: bool
    norm_dtype: torch.dtype = torch.float32
    overlap: bool = False


class Leaf(NamedTuple):
    """A module whose gradients enter the buckets together after its backward pass.

    Parameters without a gradient contribute zeros.
    """

    module: torch.nn.Module
    parameters: tuple[torch.nn.Parameter, ...]


class ShardedGradients:
    """Reduces gradients to their owners, and accumulates this rank's shards.

    Args:
        groups: The param groups.
        dtypes: The communication dtype of each parameter's gradient.
        policy: The rules by which gradients are reduced.
        group: The data-parallel ranks.
        accumulation: The dtype of the accumulated shards; None for the dtype of the parameters.
        at_boundary: A function that returns whether the current micro-batch is the last of its step.
        leaves: Modules whose gradients are added together, if the stage reduces during backward.
        unpartitioned: Parameters whose gradients are summed on every rank, in separate buckets.

    Attributes:
        shards: For each param group, this rank's shard of the reduced gradient, 1-D. Zeros if there is no
            gradient.
        unsharded: The whole reduced gradients that ``keep_whole`` requested, by name; 1-D.
    """

    def __init__(
        self,
        groups: Sequence[ParameterGroup],
        dtypes: Mapping[torch.nn.Parameter, torch.dtype],
        policy: Policy,
        group: DataParallelGroup,
        accumulation: torch.dtype | None,
        at_boundary: Callable[[], bool],
        leaves: Sequence[Leaf] = (),
        unpartitioned: Collection[torch.nn.Parameter] = (),
    ) -> None:
        self._unpartitioned = unpartitioned
        self._groups: list[ParameterGroup] = []
        self._dtypes: dict[torch.nn.Parameter, torch.dtype] = {}
        self._policy = policy
        self._group = group
        self._at_boundary = at_boundary
        self._paused = False
        self._closed = False
        self._overlap = Overlap(group.device, policy.overlap)
        self._accumulation = accumulation
        self._bucketer = Bucketer(
            policy.limit,
            0,
            policy.contiguous,
            policy.scaling,
            self._send,
            buffers=DEPTH if policy.overlap else 1,
            members=group.global_ranks,
        )
        self._shards: list[list[tuple[ShardRange, ...]]] = []
        self.shards: list[torch.Tensor] = []
        self.unsharded: dict[str, torch.Tensor] = {}
        self._leaves: dict[torch.nn.Module, Leaf] = {}
        self._places: dict[torch.nn.Parameter, tuple[int, int]] = {}
        self._handles: list[RemovableHandle] = []
        self.add(groups, dtypes, leaves)

    def add(
        self,
        groups: Sequence[ParameterGroup],
        dtypes: Mapping[torch.nn.Parameter, torch.dtype],
        leaves: Sequence[Leaf] = (),
    ) -> None:
        """Reduce the gradients of the additional ``groups``, too."""
        first = len(self._groups)
        self._groups += groups
        self._has_experts = any(each.ranks is not None for each in self._groups)
        self._dtypes.update(dtypes)
        self._leaves.update((leaf.module, leaf) for leaf in leaves)
        self._bucketer.grow(sum(each.numel for each in groups))
        for number, each in enumerate(groups, first):
            self._shards.append([self._shards_of(each, index) for index in range(len(each.parameters))])
            self.shards.append(self._zeros(each))
            self._places.update((p, (number, index)) for index, p in enumerate(each.parameters))
        if self._policy.stage.reduces_in_hooks:
            self._hook([parameter for each in groups for parameter in each.parameters])

    def _zeros(self, each: ParameterGroup) -> torch.Tensor:
        """Return the shard of a group's gradient before the first gradient is added."""
        like = each.parameters[0]
        dtype = self._accumulation or like.dtype
        return torch.zeros(each.layout.shard_numel, dtype=dtype, device=like.device)

    def _shards_of(self, each: ParameterGroup, index: int) -> tuple[ShardRange, ...]:
        """Return the shards of a parameter. Each owner is a rank within the data-parallel group."""
        shards = each.layout.shards(index)
        if each.ranks is None:
            return shards
        ranks = each.ranks.global_ranks
        return tuple(
            shard._replace(owner=self._group.global_ranks.index(ranks[shard.owner])) for shard in shards
        )

    def _hook(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        within = {parameter for leaf in self._leaves.values() for parameter in leaf.parameters}
        for parameter in parameters:
            if parameter not in within:
                hook = partial(self._on_gradient, *self._places[parameter])
                self._handles.append(parameter.register_post_accumulate_grad_hook(hook))

    def close(self) -> None:
        """Remove the hooks. No gradient is added afterwards."""
        for handle in self._handles:
            handle.remove()
        self._closed = True

    def keep_whole(self, name: str, numel: int) -> None:
        """Keep the whole gradient of parameter ``name``, too.

        The reduction must leave the whole sum on every rank.
        """
        self.unsharded[name] = self.shards[0].new_zeros(numel)

    def begin_step(self) -> None:
        """Count buckets from 0 again."""
        if self._closed:
            raise UsageError(
                "the model of this engine was passed to initialize again; train it with the engine that the last "
                "call returned"
            )
        self._bucketer.begin_step()

    def finish_backward(self) -> None:
        """Flush the buckets. If the stage reduces whole gradients, fill the buckets first."""
        stage = self._policy.stage
        if self._paused or not self._is_due():
            return
        if not stage.reduces_every_micro_batch:
            # Hooks have added the gradients of this micro-batch. Parameters used only in earlier micro-batches remain.
            self._add_all()
        for leaf in self._leaves.values():
            if any(parameter.grad is not None for parameter in leaf.parameters):
                self._add_leaf(leaf)
        self._finish()

    def reduce_accumulated(self) -> None:
        """Reduce the gradients that several backward passes accumulated while paused, in forward order."""
        self._add_all()
        self._finish()

    def _finish(self) -> None:
        self._bucketer.flush()
        self._overlap.land_all()
        self._bucketer.release()

    def pause(self, paused: bool) -> None:
        """Set whether gradients only accumulate (``no_sync``)."""
        self._paused = paused

    @property
    def norm_dtype(self) -> torch.dtype:
        """The dtype in which squared norms are summed over ranks."""
        return self._policy.norm_dtype

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield the memory of reduced gradients."""
        yield from self.shards
        yield from self.unsharded.values()

    def buffers(self) -> Iterator[torch.Tensor]:
        """Return the bucket buffers that exist between two backward passes."""
        return self._bucketer.buffers()

    def free_buffers(self) -> None:
        """Free the buffers. They are allocated again when needed."""
        self._bucketer.release(everywhere=True)

    def norm(self) -> torch.Tensor:
        """Return the norm of all gradients.

        There is one all_reduce for each param group, and one more for each param group of experts.
        """
        ranks = [each.ranks for each in self._groups]
        return sharded_norm(self.shards, self._group, self.norm_dtype, ranks)

    def clear(self) -> None:
        """Drop the gradients, after a step."""
        self._clear_shards()
        for total in self.unsharded.values():
            total.zero_()
        for each in self._groups:
            for parameter in each.parameters:
                parameter.grad = None

    def _clear_shards(self) -> None:
        for total in self.shards:
            total.zero_()

    def _on_gradient(self, number: int, index: int, parameter: torch.Tensor) -> None:
        if not self._paused and self._is_due():
            self._add(number, index)

    def _is_due(self) -> bool:
        """Return whether gradients are reduced in this micro-batch."""
        return self._policy.stage.reduces_every_micro_batch or self._at_boundary()

    def leaf_done(self, module: torch.nn.Module) -> None:
        """Add the gradients of ``module``, whose backward pass has ended. Do nothing if it is not a leaf module.

        ``finish_backward`` adds the gradients of leaf modules without differentiable inputs.
        """
        leaf = self._leaves.get(module)
        if leaf is not None and not self._paused and self._is_due():
            self._add_leaf(leaf)

    @torch.no_grad()
    def _add_leaf(self, leaf: Leaf) -> None:
        for parameter in leaf.parameters:
            self._add(*self._places[parameter])

    def _add_all(self) -> None:
        """Add every gradient, in forward order.

        If any parameter of a leaf module has a gradient, the gradients of all its parameters are added.
        """
        used = {
            parameter
            for leaf in self._leaves.values()
            if any(each.grad is not None for each in leaf.parameters)
            for parameter in leaf.parameters
        }
        for number, each in enumerate(self._groups):
            for index, parameter in enumerate(each.parameters):
                if parameter.grad is not None or parameter in used:
                    self._add(number, index)

    def _add(self, number: int, index: int) -> None:
        each = self._groups[number]
        parameter = each.parameters[index]
        if parameter.grad is None:
            gradient = torch.zeros(each.layout.numels[index], dtype=parameter.dtype, device=parameter.device)
        else:
            gradient = parameter.grad.detach().reshape(-1)
        parameter.grad = None
        entry = Entry(each.names[index], gradient, self._shards[number][index], number)
        self._bucketer.add(entry, self._dtypes[parameter], parameter in self._unpartitioned)

    def _send(self, bucket: Bucket) -> Flight:
        return self._overlap.send(bucket, self._start)

    def _start(self, bucket: Bucket) -> Finish | None:
        """Reduce a full bucket, then add this rank's ranges to its shards."""
        # DeepSpeed adds the received sum of 16-bit gradients to fp32 shards without rounding it.
        bucket.keeps_dtype = self._accumulation is torch.float32
        if self._has_experts:
            return self._start_apart(bucket)
        reduce = all_reduce if bucket.replicated else self._policy.reduce
        return then(reduce(bucket, self._group), lambda: self._accumulate(bucket))

    def _start_apart(self, bucket: Bucket) -> Finish | None:
        """Reduce a bucket whose parameters are stored by different sets of ranks, in the same way as ``_start``."""
        ranks = [each.ranks or self._group for each in self._groups]
        by_owner = self._policy.reduce is reduce_to_owner
        finishes = []
        for part, members in parts_by_ranks(bucket, ranks, self._group.global_ranks, by_owner):
            finish = then(self._policy.reduce(part, members), partial(self._accumulate, part))
            if finish is not None:
                finishes.append(finish)
        return partial(_finish_all, finishes) if finishes else None

    @torch.no_grad()
    def _accumulate(self, bucket: Bucket) -> None:
        position = 0
        for entry in bucket.entries:
            for owner, start, numel, offset in entry.shards:
                if owner == self._group.rank:
                    addend = bucket.tensor.narrow(0, position + start, numel)
                    add_rounded(self.shards[entry.group].narrow(0, offset, numel), addend)
            full = self.unsharded.get(entry.name)
            if full is not None:
                full.add_(bucket.tensor.narrow(0, position, full.numel()))
            position += entry.gradient.numel()


def _finish_all(finishes: Sequence[Finish]) -> None:
    for finish in finishes:
        finish()


def add_rounded(total: torch.Tensor, addend: torch.Tensor) -> None:
    """Add ``addend`` to ``total``.

    Round ``addend`` first if the dtype of ``total`` is narrower, as DeepSpeed does.
    """
    narrows = torch.promote_types(total.dtype, addend.dtype) is not total.dtype
    total.add_(addend.to(total.dtype) if narrows else addend)

"""From the gradients of a backward pass to reduced pieces of them, bucket by bucket (stages 1 and 2).

This class and those of :mod:`zero_runtime.gradient_reduction.whole_gradients` have the same life: ``begin_step``; for
each micro-batch ``finish_backward``, with a hook on every parameter before it where the stage reduces during backward;
``clear`` when the step has been taken.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch.utils.hooks import RemovableHandle

from zero_runtime.comm import DataParallelGroup
from zero_runtime.errors import UsageError
from zero_runtime.gradient_reduction.buckets import Bucket, Bucketer, Entry, Scaling
from zero_runtime.gradient_reduction.clip import sharded_norm
from zero_runtime.gradient_reduction.layout import GroupLayout, ShardRange
from zero_runtime.gradient_reduction.overlap import DEPTH, Flight, Overlap
from zero_runtime.gradient_reduction.reduction import Finish, Reduction, all_reduce, then
from zero_runtime.gradient_reduction.stages import Stage
from zero_runtime.sharding.layout import ShardLayout


class ParameterGroup(NamedTuple):
    """Trainable parameters that the optimizer updates as one flat tensor, in the order of their param group.

    Attributes:
        number: of that param group; stage 3 may cut one into several groups.
        names: of the parameters.
        parameters: the parameters, all of one dtype.
        layout: who owns what.
    """

    number: int
    names: tuple[str, ...]
    parameters: tuple[torch.nn.Parameter, ...]
    layout: GroupLayout | ShardLayout

    @property
    def flat_layout(self) -> GroupLayout:
        """The layout where all parameters lie in one flat buffer, as at stages 1 and 2."""
        assert isinstance(self.layout, GroupLayout)
        return self.layout

    @property
    def numel(self) -> int:
        """Elements of all parameters, without padding."""
        return sum(self.layout.numels)


class Policy(NamedTuple):
    """How gradients are reduced.

    Attributes:
        stage: the ZeRO stage.
        reduce: what is done with a full bucket.
        scaling: when gradients are divided.
        limit: elements of a bucket.
        contiguous: whether gradients are copied into a buffer as they come.
        norm_dtype: in which the squared norms are summed over the ranks.
        overlap: whether buckets travel while the backward pass goes on.
    """

    stage: Stage
    reduce: Reduction
    scaling: Scaling
    limit: int
    contiguous: bool
    norm_dtype: torch.dtype = torch.float32
    overlap: bool = False


class Leaf(NamedTuple):
    """A module whose gradients enter the buckets together, when its backward is over; zeros for parameters it left out."""

    module: torch.nn.Module
    parameters: tuple[torch.nn.Parameter, ...]


class ShardedGradients:
    """Reduces gradients to the ranks that own them, and accumulates what this rank owns.

    Args:
        groups: the param groups.
        dtypes: in which each parameter's gradient travels.
        policy: how gradients are reduced.
        group: the data-parallel ranks.
        accumulation: dtype of the accumulated pieces; None for the parameters' own.
        at_boundary: whether the micro-batch at hand is the last of its step.
        leaves: modules whose gradients come together, where the stage reduces during backward.
        unpartitioned: parameters whose gradients are summed on every rank, in buckets of their own.

    Attributes:
        pieces: for each param group, this rank's piece of the reduced gradient, 1-D; zeros where nothing came.
        whole: by name, whole reduced gradients, 1-D, where they have been asked for.
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
        """Reduce the gradients of further ``groups`` too."""
        first = len(self._groups)
        self._groups += groups
        self._dtypes.update(dtypes)
        self._leaves.update((leaf.module, leaf) for leaf in leaves)
        self._bucketer.grow(sum(each.numel for each in groups))
        for number, each in enumerate(groups, first):
            self._shards.append([each.layout.shards(index) for index in range(len(each.parameters))])
            like = each.parameters[0]
            dtype = self._accumulation or like.dtype
            self.shards.append(torch.zeros(each.layout.shard_numel, dtype=dtype, device=like.device))
            self._places.update((p, (number, index)) for index, p in enumerate(each.parameters))
        if self._policy.stage.reduces_in_hooks:
            self._hook([parameter for each in groups for parameter in each.parameters])

    def _hook(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        within = {parameter for leaf in self._leaves.values() for parameter in leaf.parameters}
        for parameter in parameters:
            if parameter not in within:
                hook = partial(self._on_gradient, *self._places[parameter])
                self._handles.append(parameter.register_post_accumulate_grad_hook(hook))

    def close(self) -> None:
        """Take the hooks away: no gradient comes any more."""
        for handle in self._handles:
            handle.remove()
        self._closed = True

    def keep_whole(self, name: str, numel: int) -> None:
        """Keep the whole gradient of parameter ``name`` besides; the reduction must leave all of it on every rank."""
        self.unsharded[name] = self.shards[0].new_zeros(numel)

    def begin_step(self) -> None:
        """Count buckets from 0 again."""
        if self._closed:
            raise UsageError(
                "the model of this engine was given to initialize again; train it with the engine of the last call"
            )
        self._bucketer.begin_step()

    def finish_backward(self) -> None:
        """Send what is left in the buckets; where the stage waits for the whole gradient, fill them first."""
        stage = self._policy.stage
        if self._paused or not (stage.shards_gradients or self._at_boundary()):
            return
        if not stage.shards_gradients:
            self._add_all()  # also what only earlier micro-batches gave, where hooks have sent the rest
        for leaf in self._leaves.values():
            if any(parameter.grad is not None for parameter in leaf.parameters):
                self._add_leaf(leaf)
        self._finish()

    def reduce_accumulated(self) -> None:
        """Reduce what several backward passes have left while paused: all gradients, in forward order."""
        self._add_all()
        self._finish()

    def _finish(self) -> None:
        self._bucketer.flush()
        self._overlap.land_all()
        self._bucketer.release()

    def pause(self, paused: bool) -> None:
        """Whether gradients only accumulate for now (``no_sync``)."""
        self._paused = paused

    @property
    def norm_dtype(self) -> torch.dtype:
        """In which squared norms are summed over ranks."""
        return self._policy.norm_dtype

    def tensors(self) -> Iterator[torch.Tensor]:
        """The memory of reduced gradients."""
        yield from self.shards
        yield from self.unsharded.values()

    def buffers(self) -> Iterator[torch.Tensor]:
        """The buffers of buckets that are kept between two backward passes."""
        return self._bucketer.buffers()

    def free_buffers(self) -> None:
        """Drop these; they are made again when they are needed."""
        self._bucketer.release(everywhere=True)

    def norm(self) -> torch.Tensor:
        """The norm of all gradients: one all_reduce for each param group."""
        return sharded_norm(self.shards, self._group, self.norm_dtype)

    def clear(self) -> None:
        """Forget the gradients of the step that has been taken."""
        for total in (*self.shards, *self.unsharded.values()):
            total.zero_()
        for each in self._groups:
            for parameter in each.parameters:
                parameter.grad = None

    def _on_gradient(self, number: int, index: int, parameter: torch.Tensor) -> None:
        if not self._paused and (self._policy.stage.shards_gradients or self._at_boundary()):
            self._add(number, index)

    def leaf_done(self, module: torch.nn.Module) -> None:
        """The backward pass of ``module`` has ended; nothing happens unless it is a leaf module.

        What leaf modules without differentiable inputs have left is taken by ``finish_backward``.
        """
        leaf = self._leaves.get(module)
        if leaf is not None and not self._paused:
            self._add_leaf(leaf)

    @torch.no_grad()
    def _add_leaf(self, leaf: Leaf) -> None:
        for parameter in leaf.parameters:
            self._add(*self._places[parameter])

    def _add_all(self) -> None:
        """Every gradient there is, in forward order, and with one of a leaf module those of all its parameters."""
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
        """Reduce a full bucket and, once that is done, add what this rank owns to its pieces."""
        reduce = all_reduce if bucket.replicated else self._policy.reduce
        return then(reduce(bucket, self._group), lambda: self._accumulate(bucket))

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


def add_rounded(total: torch.Tensor, addend: torch.Tensor) -> None:
    """Add ``addend`` to ``total``, rounded to its dtype first where that is the narrower one, as DeepSpeed does."""
    narrows = torch.promote_types(total.dtype, addend.dtype) is not total.dtype
    total.add_(addend.to(total.dtype) if narrows else addend)

"""Owner-ordered buckets (stages 1 and 2 with ``gradient_reduction: reduce_scatter``).

A chunk of the flat buffer (:mod:`zero_runtime.gradient_reduction.flat_layout`) is a bucket with a fixed
position. Every rank owns an equal row of the chunk, in rank order, so nothing is rearranged. A gradient is
divided, cast and copied to its position in one pass. The chunk is sent unchanged, and this rank's row of the
sum is added to its shard.

All ranks send chunks in the same order, which is the order of a backward pass through the reversed model. This
order does not depend on the order in which gradients become ready. A complete chunk waits for the chunks before
it. A parameter without a gradient contributes zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch.utils.hooks import RemovableHandle

from commprof import hooks
from zero_runtime.comm import DataParallelGroup
from zero_runtime.experimental.compression.quantized_messages import scatter_quantized
from zero_runtime.gradient_reduction.clip import sharded_norm
from zero_runtime.gradient_reduction.flat_layout import Run, ShardRange
from zero_runtime.gradient_reduction.gradient_buckets import (
    END_OF_BACKWARD,
    FULL,
    Bucket,
    Entry,
    Flight,
    Scaling,
)
from zero_runtime.gradient_reduction.reducer import ParameterGroup, Policy, add_rounded
from zero_runtime.gradient_reduction.reduction import (
    NATIVE,
    Finish,
    after,
    default_implementation,
    row_of_sum,
)
from zero_runtime.gradient_reduction.reduction_overlap import CHUNK_DEPTH, Overlap


@dataclass(frozen=True, slots=True)
class Member:
    """The range of one parameter that is in a chunk. Counts are elements."""

    parameter: torch.nn.Parameter
    name: str
    start: int  # within the flattened parameter
    numel: int
    position: int  # within the chunk


@dataclass(slots=True)
class Chunk:
    """A chunk of a group's flat buffer.

    Attributes:
        group: The number of the param group.
        number: The number of the chunk within the group.
        numel: The number of elements, including padding.
        end: The first element of the padding, or ``numel`` if there is no padding.
        dtype: The communication dtype.
        members: The ranges of parameters in the chunk.
        waiting: The parameters whose gradients are not ready yet in this pass.
        buffer: The gradients that are ready, at their positions in the chunk.
    """

    group: int
    number: int
    numel: int
    end: int
    dtype: torch.dtype
    members: tuple[Member, ...]
    waiting: set[torch.nn.Parameter]
    buffer: torch.Tensor | None = None


class OwnerOrderedGradients:
    """Reduces gradients to the ranks that own them, and accumulates the rows that this rank owns.

    The class has the arguments and attributes of
    :class:`zero_runtime.gradient_reduction.reducer.ShardedGradients`, and:

    Args:
        order: The model's parameters, in the model's order.
        implementation: The implementation of the reduce_scatter, ``native`` or ``all_to_all``. None for the
            default of the backend.
        quantized: Whether chunks are sent in 4 bits, by an all_to_all of bytes and a local sum.
    """

    def __init__(
        self,
        groups: Sequence[ParameterGroup],
        dtypes: Mapping[torch.nn.Parameter, torch.dtype],
        policy: Policy,
        group: DataParallelGroup,
        accumulation: torch.dtype | None,
        at_boundary: Callable[[], bool],
        order: Sequence[torch.nn.Parameter],
        implementation: str | None = None,
        quantized: bool = False,
    ) -> None:
        self._quantized = quantized and group.world_size > 1
        self._groups = groups
        self._policy = policy
        self._group = group
        self._at_boundary = at_boundary
        self._implementation = implementation or default_implementation(group.backend)
        self._paused = False
        self._number = 0
        self._overlap = Overlap(group.device, policy.overlap, CHUNK_DEPTH)
        self._chunks = chunks(groups, dtypes, order)
        self._of: dict[torch.nn.Parameter, list[tuple[Chunk, Member]]] = {}
        for chunk in self._chunks:
            for member in chunk.members:
                self._of.setdefault(member.parameter, []).append((chunk, member))
        self._sent = 0  # chunks of this pass
        self._spare: list[tuple[torch.Tensor, Flight]] = []
        self._empty = True
        self.shards = [
            torch.zeros(
                each.layout.shard_numel,
                dtype=accumulation or each.parameters[0].dtype,
                device=each.parameters[0].device,
            )
            for each in groups
        ]
        self._handles: list[RemovableHandle] = []
        if policy.stage.reduces_in_hooks:
            for parameter in self._of:
                hook = parameter.register_post_accumulate_grad_hook(self._on_gradient)
                self._handles.append(hook)

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def begin_step(self) -> None:
        """Count chunks from 0 again."""
        self._number = 0

    def finish_backward(self) -> None:
        """Send the remaining chunks. If the stage reduces whole gradients, fill the chunks first."""
        stage = self._policy.stage
        if self._paused or not (stage.reduces_every_micro_batch or self._at_boundary()):
            return
        if not stage.reduces_every_micro_batch:
            # Hooks have sent the gradients of this micro-batch. Parameters used only in earlier micro-batches remain.
            self._put_all()
        self._finish_pass()

    @torch.no_grad()
    def reduce_accumulated(self) -> None:
        """Reduce the gradients that several backward passes accumulated while paused."""
        self._put_all()
        self._finish_pass()

    def _put_all(self) -> None:
        """Send the gradients that are whole on each rank. Afterwards the sum is only in the shards."""
        for chunk in self._chunks[self._sent :]:
            for member in chunk.members:
                if member.parameter.grad is not None:
                    self._put(chunk, member, member.parameter.grad)
            self._send(chunk)
        for parameter in self._of:
            parameter.grad = None

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

    def buffers(self) -> Iterator[torch.Tensor]:
        """Yield nothing, because buffers of chunks exist only during a backward pass."""
        return iter(())

    def free_buffers(self) -> None:
        """Do nothing: there are no buffers between backward passes."""

    def norm(self) -> torch.Tensor:
        """Return the norm of all gradients, with one all_reduce for each param group."""
        return sharded_norm(self.shards, self._group, self.norm_dtype)

    def clear(self) -> None:
        """Drop the gradients, after a step or an interrupted pass."""
        self._overlap.land_all()
        self._begin_pass()
        for shard in self.shards:
            shard.zero_()
        self._empty = True
        for parameter in self._of:
            parameter.grad = None

    @torch.no_grad()
    def _on_gradient(self, parameter: torch.Tensor) -> None:
        if self._paused or not (self._policy.stage.reduces_every_micro_batch or self._at_boundary()):
            return
        assert isinstance(parameter, torch.nn.Parameter) and parameter.grad is not None
        places = self._of[parameter]
        if any(parameter not in chunk.waiting for chunk, _ in places):
            # This is the parameter's second gradient in one pass, as with reentrant checkpointing.
            self._finish_pass()
        gradient, parameter.grad = parameter.grad, None
        for chunk, member in places:
            self._put(chunk, member, gradient)
        while self._sent < len(self._chunks) and not self._chunks[self._sent].waiting:
            self._send(self._chunks[self._sent])

    def _finish_pass(self) -> None:
        """Send the remaining chunks, wait for all of them, and prepare the chunks for the next pass."""
        while self._sent < len(self._chunks):
            self._send(self._chunks[self._sent])
        self._overlap.land_all()
        self._empty = False
        self._begin_pass()

    def _begin_pass(self) -> None:
        self._sent = 0
        self._spare.clear()
        for chunk in self._chunks:
            chunk.buffer = None
            chunk.waiting = {member.parameter for member in chunk.members}

    def _put(self, chunk: Chunk, member: Member, gradient: torch.Tensor) -> None:
        portion = gradient.detach().reshape(-1).narrow(0, member.start, member.numel)
        target = self._buffer(chunk).narrow(0, member.position, member.numel)
        divisor = self._policy.scaling.bucket_divisor
        if divisor == 1.0:
            target.copy_(portion)
        else:
            torch.div(portion, divisor, out=target)
        chunk.waiting.discard(member.parameter)

    def _buffer(self, chunk: Chunk) -> torch.Tensor:
        if chunk.buffer is None:
            chunk.buffer = self._free(chunk)
            used = sum(member.numel for member in chunk.members)
            if used < chunk.numel:
                chunk.buffer.zero_()
        return chunk.buffer

    def _free(self, chunk: Chunk) -> torch.Tensor:
        """Return memory for ``chunk``. Reuse the memory of a landed chunk if possible."""
        for index, (tensor, flight) in enumerate(self._spare):
            if tensor.dtype is chunk.dtype and tensor.numel() == chunk.numel and flight.landed:
                return self._spare.pop(index)[0]
        return torch.empty(chunk.numel, dtype=chunk.dtype, device=self._group.device)

    def _send(self, chunk: Chunk) -> None:
        self._sent += 1
        buffer = self._buffer(chunk)
        for member in chunk.members:
            if member.parameter in chunk.waiting:
                buffer.narrow(0, member.position, member.numel).zero_()
        bucket = self._bucket(chunk, buffer)
        chunk.buffer = None
        if hooks.recording():
            bucket.publish()
        self._spare.append((buffer, self._overlap.send(bucket, partial(self._start, chunk))))

    def _bucket(self, chunk: Chunk, buffer: torch.Tensor) -> Bucket:
        row = chunk.numel // self._group.world_size
        entries = tuple(
            Entry(member.name, buffer.narrow(0, member.position, member.numel), (), chunk.group)
            for member in chunk.members
        )
        # An all_to_all takes rows of different lengths, so the padding need not be sent.
        padded = self._implementation == NATIVE or self._quantized
        bucket = Bucket(
            number=self._number,
            tensor=buffer if padded else buffer.narrow(0, 0, chunk.end),
            runs=tuple(
                Run(owner, owner * row, max(0, min(row, chunk.end - owner * row)))
                for owner in range(self._group.world_size)
            ),
            dtype=chunk.dtype,
            limit=self._policy.limit,
            scaling=Scaling(),
            entries=entries,
            flush_reason=END_OF_BACKWARD if chunk.waiting or self._sent == len(self._chunks) else FULL,
            members=self._group.global_ranks,
        )
        self._number += 1
        return bucket

    def _start(self, chunk: Chunk, bucket: Bucket) -> Finish | None:
        """Send a chunk, and add this rank's row of the sum to the shard."""
        row = chunk.numel // self._group.world_size
        mine = self.shards[chunk.group].narrow(0, chunk.number * row, row)
        if self._quantized:
            work, total = scatter_quantized(bucket.tensor, bucket, self._group)
            return after([work], lambda: self._take(mine, total()))
        return row_of_sum(bucket, self._group, self._implementation, partial(self._take, mine))

    @torch.no_grad()
    def _take(self, mine: torch.Tensor, total: torch.Tensor) -> None:
        if self._empty:
            mine.narrow(0, 0, total.numel()).copy_(total)
        else:
            add_rounded(mine.narrow(0, 0, total.numel()), total)


def chunks(
    groups: Sequence[ParameterGroup],
    dtypes: Mapping[torch.nn.Parameter, torch.dtype],
    order: Sequence[torch.nn.Parameter],
) -> list[Chunk]:
    """Return the chunks of all groups in the order of a backward pass: chunks that start late in the model are first.

    Args:
        groups: The param groups.
        dtypes: The communication dtype of each parameter; equal within a group.
        order: The model's parameters, in the model's order.
    """
    place = {parameter: number for number, parameter in enumerate(order)}
    all_chunks = []
    for number, each in enumerate(groups):
        layout = each.flat_layout
        members: list[list[Member]] = [[] for _ in range(layout.chunks)]
        for name, parameter, offset in zip(each.names, each.parameters, layout.offsets, strict=True):
            for interval in _cut(offset, parameter.numel(), layout.chunk_numel):
                member = Member(parameter, name, interval.start, interval.numel, interval.offset)
                members[interval.owner].append(member)
        all_chunks += [
            Chunk(
                number,
                index,
                layout.chunk_numel,
                min(layout.chunk_numel, layout.end - index * layout.chunk_numel),
                dtypes[each.parameters[0]],
                tuple(inside),
                {member.parameter for member in inside},
            )
            for index, inside in enumerate(members)
        ]

    def when_complete(chunk: Chunk) -> tuple[int, int]:
        first = min((place.get(member.parameter, len(place)) for member in chunk.members), default=-1)
        return first, chunk.number

    return sorted(all_chunks, key=when_complete, reverse=True)


def _cut(offset: int, numel: int, width: int) -> list[ShardRange]:
    """Divide elements ``offset`` to ``offset + numel`` at multiples of ``width``.

    The ``owner`` of each returned range is the number of its chunk.
    """
    intervals = []
    position = offset
    while position < offset + numel:
        chunk, within = divmod(position, width)
        end = min(offset + numel, (chunk + 1) * width)
        intervals.append(ShardRange(chunk, position - offset, end - position, within))
        position = end
    return intervals

"""Reduction of gradients block by block (stage 3): one reduce_scatter for the parameters that one message gathers.

When a gradient is ready, it is divided and copied into the rows of its block. Row r has shard r of every
parameter, padded with zeros to ceil(numel / ranks) elements. The rows are sent during the backward pass, when
the last gradient has arrived. At the end of the pass a block without some of its gradients is sent with zeros
for these gradients. A block without any gradient is not sent.

In the first pass of a step the shards remain separate, one tensor for each message, until the pass has ended.
Memory for all shards together would otherwise be allocated while most parameters are gathered.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from zero_runtime.gradient_reduction import reduction
from zero_runtime.gradient_reduction.flat_layout import Run
from zero_runtime.gradient_reduction.gradient_buckets import END_OF_BACKWARD, FULL, Bucket, Entry
from zero_runtime.gradient_reduction.reducer import Leaf, ParameterGroup, ShardedGradients, add_rounded
from zero_runtime.gradient_reduction.reduction import Finish
from zero_runtime.gradient_reduction.reduction_overlap import Overlap
from zero_runtime.sharding.message_memory import MessageMemory
from zero_runtime.sharding.shards import shard_of, slice_numel


class _Member(NamedTuple):
    """One parameter of a message. Counts are elements.

    Attributes:
        name: The name of the parameter.
        group, place: The number of the parameter's group, and the number of the parameter in this group.
        numel: The number of elements of the parameter.
        start, width: The position and the length of the shard in a row, including padding.
        target: The first element of the shard in the gradients of its group.
    """

    name: str
    group: int
    place: int
    numel: int
    start: int
    width: int
    target: int


class _Message:
    """The parameters that one reduce_scatter sums, and the gradients that have arrived.

    Attributes:
        members: the parameters, in the order of the rows.
        dtype: the communication dtype.
        kept: The dtype of the gradients.
        width: The number of elements of a row.
        gathered: The number of elements of the parameters that are gathered in the backward pass, including
            padding.
        rows: The gradients, one row for each rank; None if no gradient has arrived.
        arrived: the members whose gradients are in ``rows``.
    """

    __slots__ = ("arrived", "dtype", "gathered", "kept", "members", "rows", "spans", "width")

    def __init__(
        self, members: Sequence[_Member], dtype: torch.dtype, kept_dtype: torch.dtype, gathered: int
    ) -> None:
        self.members = members
        self.dtype = dtype
        self.kept = kept_dtype
        self.width = sum(each.width for each in members)
        self.gathered = gathered
        self.rows: torch.Tensor | None = None
        self.arrived: set[_Member] = set()
        self.spans = _spans(members)

    def real(self, rank: int) -> int:
        """Return the number of elements of row ``rank`` without padding."""
        return sum(max(0, min(each.width, each.numel - rank * each.width)) for each in self.members)


class _Piece(NamedTuple):
    """The sums of shards from a message.

    ``group`` is the number of the shards' group, and ``target`` is the first element in the gradient of this
    group.
    """

    group: int
    target: int
    values: torch.Tensor


class BlockGradients(ShardedGradients):
    """A :class:`ShardedGradients` that sends one message for each block and dtype.

    Unpartitioned parameters are not in a block. Their gradients enter buckets. Between a step and the end of
    the next pass there is no memory for ``shards``, unless they are read.

    Args:
        blocks: the parameters of each block, in the order of the rows.
        implementation: The implementation of a reduce_scatter: ``native``, ``all_to_all``, or None for the
            default of the backend.
        memory: The memory of the messages.
        ahead: The number of elements of parameters that are gathered ahead in the backward pass. None if all
            parameters stay gathered after the forward pass.
        unread: The parameters that are not gathered in the backward pass.
        arguments: The other arguments, which are those of a ShardedGradients.
    """

    def __init__(
        self,
        blocks: Sequence[Sequence[torch.nn.Parameter]],
        implementation: str | None,
        memory: MessageMemory,
        ahead: int | None,
        unread: Collection[torch.nn.Parameter],
        groups: Sequence[ParameterGroup],
        *arguments: Any,
    ) -> None:
        self._blocks = blocks
        self._ahead = ahead
        self._unread = unread
        self._implementation = implementation
        self._memory = memory
        self._messages: list[_Message] = []
        self._message_of: dict[tuple[int, int], tuple[_Message, _Member]] = {}
        self._totals: list[torch.Tensor] = []
        self._pieces: list[_Piece] = []
        self._apart = False
        self._unsent: dict[_Message, None] = {}  # messages that this backward pass has not sent yet
        self._last = 0  # bytes of the last message of this backward pass
        self._most = 0  # largest number of bytes so far, see _depth
        super().__init__(groups, *arguments)
        self._clear_shards()
        # The depth of buckets, which contain the gradients that are not in a block. Each message has its own depth.
        self._overlap = Overlap(self._group.device, self._policy.overlap, depth=1)
        self._divide()

    def add(
        self,
        groups: Sequence[ParameterGroup],
        dtypes: Mapping[torch.nn.Parameter, torch.dtype],
        leaves: Sequence[Leaf] = (),
        blocks: Sequence[Sequence[torch.nn.Parameter]] | None = None,
    ) -> None:
        """Reduce the gradients of the additional ``groups``, too. Afterwards ``blocks`` contain all parameters."""
        self._join()
        super().add(groups, dtypes, leaves)
        if blocks is not None:
            self._blocks = blocks
            self._divide()

    @property  # type: ignore[override]
    def shards(self) -> list[torch.Tensor]:
        """For each param group, this rank's shard of the reduced gradient."""
        self._join()
        return self._totals

    @shards.setter
    def shards(self, totals: list[torch.Tensor]) -> None:
        self._totals = totals

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield the memory of reduced gradients that is allocated."""
        yield from self._totals
        yield from self.unsharded.values()

    def _join(self) -> None:
        """Combine the sums of all messages into one shard for each param group, if they are still separate."""
        if self._apart:
            self._apart = False
            self._totals = [self._zeros(each) for each in self._groups]
            while self._pieces:
                group, target, values = self._pieces.pop(0)
                add_rounded(self._totals[group].narrow(0, target, values.numel()), values)

    def _clear_shards(self) -> None:
        self._apart = True
        self._totals = []
        self._pieces.clear()

    def _divide(self) -> None:
        self._messages.clear()
        self._message_of.clear()
        for block in self._blocks:
            alike: dict[tuple[torch.dtype, torch.dtype], list[torch.nn.Parameter]] = {}
            for parameter in block:
                if parameter in self._places and _numel(parameter):
                    dtypes = self._dtypes[parameter], parameter.dtype
                    alike.setdefault(dtypes, []).append(parameter)
            for (dtype, _), parameters in sorted(alike.items(), key=lambda each: str(each[0])):
                self._add_message(parameters, dtype)
        self._begin_pass()

    def _begin_pass(self) -> None:
        self._unsent = dict.fromkeys(self._messages)
        self._last = self._most = 0

    def _add_message(self, parameters: Sequence[torch.nn.Parameter], dtype: torch.dtype) -> None:
        members, start, gathered = [], 0, 0
        for parameter in parameters:
            number, index = self._places[parameter]
            numel = _numel(parameter)
            width = slice_numel(numel, self._group.world_size)
            target = self._shards[number][index][0].offset
            name = self._groups[number].names[index]
            members.append(_Member(name, number, index, numel, start, width, target))
            start += width
            gathered += 0 if parameter in self._unread else width * self._group.world_size
        message = _Message(members, dtype, parameters[0].dtype, gathered)
        self._messages.append(message)
        self._message_of.update(((each.group, each.place), (message, each)) for each in members)

    @torch.no_grad()
    def _add(self, number: int, index: int) -> None:
        place = self._message_of.get((number, index))
        parameter = self._groups[number].parameters[index]
        if place is None:
            super()._add(number, index)
            return
        message, member = place
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:
            return
        self._lay(message, member, gradient.reshape(-1))
        if len(message.arrived) == len(message.members):
            self._send_message(message, FULL)

    def _lay(self, message: _Message, member: _Member, gradient: torch.Tensor) -> None:
        """Divide a gradient and copy it to its places in the rows.

        If the rows already contain a gradient of the parameter, the gradient is added.
        """
        world = self._group.world_size
        if message.rows is None:
            rows = self._memory.take(world * message.width, message.dtype, gradient.device)
            message.rows = rows.view(world, message.width)
        places = message.rows.narrow(1, member.start, member.width)
        divisor = self._policy.scaling.divisor
        full_rows, rest = divmod(member.numel, member.width)
        parts = []
        if full_rows:
            parts.append(
                (places[:full_rows], gradient[: full_rows * member.width].view(full_rows, member.width))
            )
        if rest:
            parts.append((places[full_rows, :rest], gradient[full_rows * member.width :]))
        if member in message.arrived:
            for place, part in parts:
                place.add_(part.to(place.dtype).div(divisor))
            return
        message.arrived.add(member)
        for place, part in parts:
            if part.dtype is place.dtype:
                torch.div(part, divisor, out=place)
            else:
                place.copy_(part).div_(divisor)
        if full_rows < world:
            places[full_rows, rest:].zero_()
            places[full_rows + 1 :].zero_()

    def _finish(self) -> None:
        for message in self._messages:
            if message.rows is not None:
                for member in message.members:
                    if member not in message.arrived:
                        message.rows.narrow(1, member.start, member.width).zero_()
                self._send_message(message, END_OF_BACKWARD)
        super()._finish()
        self._memory.give_back()
        self._begin_pass()
        self._join()

    def _send_message(self, message: _Message, reason: str) -> None:
        rows = message.rows
        assert rows is not None
        message.rows = None
        message.arrived = set()
        scaling = self._policy.scaling
        if scaling.factor_before != 1.0:
            rows.mul_(scaling.factor_before)
        bucket = Bucket(
            number=self._bucketer.take_number(),
            tensor=rows.view(-1),
            runs=tuple(
                Run(rank, rank * message.width, message.real(rank)) for rank in range(self._group.world_size)
            ),
            dtype=message.dtype,
            limit=rows.numel(),
            scaling=scaling,
            entries=tuple(Entry(each.name, rows, (), each.group) for each in message.members),
            flush_reason=reason,
            members=self._group.global_ranks,
        )
        bucket.publish()
        self._overlap.send(bucket, lambda each: self._scatter(message, each), self._depth(message))

    def _depth(self, message: _Message) -> int:
        """Return the number of messages in flight after ``message`` is sent.

        The number is two if the pass has needed as much memory before, otherwise one.

        A second message keeps the network busy while the slowest rank fills the next message. But each message
        takes twice its bytes, for the sent and the received data. Early in the pass most parameters are
        gathered, and there is no memory for a second message. Later the released parameters of the sent blocks
        have left enough memory.
        """
        self._unsent.pop(message, None)
        later = sum(each.gathered for each in self._unsent)
        if self._ahead is not None:
            later = min(later, self._ahead)
        gathered = (message.gathered + later) * message.kept.itemsize
        numel = self._group.world_size * message.width
        before, size = self._last, numel * message.dtype.itemsize
        self._last = size
        # The previous message keeps its memory until this message is about to be sent, or until the previous one lands.
        self._most = max(self._most, 2 * before + size + gathered, 2 * size + gathered)
        return 2 if 2 * before + 2 * size + gathered <= self._most else 1

    def _scatter(self, message: _Message, bucket: Bucket) -> Finish | None:
        """Send the rows, and add this rank's row of the sum to its shards."""
        group, rows = self._group, bucket.tensor
        received = None
        if (self._implementation or reduction.default_implementation(group.backend)) == reduction.ALL_TO_ALL:
            received = self._memory.take(rows.numel(), rows.dtype, rows.device)
            work, total = reduction.exchange(
                rows, [message.width] * group.world_size, bucket, group, received
            )
        else:
            work, total = reduction.scatter(rows, bucket, group)

        def finish() -> None:
            self._take(message, total(), bucket.scaling.factor_after)
            for buffer in (rows, received):
                if buffer is not None:
                    self._memory.put(buffer)

        return reduction.after([work], finish)

    @torch.no_grad()
    def _take(self, message: _Message, total: torch.Tensor, factor: float) -> None:
        mine = total.to(message.kept)
        if factor != 1.0:
            mine = mine * factor
        for group, target, start, width in message.spans:
            part = mine.narrow(0, start, width)
            if self._apart:
                self._pieces.append(_Piece(group, target, part))
            else:
                add_rounded(self._totals[group].narrow(0, target, width), part)


def _numel(parameter: torch.nn.Parameter) -> int:
    shard = shard_of(parameter)
    assert shard is not None
    return shard.numel


def _spans(members: Sequence[_Member]) -> list[tuple[int, int, int, int]]:
    """Return the spans of adjacent members that are also adjacent in one group.

    A span is the group, the position in the group, the position in a row, and the width.
    """
    spans: list[tuple[int, int, int, int]] = []
    for each in members:
        if spans:
            group, target, start, width = spans[-1]
            if group == each.group and target + width == each.target:
                spans[-1] = group, target, start, width + each.width
                continue
        spans.append((each.group, each.target, each.start, each.width))
    return spans

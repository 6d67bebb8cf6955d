"""Parameters as views of flat buffers, replicated on every rank (stages 1 and 2).

The sharded optimizer uses the same methods here and in :mod:`zero_runtime.sharding.sharded_parameters`. ``own``
is this rank's shard of every group, in the model's dtype.
:class:`zero_runtime.optimizer_step.owned_shards.OwnedShards` describes how the shards are read and written. The
optimizer calls ``begin_step`` before it writes the shards, and ``share`` afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

import torch

from commprof import hooks
from zero_runtime.comm import DataParallelGroup, Work
from zero_runtime.experimental.compression.quantized_messages import gather_quantized, round_rows
from zero_runtime.gradient_reduction.reducer import ParameterGroup
from zero_runtime.optimizer_step.gradient_arrivals import Arrivals
from zero_runtime.optimizer_step.owned_shards import OwnedShards

_GATHER: Final = hooks.tag("parameter_gather")


class _GatherMessage(NamedTuple):
    """One message of the parameter gather.

    Attributes:
        contiguous: The rows as one tensor. None if the rows are not contiguous.
        rows: The row of each rank.
        whys: The tag of each row, with the number of padding bytes of the row.
        why: The tag of all rows together.
        ranks: The group of the ranks that gather the message.
    """

    contiguous: torch.Tensor | None
    rows: tuple[torch.Tensor, ...]
    whys: tuple[hooks.tag, ...]
    why: hooks.tag
    ranks: DataParallelGroup


class FlatParameters(OwnedShards):
    """Makes the parameters of each group views of one flat buffer. This rank updates one shard of the buffer.

    Args:
        groups: The trainable parameters.
        group: The group of the data-parallel ranks.
        by_broadcast: Whether to share the shards with one broadcast each, instead of with an all_gather.
        bucket: The number of elements of the largest message of such an all_gather. None sends each chunk as
            one message.
        module: The model, if ``share`` only starts the gather and accesses to parameters wait for it. None if
            ``share`` itself waits.
        quantized: Whether an all_gather sends the shards in 8 bits. Every rank then has the same rounded
            parameters.

    Attributes:
        own: For each group, this rank's 1-D shard of the flat buffer. The shard is a view of the buffer. If
            there are several chunks or the gather is quantized, the shard is a copy of this rank's rows.
    """

    def __init__(
        self,
        groups: Sequence[ParameterGroup],
        group: DataParallelGroup,
        by_broadcast: bool = False,
        bucket: int | None = None,
        module: torch.nn.Module | None = None,
        quantized: bool = False,
    ) -> None:
        self._quantized = quantized and group.world_size > 1
        self._group = group
        self._by_broadcast = by_broadcast
        self._bucket = bucket
        flats = [flatten(each) for each in groups]
        self._rows = [
            flat.view(each.flat_layout.chunks, ranks.world_size, -1).select(1, ranks.rank)
            for flat, each in zip(flats, groups, strict=True)
            for ranks in [each.ranks or group]
        ]
        self.own = [rows.reshape(-1) for rows in self._rows]
        if self._quantized:
            self.own = [own.clone() for own in self.own]
        self._messages = [
            message
            for flat, each in zip(flats, groups, strict=True)
            for chunk in flat.chunk(each.flat_layout.chunks)
            for message in self._messages_of(chunk, each)
        ]
        self._arrivals = None if module is None else Arrivals(module, self._carriers(groups))

    def close(self) -> None:
        """Wait for messages in flight and remove the hooks."""
        if self._arrivals is not None:
            self._arrivals.close()

    def begin_step(self) -> Sequence[tuple[int, slice]]:
        """Wait for messages in flight.

        The messages read the shards and fill the parameters, so they must be complete before the shards change.

        Returns:
            An empty sequence, because changes by scripts are not detected at these stages.
        """
        return self.changes()

    def changes(self) -> Sequence[tuple[int, slice]]:
        """Wait for messages in flight. The return value is the same as that of ``begin_step``."""
        if self._arrivals is not None:
            self._arrivals.land_all()
        return ()

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield every tensor of the flat buffers, after all messages in flight."""
        self.changes()
        yield from self.own
        yield from self._rows
        for message in self._messages:
            yield from message.rows
            if message.contiguous is not None:
                yield message.contiguous

    def share(self) -> None:
        """Gather the updated shards of all ranks on every rank."""
        for own, rows in zip(self.own, self._rows, strict=True):
            if len(rows) > 1 or self._quantized:
                rows.copy_(own.view_as(rows))
        if self._group.world_size == 1:
            return
        if self._by_broadcast:
            for message in self._messages:
                for owner, (row, why) in enumerate(zip(message.rows, message.whys, strict=True)):
                    message.ranks.broadcast(row, owner, why=why)
            return
        # Several messages are in flight at the same time, so the network stays busy while one of them starts or ends.
        if self._quantized:
            self._share_quantized()
            return
        asynchronous = self._arrivals is not None or len(self._messages) > len(self._rows)
        works = [self._gather(message, asynchronous) for message in self._messages]
        under_way = [work for work in works if work is not None]
        if self._arrivals is not None:
            self._arrivals.expect(under_way)
        else:
            for work in under_way:
                work.wait()

    def refresh(self) -> None:
        """Update the shards that are copies of the rows."""
        for own, rows in zip(self.own, self._rows, strict=True):
            if own.data_ptr() != rows.data_ptr():
                own.detach().view_as(rows).copy_(rows)

    @torch.no_grad()
    def loaded(self) -> None:
        """Round the whole buffers, if :meth:`share` sends rounded shards."""
        if self._quantized:
            for message in self._messages:
                round_rows(message.rows)

    def _share_quantized(self) -> None:
        sent: list[tuple[Work | None, Callable[[], None]]] = [
            gather_quantized(message.rows, message.ranks, _GATHER, len(self._messages) > len(self._rows))
            for message in self._messages
        ]
        for work, fill in sent:
            if work is not None:
                work.wait()
            fill()

    def _messages_of(self, chunk: torch.Tensor, of: ParameterGroup) -> Iterator[_GatherMessage]:
        """Yield the messages that gather ``chunk``. Each part of a row begins at an even element."""
        ranks = of.ranks or self._group
        rows = chunk.chunk(ranks.world_size)
        if of.ranks is not None and ranks.world_size == 1:
            return
        width = rows[0].numel() if self._bucket is None else self._width(ranks)
        if self._by_broadcast or width >= rows[0].numel():
            yield _gather_message(chunk, rows, of, ranks)
            return
        for begin in range(0, rows[0].numel(), width):
            yield _gather_message(None, tuple(row[begin : begin + width] for row in rows), of, ranks)

    def _width(self, ranks: DataParallelGroup) -> int:
        assert self._bucket is not None
        return max(2, self._bucket // ranks.world_size // 2 * 2)

    def _gather(self, message: _GatherMessage, asynchronous: bool) -> Work | None:
        ranks = message.ranks
        own = message.rows[ranks.rank]
        if message.contiguous is not None:
            return ranks.all_gather_single(
                message.contiguous, own, why=message.why, asynchronous=asynchronous
            )
        return ranks.all_gather(list(message.rows), own, why=message.why, asynchronous=asynchronous)

    def _carriers(self, groups: Sequence[ParameterGroup]) -> dict[torch.nn.Parameter, tuple[int, ...]]:
        """Return the numbers of the messages that carry a part of each parameter."""
        carriers_of: dict[torch.nn.Parameter, tuple[int, ...]] = {}
        first = 0
        for each in groups:
            row = each.flat_layout.row_numel
            if each.ranks is not None and each.ranks.world_size == 1:
                carriers_of.update(dict.fromkeys(each.parameters, ()))
                continue
            width = row if self._bucket is None else self._width(each.ranks or self._group)
            in_a_chunk = -(-row // width) if width else 0
            for index, parameter in enumerate(each.parameters):
                carriers: set[int] = set()
                for shard in each.layout.shards(index):
                    chunk, within = divmod(shard.offset, row)
                    last = (within + shard.numel - 1) // width
                    carriers.update(first + chunk * in_a_chunk + n for n in range(within // width, last + 1))
                carriers_of[parameter] = tuple(sorted(carriers))
            first += each.flat_layout.chunks * in_a_chunk
        return carriers_of


def _gather_message(
    contiguous: torch.Tensor | None,
    rows: tuple[torch.Tensor, ...],
    of: ParameterGroup,
    ranks: DataParallelGroup,
) -> _GatherMessage:
    # The flat buffer has its own storage, so storage offsets are offsets in the buffer.
    starts = [int(row.storage_offset()) for row in rows]
    paddings = [
        of.flat_layout.padding(start, start + row.numel()) * row.element_size()
        for start, row in zip(starts, rows, strict=True)
    ]
    return _GatherMessage(contiguous, rows, tuple(map(_why, paddings)), _why(sum(paddings)), ranks)


def _why(padding_bytes: int) -> hooks.tag:
    return hooks.tag("parameter_gather", padding_bytes=padding_bytes) if padding_bytes else _GATHER


def flatten(each: ParameterGroup) -> torch.Tensor:
    """Concatenate the parameters of a group in a new flat buffer, and make the parameters views of the buffer."""
    first, layout = each.parameters[0], each.flat_layout
    flat = torch.zeros(layout.numel, dtype=first.dtype, device=first.device)
    for parameter, offset in zip(each.parameters, layout.offsets, strict=True):
        view = flat.narrow(0, offset, parameter.numel()).view(parameter.shape)
        view.copy_(parameter.detach())
        parameter.data = view
    return flat

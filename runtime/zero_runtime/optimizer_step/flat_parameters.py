"""Parameters as views of flat buffers, whole on every rank (stages 1 and 2).

What an optimizer over pieces needs of the parameters, here and in :mod:`zero_runtime.sharding.parameters`: ``own``, this
rank's piece of every group in the model's dtype, and how the step reads and writes it
(:class:`zero_runtime.optimizer_step.owned_shards.Pieces`); ``begin_step`` before the pieces are written; ``share`` after.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

import torch

from commprof import hooks
from zero_runtime.comm import DataParallelGroup, Work
from zero_runtime.experimental.compression.quantized_messages import gather_quantized, round_rows
from zero_runtime.gradient_reduction.reducer import ParameterGroup
from zero_runtime.optimizer_step.arrivals import Arrivals
from zero_runtime.optimizer_step.owned_shards import Pieces

_GATHER: Final = hooks.tag("parameter_gather")


class _Part(NamedTuple):
    """What one message gathers.

    Attributes:
        whole: the rows end to end; None where they lie apart.
        rows: of each rank.
        whys: the tag of each row, which says how much of it is padding.
        why: the tag of all rows together.
    """

    whole: torch.Tensor | None
    rows: tuple[torch.Tensor, ...]
    whys: tuple[hooks.tag, ...]
    why: hooks.tag


class FlatParameters(Pieces):
    """Makes the parameters of each group views of one flat buffer, of which this rank updates a piece.

    Args:
        groups: the trainable parameters.
        group: the data-parallel ranks.
        by_broadcast: share the pieces by one broadcast each, instead of by an all_gather.
        bucket: elements of the largest message of such an all_gather; None sends each chunk at once.
        module: the model, where ``share`` only begins to gather the pieces, and the model's parameters are waited for
            as they are needed; None where they are there when it returns.
        quantized: whether an all_gather sends the pieces in 8 bits. What the model has is then rounded on all ranks alike.

    Attributes:
        own: for each group, this rank's piece of the flat buffer, 1-D: a part of it, or where it has several chunks, or
            travels quantized, a copy of this rank's rows.
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
            flat.view(each.flat_layout.chunks, group.world_size, -1).select(1, group.rank)
            for flat, each in zip(flats, groups, strict=True)
        ]
        self.own = [rows.reshape(-1) for rows in self._rows]
        if self._quantized:
            self.own = [own.clone() for own in self.own]
        self._parts = [
            part
            for flat, each in zip(flats, groups, strict=True)
            for chunk in flat.chunk(each.flat_layout.chunks)
            for part in self._cut(chunk, each)
        ]
        self._arrivals = None if module is None else Arrivals(module, self._carriers(groups))

    def close(self) -> None:
        """Wait for what is under way, and take the hooks away."""
        if self._arrivals is not None:
            self._arrivals.close()

    def begin_step(self) -> Sequence[tuple[int, slice]]:
        """The pieces are part of what the model uses: they must have arrived before they are written again.

        Returns:
            Nothing: parts of which copies are out of date are not known here.
        """
        return self.changes()

    def changes(self) -> Sequence[tuple[int, slice]]:
        """Wait for what is under way; the rest as in ``begin_step``."""
        if self._arrivals is not None:
            self._arrivals.land_all()
        return ()

    def tensors(self) -> Iterator[torch.Tensor]:
        """Every tensor of the flat buffers, once nothing is under way to them."""
        self.changes()
        yield from self.own
        yield from self._rows
        for part in self._parts:
            yield from part.rows
            if part.whole is not None:
                yield part.whole

    def share(self) -> None:
        """Send this rank's pieces to the others, and get theirs."""
        for own, rows in zip(self.own, self._rows, strict=True):
            if len(rows) > 1 or self._quantized:
                rows.copy_(own.view_as(rows))
        if self._group.world_size == 1:
            return
        if self._by_broadcast:
            for part in self._parts:
                for owner, (piece, why) in enumerate(zip(part.rows, part.whys, strict=True)):
                    self._group.broadcast(piece, owner, why=why)
            return
        # Several at once keep the wire busy while one of them begins or ends.
        if self._quantized:
            self._share_quantized()
            return
        asynchronous = self._arrivals is not None or len(self._parts) > len(self._rows)
        works = [self._gather(part, asynchronous) for part in self._parts]
        under_way = [work for work in works if work is not None]
        if self._arrivals is not None:
            self._arrivals.expect(under_way)
        else:
            for work in under_way:
                work.wait()

    def refresh(self) -> None:
        """Bring pieces that are copies of the rows up to date."""
        for own, rows in zip(self.own, self._rows, strict=True):
            if own.data_ptr() != rows.data_ptr():
                own.detach().view_as(rows).copy_(rows)

    @torch.no_grad()
    def loaded(self) -> None:
        """Round the whole buffers, where :meth:`share` sends rounded pieces."""
        if self._quantized:
            for part in self._parts:
                round_rows(part.rows)

    def _share_quantized(self) -> None:
        sent: list[tuple[Work | None, Callable[[], None]]] = [
            gather_quantized(part.rows, self._group, _GATHER, len(self._parts) > len(self._rows))
            for part in self._parts
        ]
        for work, fill in sent:
            if work is not None:
                work.wait()
            fill()

    def _cut(self, chunk: torch.Tensor, of: ParameterGroup) -> Iterator[_Part]:
        """The messages in which ``chunk`` is gathered; each part of a row begins at an even element."""
        rows = chunk.chunk(self._group.world_size)
        if self._bucket is None or self._by_broadcast:
            yield _part(chunk, rows, of)
            return
        width = self._width()
        for begin in range(0, rows[0].numel(), width):
            yield _part(None, tuple(row[begin : begin + width] for row in rows), of)

    def _width(self) -> int:
        assert self._bucket is not None
        return max(2, self._bucket // self._group.world_size // 2 * 2)

    def _gather(self, part: _Part, asynchronous: bool) -> Work | None:
        own = part.rows[self._group.rank]
        if part.whole is not None:
            return self._group.all_gather_single(part.whole, own, why=part.why, asynchronous=asynchronous)
        return self._group.all_gather(list(part.rows), own, why=part.why, asynchronous=asynchronous)

    def _carriers(self, groups: Sequence[ParameterGroup]) -> dict[torch.nn.Parameter, tuple[int, ...]]:
        """The numbers of the messages that carry a part of each parameter."""
        found = {}
        first = 0
        for each in groups:
            row = each.flat_layout.row_numel
            width = row if self._bucket is None else self._width()
            in_a_chunk = -(-row // width) if width else 0
            for index, parameter in enumerate(each.parameters):
                carriers: set[int] = set()
                for piece in each.layout.shards(index):
                    chunk, within = divmod(piece.offset, row)
                    last = (within + piece.numel - 1) // width
                    carriers.update(first + chunk * in_a_chunk + n for n in range(within // width, last + 1))
                found[parameter] = tuple(sorted(carriers))
            first += each.flat_layout.chunks * in_a_chunk
        return found


def _part(whole: torch.Tensor | None, rows: tuple[torch.Tensor, ...], of: ParameterGroup) -> _Part:
    starts = [int(row.storage_offset()) for row in rows]  # the flat buffer is all of its storage
    paddings = [
        of.flat_layout.padding(start, start + row.numel()) * row.element_size()
        for start, row in zip(starts, rows, strict=True)
    ]
    return _Part(whole, rows, tuple(map(_why, paddings)), _why(sum(paddings)))


def _why(padding_bytes: int) -> hooks.tag:
    return hooks.tag("parameter_gather", padding_bytes=padding_bytes) if padding_bytes else _GATHER


def flatten(each: ParameterGroup) -> torch.Tensor:
    """Lay the parameters of a group end to end in one new flat buffer, and make them views of it."""
    first, layout = each.parameters[0], each.flat_layout
    flat = torch.zeros(layout.numel, dtype=first.dtype, device=first.device)
    for parameter, offset in zip(each.parameters, layout.offsets, strict=True):
        view = flat.narrow(0, offset, parameter.numel()).view(parameter.shape)
        view.copy_(parameter.detach())
        parameter.data = view
    return flat

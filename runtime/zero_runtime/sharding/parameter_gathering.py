"""Gathering of sharded parameters: the messages of stage 3.

Several parameters share one all_gather for each dtype. Every rank concatenates its shards, ordered by the
number of the parameter. A single parameter has its own all_gather, without a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch

from commprof import hooks
from zero_runtime import comm
from zero_runtime.comm import DataParallelGroup
from zero_runtime.experimental.compression.quantization import dequantized, quantized
from zero_runtime.groups.detailed_tags import detailed
from zero_runtime.sharding.message_memory import MessageMemory
from zero_runtime.sharding.placement.pages import Pager
from zero_runtime.sharding.shards import Shard, Status

_GATHER: Final = hooks.tag("parameter_gather")
_BROADCAST: Final = hooks.tag("parameter_broadcast")
_CHECKPOINT: Final = hooks.tag("checkpoint")
ACCESS: Final = hooks.tag("parameter_access")  # gathers by a program that reads or changes whole parameters
WEIGHT_BITS: Final = 8
_ALIGNMENT: Final = 64  # bytes; the alignment of torch's allocations on a CPU


class _Message(NamedTuple):
    """One message in flight, and the parameters that it gathers.

    ``rows`` is the number of rows in ``buffer``. Each row has one shard of every parameter. With 0 rows, the
    buffer contains the whole, padded parameters, concatenated. A quantized message is in ``payloads``, one row
    from each rank, until it is copied to the buffer.
    """

    work: Any
    buffer: torch.Tensor
    shards: Sequence[Shard]
    rows: int
    payloads: torch.Tensor | None = None


class Gathering:
    """A gather in flight; ``wait`` completes it.

    ``memory`` is the source of the buffers of blocks; None for modules.
    """

    def __init__(self, messages: Sequence[_Message], memory: MessageMemory | None = None) -> None:
        self._messages = messages
        self._memory = memory

    @torch.inference_mode(False)
    @torch.no_grad()
    def wait(self) -> None:
        """Wait for the messages, and fill the parameters that they gather. May be called again."""
        messages, self._messages = self._messages, ()
        for message in messages:
            comm.wait(message.work)
            if message.payloads is not None:
                rows = message.buffer.view(len(message.payloads), -1)
                rows.copy_(dequantized(message.payloads, rows.shape[1], WEIGHT_BITS))
            if message.rows:
                _unpack_rows(message, of_block=self._memory is not None)
                if self._memory is not None:
                    self._memory.put(message.buffer)
            else:
                _unpack_whole(message)
            for shard in message.shards:
                shard.rounded = message.payloads is not None


class Gatherer:
    """Sends the messages that gather parameters.

    Args:
        sequential: Whether there is one message for each parameter.
        by_all_reduce: Whether several parameters are gathered by one all_reduce of whole, padded buffers, to
            which each rank adds its shards.
        secondary: The ranks of the secondary partition; None without a secondary partition.
        dtypes: The communication dtype of the parameters for which it differs from their own dtype.
        quantizes: A function that returns whether a parameter is gathered in 8 bits among all ranks. Gathers
            within the secondary group and gathers by ``gather_each``, whose parameters may be changed and kept,
            are never quantized.
        why: The tag of the messages; None for the gather of a pass.
        group: The ranks as a separate group for the messages of :meth:`start`, so that these messages do not
            wait for other messages. None for the group of each shard.
        memory: The memory of the messages of blocks; None if modules are gathered.
    """

    def __init__(
        self,
        sequential: bool = False,
        by_all_reduce: bool = False,
        secondary: DataParallelGroup | None = None,
        dtypes: Mapping[torch.nn.Parameter, torch.dtype] | None = None,
        quantizes: Callable[[torch.nn.Parameter], bool] = lambda parameter: False,
        why: hooks.tag | None = None,
        group: DataParallelGroup | None = None,
        memory: MessageMemory | None = None,
    ) -> None:
        self._memory = memory
        self._why = why or _GATHER
        self._group = group
        self._quantizes = quantizes
        self._sequential = sequential
        self._by_all_reduce = by_all_reduce
        self._secondary = secondary
        self._dtypes = dtypes or {}

    @torch.inference_mode(False)
    @torch.no_grad()
    def start(self, shards: Iterable[Shard]) -> Gathering:
        """Start to gather the released parameters of ``shards``, in as few messages as possible."""
        waiting = sorted(
            (each for each in shards if each.status is Status.NOT_AVAILABLE), key=lambda each: each.number
        )
        _begin_to_read(waiting)
        messages: list[_Message] = []
        first = [each for each in waiting if each.secondary is not None]
        for batch in (first, [each for each in waiting if each.secondary is None]):
            sent = _without_messages(batch)
            for each in sent:
                each.status = Status.INFLIGHT
            if self._sequential or len(sent) == 1:
                messages += [self._send_one(each) for each in sent]
            else:
                messages += self._send_several(sent)
        gathering = Gathering(messages, self._memory)
        for message in messages:
            for each in message.shards:
                each.gathering = gathering
        return gathering

    @torch.inference_mode(False)
    @torch.no_grad()
    def gather_each(self, shards: Iterable[Shard]) -> None:
        """Gather the released parameters of ``shards`` from their primary shards.

        There is one message for each parameter, in the given order.
        """
        shards = list(shards)
        for each in shards:
            each.wait()
        waiting = [each for each in shards if each.status is Status.NOT_AVAILABLE or each.rounded]
        _begin_to_read(waiting)
        # With one rank DeepSpeed sends a message for a single parameter, but no message for several parameters.
        sent = waiting if len(waiting) == 1 and waiting[0].numel else _without_messages(waiting)
        for each in sent:
            each.status = Status.INFLIGHT
        Gathering([self._send(each, None, each.dtype) for each in sent]).wait()

    def keep_secondary(self, shard: Shard) -> None:
        """Create the secondary shard of a gathered parameter, unless it exists or there is no secondary group."""
        if self._secondary is None or shard.secondary is not None or not shard.numel:
            return
        numel = shard.slice_numel * shard.group.world_size // self._secondary.world_size
        own = torch.zeros(numel, dtype=shard.dtype, device=shard.place.device or shard.parameter.device)
        shard.cut(own, self._secondary.rank)
        shard.secondary = own

    def _send_one(self, shard: Shard) -> _Message:
        dtype, secondary = self._dtypes.get(shard.parameter, shard.dtype), self._secondary_of(shard)
        quantize = secondary is None and self._quantizes(shard.parameter)
        return self._send(shard, secondary, dtype, quantize, self._group)

    def _secondary_of(self, shard: Shard) -> DataParallelGroup | None:
        return None if shard.secondary is None else self._secondary

    def _send(
        self,
        shard: Shard,
        secondary: DataParallelGroup | None,
        dtype: torch.dtype,
        quantize: bool = False,
        primary: DataParallelGroup | None = None,
    ) -> _Message:
        """Gather one parameter from its shards in the group ``secondary``, or from its primary shards if it is None."""
        group = secondary or primary or shard.group
        numel = _numel(shard, secondary)
        buffer = torch.empty(numel * group.world_size, dtype=dtype, device=shard.parameter.device)
        if secondary is None and shard.pager is not None:
            row = buffer.narrow(0, group.rank * numel, numel)
            shard.read(row)
        else:
            own = shard.own if secondary is None else shard.secondary
            assert own is not None
            row = own.to(device=buffer.device, dtype=dtype)
        if quantize:
            return _send_quantized(buffer, row, group, [shard], 0)
        why = _tag_of([shard], self._why, buffer)
        return _Message(group.start_all_gather(buffer, row, why=why), buffer, [shard], 0)

    def _send_several(self, shards: Sequence[Shard]) -> list[_Message]:
        batches: dict[tuple[str, bool, int], list[Shard]] = {}
        for each in shards:
            dtype = self._dtypes.get(each.parameter, each.dtype)
            quantize = each.secondary is None and self._quantizes(each.parameter)
            batches.setdefault((str(dtype), quantize, id(each.group)), []).append(each)
        return [
            self._send_batch(batches[key], key[1])
            for key in sorted(batches, key=lambda key: (key[0], key[1]))
        ]

    def _send_batch(self, shards: Sequence[Shard], quantize: bool) -> _Message:
        first = shards[0]
        secondary = self._secondary_of(first)
        group = secondary or self._group or first.group
        dtype, device = self._dtypes.get(first.parameter, first.dtype), first.parameter.device
        if self._by_all_reduce and secondary is None:
            return _reduce_whole(shards, group, dtype, device)
        numel = sum(_numel(each, secondary) for each in shards)
        take = torch.empty if self._memory is None else self._memory.take
        buffer = take(group.world_size * numel, dtype=dtype, device=device)
        row = _end_to_end(shards, secondary, numel)
        if row is None:
            row = buffer.narrow(0, group.rank * numel, numel)
            _lay(shards, secondary, row)
        row = row.to(device=device, dtype=dtype)
        if quantize:
            return _send_quantized(buffer, row, group, shards, group.world_size)
        work = group.start_all_gather(buffer, row, why=_tag_of(shards, self._why, buffer))
        return _Message(work, buffer, shards, group.world_size)


def _send_quantized(
    buffer: torch.Tensor, row: torch.Tensor, group: DataParallelGroup, shards: Sequence[Shard], rows: int
) -> _Message:
    """Send this rank's ``row`` quantized. The other arguments are those of the message."""
    payload = quantized(row.view(1, -1), WEIGHT_BITS).view(-1)
    payloads = payload.new_empty(group.world_size, payload.numel())
    work = group.start_all_gather(payloads.view(-1), payload, why=_tag_of(shards, _GATHER))
    return _Message(work, buffer, shards, rows, payloads)


def broadcast(
    parameter: torch.nn.Parameter, group: DataParallelGroup, owner: int = 0, why: hooks.tag = _BROADCAST
) -> None:
    """Broadcast the whole parameter of member ``owner`` to ``group`` as bytes, with the tag ``why``."""
    data = parameter.detach()
    message = data.contiguous().view(-1).view(torch.uint8)
    group.broadcast(message, owner, why=_CHECKPOINT if _in_checkpoint() else why)
    if not data.is_contiguous():
        data.copy_(message.view(data.dtype).view(data.shape))


def _tag_of(shards: Sequence[Shard], why: hooks.tag, padded: torch.Tensor | None = None) -> hooks.tag:
    """Return the tag of a message. ``padded`` is the gathered buffer, unless the message is quantized."""
    if not detailed():
        return why
    purpose = _CHECKPOINT.purpose if _in_checkpoint() else why.purpose
    padding = 0
    if padded is not None:
        padding = (padded.numel() - sum(each.numel for each in shards)) * padded.element_size()
    return hooks.tag(purpose, parameters=tuple(each.name for each in shards), padding_bytes=padding or None)


def _in_checkpoint() -> bool:
    """Return whether a checkpoint is being written or read. Its messages are not part of the training."""
    return hooks.position.phase == "checkpoint"


def _numel(shard: Shard, secondary: DataParallelGroup | None) -> int:
    """Return the number of elements of this rank's primary or secondary shard."""
    if secondary is None:
        return shard.slice_numel
    return shard.slice_numel * shard.group.world_size // secondary.world_size


def _begin_to_read(shards: Sequence[Shard]) -> None:
    """Start to read shards on NVMe, so that the read of one shard overlaps the copy of another to the send buffer."""
    filed: dict[Pager, list[Shard]] = {}
    for each in shards:
        if each.pager is not None and each.secondary is None:
            filed.setdefault(each.pager, []).append(each)
    for pager, theirs in filed.items():
        pager.begin(theirs)


def _without_messages(shards: Sequence[Shard]) -> list[Shard]:
    """Fill the parameters that need no data from other ranks, and return the remaining shards."""
    rest = []
    for each in shards:
        if each.numel and each.group.world_size > 1:
            rest.append(each)
        elif each.pager is None:
            each.fill(each.own.to(each.parameter.device))
        else:
            values = torch.empty(each.slice_numel, dtype=each.dtype, device=each.parameter.device)
            each.read(values)
            each.fill(values)
    return rest


def _end_to_end(
    shards: Sequence[Shard], secondary: DataParallelGroup | None, numel: int
) -> torch.Tensor | None:
    """Return the primary shards as one tensor, if they are adjacent in memory in the order of the message.

    Otherwise return None.
    """
    if secondary is not None or any(each.pager is not None for each in shards):
        return None
    first = shards[0].own
    storage, end = first.untyped_storage().data_ptr(), first.storage_offset()
    for own in (each.own for each in shards):
        apart = own.untyped_storage().data_ptr() != storage or own.storage_offset() != end
        if apart or own.dtype != first.dtype:
            return None
        end += own.numel()
    return first.as_strided((numel,), (1,))


def _lay(shards: Sequence[Shard], secondary: DataParallelGroup | None, row: torch.Tensor) -> None:
    """Concatenate the primary or secondary shards in ``row``."""
    if secondary is not None or all(each.pager is None for each in shards):
        shards_of_rank = [each.own if secondary is None else each.secondary for each in shards]
        torch.cat([tensor.to(row) for tensor in shards_of_rank if tensor is not None], out=row)
        return
    start = 0
    for each in shards:
        each.read(row.narrow(0, start, each.slice_numel))
        start += each.slice_numel


def _reduce_whole(
    shards: Sequence[Shard], group: DataParallelGroup, dtype: torch.dtype, device: torch.device
) -> _Message:
    buffer = torch.zeros(
        sum(each.slice_numel for each in shards) * group.world_size, dtype=dtype, device=device
    )
    start = 0
    for each in shards:
        each.read(buffer.narrow(0, start + each.slice_numel * group.rank, each.slice_numel))
        start += each.slice_numel * group.world_size
    return _Message(group.start_all_reduce(buffer, why=_tag_of(shards, _GATHER, buffer)), buffer, shards, 0)


def _unpack_rows(message: _Message, of_block: bool) -> None:
    """Fill the parameters of a message from its rows.

    The parameters of a block share an allocation for each dtype. They are released together, and one large
    allocation costs less than several. A message for prefetched modules contains parameters that are released
    one after the other.
    """
    rows = message.buffer.view(message.rows, -1)
    numels = [each.slice_numel * each.group.world_size for each in message.shards]
    if of_block:
        room = _adjacent(numels, [each.dtype for each in message.shards], rows.device)
    else:
        room = [
            torch.empty(numel, dtype=each.dtype, device=rows.device)
            for each, numel in zip(message.shards, numels, strict=True)
        ]
    start = 0
    for each, values in zip(message.shards, room, strict=True):
        width = values.numel() // message.rows
        values.view(message.rows, width).copy_(rows.narrow(1, start, width))
        each.fill(values)
        start += width


def _adjacent(
    numels: Sequence[int], dtypes: Sequence[torch.dtype], device: torch.device
) -> list[torch.Tensor]:
    """Return aligned tensors with these numbers of elements, in one allocation for each dtype."""
    places: list[int] = []
    ends: dict[torch.dtype, int] = {}
    for numel, dtype in zip(numels, dtypes, strict=True):
        places.append(ends.get(dtype, 0))
        aligned = _ALIGNMENT // dtype.itemsize
        ends[dtype] = places[-1] + -(-numel // aligned) * aligned
    shared = {dtype: torch.empty(end, dtype=dtype, device=device) for dtype, end in ends.items()}
    return [
        shared[dtype].narrow(0, place, numel)
        for numel, dtype, place in zip(numels, dtypes, places, strict=True)
    ]


def _unpack_whole(message: _Message) -> None:
    start = 0
    for each in message.shards:
        numel = each.slice_numel * each.group.world_size
        each.fill(message.buffer.narrow(0, start, numel).to(each.dtype))
        start += numel

"""Gradient buckets: how they are filled and flushed.

Gradients enter in the order in which they become ready. A bucket is flushed when the next gradient would exceed
``reduce_bucket_size`` elements, and the last one after backward. A larger gradient is a bucket of its own and is not
copied. There is one open bucket for each communication dtype. These are DeepSpeed 0.19.8's rules for stages 1 and 2.

Contiguous buckets copy each gradient into one buffer. The others keep the gradients and concatenate them at the flush.
DeepSpeed allocates ``reduce_bucket_size`` elements for every model; here the buffer never exceeds the model. Asynchronous
buckets use several buffers in turn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Final, NamedTuple

import torch

from commprof import hooks
from zero_runtime.comm import DataParallelGroup
from zero_runtime.gradient_reduction.flat_layout import Run, ShardRange, owner_runs
from zero_runtime.groups.detailed_tags import detailed

FULL: Final = "full"
OVERSIZED: Final = "oversized"
END_OF_BACKWARD: Final = "end_of_backward"


# Communication dtype, dtype of the gradients, whether replicated: a buffer holds gradients of one dtype.
_Dtypes = tuple[torch.dtype, torch.dtype, bool]


class Scaling(NamedTuple):
    """When and by how much gradients are scaled; 1.0 means unscaled. The order decides the last bit of the result."""

    bucket_divisor: float = 1.0  # the bucket, in the gradients' dtype, before any cast
    divisor: float = 1.0  # after the cast to the communication dtype, before the sum
    factor_before: float = 1.0  # after the cast, before the sum
    factor_after: float = 1.0  # after the sum, in the communication dtype


@dataclass(slots=True)
class Entry:
    """A gradient, or a range of one, that enters a bucket.

    Attributes:
        name: of its parameter.
        gradient: 1-D view of the gradient.
        shards: the owner of each range of ``gradient``, in element order; ``start`` counts from its first element.
        group: the optimizer's param group.
    """

    name: str
    gradient: torch.Tensor
    shards: tuple[ShardRange, ...]
    group: int = 0


@dataclass(slots=True)
class Bucket:
    """A full bucket, the argument of a reduction.

    Attributes:
        number: within the optimizer step, from 0.
        tensor: the concatenated gradients, 1-D; the reduction leaves the result in it, at least in this rank's runs.
        runs: the owner of each range of ``tensor``, in order; consecutive ranges of one owner are merged.
        dtype: the communication dtype.
        limit: ``reduce_bucket_size``, in elements.
        scaling: when gradients are divided.
        entries: its gradients.
        flush_reason: full, oversized or end_of_backward.
        asynchronous: whether its collectives are started without waiting for them.
        replicated: whether every rank needs the whole sum.
        keeps_dtype: whether the sum stays in the communication dtype instead of being rounded to that of the gradients.
        members: global ranks of the group; runs name them by position. Empty where that is the global rank.
        publication: what the recorder gets about it, once a recorder asks.
    """

    number: int
    tensor: torch.Tensor
    runs: tuple[Run, ...]
    dtype: torch.dtype
    limit: int
    scaling: Scaling
    entries: tuple[Entry, ...]
    flush_reason: str
    asynchronous: bool = False
    replicated: bool = False
    keeps_dtype: bool = False
    members: tuple[int, ...] = ()
    publication: Publication | None = field(default=None, repr=False, compare=False)

    @property
    def num_bytes(self) -> int:
        """Bytes of the bucket in the communication dtype."""
        return self.tensor.numel() * self.dtype.itemsize

    def keep(self, total: torch.Tensor, runs: Iterable[Run] | None = None) -> None:
        """Leave the sum ``total``, of the communication dtype, in ``tensor``.

        Args:
            total: as many elements; ``tensor`` itself if nothing was cast.
            runs: the ranges that are valid; None for all.
        """
        if self.keeps_dtype:
            self.tensor = total
        elif total is not self.tensor and runs is None:
            self.tensor.copy_(total)
        elif total is not self.tensor:
            for run in runs or ():
                self.tensor.narrow(0, run.start, run.numel).copy_(total.narrow(0, run.start, run.numel))

    def why(
        self, owner: int | None = None, intended_op: str | None = None, padded: torch.Tensor | None = None
    ) -> hooks.tag:
        """The tag of a collective that carries this bucket; only its purpose if nobody reads more.

        Args:
            padded: the sent tensor, where it has more elements than the runs of the bucket: the rest is padding.
        """
        if not detailed():
            return _UNRECORDED
        padding = 0
        if padded is not None:
            padding = (padded.numel() - sum(run.numel for run in self.runs)) * padded.element_size()
        return self._publication().tag(owner, intended_op, padding or None)

    def publish(self) -> None:
        """Report the flush of the bucket to the recorder."""
        if hooks.recording():
            self._publication().content.flushed()

    def published_part(self, entries: Sequence[Entry]) -> Publication | None:
        """What the recorder gets about a part of this bucket with ``entries``; None if nobody reads it."""
        if not detailed():
            return None
        return Publication(self._publication().content, tuple(dict.fromkeys(entry.name for entry in entries)))

    def _publication(self) -> Publication:
        if self.publication is None:
            self.publication = _publication(
                self.number,
                tuple([entry.name for entry in self.entries]),
                self.tensor.numel(),
                self.limit,
                self.dtype,
                self.runs,
                self.members,
                self.flush_reason,
            )
        return self.publication


_UNRECORDED: Final = hooks.tag("gradient_reduce")


@dataclass(slots=True)
class Publication:
    """A bucket as the recorder sees it: its content and the tags of its collectives."""

    content: hooks.bucket
    names: tuple[str, ...]
    tags: dict[tuple[int | None, str | None, int | None], hooks.tag] = field(default_factory=dict)

    def tag(self, owner: int | None, intended_op: str | None, padding_bytes: int | None = None) -> hooks.tag:
        """The tag of a collective; a cached tag is cheaper for the recorder."""
        key = owner, intended_op, padding_bytes
        tag = self.tags.get(key)
        if tag is None:
            row = self.content.row
            tag = self.tags[key] = hooks.tag(
                "gradient_reduce",
                bucket=row["bucket"],
                owner=owner,
                parameters=self.names,
                intended_op=intended_op,
                bucket_bytes=row["bytes"],
                padding_bytes=padding_bytes,
            )
        return tag


@lru_cache(maxsize=4096)
def _publication(
    number: int,
    parameters: tuple[str, ...],
    numel: int,
    limit: int,
    dtype: torch.dtype,
    runs: tuple[Run, ...],
    members: tuple[int, ...],
    flush_reason: str,
) -> Publication:
    # The same buckets come back every step.
    owners = tuple(dict.fromkeys(run.owner for run in runs))
    if members:
        owners = tuple(members[owner] for owner in owners)
    names = tuple(dict.fromkeys(parameters))
    content = hooks.bucket(
        bucket=number,
        numel=numel,
        bytes=numel * dtype.itemsize,
        capacity=limit,
        dtype=str(dtype).removeprefix("torch."),
        owners=",".join(map(str, owners)) or None,
        parameters=",".join(names),
        flush_reason=flush_reason,
    )
    return Publication(content, names)


class Flight:
    """A bucket in flight, or one that has landed already."""

    def __init__(self, finish: Callable[[], None] | None = None) -> None:
        self._finish = finish

    @property
    def landed(self) -> bool:
        """Whether ``land`` has nothing left to do."""
        return self._finish is None

    def land(self) -> None:
        """Wait for the bucket and process its sum; its memory is free after that."""
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()


@dataclass(slots=True)
class _Buffer:
    """Memory for a bucket, and the flight of the last bucket in it; None where it is free."""

    tensor: torch.Tensor
    flight: Flight | None = None


@dataclass(slots=True)
class _Open:
    """The open bucket of one communication dtype. Its buffer is the first one."""

    entries: list[Entry] = field(default_factory=list)
    numel: int = 0
    buffers: deque[_Buffer] = field(default_factory=deque)


class Bucketer:
    """Collects gradients into buckets and sends each full bucket.

    Args:
        limit: ``reduce_bucket_size``, in elements.
        buffer_numel: elements of a contiguous buffer, where one is used; larger gradients are not copied.
        contiguous: copy gradients into one buffer, or keep them until the flush.
        scaling: when gradients are divided.
        send: called with every full bucket: reduces it and takes this rank's shard out of it. The bucket's memory is
            reused once the returned flight has landed; None means that it has landed already.
        buffers: number of contiguous buffers for each communication dtype.
        members: see :class:`Bucket`.
    """

    def __init__(
        self,
        limit: int,
        buffer_numel: int,
        contiguous: bool,
        scaling: Scaling,
        send: Callable[[Bucket], Flight | None],
        buffers: int = 1,
        members: tuple[int, ...] = (),
    ) -> None:
        self._limit = limit
        self._model_numel = buffer_numel
        self._contiguous = contiguous
        self._scaling = scaling
        self._send = send
        self._buffers = buffers
        self._members = members
        self._open: dict[_Dtypes, _Open] = {}
        self._number = 0

    def grow(self, numel: int) -> None:
        """Make room in the contiguous buffers for gradients of ``numel`` more elements."""
        self._model_numel += numel
        for current in self._open.values():
            current.buffers.clear()

    def begin_step(self) -> None:
        """Count buckets from 0 again."""
        self._number = 0

    def take_number(self) -> int:
        """The number of the next bucket of the step, which counts it."""
        self._number += 1
        return self._number - 1

    def add(self, entry: Entry, dtype: torch.dtype, replicated: bool = False) -> None:
        """Add a gradient to the bucket of communication dtype ``dtype``; flush the bucket first if it would not fit.

        Gradients that are ``replicated`` (summed on every rank) have buckets of their own.
        """
        numel = entry.gradient.numel()
        if numel == 0:
            return
        dtypes = dtype, entry.gradient.dtype, replicated
        current = self._open.setdefault(dtypes, _Open())
        if current.numel + numel > self._limit:
            self._flush(dtypes, FULL)
        if self._contiguous and numel <= self._limit:
            buffer = self._buffer(current, entry.gradient)
            entry.gradient = buffer.narrow(0, current.numel, numel).copy_(entry.gradient)
        current.entries.append(entry)
        current.numel += numel

    def flush(self, reason: str = END_OF_BACKWARD) -> None:
        """Flush every bucket that is not empty, in the alphabetical order of the dtypes."""
        for dtypes in sorted(self._open, key=str):
            self._flush(dtypes, reason)

    def release(self, everywhere: bool = False) -> None:
        """Return the buffers to torch's allocator, once all flights have landed.

        On a CPU only with ``everywhere``: there each allocation gets new memory from the system, which takes ten times as
        long as a pass over it.
        """
        for current in self._open.values():
            if current.buffers and (everywhere or current.buffers[0].tensor.device.type != "cpu"):
                current.buffers.clear()

    def buffers(self) -> Iterator[torch.Tensor]:
        """All allocated buffers."""
        return (each.tensor for current in self._open.values() for each in current.buffers)

    def _buffer(self, current: _Open, like: torch.Tensor) -> torch.Tensor:
        """The buffer of the open bucket; a new bucket gets a free one."""
        if not current.entries and len(current.buffers) < self._buffers:
            current.buffers.appendleft(_Buffer(like.new_empty(min(self._limit, self._model_numel))))
        buffer = current.buffers[0]
        if buffer.flight is not None:
            buffer.flight.land()
            buffer.flight = None
        return buffer.tensor

    def _flush(self, dtypes: _Dtypes, reason: str) -> None:
        current = self._open[dtypes]
        if not current.entries:
            return
        entries = tuple(current.entries)
        buffered = self._contiguous and current.numel <= self._limit
        if buffered:
            tensor = current.buffers[0].tensor.narrow(0, 0, current.numel)
        else:
            tensor = joined([entry.gradient for entry in entries])
        bucket = Bucket(
            number=self.take_number(),
            tensor=tensor,
            runs=owner_runs([(shard.owner, shard.numel) for entry in entries for shard in entry.shards]),
            dtype=dtypes[0],
            limit=self._limit,
            scaling=self._scaling,
            entries=entries,
            flush_reason=OVERSIZED if current.numel > self._limit else reason,
            replicated=dtypes[2],
            members=self._members,
        )
        current.entries = []
        current.numel = 0
        if hooks.recording():
            bucket.publish()
        flight = self._send(bucket)
        if buffered:
            current.buffers[0].flight = flight
            current.buffers.rotate(-1)


def parts_by_ranks(
    bucket: Bucket,
    ranks_of: Sequence[DataParallelGroup],
    data_ranks: Sequence[int],
    by_owner: bool,
) -> list[tuple[Bucket, DataParallelGroup]]:
    """The parts of a bucket that different ranks reduce, in the order in which they begin in it.

    Args:
        bucket: whose entries name the owners by their data-parallel ranks.
        ranks_of: for each param group the ranks that hold its parameters.
        data_ranks: the data-parallel ranks, as global ranks.
        by_owner: make a part for each owner, too.
    """
    ranges: dict[tuple[int, int | None], list[Entry]] = {}
    members: dict[tuple[int, int | None], DataParallelGroup] = {}
    position = 0
    for entry in bucket.entries:
        ranks = ranks_of[entry.group]
        for shard in entry.shards:
            key = id(ranks), shard.owner if by_owner else None
            members[key] = ranks
            values = bucket.tensor.narrow(0, position + shard.start, shard.numel)
            ranges.setdefault(key, []).append(
                Entry(entry.name, values, (shard._replace(start=0),), entry.group)
            )
        position += entry.gradient.numel()
    parts = []
    for key, entries in ranges.items():
        ranks = members[key]
        owners = [ranks.global_ranks.index(data_ranks[entry.shards[0].owner]) for entry in entries]
        part = replace(
            bucket,
            tensor=_adjacent(bucket.tensor, [entry.gradient for entry in entries]),
            runs=owner_runs(
                [(owner, entry.gradient.numel()) for owner, entry in zip(owners, entries, strict=True)]
            ),
            entries=tuple(entries),
            members=ranks.global_ranks,
            publication=bucket.published_part(entries),
        )
        parts.append((part, ranks))
    return parts


def _adjacent(tensor: torch.Tensor, ranges: Sequence[torch.Tensor]) -> torch.Tensor:
    """The concatenated ``ranges`` of ``tensor``: a view of it if they are adjacent, otherwise a copy."""
    start = position = int(ranges[0].storage_offset())
    for each in ranges:
        if each.storage_offset() != position:
            return joined(ranges)
        position += each.numel()
    return tensor.narrow(0, start - int(tensor.storage_offset()), position - start)


def joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The concatenated 1-D tensors; a single tensor is returned itself, not copied."""
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))

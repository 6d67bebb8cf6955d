"""Gradient buckets, and the rules by which they are filled and flushed.

Gradients enter in the order in which they become ready. A bucket is flushed when the next gradient would exceed
``reduce_bucket_size`` elements. The last bucket is flushed after backward. A gradient that is larger than
``reduce_bucket_size`` is a bucket by itself and is not copied. There is one open bucket for each communication
dtype. These are DeepSpeed 0.19.8's rules for stages 1 and 2.

Contiguous buckets copy each gradient into one buffer. Other buckets keep the gradients and concatenate them at
the flush. DeepSpeed allocates ``reduce_bucket_size`` elements for every model. In zero_runtime the buffer never
exceeds the model. Asynchronous buckets use several buffers in turn.
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


# Communication dtype, dtype of the gradients, and whether the gradients are replicated. The dtype of the gradients
# is part of the key because all gradients in a buffer have the same dtype.
_Dtypes = tuple[torch.dtype, torch.dtype, bool]


class Scaling(NamedTuple):
    """The factors and divisors of gradients, and when they are applied; 1.0 means unscaled.

    The order of the operations decides the last bit of the result.
    """

    bucket_divisor: float = 1.0  # applied in the gradients' dtype, before any cast
    divisor: float = 1.0  # after the cast to the communication dtype, before the sum
    factor_before: float = 1.0  # after the cast, before the sum
    factor_after: float = 1.0  # after the sum, in the communication dtype


@dataclass(slots=True)
class Entry:
    """A gradient, or a range of a gradient, that enters a bucket.

    Attributes:
        name: The name of the parameter.
        gradient: A 1-D view of the gradient.
        shards: The owner of each range of ``gradient``, in element order. ``start`` counts from the first
            element of ``gradient``.
        group: The number of the optimizer's param group.
    """

    name: str
    gradient: torch.Tensor
    shards: tuple[ShardRange, ...]
    group: int = 0


@dataclass(slots=True)
class Bucket:
    """A full bucket, which is passed to a reduction.

    Attributes:
        number: The number of the bucket within the optimizer step, from 0.
        tensor: The concatenated gradients, 1-D. The reduction writes the result into it, at least in the runs
            that this rank owns.
        runs: The owner of each range of ``tensor``, in order. Consecutive ranges of one owner are merged.
        dtype: The communication dtype.
        limit: ``reduce_bucket_size``, in elements.
        scaling: The factors and divisors of the gradients.
        entries: The gradients in the bucket.
        flush_reason: The reason of the flush: full, oversized or end_of_backward.
        asynchronous: Whether the collectives are started without waiting for them.
        replicated: whether every rank needs the whole sum.
        keeps_dtype: Whether the sum stays in the communication dtype instead of being rounded to the dtype of
            the gradients.
        members: The global ranks of the group. A run names its owner by the position in this tuple. Empty if
            the position is the global rank.
        publication: The description of the bucket for the recorder. It is created when the recorder first needs
            it.
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
        """The size of the bucket in the communication dtype, in bytes."""
        return self.tensor.numel() * self.dtype.itemsize

    def keep(self, total: torch.Tensor, runs: Iterable[Run] | None = None) -> None:
        """Store the sum ``total``, which has the communication dtype, in ``tensor``.

        Args:
            total: The sum, with as many elements as ``tensor``. It is ``tensor`` itself if nothing was cast.
            runs: The ranges of ``total`` that are valid; None for all.
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
        """Return the tag of a collective that sends this bucket.

        The tag has only a purpose if details are not recorded.

        Args:
            padded: The sent tensor, if it has more elements than the runs of the bucket. The extra elements are
                padding.
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
        """Return the description of a part of this bucket for the recorder, or None if details are not recorded.

        ``entries`` are the gradients in the part.
        """
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
    """The description of a bucket for the recorder: its content and the tags of its collectives."""

    content: hooks.bucket
    names: tuple[str, ...]
    tags: dict[tuple[int | None, str | None, int | None], hooks.tag] = field(default_factory=dict)

    def tag(self, owner: int | None, intended_op: str | None, padding_bytes: int | None = None) -> hooks.tag:
        """Return the tag of a collective. Tags are cached, because a cached tag is cheaper for the recorder."""
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
    # Cached, because the same buckets occur in every step.
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
    """The reduction of a bucket, which is in flight or has already landed."""

    def __init__(self, finish: Callable[[], None] | None = None) -> None:
        self._finish = finish

    @property
    def landed(self) -> bool:
        """Whether ``land`` has nothing left to do."""
        return self._finish is None

    def land(self) -> None:
        """Wait for the bucket and process its sum. The memory of the bucket is free afterwards."""
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()


@dataclass(slots=True)
class _Buffer:
    """Memory for a bucket, and the flight of the last bucket in this memory.

    The flight is None if the memory is free.
    """

    tensor: torch.Tensor
    flight: Flight | None = None


@dataclass(slots=True)
class _Open:
    """The open bucket of one communication dtype. It uses the first of the buffers."""

    entries: list[Entry] = field(default_factory=list)
    numel: int = 0
    buffers: deque[_Buffer] = field(default_factory=deque)


class Bucketer:
    """Collects gradients into buckets and sends each full bucket.

    Args:
        limit: ``reduce_bucket_size``, in elements.
        buffer_numel: The number of elements of a contiguous buffer, if there is one. Larger gradients are not
            copied.
        contiguous: Whether gradients are copied into one buffer. Otherwise they are kept until the flush.
        scaling: The factors and divisors of the gradients.
        send: A function that is called with every full bucket. It reduces the bucket and extracts this rank's
            shard. The bucket's memory is reused after the returned flight has landed. None means that the
            bucket has already landed.
        buffers: The number of contiguous buffers for each communication dtype.
        members: See :class:`Bucket`.
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
        """Return the number of the next bucket of the step, and increment the count."""
        self._number += 1
        return self._number - 1

    def add(self, entry: Entry, dtype: torch.dtype, replicated: bool = False) -> None:
        """Add a gradient to the bucket of communication dtype ``dtype``.

        The bucket is flushed first if the gradient would not fit.

        Gradients that are ``replicated`` (summed on every rank) have separate buckets.
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
        """Return the buffers to torch's allocator. All flights must have landed.

        On a CPU this happens only with ``everywhere``. There each allocation gets new memory from the system,
        which takes ten times as long as a pass over the memory.
        """
        for current in self._open.values():
            if current.buffers and (everywhere or current.buffers[0].tensor.device.type != "cpu"):
                current.buffers.clear()

    def buffers(self) -> Iterator[torch.Tensor]:
        """Return all allocated buffers."""
        return (each.tensor for current in self._open.values() for each in current.buffers)

    def _buffer(self, current: _Open, like: torch.Tensor) -> torch.Tensor:
        """Return the buffer of the open bucket. A new bucket gets a free buffer."""
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
    """Return the parts of a bucket that different sets of ranks reduce, in the order of their first elements.

    Args:
        bucket: The bucket. Its entries name the owners by their data-parallel ranks.
        ranks_of: For each param group, the ranks that store its parameters.
        data_ranks: The data-parallel ranks, as global ranks.
        by_owner: Whether each owner gets a separate part, too.
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
    """Return the concatenated ``ranges`` of ``tensor``: a view of ``tensor`` if they are adjacent, otherwise a copy."""
    start = position = int(ranges[0].storage_offset())
    for each in ranges:
        if each.storage_offset() != position:
            return joined(ranges)
        position += each.numel()
    return tensor.narrow(0, start - int(tensor.storage_offset()), position - start)


def joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the concatenated 1-D tensors. A single tensor is returned without a copy."""
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))

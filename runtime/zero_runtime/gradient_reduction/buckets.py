"""Filling and flushing gradient buckets.

Gradients enter in the order in which they become ready. A bucket is sent when the next gradient would not fit into
``reduce_bucket_size`` elements, and the last one after backward. A gradient larger than that is a bucket of its own, and
is not copied. There is one open bucket for each communication dtype. These are DeepSpeed 0.19.8's rules for stages 1 and 2.

Contiguous buckets copy each gradient into one buffer; the others keep the gradients and join them when they are sent.
DeepSpeed allocates ``reduce_bucket_size`` elements whatever the model; here the buffer never exceeds the model. Where
buckets are sent without waiting for them there are several buffers, used in turn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from commprof import hooks
from zero_runtime.gradient_reduction.layout import Run, ShardRange, owner_runs

if TYPE_CHECKING:
    from zero_runtime.gradient_reduction.overlap import Flight

FULL: Final = "full"
OVERSIZED: Final = "oversized"
END_OF_BACKWARD: Final = "end_of_backward"


# The dtype in which a bucket travels, and that of the gradients in it: a buffer holds gradients of one dtype.
_Dtypes = tuple[torch.dtype, torch.dtype, bool]


class Scaling(NamedTuple):
    """When and by how much gradients are scaled; the order decides the last bit. 1.0 means not at all."""

    bucket_divisor: float = 1.0  # the bucket, in the gradients' dtype, before any cast
    divisor: float = 1.0  # after the cast to the communication dtype, before the sum
    factor_before: float = 1.0  # after the cast, before the sum
    factor_after: float = 1.0  # after the sum, in the communication dtype


@dataclass(slots=True)
class Entry:
    """A gradient, or a part of one, on its way into a bucket.

    Attributes:
        name: of its parameter.
        gradient: 1-D view of the gradient.
        shards: who owns which part of ``gradient``, in element order; ``start`` counts from its first element.
        group: the optimizer's param group.
    """

    name: str
    gradient: torch.Tensor
    shards: tuple[ShardRange, ...]
    group: int = 0


@dataclass(slots=True)
class Bucket:
    """A full bucket as a reduction gets it.

    Attributes:
        number: within the optimizer step, from 0.
        tensor: the gradients end to end, 1-D; the reduction leaves the result in it, at least in this rank's runs.
        runs: who owns which elements of ``tensor``, in order, neighbours of one owner merged.
        dtype: in which it travels.
        limit: ``reduce_bucket_size``, in elements.
        scaling: when gradients are divided.
        entries: what is in it.
        flush_reason: full, oversized or end_of_backward.
        asynchronous: whether its messages are only begun.
        replicated: whether every rank is to have all of the sum.
        members: global ranks of those that reduce it, which runs name by their place; empty where that is the global rank.
        publication: what a recorder is told of it, once there is one.
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
    members: tuple[int, ...] = ()
    publication: Publication | None = field(default=None, repr=False, compare=False)

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole bucket as it travels."""
        return self.tensor.numel() * self.dtype.itemsize

    def why(
        self, owner: int | None = None, intended_op: str | None = None, padded: torch.Tensor | None = None
    ) -> hooks.tag:
        """The tag of a collective that carries this bucket; no more than its purpose when nobody records.

        Args:
            padded: what is sent, where it holds more than the runs of the bucket: the rest is padding.
        """
        if not hooks.recording():
            return _UNRECORDED
        padding = 0
        if padded is not None:
            padding = (padded.numel() - sum(run.numel for run in self.runs)) * padded.element_size()
        return self._publication().tag(owner, intended_op, padding or None)

    def publish(self) -> None:
        """Tell whoever records that the bucket is flushed."""
        if hooks.recording():
            self._publication().content.flushed()

    def _publication(self) -> Publication:
        if self.publication is None:
            names = tuple([entry.name for entry in self.entries])
            owners = tuple(dict.fromkeys(run.owner for run in self.runs))
            self.publication = _publication(
                self.number,
                names,
                self.tensor.numel(),
                self.limit,
                self.dtype,
                tuple(self.members[owner] for owner in owners) if self.members else owners,
                self.flush_reason,
            )
        return self.publication


_UNRECORDED: Final = hooks.tag("gradient_reduce")


@dataclass(slots=True)
class Publication:
    """What a recorder is told of a bucket: its content, and the tags of its collectives."""

    content: hooks.bucket
    names: tuple[str, ...]
    tags: dict[tuple[int | None, str | None, int | None], hooks.tag] = field(default_factory=dict)

    def tag(self, owner: int | None, intended_op: str | None, padding_bytes: int | None = None) -> hooks.tag:
        """The tag of a collective; a tag that is kept is cheaper for the recorder."""
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
    owners: tuple[int, ...],
    flush_reason: str,
) -> Publication:
    # The same buckets come back every step.
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


@dataclass(slots=True)
class _Buffer:
    """Memory for a bucket, and the bucket that has it last; None where it is free."""

    tensor: torch.Tensor
    flight: Flight | None = None


@dataclass(slots=True)
class _Open:
    """The bucket being filled for one communication dtype. Its buffer is the first."""

    entries: list[Entry] = field(default_factory=list)
    numel: int = 0
    buffers: deque[_Buffer] = field(default_factory=deque)


class Bucketer:
    """Collects gradients into buckets and hands each full one on.

    Args:
        limit: ``reduce_bucket_size``, in elements.
        buffer_numel: elements of a contiguous buffer, where one is used; larger gradients are not copied.
        contiguous: copy gradients into one buffer, or keep them until the bucket is sent.
        scaling: when gradients are divided.
        send: called with every full bucket: reduces it and takes what this rank owns out of it. The bucket's memory
            is used again when that has landed; None says that it has.
        buffers: how many contiguous buffers there are, for each communication dtype.
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

    def add(self, entry: Entry, dtype: torch.dtype, replicated: bool = False) -> None:
        """Put a gradient into the bucket of communication dtype ``dtype``; send that first if it would not fit.

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
        """Send every bucket that holds something, in the alphabetical order of the dtypes."""
        for dtypes in sorted(self._open, key=str):
            self._flush(dtypes, reason)

    def release(self, everywhere: bool = False) -> None:
        """Give the buffers back to torch's allocator, once all that was sent has landed.

        Not on a CPU, where memory comes fresh from the system each time, at ten times the cost of a pass over it, unless
        ``everywhere`` is set.
        """
        for current in self._open.values():
            if current.buffers and (everywhere or current.buffers[0].tensor.device.type != "cpu"):
                current.buffers.clear()

    def buffers(self) -> Iterator[torch.Tensor]:
        """The buffers that there are."""
        return (each.tensor for current in self._open.values() for each in current.buffers)

    def _buffer(self, current: _Open, like: torch.Tensor) -> torch.Tensor:
        """The buffer of the open bucket: when it is begun, one that is free."""
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
            number=self._number,
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
        self._number += 1
        if hooks.recording():
            bucket.publish()
        flight = self._send(bucket)
        if buffered:
            current.buffers[0].flight = flight
            current.buffers.rotate(-1)


def joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The 1-D tensors end to end; a single one is returned itself, not copied."""
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))

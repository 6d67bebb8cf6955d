"""The partition of the parameters into shards at ZeRO stages 1 and 2. Pure arithmetic.

The trainable parameters of one optimizer param group are concatenated in one flat buffer. The length of the
buffer is padded to a multiple of 2 x world_size elements. The buffer is partitioned into world_size equal
shards: rank r owns shard r. A parameter may cross one or several boundaries between shards::

    parameters   |   p0   | p1 |        p2         |  p3  |pad|
    shards       |     rank 0     |     rank 1     |   rank 2     |

The factor 2 keeps every shard of a 16-bit buffer aligned to 4 bytes. These rules were measured on DeepSpeed
0.19.8: the order of the group, ``round_robin_gradients`` and ``parameter_alignment``.

A buffer may also be divided into several chunks first, and each chunk into world_size equal rows. The shard of
rank r is then the concatenation of row r of every chunk. Each chunk is an owner-ordered bucket: every rank owns
the same number of its elements. Buckets of DeepSpeed's single chunk do not have this property::

    parameters   |   p0   | p1 |        p2         |  p3  |pad|
    chunks       |       chunk 0      |       chunk 1          |
    rows         |rank 0|rank 1|rank 2|rank 0 |rank 1 |rank 2 |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

SHARD_ALIGNMENT: Final = 2  # elements, per rank
PARAMETER_ALIGNMENT_BYTES: Final = 16
CHUNKS: Final = 16
SMALLEST_CHUNK: Final = 2**18  # elements
LARGEST_CHUNK: Final = 2**23


class ShardRange(NamedTuple):
    """The range of one parameter that one rank owns. Counts are elements."""

    owner: int  # rank within the data-parallel group
    start: int  # first element within the flattened parameter
    numel: int
    offset: int  # first element within the owner's shard


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """The flat buffer of one param group. Counts and offsets are elements.

    Attributes:
        numels: The sizes of the parameters, in the order of the group.
        offsets: The start of each parameter in the flat buffer, in the order of the group.
        order: The positions of the parameters within the group, in the order of the flat buffer.
        numel: The length of the flat buffer, including padding.
        world_size: The number of shards.
        chunks: The number of chunks.
    """

    numels: tuple[int, ...]
    offsets: tuple[int, ...]
    order: tuple[int, ...]
    numel: int
    world_size: int
    chunks: int = 1

    @property
    def shard_numel(self) -> int:
        """The number of elements that each rank owns, including padding."""
        return self.numel // self.world_size

    @property
    def end(self) -> int:
        """The end of the last parameter in the flat buffer. The rest is padding."""
        return max(map(sum, zip(self.offsets, self.numels, strict=True)), default=0)

    @property
    def chunk_numel(self) -> int:
        """The number of elements of a chunk."""
        return self.numel // self.chunks

    @property
    def row_numel(self) -> int:
        """The number of elements of a chunk that each rank owns."""
        return self.shard_numel // self.chunks

    def padding(self, start: int, stop: int) -> int:
        """Return the number of padding elements from ``start`` to before ``stop`` of the flat buffer."""
        ends = zip(self.offsets, self.numels, strict=True)
        overlaps = (min(stop, offset + numel) - max(start, offset) for offset, numel in ends)
        return stop - start - sum(numel for numel in overlaps if numel > 0)

    def shards(self, index: int) -> tuple[ShardRange, ...]:
        """Return the ranges of parameter ``index`` of the group, in element order; empty for an empty parameter."""
        row = self.row_numel
        start, stop = self.offsets[index], self.offsets[index] + self.numels[index]
        shards = []
        position = start
        while position < stop:
            number, within = divmod(position, row)
            end = min(stop, (number + 1) * row)
            chunk, owner = divmod(number, self.world_size)
            shards.append(ShardRange(owner, position - start, end - position, chunk * row + within))
            position = end
        return tuple(shards)


def group_layout(
    numels: Sequence[int],
    world_size: int,
    *,
    round_robin: bool = False,
    alignment: int = 1,
    chunk_limit: int | None = None,
) -> GroupLayout:
    """Return the layout of one param group.

    Args:
        numels: The sizes of the trainable parameters, in the order of the group.
        world_size: The number of ranks of the data-parallel group, at least 1.
        round_robin: Whether to put parameter i into list i mod world_size and then concatenate the lists.
            Gradients that become ready together then belong to different ranks.
        alignment: Each parameter is padded to a multiple of this number of elements.
        chunk_limit: The largest number of elements of a chunk. If it is below the smallest possible chunk,
            chunks have the smallest possible size. None for a single chunk.
    """
    order = round_robin_order(len(numels), world_size) if round_robin else tuple(range(len(numels)))
    offsets = [0] * len(numels)
    position = 0
    for index in order:
        offsets[index] = position
        position += _round_up(numels[index], alignment)
    unit = SHARD_ALIGNMENT * world_size
    chunks = 1 if chunk_limit is None else -(-position // max(unit, chunk_limit // unit * unit)) or 1
    return GroupLayout(
        tuple(numels), tuple(offsets), order, _round_up(position, unit * chunks), world_size, chunks
    )


def chunk_limit(numel: int, limit: int) -> int:
    """Return the number of elements of the largest chunk of a buffer of ``numel`` elements.

    ``limit`` is the largest number of elements of a bucket.

    A chunk is a 16th of the buffer, within fixed limits. The first message then leaves early in the backward
    pass, and several messages are in flight. Latency would dominate smaller messages, and larger messages gain
    no bandwidth.
    """
    return min(limit, max(SMALLEST_CHUNK, min(-(-numel // CHUNKS), LARGEST_CHUNK)))


def round_robin_order(count: int, world_size: int) -> tuple[int, ...]:
    """Return positions 0..count-1, distributed to ``world_size`` lists in turn. The lists are then concatenated.

    >>> round_robin_order(5, 2)
    (0, 2, 4, 1, 3)
    """
    return tuple(index for first in range(world_size) for index in range(first, count, world_size))


class Run(NamedTuple):
    """Consecutive elements of a bucket that belong to one owner. Counts are elements."""

    owner: int
    start: int  # within the bucket
    numel: int


def owner_runs(shards: Sequence[tuple[int, int]]) -> tuple[Run, ...]:
    """Merge consecutive shards (owner, numel) of a bucket, in bucket order, into runs of one owner.

    >>> owner_runs([(1, 4), (1, 2), (0, 3)])
    (Run(owner=1, start=0, numel=6), Run(owner=0, start=6, numel=3))
    """
    runs: list[Run] = []
    position = 0
    for owner, numel in shards:
        if runs and runs[-1].owner == owner:
            runs[-1] = runs[-1]._replace(numel=runs[-1].numel + numel)
        else:
            runs.append(Run(owner, position, numel))
        position += numel
    return tuple(runs)


def flushed_runs(runs: Sequence[Run], limit: int) -> tuple[tuple[Run, ...], ...]:
    """Split ``runs`` into the batches that DeepSpeed sends: a batch ends once it has more than ``limit`` elements.

    >>> [[run.numel for run in batch] for batch in flushed_runs([Run(0, 0, 9), Run(1, 9, 4), Run(2, 13, 1)], 8)]
    [[9], [4, 1]]
    """
    batches: list[tuple[Run, ...]] = []
    batch: list[Run] = []
    batch_numel = 0
    for run in runs:
        batch.append(run)
        batch_numel += run.numel
        if batch_numel > limit:
            batches.append(tuple(batch))
            batch, batch_numel = [], 0
    if batch:
        batches.append(tuple(batch))
    return tuple(batches)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple

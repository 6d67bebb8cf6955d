"""Who owns which slice of the parameters, for ZeRO stages 1 and 2. Pure arithmetic.

The trainable parameters of one optimizer param group are laid end to end in one flat buffer. Its
length is padded to a multiple of 2 x world_size elements, and it is cut into world_size equal pieces: rank r owns piece
r. A parameter may straddle one or several boundaries::

    parameters   |   p0   | p1 |        p2         |  p3  |pad|
    pieces       |     rank 0     |     rank 1     |   rank 2     |

The factor 2 keeps every piece of a 16-bit buffer aligned to 4 bytes. The rules are those measured on DeepSpeed
0.19.8: order of the group, ``round_robin_gradients``, ``parameter_alignment``.

A buffer may also be cut into several bands first, and each band into world_size equal rows: rank r's piece is row r of
every band, end to end. A band is then a bucket of which every rank owns as much, which DeepSpeed's single band is not::

    parameters   |   p0   | p1 |        p2         |  p3  |pad|
    bands        |        band 0      |       band 1          |
    rows         |rank 0|rank 1|rank 2|rank 0 |rank 1 |rank 2 |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

PIECE_ALIGNMENT: Final = 2  # elements, per rank
PARAMETER_ALIGNMENT_BYTES: Final = 16
BANDS: Final = 8
SMALLEST_BAND: Final = 2**18  # elements
LARGEST_BAND: Final = 2**23


class Slice(NamedTuple):
    """The part of one parameter that one rank owns. Counts are elements."""

    owner: int  # rank within the data-parallel group
    start: int  # first element within the flattened parameter
    numel: int
    offset: int  # first element within the owner's piece


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """The flat buffer of one param group. Counts and offsets are elements.

    Attributes:
        numels: sizes of the parameters, in the order of the group.
        offsets: where each begins in the flat buffer, in the order of the group.
        order: positions within the group, in the order of the flat buffer.
        numel: length of the flat buffer, padding included.
        world_size: number of pieces.
        bands: number of bands.
    """

    numels: tuple[int, ...]
    offsets: tuple[int, ...]
    order: tuple[int, ...]
    numel: int
    world_size: int
    bands: int = 1

    @property
    def piece_numel(self) -> int:
        """Elements that each rank owns, padding included."""
        return self.numel // self.world_size

    @property
    def end(self) -> int:
        """Where the last parameter ends in the flat buffer; the rest is padding."""
        return max(map(sum, zip(self.offsets, self.numels, strict=True)), default=0)

    @property
    def band_numel(self) -> int:
        """Elements of a band."""
        return self.numel // self.bands

    @property
    def row_numel(self) -> int:
        """Elements of a band that each rank owns."""
        return self.piece_numel // self.bands

    def padding(self, start: int, stop: int) -> int:
        """Elements of padding from ``start`` to before ``stop`` of the flat buffer."""
        ends = zip(self.offsets, self.numels, strict=True)
        held = (min(stop, offset + numel) - max(start, offset) for offset, numel in ends)
        return stop - start - sum(numel for numel in held if numel > 0)

    def slices(self, index: int) -> tuple[Slice, ...]:
        """The slices of the group's parameter number ``index``, in element order; none for an empty one."""
        row = self.row_numel
        start, stop = self.offsets[index], self.offsets[index] + self.numels[index]
        slices = []
        position = start
        while position < stop:
            number, within = divmod(position, row)
            end = min(stop, (number + 1) * row)
            band, owner = divmod(number, self.world_size)
            slices.append(Slice(owner, position - start, end - position, band * row + within))
            position = end
        return tuple(slices)


def group_layout(
    numels: Sequence[int],
    world_size: int,
    *,
    round_robin: bool = False,
    alignment: int = 1,
    band_limit: int | None = None,
) -> GroupLayout:
    """Lay out the parameters of one param group.

    Args:
        numels: sizes of the trainable parameters, in the order of the group.
        world_size: ranks of the data-parallel group, at least 1.
        round_robin: parameter i goes to list i mod world_size, and the lists follow one another, so that
            gradients that become ready together belong to different ranks.
        alignment: each parameter is padded to a multiple of this many elements.
        band_limit: cut the buffer into bands of at most this many elements, or the fewest that a band can have;
            None for a single one.
    """
    order = round_robin_order(len(numels), world_size) if round_robin else tuple(range(len(numels)))
    offsets = [0] * len(numels)
    position = 0
    for index in order:
        offsets[index] = position
        position += _round_up(numels[index], alignment)
    unit = PIECE_ALIGNMENT * world_size
    bands = 1 if band_limit is None else -(-position // max(unit, band_limit // unit * unit)) or 1
    return GroupLayout(
        tuple(numels), tuple(offsets), order, _round_up(position, unit * bands), world_size, bands
    )


def band_limit(numel: int, limit: int) -> int:
    """Elements of the largest band of a buffer of ``numel``, where a bucket may have ``limit``.

    An eighth of the buffer, so that most of the exchange goes along with the backward pass; but not below what a message
    needs to be worth its start, nor above what gains nothing any more.
    """
    return min(limit, max(SMALLEST_BAND, min(-(-numel // BANDS), LARGEST_BAND)))


def round_robin_order(count: int, world_size: int) -> tuple[int, ...]:
    """Positions 0..count-1 dealt to ``world_size`` lists in turn, the lists then joined.

    >>> round_robin_order(5, 2)
    (0, 2, 4, 1, 3)
    """
    return tuple(index for first in range(world_size) for index in range(first, count, world_size))


class Run(NamedTuple):
    """Consecutive elements of a bucket that belong to one owner. Counts are elements."""

    owner: int
    start: int  # within the bucket
    numel: int


def owner_runs(slices: Sequence[tuple[int, int]]) -> tuple[Run, ...]:
    """Merge consecutive slices (owner, numel) of a bucket, given in bucket order, into runs of one owner.

    >>> owner_runs([(1, 4), (1, 2), (0, 3)])
    (Run(owner=1, start=0, numel=6), Run(owner=0, start=6, numel=3))
    """
    runs: list[Run] = []
    position = 0
    for owner, numel in slices:
        if runs and runs[-1].owner == owner:
            runs[-1] = runs[-1]._replace(numel=runs[-1].numel + numel)
        else:
            runs.append(Run(owner, position, numel))
        position += numel
    return tuple(runs)


def flushed_runs(runs: Sequence[Run], limit: int) -> tuple[tuple[Run, ...], ...]:
    """Split ``runs`` as DeepSpeed sends them: a batch ends as soon as it holds more than ``limit`` elements.

    >>> [[run.numel for run in batch] for batch in flushed_runs([Run(0, 0, 9), Run(1, 9, 4), Run(2, 13, 1)], 8)]
    [[9], [4, 1]]
    """
    batches: list[tuple[Run, ...]] = []
    batch: list[Run] = []
    held = 0
    for run in runs:
        batch.append(run)
        held += run.numel
        if held > limit:
            batches.append(tuple(batch))
            batch, held = [], 0
    if batch:
        batches.append(tuple(batch))
    return tuple(batches)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple

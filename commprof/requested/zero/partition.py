"""The flat buffers of stages 1 and 2, and the rank that owns each shard of a parameter.

The trained parameters of an optimizer group are concatenated in a flat buffer. Its length is rounded up to a multiple
of 2 x ranks. Rank r owns the r-th of equal shards. The shard boundaries ignore the boundaries of parameters, so one
parameter may have several owners. Source: reference measurements of DeepSpeed 0.19.8. The factor 2 aligns 16-bit
elements to 4 bytes.

For ``gradient_reduction: reduce_scatter``, which DeepSpeed does not have, zero_runtime first divides the buffer into
equal chunks, which are the buckets. Each chunk has one equal row per rank. Rank r owns row r of every chunk, and its
shard is the concatenation of these rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from commprof.requested.errors import RequestedError
from commprof.requested.parameters import Parameter, item_bytes

ALIGNMENT_ELEMENTS: Final = 2  # alignment of each rank's shard of a flat buffer
PARAMETER_ALIGNMENT_BYTES: Final = 16  # alignment of each parameter, with parameter_alignment
CHUNKS: Final = 16  # number of chunks of a buffer, unless chunks would be too small or too large
SMALLEST_CHUNK: Final = 2**18  # elements, unless reduce_bucket_size is smaller
LARGEST_CHUNK: Final = 2**23  # elements


class OwnedShard(NamedTuple):
    """Adjacent elements that have the same owner.

    Attributes:
        owner: The rank of the owner within the group.
        numel: The number of elements.
        offset: The position of the first element in the owner's shard of the flat buffer.
        ep_size: The ``ep_size`` of the experts that the parameter belongs to, or None for a dense parameter.
    """

    owner: int
    numel: int
    offset: int = 0
    ep_size: int | None = None


class FlatGroup(NamedTuple):
    """The flat buffer of one optimizer parameter group.

    Attributes:
        numel: The number of elements including padding, a multiple of 2 x ranks.
        end: The position at which the padding at the end begins.
        shard_numel: The number of elements that each rank owns.
        dtype: The element type of the model.
        chunks: The number of chunks.
        data_numel: The number of elements of the parameters, without any padding.
        ep_size: The ``ep_size`` of experts, whose buffer is partitioned among their expert-data group. None for dense
            parameters, whose buffer is partitioned among all ranks.
    """

    numel: int
    end: int
    shard_numel: int
    dtype: str
    chunks: int = 1
    data_numel: int = 0
    ep_size: int | None = None

    @property
    def chunk_numel(self) -> int:
        """The number of elements of a chunk."""
        return self.numel // self.chunks

    @property
    def row_numel(self) -> int:
        """The number of elements of a chunk that each rank owns."""
        return self.shard_numel // self.chunks


@dataclass(frozen=True, slots=True)
class Layout:
    """All flat buffers of a model.

    Attributes:
        groups: One flat buffer per optimizer parameter group with trained parameters.
        places: A mapping from the parameter name to (position in ``groups``, offset in the flat buffer in elements).
    """

    groups: tuple[FlatGroup, ...]
    places: dict[str, tuple[int, int]]

    @property
    def ranks(self) -> int:
        """The number of ranks among which the buffers of dense parameters are partitioned."""
        first = self.groups[0] if self.groups else None
        return first.numel // first.shard_numel * (first.ep_size or 1) if first is not None else 1

    def shards(self, parameter: Parameter) -> list[OwnedShard]:
        """Return ``parameter`` divided at the boundaries between owners, in order."""
        number, start = self.places[parameter.name]
        flat = self.groups[number]
        end = start + parameter.numel
        cut = []
        while start < end:
            chunk, within_chunk = divmod(start, flat.chunk_numel)
            owner, within_row = divmod(within_chunk, flat.row_numel)
            stop = min(end, start - within_row + flat.row_numel)
            cut.append(OwnedShard(owner, stop - start, chunk * flat.row_numel + within_row, flat.ep_size))
            start = stop
        return cut


def padded(numel: int, multiple: int) -> int:
    """Return ``numel`` rounded up to a multiple of ``multiple``."""
    return -(-numel // multiple) * multiple


def dealt(parameters: Sequence[Parameter], world_size: int) -> list[Parameter]:
    """Return ``parameters`` assigned to the ranks round robin and concatenated by rank (round_robin_gradients)."""
    return [parameter for rank in range(world_size) for parameter in parameters[rank::world_size]]


def lay_out(
    groups: Sequence[Sequence[Parameter]],
    world_size: int,
    model_dtype: str | None = None,
    *,
    round_robin: bool = False,
    align_parameters: bool = False,
    bucket_size: int | None = None,
) -> Layout:
    """Lay out the flat buffer of each group.

    Args:
        groups: The trained parameters of each optimizer parameter group, in the order of the group.
        world_size: The number of ranks among which the buffers of dense parameters are partitioned.
        model_dtype: The element type of the model, or None for the type of each group's first parameter.
        round_robin: The value of ``round_robin_gradients``.
        align_parameters: The value of ``parameter_alignment``. If true, each parameter occupies a multiple of 16 bytes.
        bucket_size: The value of ``reduce_bucket_size`` if buffers are divided into chunks. None means that each buffer
            is a single chunk.

    Raises:
        RequestedError: a group contains parameters with different values of ``ep_size``.
    """
    flat: list[FlatGroup] = []
    places: dict[str, tuple[int, int]] = {}
    for number, group in enumerate(groups):
        dtype = model_dtype or group[0].dtype
        ep_size = _ep_size(group)
        ranks = world_size // (ep_size or 1)
        unit = PARAMETER_ALIGNMENT_BYTES // item_bytes(dtype) if align_parameters else 1
        offset = end = 0
        for parameter in dealt(group, ranks) if round_robin else group:
            places[parameter.name] = (number, offset)
            end = max(end, offset + parameter.numel)
            offset += padded(parameter.numel, unit)
        unit = ALIGNMENT_ELEMENTS * ranks
        chunks = 1
        if bucket_size is not None and offset:
            largest = _largest_chunk(sum(parameter.numel for parameter in group), bucket_size)
            chunks = -(-offset // max(unit, largest // unit * unit))
        numel = padded(offset, unit * chunks)
        data = sum(parameter.numel for parameter in group)
        flat.append(FlatGroup(numel, end, numel // ranks, dtype, chunks, data, ep_size))
    return Layout(tuple(flat), places)


def _ep_size(group: Sequence[Parameter]) -> int | None:
    sizes = {parameter.ep_size for parameter in group}
    if len(sizes) > 1:
        raise RequestedError(
            f"the optimizer group of {group[0].name!r} has parameters with ep_size "
            f"{' and '.join(sorted(map(str, sizes)))}; expected a group for each size"
        )
    return sizes.pop() if sizes else None


def _largest_chunk(numel: int, bucket_size: int) -> int:
    """Return the largest allowed chunk in elements.

    It is a 16th of a buffer, but at least a size that amortizes the latency of a message. It never exceeds
    ``bucket_size``.
    """
    return min(bucket_size, max(SMALLEST_CHUNK, min(-(-numel // CHUNKS), LARGEST_CHUNK)))

"""The flat buffers of stages 1 and 2, and which rank owns which shard of each parameter.

The trained parameters of an optimizer group are concatenated in a flat buffer whose length is rounded up to a multiple of
2 x ranks; rank r owns the r-th of equal shards. Boundaries ignore parameters: one parameter may have several owners. Source:
reference measurements of DeepSpeed 0.19.8; the factor 2 aligns 16-bit elements to 4 bytes.

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

ALIGNMENT_ELEMENTS: Final = 2  # of each rank's shard of a flat buffer
PARAMETER_ALIGNMENT_BYTES: Final = 16  # of each parameter, with parameter_alignment
CHUNKS: Final = 16  # chunks of a buffer, unless they would get too small or too large
SMALLEST_CHUNK: Final = 2**18  # elements, where reduce_bucket_size allows as much
LARGEST_CHUNK: Final = 2**23


class OwnedShard(NamedTuple):
    """Adjacent elements with one owner.

    Attributes:
        owner: rank within the group.
        numel: elements.
        offset: first element within the owner's shard of the flat buffer.
        ep_size: of the experts that the parameter belongs to; None for a dense parameter.
    """

    owner: int
    numel: int
    offset: int = 0
    ep_size: int | None = None


class FlatGroup(NamedTuple):
    """The flat buffer of one optimizer parameter group.

    Attributes:
        numel: elements, padding included; a multiple of 2 x ranks.
        end: where the padding begins.
        shard_numel: elements that each rank owns.
        dtype: element type of the model.
        chunks: how many there are.
        data_numel: elements of the parameters, without any padding.
        ep_size: of experts, whose buffers their expert-data group shares; None for dense parameters, which all ranks share.
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
        """Elements of a chunk."""
        return self.numel // self.chunks

    @property
    def row_numel(self) -> int:
        """Elements of a chunk that each rank owns."""
        return self.shard_numel // self.chunks


@dataclass(frozen=True, slots=True)
class Layout:
    """All flat buffers of a model.

    Attributes:
        groups: one per optimizer parameter group that trains something.
        places: parameter name -> (position in ``groups``, offset in that buffer in elements).
    """

    groups: tuple[FlatGroup, ...]
    places: dict[str, tuple[int, int]]

    @property
    def ranks(self) -> int:
        """Ranks that share the buffers of dense parameters."""
        first = self.groups[0] if self.groups else None
        return first.numel // first.shard_numel * (first.ep_size or 1) if first is not None else 1

    def shards(self, parameter: Parameter) -> list[OwnedShard]:
        """``parameter`` divided at the boundaries between the owners, in order."""
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
    """``numel`` rounded up to a multiple of ``multiple``."""
    return -(-numel // multiple) * multiple


def dealt(parameters: Sequence[Parameter], world_size: int) -> list[Parameter]:
    """``parameters`` assigned to the ranks round robin, then concatenated by rank (round_robin_gradients)."""
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
        groups: the trained parameters of each optimizer parameter group, in the order of the group.
        world_size: ranks that share the buffers of dense parameters.
        model_dtype: element type of the model; None takes that of the group's first parameter.
        round_robin: the key ``round_robin_gradients``.
        align_parameters: the key ``parameter_alignment``: each parameter takes up a multiple of 16 bytes.
        bucket_size: ``reduce_bucket_size`` where buffers are divided into chunks; None where each is a single one.

    Raises:
        RequestedError: a group has parameters of experts and others.
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
    """A 16th of a buffer, but at least a size that amortizes the latency of a message; ``bucket_size`` at most."""
    return min(bucket_size, max(SMALLEST_CHUNK, min(-(-numel // CHUNKS), LARGEST_CHUNK)))

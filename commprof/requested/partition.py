"""The flat buffers of stages 1 and 2, and which rank owns which part of each parameter.

The trained parameters of an optimizer group lie one after the other in a flat buffer whose length is rounded up to a
multiple of 2 x ranks; rank r owns the r-th of as many equal pieces. Boundaries fall where they fall: one parameter may
have several owners. Source: reference measurements of DeepSpeed 0.19.8; the factor 2 aligns 16-bit elements to 4 bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from commprof.requested.parameters import Parameter, item_bytes

ALIGNMENT_ELEMENTS: Final = 2  # of each rank's piece of a flat buffer
PARAMETER_ALIGNMENT_BYTES: Final = 16  # of each parameter, with parameter_alignment


class OwnedSlice(NamedTuple):
    """A run of neighbouring elements with one owner.

    Attributes:
        owner: rank within the group.
        numel: elements.
        offset: first element within the owner's piece of the flat buffer.
    """

    owner: int
    numel: int
    offset: int = 0


class FlatGroup(NamedTuple):
    """The flat buffer of one optimizer parameter group.

    Attributes:
        numel: elements, padding included; a multiple of 2 x ranks.
        piece_numel: elements that each rank owns.
        dtype: element type of the model.
    """

    numel: int
    piece_numel: int
    dtype: str


@dataclass(frozen=True, slots=True)
class Layout:
    """All flat buffers of a model.

    Attributes:
        groups: one per optimizer parameter group that trains something.
        places: parameter name -> (position in ``groups``, offset in that buffer in elements).
    """

    groups: tuple[FlatGroup, ...]
    places: dict[str, tuple[int, int]]

    def slices(self, parameter: Parameter) -> list[OwnedSlice]:
        """``parameter`` cut at the boundaries between the owners, in order."""
        number, start = self.places[parameter.name]
        piece = self.groups[number].piece_numel
        end = start + parameter.numel
        cut = []
        while start < end:
            owner = start // piece
            stop = min(end, (owner + 1) * piece)
            cut.append(OwnedSlice(owner, stop - start, start - owner * piece))
            start = stop
        return cut


def padded(numel: int, multiple: int) -> int:
    """``numel`` rounded up to a multiple of ``multiple``."""
    return -(-numel // multiple) * multiple


def dealt(parameters: Sequence[Parameter], world_size: int) -> list[Parameter]:
    """``parameters`` dealt out to the ranks in turn, the hands then laid one after the other (round_robin_gradients)."""
    return [parameter for rank in range(world_size) for parameter in parameters[rank::world_size]]


def lay_out(
    groups: Sequence[Sequence[Parameter]],
    world_size: int,
    model_dtype: str | None = None,
    *,
    round_robin: bool = False,
    align_parameters: bool = False,
) -> Layout:
    """Lay out the flat buffer of each group.

    Args:
        groups: the trained parameters of each optimizer parameter group, in the order of the group.
        world_size: ranks that share the buffers.
        model_dtype: element type of the model; None takes that of the group's first parameter.
        round_robin: the key ``round_robin_gradients``.
        align_parameters: the key ``parameter_alignment``: each parameter takes up a multiple of 16 bytes.
    """
    flat: list[FlatGroup] = []
    places: dict[str, tuple[int, int]] = {}
    for number, group in enumerate(groups):
        dtype = model_dtype or group[0].dtype
        unit = PARAMETER_ALIGNMENT_BYTES // item_bytes(dtype) if align_parameters else 1
        offset = 0
        for parameter in dealt(group, world_size) if round_robin else group:
            places[parameter.name] = (number, offset)
            offset += padded(parameter.numel, unit)
        numel = padded(offset, ALIGNMENT_ELEMENTS * world_size)
        flat.append(FlatGroup(numel, numel // world_size, dtype))
    return Layout(tuple(flat), places)

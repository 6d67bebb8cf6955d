"""Codecs of compressed gradients, which are pure functions from numbers to bytes and back.

| name | sent of n numbers                                                         | bytes                     |
|------|---------------------------------------------------------------------------|---------------------------|
| topk | the ceil(ratio n) largest by magnitude, and their positions               | (4 + item) ceil(ratio n)  |
| 1bit | the sign of each, and the mean magnitude of every 2,048                   | n / 8 + 4 ceil(n / 2,048) |
| 2bit | the sign of each, whether its magnitude is above the mean of its 2,048,   | n / 4 + 8 ceil(n / 2,048) |
|      | and the mean magnitude of those above and of those below                  |                           |

An item is a number of the communication dtype. topk is top-k sparsification (Aji and Heafield,
arXiv:1704.05021), and 1bit is scaled signs (Karimireddy et al., arXiv:1901.09847). 2bit is a quantizer with
two magnitudes. Each of the two is the mean of the magnitudes that it replaces.

No codec is unbiased, so error feedback is needed (:mod:`zero_runtime.experimental.compression.residuals`). If
a number is infinite or NaN, its decoded value, or all decoded values of its block, are infinite or NaN too.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Final, NamedTuple, Protocol

import torch
from torch.nn import functional

from zero_runtime.experimental.compression.bits import looked_up, pack, packed_bytes

BLOCK: Final = 2048  # numbers that share their levels
_SIGNS: Final = (-1.0, 1.0)
_ITEM: Final = 4  # bytes of a level, fp32
_LARGEST_INT32: Final = 2**31 - 1


class Section(NamedTuple):
    """A section of a payload: ``num_bytes`` bytes of numbers of ``width`` bytes each."""

    num_bytes: int
    width: int


class Codec(Protocol):
    """A codec, which encodes numbers as bytes and adds decoded numbers to a sum."""

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """Return ``values`` (fp32, 1-D) as a payload (uint8, 1-D), whose length is the sum of its sections."""

    def add(self, payload: torch.Tensor, total: torch.Tensor) -> None:
        """Add the decoded ``payload`` to ``total`` (fp32, 1-D, of the same length as the encoded values)."""

    def sections(self, numel: int) -> tuple[Section, ...]:
        """Return the sections of the payload of ``numel`` numbers, in order."""


@dataclass(frozen=True, slots=True)
class TopK:
    """A codec that sends the largest numbers and their positions.

    The numbers are sent in the order of their positions. Each position is sent as the distance from the
    previous position.

    Attributes:
        ratio: The share of the numbers that is sent, above 0 and up to 1.
        dtype: The communication dtype.
    """

    ratio: float
    dtype: torch.dtype = torch.float32

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """Return ``values`` as a payload; see :class:`Codec`."""
        count = self._count(values.numel())
        places = values.abs().topk(count, sorted=False).indices.sort().values
        distances = torch.diff(places, prepend=places.new_zeros(1)).to(_index_dtype(values.numel()))
        largest = values[places].to(self.dtype)
        return torch.cat([largest.view(torch.uint8), distances.view(torch.uint8)])

    def add(self, payload: torch.Tensor, total: torch.Tensor) -> None:
        """Add the decoded ``payload`` to ``total``; see :class:`Codec`."""
        first, second = (section.num_bytes for section in self.sections(total.numel()))
        # The copies have memory that is aligned for the other dtypes.
        values = payload.narrow(0, 0, first).clone().view(self.dtype)
        distances = payload.narrow(0, first, second).clone().view(_index_dtype(total.numel()))
        total.index_add_(0, distances.cumsum(0, dtype=torch.int64), values.to(total.dtype))

    def sections(self, numel: int) -> tuple[Section, ...]:
        """Return the sections of the payload of ``numel`` numbers; see :class:`Codec`."""
        count = self._count(numel)
        widths = self.dtype.itemsize, _index_dtype(numel).itemsize
        return tuple(Section(count * width, width) for width in widths)

    def _count(self, numel: int) -> int:
        return min(numel, max(1, ceil(self.ratio * numel)))


@dataclass(frozen=True, slots=True)
class OneBit:
    """A codec that sends signs, and one magnitude for every :data:`BLOCK` numbers. Zero counts as positive."""

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """Return ``values`` as a payload; see :class:`Codec`."""
        rows, counts = _blocks(values)
        levels = rows.abs().sum(1) / counts
        return torch.cat([pack((values >= 0).to(torch.uint8), 1), levels.view(torch.uint8)])

    def add(self, payload: torch.Tensor, total: torch.Tensor) -> None:
        """Add the decoded ``payload`` to ``total``; see :class:`Codec`."""
        numel = total.numel()
        packed, levels = _parts(payload, self.sections(numel))
        signs = looked_up(packed, numel, 1, _SIGNS)
        total.add_(signs.mul_(_spread(levels, numel)))

    def sections(self, numel: int) -> tuple[Section, ...]:
        """Return the sections of the payload of ``numel`` numbers; see :class:`Codec`."""
        return Section(packed_bytes(numel, 1), 1), Section(_ITEM * -(-numel // BLOCK), _ITEM)


@dataclass(frozen=True, slots=True)
class TwoBit:
    """A codec that sends each number's sign and which of the two magnitudes of its :data:`BLOCK` numbers it has."""

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """Return ``values`` as a payload; see :class:`Codec`."""
        rows, counts = _blocks(values)
        magnitudes = rows.abs()
        sums = magnitudes.sum(1)
        above = magnitudes > (sums / counts).unsqueeze(1)
        large = (magnitudes * above).sum(1)
        many = above.sum(1)
        levels = torch.stack([(sums - large) / (counts - many).clamp(min=1), large / many.clamp(min=1)])
        is_large = above.view(-1).narrow(0, 0, values.numel())
        codes = (values >= 0).to(torch.uint8) | (is_large.to(torch.uint8) << 1)
        return torch.cat([pack(codes, 2), levels.view(-1).view(torch.uint8)])

    def add(self, payload: torch.Tensor, total: torch.Tensor) -> None:
        """Add the decoded ``payload`` to ``total``; see :class:`Codec`."""
        numel = total.numel()
        packed, levels = _parts(payload, self.sections(numel))
        small, large = levels.view(2, -1)
        signs = looked_up(packed, numel, 2, (*_SIGNS, *_SIGNS))
        is_large = looked_up(packed, numel, 2, (0.0, 0.0, 1.0, 1.0)).bool()
        total.add_(signs.mul_(torch.where(is_large, _spread(large, numel), _spread(small, numel))))

    def sections(self, numel: int) -> tuple[Section, ...]:
        """Return the sections of the payload of ``numel`` numbers; see :class:`Codec`."""
        return Section(packed_bytes(numel, 2), 1), Section(2 * _ITEM * -(-numel // BLOCK), _ITEM)


def num_bytes(codec: Codec, numel: int) -> int:
    """Return the number of bytes of the payload of ``numel`` numbers."""
    return sum(section.num_bytes for section in codec.sections(numel))


def _blocks(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``values`` as rows of :data:`BLOCK` numbers, and the number of values in each row.

    The last row is padded with zeros.
    """
    missing = -values.numel() % BLOCK
    rows = (functional.pad(values, (0, missing)) if missing else values).view(-1, BLOCK)
    counts = torch.full((rows.shape[0],), BLOCK, device=values.device)
    counts[-1] -= missing
    return rows, counts


def _parts(payload: torch.Tensor, sections: tuple[Section, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes of ``payload``, and the fp32 levels that follow the codes, in aligned memory."""
    codes, levels = (section.num_bytes for section in sections)
    return payload.narrow(0, 0, codes), payload.narrow(0, codes, levels).clone().view(torch.float32)


def _spread(levels: torch.Tensor, numel: int) -> torch.Tensor:
    """Return, for each of ``numel`` numbers, the level of its block."""
    return levels.repeat_interleave(BLOCK).narrow(0, 0, numel)


def _index_dtype(numel: int) -> torch.dtype:
    return torch.int32 if numel <= _LARGEST_INT32 else torch.int64

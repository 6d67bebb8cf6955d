"""Huffman coding of payloads with zlib's Z_HUFFMAN_ONLY strategy, which does not search for repetitions.

The numbers of a section are divided into byte planes: all first bytes, all second bytes and so on. Each plane
is coded separately. The high bytes of indices are mostly zero. The high bytes of floats contain the exponent
and have few different values.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import Final

import torch

from zero_runtime.experimental.compression.codecs import Section

_LENGTH_BYTES: Final = 4
_LEVEL: Final = 6
_RAW_DEFLATE: Final = -15


def coded(payload: torch.Tensor, sections: Sequence[Section]) -> torch.Tensor:
    """Return the coded ``payload``: for every plane its length, and then the coded bytes.

    Both tensors are uint8 and 1-D, on the same device.
    """
    host = payload.cpu()
    coded_planes = []
    for plane in _planes(host, sections):
        coder = zlib.compressobj(_LEVEL, zlib.DEFLATED, _RAW_DEFLATE, 9, zlib.Z_HUFFMAN_ONLY)
        data = coder.compress(_bytes(plane)) + coder.flush()
        coded_planes.append(len(data).to_bytes(_LENGTH_BYTES, "little") + data)
    return torch.frombuffer(bytearray(b"".join(coded_planes)), dtype=torch.uint8).to(payload.device)


def decoded(message: torch.Tensor, sections: Sequence[Section]) -> torch.Tensor:
    """Return the payload that :func:`coded` encoded as ``message``.

    Extra bytes at the end of ``message`` are ignored.
    """
    data = _bytes(message.cpu())
    payload = torch.empty(sum(section.num_bytes for section in sections), dtype=torch.uint8)
    position = 0
    for plane in _planes(payload, sections):
        length = int.from_bytes(data[position : position + _LENGTH_BYTES], "little")
        position += _LENGTH_BYTES
        plain = zlib.decompress(data[position : position + length], _RAW_DEFLATE, plane.numel())
        position += length
        plane.copy_(torch.frombuffer(bytearray(plain), dtype=torch.uint8))
    return payload.to(message.device)


def _planes(payload: torch.Tensor, sections: Sequence[Section]) -> Iterator[torch.Tensor]:
    """Yield the planes of ``payload``, as views of it."""
    position = 0
    for num_bytes, width in sections:
        rows = payload.narrow(0, position, num_bytes).view(-1, width)
        for place in range(width if num_bytes else 0):
            yield rows[:, place]
        position += num_bytes


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().numpy().tobytes()

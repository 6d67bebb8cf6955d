"""A writer of safetensors files, which writes one tensor at a time.

A file begins with 8 bytes that contain the length of the header, little-endian. Then follow a JSON header with
the dtype, shape and position of each tensor, and the bytes of the tensors in order. The safetensors package
reads these files. It is not used for writing, because it needs all tensors in CPU memory at once, and neither
syncs the file nor computes a checksum.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from zero_runtime.errors import CheckpointError

NAMES: Final = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
DTYPES: Final = {name: dtype for dtype, name in NAMES.items()}
_CHUNK: Final = 1 << 24  # The number of bytes of one write.


class Entry(NamedTuple):
    """A tensor to be written.

    Attributes:
        key: The name of the tensor in the file.
        dtype: The dtype of its elements.
        shape: The shape of the tensor.
        produce: A function that returns the tensor, on any device. It is called once, when the tensor is
            written.
    """

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    produce: Callable[[], torch.Tensor]


class Written(NamedTuple):
    """A file that has been written: its length in bytes, and its CRC-32."""

    num_bytes: int
    crc32: int


def entry_of(key: str, tensor: torch.Tensor, shape: Sequence[int] | None = None) -> Entry:
    """Return the entry of an existing tensor. If ``shape`` is not None, it replaces the shape of the tensor."""
    entry_shape = tuple(tensor.shape) if shape is None else tuple(shape)
    return Entry(key, tensor.dtype, entry_shape, lambda: tensor)


def write(path: Path, entries: Sequence[Entry], metadata: Mapping[str, str]) -> Written:
    """Write ``entries`` to a new file at ``path``, one tensor in memory at a time, and sync the file to the disk.

    Raises:
        CheckpointError: The disk is full, or the file cannot be written, and the file is removed. The error is
            also raised for a dtype that the format does not have.
    """
    with removed_on_failure(path), path.open("wb") as file:
        crc = 0
        for chunk in _chunks(_in_file_order(entries), metadata):
            file.write(chunk)
            crc = zlib.crc32(chunk, crc)
        file.flush()
        os.fsync(file.fileno())
        return Written(file.tell(), crc)


@contextmanager
def removed_on_failure(path: Path) -> Iterator[None]:
    """Remove the file at ``path`` if the ``with`` block fails.

    An OSError is replaced by a CheckpointError with the reason. Other errors are raised unchanged.
    """
    try:
        yield
    except OSError as error:
        discard(path)
        raise CheckpointError(could_not(path, error)) from None
    except BaseException:
        discard(path)
        raise


def discard(path: Path) -> None:
    """Remove an incomplete or superseded file. Errors are ignored."""
    with suppress(OSError):
        path.unlink()


def could_not(path: Path, error: OSError) -> str:
    """Return the message for a file that cannot be written."""
    return (
        f"{path} could not be written: {error.strerror or error}; make room or choose another directory. Existing files are "
        "unchanged"
    )


def data(entry: Entry) -> memoryview:
    """Return the bytes of the tensor of ``entry``, on the CPU."""
    tensor = entry.produce()
    if tensor.dtype != entry.dtype or tensor.numel() != math.prod(entry.shape):
        raise CheckpointError(
            f"{entry.key} was announced as {entry.shape} of {entry.dtype}, and is {tuple(tensor.shape)} of {tensor.dtype}"
        )
    return as_bytes(tensor)


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a tensor, without a copy if the tensor is contiguous and on the CPU."""
    if tensor.numel() == 0:
        return memoryview(b"")
    flat = tensor.detach().cpu().contiguous().view(-1)
    array: Any = flat.view(torch.uint8).numpy()
    return memoryview(array)


def header(entries: Sequence[Entry], metadata: Mapping[str, str]) -> tuple[bytes, dict[str, int]]:
    """Return the header of a file of ``entries``, and the position of each tensor in the file in bytes, by key."""
    description: dict[str, object] = {"__metadata__": dict(metadata)}
    starts = {}
    position = 0
    for entry in _in_file_order(entries):
        if entry.dtype not in NAMES:
            raise CheckpointError(
                f"{entry.key} is of {entry.dtype}, which a safetensors file cannot hold; convert it"
            )
        end = position + math.prod(entry.shape) * entry.dtype.itemsize
        description[entry.key] = {
            "dtype": NAMES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [position, end],
        }
        starts[entry.key] = position
        position = end
    text = json.dumps(description, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    begin = 8 + len(text)
    return len(text).to_bytes(8, "little") + text, {key: begin + start for key, start in starts.items()}


def _in_file_order(entries: Sequence[Entry]) -> list[Entry]:
    # Tensors with wide elements are first, so that every tensor begins at a multiple of its element size. Otherwise the
    # given order stays, so that tensors that come from files are read in the order of these files.
    return sorted(entries, key=lambda entry: -entry.dtype.itemsize)


def _chunks(entries: Sequence[Entry], metadata: Mapping[str, str]) -> Iterator[bytes | memoryview]:
    yield header(entries, metadata)[0]
    for entry in entries:
        content = data(entry)
        for begin in range(0, len(content), _CHUNK):
            yield content[begin : begin + _CHUNK]


def sync_directory(path: Path) -> None:
    """Sync the directory entries of ``path`` to disk, if the file system supports that."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        pass  # Some file systems cannot sync directories.
    finally:
        os.close(descriptor)


def replace_file(path: Path, text: str) -> None:
    """Replace the content of the file at ``path`` with ``text``. Readers see either the old or the new content.

    Raises:
        CheckpointError: The file cannot be written. Its old content is unchanged.
    """
    fresh = path.with_name(f".{path.name}.writing")
    try:
        with fresh.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
        sync_directory(path.parent)
    except OSError as error:
        discard(fresh)
        raise CheckpointError(could_not(path, error)) from None

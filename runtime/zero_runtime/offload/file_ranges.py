"""Reads and writes of one range of a file. They bypass the page cache if the file system supports it (O_DIRECT).

Direct transfers go between the disk and the caller's memory. They must begin and end at multiples of
:data:`ALIGNMENT` bytes, in memory and in the file. Unaligned data is copied through an aligned buffer of the
thread.
"""

from __future__ import annotations

import mmap
import os
import threading
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

ALIGNMENT: Final = 4096
_local = threading.local()


def aligned_empty(size: int, pinned: bool = False) -> torch.Tensor:
    """Return 1-D uint8 memory of ``size`` bytes that begins at a multiple of ``ALIGNMENT``.

    The memory is allocated up to the next multiple of ``ALIGNMENT`` after its end. With ``pinned``, which needs
    CUDA, an accelerator copies from the memory without an intermediate copy.
    """
    memory = torch.empty(aligned(size) + ALIGNMENT, dtype=torch.uint8, device="cpu", pin_memory=pinned)
    return memory.narrow(0, -memory.data_ptr() % ALIGNMENT, aligned(size)).narrow(0, 0, size)


def aligned(size: int) -> int:
    """Return ``size`` rounded up to a multiple of ``ALIGNMENT``."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def as_memory(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor in host memory.

    Raises:
        ValueError: The tensor is on another device, or is not contiguous.
    """
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError(
            f"a tensor of shape {tuple(tensor.shape)} on {tensor.device} is not contiguous host memory"
        )
    array: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


def takes_direct(folder: Path) -> bool:
    """Return whether the file system of ``folder`` supports direct reads and writes."""
    path = folder / ".direct"
    memory = mmap.mmap(-1, ALIGNMENT)
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    except OSError:
        return False
    try:
        return os.pwritev(descriptor, [memory], 0) == os.preadv(descriptor, [memory], 0) == ALIGNMENT
    except OSError:
        return False
    finally:
        os.close(descriptor)
        path.unlink()


def write_range(path: Path, data: memoryview, offset: int, direct: bool) -> None:
    """Write ``data`` at ``offset`` of an existing file.

    With ``direct``, up to ``ALIGNMENT`` more bytes may be written after the data.

    Args:
        path: The path of the file.
        data: The bytes to write.
        offset: The offset in bytes. With ``direct`` it must be a multiple of ``ALIGNMENT``.
        direct: Whether to bypass the page cache.
    """
    descriptor = os.open(path, os.O_WRONLY | (os.O_DIRECT if direct else 0))
    try:
        if not direct:
            _write_all(descriptor, data, offset)
            return
        direct_bytes = len(data) // ALIGNMENT * ALIGNMENT if _begins_aligned(data) else 0
        _write_all(descriptor, data[:direct_bytes], offset)
        if direct_bytes < len(data):
            rest = len(data) - direct_bytes
            bounce = _bounce(aligned(rest))
            bounce[:rest] = data[direct_bytes:]
            _write_all(descriptor, bounce, offset + direct_bytes)
    finally:
        os.close(descriptor)


def read_range(path: Path, target: memoryview, offset: int, direct: bool) -> None:
    """Fill ``target`` from ``offset`` of a file that ``write_range`` wrote with the same ``direct``.

    Raises:
        EOFError: The file is too short.
    """
    descriptor = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
    try:
        if not direct:
            _read_all(descriptor, target, offset, len(target))
            return
        direct_bytes = len(target) // ALIGNMENT * ALIGNMENT if _begins_aligned(target) else 0
        _read_all(descriptor, target[:direct_bytes], offset, direct_bytes)
        if direct_bytes < len(target):
            rest = len(target) - direct_bytes
            bounce = _bounce(aligned(rest))
            _read_all(descriptor, bounce, offset + direct_bytes, rest)
            target[direct_bytes:] = bounce[:rest]
    finally:
        os.close(descriptor)


def _write_all(descriptor: int, data: memoryview, offset: int) -> None:
    while len(data):
        written = os.pwritev(descriptor, [data], offset)
        data, offset = data[written:], offset + written


def _read_all(descriptor: int, target: memoryview, offset: int, least: int) -> None:
    """Read into ``target``. The file must have at least ``least`` bytes after ``offset``."""
    done = 0
    while done < least:
        count = os.preadv(descriptor, [target[done:]], offset + done)
        if count == 0:
            raise EOFError
        done += count


def _begins_aligned(memory: memoryview) -> bool:
    if len(memory) == 0:
        return True
    return bool(np.frombuffer(memory, np.uint8).ctypes.data % ALIGNMENT == 0)


def _bounce(size: int) -> memoryview:
    """Return an aligned buffer of this thread."""
    buffer: mmap.mmap | None = getattr(_local, "bounce", None)
    if buffer is None or len(buffer) < size:
        buffer = _local.bounce = mmap.mmap(-1, size)
    return memoryview(buffer)[:size]

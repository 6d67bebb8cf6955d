"""A benchmark of how fast a disk reads and writes offloaded tensors, by block size, threads and use of the page cache.

The benchmark runs the code of the offload itself, including checksums. Therefore the fastest row is the best
``aio`` block. Direct writes go to the disk, and writes through the page cache are timed until fsync returns.
Before each read, the file is dropped from the page cache.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from statistics import median
from typing import Final, NamedTuple

import torch

from zero_runtime.bench.option_types import count, size
from zero_runtime.errors import UsageError
from zero_runtime.offload.file_ranges import aligned_empty, takes_direct
from zero_runtime.offload.folders import new_folder, remove_folder
from zero_runtime.offload.tensor_files import AsynchronousIO, TensorFiles

_MIB: Final = 1 << 20
_NAME: Final = "tensor"


class Setting(NamedTuple):
    """One way to read and write files.

    Attributes:
        direct: Whether reads and writes bypass the page cache.
        io: The block size, the queue depth and the number of threads.
    """

    direct: bool
    io: AsynchronousIO


class Speed(NamedTuple):
    """The write and read speed of one setting, in bytes per second."""

    setting: Setting
    write: float
    read: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return the exit code 0. The caller reports errors."""
    parser = argparse.ArgumentParser(
        prog="python -m zero_runtime.bench io",
        description="Measure how fast files of offloaded tensors are written and read, and print the "
        "fastest settings as the configuration block aio.",
    )
    parser.add_argument("--path", type=Path, default=Path(), help="a folder on the disk (default: this one)")
    parser.add_argument("--size", type=size, default=256 * _MIB, help="bytes of the file (default: 256m)")
    parser.add_argument(
        "--blocks",
        type=size,
        nargs="+",
        default=[256 << 10, _MIB, 8 * _MIB],
        help="block_size (256k 1m 8m)",
    )
    parser.add_argument(
        "--threads", type=count, nargs="+", default=[1, 2, 4], help="intra_op_parallelism (1 2 4)"
    )
    parser.add_argument(
        "--depth", type=count, default=1, help="queue_depth: blocks in one request (default: 1)"
    )
    parser.add_argument("--repeat", type=count, default=3, help="repetitions; the median counts (default: 3)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args(arguments)
    if options.size % 4096:
        raise UsageError(f"--size is {options.size}; expected a multiple of 4096 bytes")
    folder = new_folder(options.path, 0, "bench", "--path")
    try:
        if not takes_direct(folder):
            print(
                f"zero_runtime: {options.path} does not support direct reads and writes (O_DIRECT)",
                file=sys.stderr,
            )
        settings = ways(folder, options.blocks, options.threads, options.depth)
        speeds = [measure(folder, setting, options.size, options.repeat) for setting in settings]
    finally:
        remove_folder(folder)
    print(_as_json(speeds, options.size) if options.json else _as_table(speeds, options.size, options.path))
    return 0


def ways(folder: Path, blocks: Sequence[int], threads: Sequence[int], depth: int) -> list[Setting]:
    """Return all combinations of settings, direct ones first if the file system of ``folder`` supports them."""
    how = [True, False] if takes_direct(folder) else [False]
    return [
        Setting(direct, AsynchronousIO(block, depth, threads=count))
        for direct, block, count in product(how, blocks, threads)
    ]


def measure(folder: Path, setting: Setting, size: int, repeats: int) -> Speed:
    """Write and read a tensor of ``size`` bytes ``repeats`` times in a folder below ``folder``.

    Raises:
        OffloadError: The tensor cannot be written or read, or its file was changed on the disk.
    """
    below = folder / "files"
    below.mkdir()
    files = TensorFiles(below, setting.io, direct=setting.direct, key="--path")
    try:
        written = aligned_empty(size)
        written.view(torch.int64).random_(generator=torch.Generator().manual_seed(0))
        read = aligned_empty(size)
        seconds = [_once(files, below, written, read) for _ in range(repeats)]
    finally:
        files.close()
    return Speed(setting, *(size / median(each) for each in zip(*seconds, strict=True)))


def _once(files: TensorFiles, folder: Path, written: torch.Tensor, read: torch.Tensor) -> tuple[float, float]:
    begin = time.perf_counter()
    files.write(_NAME, written).wait()
    path = next(each for each in folder.iterdir() if each.name.endswith(_NAME))
    with _opened(path) as descriptor:
        os.fsync(descriptor)
        end = time.perf_counter()
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    before = time.perf_counter()
    files.read(_NAME, read).wait()
    return end - begin, time.perf_counter() - before


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def fastest(speeds: Sequence[Speed]) -> Speed:
    """Return the speed of the setting that takes the least time to write and read a byte."""
    return min(speeds, key=lambda speed: 1 / speed.write + 1 / speed.read)


def _as_table(speeds: Sequence[Speed], size: int, path: Path) -> str:
    lines = [
        f"{size / _MIB:.0f} MiB in {path.absolute()}, checksums included; MB/s are 10^6 bytes per second",
        "",
        f"{'page cache':<10} {'block':>9} {'threads':>7} {'write MB/s':>11} {'read MB/s':>10}",
    ]
    best = fastest(speeds)
    for speed in speeds:
        direct, io = speed.setting
        lines.append(
            f"{'past' if direct else 'through':<10} {io.block_size / 1024:>5.0f} KiB {io.threads:>7} "
            f"{speed.write / 1e6:>11.0f} {speed.read / 1e6:>10.0f}{'  fastest' if speed is best else ''}"
        )
    return "\n".join([*lines, "", f'"aio": {json.dumps(_aio(best))}'])


def _as_json(speeds: Sequence[Speed], size: int) -> str:
    rows = [
        {
            "direct": speed.setting.direct,
            "block_size": speed.setting.io.block_size,
            "threads": speed.setting.io.threads,
            "queue_depth": speed.setting.io.queue_depth,
            "write_bytes_per_s": round(speed.write),
            "read_bytes_per_s": round(speed.read),
        }
        for speed in speeds
    ]
    return json.dumps({"size_bytes": size, "rows": rows, "aio": _aio(fastest(speeds))}, indent=1)


def _aio(speed: Speed) -> dict[str, int]:
    io = speed.setting.io
    return {
        "block_size": io.block_size,
        "queue_depth": io.queue_depth,
        "intra_op_parallelism": io.threads,
    }

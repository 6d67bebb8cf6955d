"""A report on this environment: versions, backends, memory, disks and their speed (``python -m zero_runtime.report``)."""

from __future__ import annotations

import argparse
import logging
import os
import platform
import shutil
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path

import torch

from zero_runtime import comm, log
from zero_runtime.bench.io import measure, ways
from zero_runtime.bench.option_types import size
from zero_runtime.deepspeed_names.devices.accelerator import get_accelerator
from zero_runtime.deepspeed_names.distribution import DISTRIBUTION, FOLLOWED, NamesDistribution
from zero_runtime.deepspeed_names.ranks import comm_functions
from zero_runtime.errors import ZeroRuntimeError
from zero_runtime.offload.folders import new_folder, remove_folder
from zero_runtime.startup.huge_pages import huge_pages_state
from zero_runtime.startup.memory_status import memory_in_use
from zero_runtime.version import VERSION

_GIB = 2**30
_BLOCK = 1 << 20
_BLOCK_ALIGNMENT = 4096
_PACKAGES = ("numpy", "safetensors", "transformers", "accelerate")


def lines(directory: Path, measured_bytes: int = 0) -> Iterator[tuple[str, str]]:
    """Yield the lines of the report, as (name, text).

    Args:
        directory: A directory on the disk to report.
        measured_bytes: The size in bytes of a file that is written and read in ``directory`` to measure the
            disk. With 0, the disk is not measured.
    """
    yield "zero_runtime", f"{VERSION}, with the names of DeepSpeed {FOLLOWED}"
    yield "DeepSpeed", _deepspeed()
    yield "Python", f"{platform.python_version()}, {sys.executable}"
    yield "torch", f"{torch.__version__}, {Path(torch.__file__).parent}"
    for name in _PACKAGES:
        yield name, _version(name)
    yield "backends", ", ".join(comm_functions.available_backends()) or "none"
    yield "nccl", ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else "no CUDA"
    yield "device", get_accelerator().device_name()
    for number in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(number)
        yield f"cuda:{number}", f"{properties.name}, {properties.total_memory / _GIB:.1f} GiB"
    yield (
        "dtypes",
        ", ".join(str(each).removeprefix("torch.") for each in get_accelerator().supported_dtypes()),
    )
    yield "cores", f"{len(os.sched_getaffinity(0))} of {os.cpu_count()} can be used"
    used = memory_in_use()
    yield "memory", f"{(used.host - used.host_used) / _GIB:.1f} GiB of {used.host / _GIB:.1f} GiB are free"
    yield "huge pages", huge_pages_state()
    yield "shared memory", _disk(Path("/dev/shm"))
    yield "disk", f"{directory}: {_disk(directory)}"
    if measured_bytes:
        yield "disk speed", _speed(directory, measured_bytes)
    yield "log level", f"{logging.getLevelName(log.level()).lower()}, by {' or '.join(log.VARIABLES)}"
    yield "ranks by the environment", _ranks()


def _deepspeed() -> str:
    for distribution in metadata.distributions(name=DISTRIBUTION):
        if not isinstance(distribution, NamesDistribution):
            return f"{distribution.version} is installed; `commprof run --engine` selects it or zero_runtime"
    return "is not installed; `commprof run --engine zero_runtime` provides its names"


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def _disk(path: Path) -> str:
    try:
        usage = shutil.disk_usage(path)
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return f"{usage.free / _GIB:.1f} GiB of {usage.total / _GIB:.1f} GiB are free"


def _speed(path: Path, num_bytes: int) -> str:
    """Return, as text, how fast files of offloaded tensors are written to and read from ``path``."""
    try:
        folder = new_folder(path, 0, "report", "--directory")
    except ZeroRuntimeError as error:
        return f"cannot be measured: {error}"
    try:
        measurements = [measure(folder, setting, num_bytes, 1) for setting in ways(folder, [_BLOCK], [2], 1)]
    except (ZeroRuntimeError, OSError) as error:
        return f"cannot be measured: {error}"
    finally:
        remove_folder(folder)
    shown = [
        f"{'past' if each.setting.direct else 'through'} the page cache {each.write / 1e6:.0f} MB/s written, "
        f"{each.read / 1e6:.0f} MB/s read"
        for each in measurements
    ]
    return f"{'; '.join(shown)} ({num_bytes / 2**20:.0f} MiB; python -m zero_runtime.bench io says more)"


def _ranks() -> str:
    if "RANK" not in os.environ:
        return "no launcher has started this process"
    return f"rank {os.environ['RANK']} of {os.environ.get('WORLD_SIZE', '?')}, local rank {comm.get_local_rank()}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report."""
    parser = argparse.ArgumentParser(prog="python -m zero_runtime.report", description=__doc__)
    parser.add_argument(
        "--directory", type=Path, default=Path.cwd(), help="a directory on the disk to report"
    )
    parser.add_argument(
        "--disk-bytes",
        type=size,
        default=32 << 20,
        help="size of the file that is written and read there to measure the disk, a multiple of 4096 (default: 32m)",
    )
    parser.add_argument(
        "--no-disk-speed", action="store_true", help="do not measure the disk; nothing is written"
    )
    parser.add_argument("--hide_operator_status", action="store_true", help="accepted for ds_report's sake")
    parser.add_argument(
        "--hide_errors_and_warnings", action="store_true", help="accepted for ds_report's sake"
    )
    options = parser.parse_args(arguments)
    if options.disk_bytes % _BLOCK_ALIGNMENT:
        parser.error(f"--disk-bytes is {options.disk_bytes}; expected a multiple of {_BLOCK_ALIGNMENT} bytes")
    table = list(lines(options.directory, 0 if options.no_disk_speed else options.disk_bytes))
    width = max(len(name) for name, _ in table)
    for name, text in table:
        print(f"{name.ljust(width)}  {text}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""``python -m zero_runtime.report``: what this runtime finds here: versions, backends, memory and disks."""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path

import torch

from zero_runtime import comm
from zero_runtime.deepspeed_names import comm as messages
from zero_runtime.deepspeed_names.accelerator import get_accelerator
from zero_runtime.deepspeed_names.distribution import DISTRIBUTION, FOLLOWED, NamesDistribution
from zero_runtime.memory import memory_in_use
from zero_runtime.version import VERSION

_GIB = 2**30
_PACKAGES = ("numpy", "safetensors", "transformers", "accelerate")


def lines(directory: Path) -> Iterator[tuple[str, str]]:
    """What is found: a name and a text each.

    Args:
        directory: of which the disk is shown.
    """
    yield "zero_runtime", f"{VERSION}, with the names of DeepSpeed {FOLLOWED}"
    yield "DeepSpeed", _deepspeed()
    yield "Python", f"{platform.python_version()}, {sys.executable}"
    yield "torch", f"{torch.__version__}, {Path(torch.__file__).parent}"
    for name in _PACKAGES:
        yield name, _version(name)
    yield "backends", ", ".join(messages.available_backends()) or "none"
    yield "nccl", ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else "no CUDA"
    yield "device", get_accelerator().device_name()
    for number in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(number)
        yield f"cuda:{number}", f"{found.name}, {found.total_memory / _GIB:.1f} GiB"
    yield (
        "dtypes",
        ", ".join(str(each).removeprefix("torch.") for each in get_accelerator().supported_dtypes()),
    )
    yield "cores", f"{len(os.sched_getaffinity(0))} of {os.cpu_count()} can be used"
    used = memory_in_use()
    yield "memory", f"{(used.host - used.host_used) / _GIB:.1f} GiB of {used.host / _GIB:.1f} GiB are free"
    yield "shared memory", _disk(Path("/dev/shm"))
    yield "disk", f"{directory}: {_disk(directory)}"
    yield "ranks by the environment", _ranks()


def _deepspeed() -> str:
    for found in metadata.distributions(name=DISTRIBUTION):
        if not isinstance(found, NamesDistribution):
            return f"{found.version} is installed; `commprof run --engine` chooses"
    return "is not installed; `commprof run --engine zero_runtime` gives its names"


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def _disk(path: Path) -> str:
    try:
        found = shutil.disk_usage(path)
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return f"{found.free / _GIB:.1f} GiB of {found.total / _GIB:.1f} GiB are free"


def _ranks() -> str:
    if "RANK" not in os.environ:
        return "no launcher has started this process"
    return f"rank {os.environ['RANK']} of {os.environ.get('WORLD_SIZE', '?')}, local rank {comm.get_local_rank()}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report."""
    parser = argparse.ArgumentParser(prog="python -m zero_runtime.report", description=__doc__)
    parser.add_argument("--directory", type=Path, default=Path.cwd(), help="of which the disk is shown")
    parser.add_argument("--hide_operator_status", action="store_true", help="accepted for ds_report's sake")
    parser.add_argument(
        "--hide_errors_and_warnings", action="store_true", help="accepted for ds_report's sake"
    )
    given = parser.parse_args(arguments)
    found = list(lines(given.directory))
    width = max(len(name) for name, _ in found)
    for name, text in found:
        print(f"{name.ljust(width)}  {text}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

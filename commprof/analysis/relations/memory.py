"""The memory limit of the engine, and the directory to which it spills data beyond the limit.

The default is half of the machine's memory or half of the limit of the control group of the process,
whichever is less. ``COMMPROF_MEMORY_LIMIT`` (``2GiB``, ``500MB``) sets another limit. Data beyond the limit
spills to the system's directory for temporary files, which ``TMPDIR`` sets.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Final

import pyarrow as pa

from commprof.errors import UsageError

VARIABLE: Final = "COMMPROF_MEMORY_LIMIT"
_UNITS: Final = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}
_LEAST: Final = 128 << 20  # the engine cannot sort with less memory
_SHARE: Final = 2
# By process; a forked child inherits the entries of its parents.
_spill_directories: Final[dict[int, str]] = {}


def engine_settings(most: int | None = None) -> dict[str, str]:
    """Return ``memory_limit`` and ``temp_directory`` of an engine.

    Args:
        most: The most bytes that the engine needs. Default: the limit of :func:`limit_bytes`.

    Raises:
        UsageError: The environment sets a limit that is not a size.
    """
    limit = limit_bytes() if most is None else min(most, limit_bytes())
    return {"memory_limit": f"{limit >> 10}KiB", "temp_directory": _spill_directory()}


def give_back() -> None:
    """Return unused memory of this process to the system, because allocators keep the memory of freed arrays."""
    pa.default_memory_pool().release_unused()
    with contextlib.suppress(AttributeError, OSError):  # the C library is not glibc
        ctypes.CDLL(None).malloc_trim(0)


def limit_bytes() -> int:
    """Return the memory limit of an engine in bytes.

    Raises:
        UsageError: The environment sets a limit that is not a size.
    """
    setting = os.environ.get(VARIABLE, "").strip()
    if not setting:
        return max(_LEAST, memory_bytes() // _SHARE)
    match = re.fullmatch(r"(\d{1,18}(?:\.\d{1,9})?)\s*([a-z]*)", setting.lower())
    if match is None or match[2] not in _UNITS:
        raise UsageError(f"{VARIABLE} is {setting[:60]!r}, not a size; expected for example 2GiB or 500MB")
    return max(_LEAST, int(float(match[1]) * _UNITS[match[2]]))


def memory_bytes(root: Path = Path("/")) -> int:
    """Return the bytes of memory of this machine, or the limit of its control groups, whichever is less.

    Args:
        root: The directory that contains ``proc`` and ``sys``.
    """
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([physical, *_group_limits(root)])


def _group_limits(root: Path) -> list[int]:
    """Return the limits of the control groups of this process and of their parents, for versions 1 and 2."""
    try:
        lines = (root / "proc/self/cgroup").read_text("utf-8", "replace").splitlines()
    except OSError:
        return []
    limits = []
    for line in lines:
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if not controllers:
            base, name = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            base, name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        group = Path(path.lstrip("/"))
        for each in (group, *group.parents):  # in a container, the path may be the path on the host
            limits += _number(base / each / name)
    return limits


def _number(file: Path) -> list[int]:
    try:
        text = file.read_text("ascii", "replace").strip()
    except OSError:
        return []
    return [int(text)] if text.isdecimal() else []  # "max" means that there is no limit


def _spill_directory() -> str:
    """Return the one directory of this process, which is removed when the process exits.

    A forked child has its own directory and does not remove the directory of its parent.
    """
    process = os.getpid()
    if process not in _spill_directories:
        made = tempfile.mkdtemp(prefix="commprof-")
        if _spill_directories.setdefault(process, made) == made:
            atexit.register(_remove, made, process)
        else:
            Path(made).rmdir()  # another thread was first
    return _spill_directories[process]


def _remove(directory: str, process: int) -> None:
    """Remove the files that ``process`` has spilled, except when a forked child exits."""
    if os.getpid() == process:
        shutil.rmtree(directory, ignore_errors=True)

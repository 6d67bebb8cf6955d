"""What the files of a run look like: those that derived tables are made from, and all of them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from pathlib import Path
from typing import Any, Final

from commprof.trace.directory import COLLECTIVES_DIRECTORY
from commprof.trace.layout import EVENTS_SUFFIX, RECORDS_SUFFIX

Stamp = tuple[tuple[str, int, int, int, int], ...]

VERSION: Final = 19  # of what is derived: the index and the summaries
_GROWING: Final = (RECORDS_SUFFIX, EVENTS_SUFFIX, ".jsonl")
_INPUTS: Final = ("clocks", "clock_offsets", "steps", "aggregates", "buckets", "groups", "stalls")


def fingerprint(run: Path) -> str:
    """Another text whenever a file that the index and the summaries of ``run`` are made from changes, comes or goes."""
    files = [run / f"{name}.parquet" for name in _INPUTS]
    files += sorted((run / COLLECTIVES_DIRECTORY).glob("*.parquet"))
    files += sorted(run.glob("rank-*"))
    found: list[Any] = [VERSION]
    for file in files:
        with contextlib.suppress(OSError):
            status = file.stat()
            found.append((file.name, status.st_size, status.st_mtime_ns))
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()


def stamp(run: Path) -> Stamp:
    """Name, size, number and times of every file below ``run``: another one whenever any of them changes.

    Raises:
        OSError: the directory cannot be read.
    """
    return tuple(sorted(_files(os.fspath(run), "")))


def _files(directory: str, prefix: str) -> list[tuple[str, int, int, int, int]]:
    found = []
    with os.scandir(directory) as entries:
        for entry in entries:
            name = prefix + entry.name
            try:
                status = entry.stat()
                found.append((name, status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns))
                if entry.is_dir(follow_symlinks=False):
                    found += _files(entry.path, f"{name}/")
            except OSError:
                continue  # gone since it was listed
    return found


def is_growing(held: Stamp) -> bool:
    """Whether files are among ``held`` that a process writes to as it goes."""
    return any(name.endswith(_GROWING) for name, *_ in held)

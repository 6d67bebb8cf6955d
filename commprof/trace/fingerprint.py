"""The fingerprint of a run: a hash of the names, sizes and times of its files, and a hash of the input files only."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

from commprof.trace.directory import COLLECTIVES_DIRECTORY
from commprof.trace.rank_files.layout import EVENTS_SUFFIX, RECORDS_SUFFIX

VERSION: Final = 26  # the version of the derived data: the index and the summaries
_GROWING: Final = (RECORDS_SUFFIX, EVENTS_SUFFIX, ".jsonl")
_INPUTS: Final = (
    "clocks",
    "clock_offsets",
    "steps",
    "aggregates",
    "buckets",
    "groups",
    "stalls",
    "outside_steps",
)
_INPUT_FILES: Final = {f"{name}.parquet": place for place, name in enumerate(_INPUTS)}


@dataclass(frozen=True)
class Fingerprint:
    """The state of the files of a run at one point in time.

    Attributes:
        run: The directory, with symbolic links resolved.
        files: The name relative to ``run``, size in bytes, inode, mtime and ctime in ns of each file. Empty if ``run``
            cannot be read.
    """

    run: Path
    files: tuple[tuple[str, int, int, int, int], ...]

    @cached_property
    def key(self) -> str:
        """A hash that changes whenever a file of the run changes, is added or is removed."""
        text = repr((os.fspath(self.run), self.files))
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()

    @cached_property
    def inputs(self) -> str:
        """A hash that changes whenever an input file of the derived data changes, is added or is removed.

        The hash stays the same if the run is moved to another directory.
        """
        file_states = sorted(
            (place, name.rpartition("/")[2], size, changed)
            for name, size, _, changed, _ in self.files
            if (place := _input_place(name)) is not None
        )
        return hashlib.sha256(json.dumps([VERSION, *(each[1:] for each in file_states)]).encode()).hexdigest()

    @property
    def is_still(self) -> bool:
        """Whether the run has no files that a running process writes to.

        Such files can change while their size and times stay the same.
        """
        return bool(self.files) and not any(name.endswith(_GROWING) for name, *_ in self.files)


class Opening:
    """A unique key for the state in which one reader found a run that is still being written."""


def fingerprint(run: Path) -> Fingerprint:
    """Return the fingerprint of the current state of ``run``."""
    path = run.resolve()
    file_states: list[tuple[str, int, int, int, int]] = []
    with contextlib.suppress(OSError):
        file_states = _files(os.fspath(path), "")
    return Fingerprint(path, tuple(sorted(file_states)))


def _files(directory: str, prefix: str) -> list[tuple[str, int, int, int, int]]:
    file_states = []
    with os.scandir(directory) as entries:
        for entry in entries:
            name = prefix + entry.name
            try:
                status = entry.stat()
                file_states.append(
                    (name, status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns)
                )
                # The records of an analysis are a link to those of its run (docs/scale.md).
                if entry.is_dir(follow_symlinks=name == COLLECTIVES_DIRECTORY):
                    file_states += _files(entry.path, f"{name}/")
            except OSError:
                continue  # The file was removed after it was listed.
    return file_states


def _input_place(name: str) -> int | None:
    """Return the sort position of file ``name`` among the inputs of derived data, and None if it is not an input."""
    directory, _, own = name.rpartition("/")
    if directory:
        return len(_INPUTS) if directory == COLLECTIVES_DIRECTORY and own.endswith(".parquet") else None
    return _INPUT_FILES.get(own, len(_INPUTS) + 1 if own.startswith("rank-") else None)

"""The fingerprint of a run: names, sizes and times of its files, and of those from which derived files are made."""

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

VERSION: Final = 26  # of what is derived: the index and the summaries
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
    """What the files of a run look like at one moment.

    Attributes:
        run: the directory, without symbolic links.
        files: name below ``run``, size, inode, and times of change of each file; empty where ``run`` cannot be read.
    """

    run: Path
    files: tuple[tuple[str, int, int, int, int], ...]

    @cached_property
    def key(self) -> str:
        """Another text whenever any file of the run changes, comes or goes."""
        text = repr((os.fspath(self.run), self.files))
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()

    @cached_property
    def inputs(self) -> str:
        """Another text whenever a file that derived files are made from changes, comes or goes: the same for a moved run."""
        file_states = sorted(
            (place, name.rpartition("/")[2], size, changed)
            for name, size, _, changed, _ in self.files
            if (place := _input_place(name)) is not None
        )
        return hashlib.sha256(json.dumps([VERSION, *(each[1:] for each in file_states)]).encode()).hexdigest()

    @property
    def is_still(self) -> bool:
        """Whether no process writes to the files as it runs: such files grow without a change of their size and times."""
        return bool(self.files) and not any(name.endswith(_GROWING) for name, *_ in self.files)


class Opening:
    """Stands for the state of a run that is being written, as one reader found it: no other one has the same."""


def fingerprint(run: Path) -> Fingerprint:
    """The fingerprint of ``run`` as it is now."""
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
                continue  # gone since it was listed
    return file_states


def _input_place(name: str) -> int | None:
    """Where file ``name`` comes among those that derived files are made from; None: it is none of them."""
    directory, _, own = name.rpartition("/")
    if directory:
        return len(_INPUTS) if directory == COLLECTIVES_DIRECTORY and own.endswith(".parquet") else None
    return _INPUT_FILES.get(own, len(_INPUTS) + 1 if own.startswith("rank-") else None)

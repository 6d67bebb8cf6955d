"""``parts.json``, which makes a directory with the parts of a shared model a checkpoint.

Each save of a tag is a generation with its own directories. ``parts.json`` names the generation. It is replaced atomically
when all parts are complete; then the parts of the previous generation are removed. So a save that is interrupted at any
point leaves either the old checkpoint or the new one.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from zero_runtime.checkpoint.files.checkpoint_manifest import (
    FILE_NAME,
    PARTS,
    is_part,
    is_rank_file,
    part_name,
)
from zero_runtime.checkpoint.files.tensor_file import discard, replace_file, sync_directory
from zero_runtime.errors import CheckpointError

_FORMAT: Final = "zero_runtime checkpoint in parts"
_VERSION: Final = 1


class Parts(NamedTuple):
    """The content of ``parts.json``.

    Attributes:
        axes: ranks along each axis that partitions the model.
        counters: as in the manifest of each part.
        generation: how many times this tag has been saved in parts.
    """

    axes: dict[str, int]
    counters: dict[str, int]
    generation: int

    def names(self, count: int) -> list[str]:
        """The directories of the first ``count`` parts."""
        return [part_name(rank, self.generation) for rank in range(count)]


def read_parts(directory: Path) -> Parts | None:
    """The content of ``parts.json`` in ``directory``; None if there is no such file.

    Raises:
        CheckpointError: it cannot be read, or is of another format or version.
    """
    path = directory / PARTS
    try:
        content = json.loads(path.read_bytes())
        known = (content["format"], content["version"]) == (_FORMAT, _VERSION)
        parts = Parts(dict(content["axes"]), dict(content["counters"]), int(content.get("generation", 1)))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; load another tag") from None
    if not known:
        raise CheckpointError(f"{path} is of another format or version; load another tag")
    return parts


def next_generation(directory: Path) -> int:
    """The generation that a save in parts to ``directory`` makes. All ranks see the same, until ``commit_parts``."""
    try:
        parts = read_parts(directory)
    except CheckpointError:
        parts = None
    return 1 if parts is None else parts.generation + 1


def commit_parts(directory: Path, parts: Parts) -> None:
    """Make ``directory`` the checkpoint that ``parts`` describes. Raises CheckpointError."""
    content = {"format": _FORMAT, "version": _VERSION, **parts._asdict()}
    replace_file(directory / PARTS, json.dumps(content, indent=1))


def remove_other_parts(directory: Path, names: list[str]) -> None:
    """Remove all parts except ``names``, and with ``names`` the files of a complete model that was saved here before."""
    for path in list(directory.iterdir()):
        if is_part(path.name) and path.name not in names:
            remove_part(path)
    if names:
        _remove_files(directory)


def remove_part(directory: Path) -> None:
    """Remove the directory of a part; other files than a checkpoint's stay."""
    with suppress(OSError):
        _remove_files(directory)
        directory.rmdir()


def end_parts(directory: Path) -> None:
    """Make the complete model in ``directory`` its checkpoint, if parts were saved here before."""
    path = directory / PARTS
    if path.exists():
        path.unlink()
        sync_directory(directory)
    remove_other_parts(directory, [])


def _remove_files(directory: Path) -> None:
    discard(directory / FILE_NAME)
    for path in list(directory.iterdir()):
        if is_rank_file(path.name):
            discard(path)

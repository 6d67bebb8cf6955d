"""``parts.json``, the file that makes a directory with the parts of a shared model a checkpoint.

Each save of a tag is a generation with its own directories, and ``parts.json`` names the generation.
``parts.json`` is replaced atomically when all parts are complete. Then the parts of the previous generation are
removed. A save that is interrupted at any point therefore leaves either the old checkpoint or the new
checkpoint.
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
        axes: The number of ranks along each axis that partitions the model.
        counters: The counters, as in the manifest of each part.
        generation: The number of times that this tag has been saved in parts.
    """

    axes: dict[str, int]
    counters: dict[str, int]
    generation: int

    def names(self, count: int) -> list[str]:
        """Return the names of the directories of the first ``count`` parts."""
        return [part_name(rank, self.generation) for rank in range(count)]


def read_parts(directory: Path) -> Parts | None:
    """Return the content of ``parts.json`` in ``directory``, or None if there is no such file.

    Raises:
        CheckpointError: The file cannot be read, or has another format or version.
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
    """Return the generation number of the next save in parts to ``directory``.

    All ranks get the same number until ``commit_parts`` is called.
    """
    try:
        parts = read_parts(directory)
    except CheckpointError:
        parts = None
    return 1 if parts is None else parts.generation + 1


def commit_parts(directory: Path, parts: Parts) -> None:
    """Make ``directory`` the checkpoint that ``parts`` describes. Raise CheckpointError if this fails."""
    content = {"format": _FORMAT, "version": _VERSION, **parts._asdict()}
    replace_file(directory / PARTS, json.dumps(content, indent=1))


def remove_other_parts(directory: Path, names: list[str]) -> None:
    """Remove all parts except ``names``.

    If ``names`` is not empty, also remove the files of a complete model that was saved here before.
    """
    for path in list(directory.iterdir()):
        if is_part(path.name) and path.name not in names:
            remove_part(path)
    if names:
        _remove_files(directory)


def remove_part(directory: Path) -> None:
    """Remove the directory of a part. Files that do not belong to a checkpoint stay."""
    with suppress(OSError):
        _remove_files(directory)
        directory.rmdir()


def end_parts(directory: Path) -> None:
    """Make the complete model in ``directory`` its checkpoint, if parts were saved in ``directory`` before."""
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

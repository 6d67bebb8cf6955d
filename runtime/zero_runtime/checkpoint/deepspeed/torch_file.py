"""Reads one torch.save file without running code in it. Tensors are memory-mapped and not copied."""

from __future__ import annotations

import json
import zipfile
import zlib
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import torch

from zero_runtime.checkpoint.deepspeed.objects import STAND_INS
from zero_runtime.errors import CheckpointError

_CHUNK: Final = 1 << 20  # The number of bytes that are read at a time.
_AGAIN: Final = "copy it again, or load another tag"


def read(path: Path) -> Any:
    """Return the content of ``path``, on the CPU. Tensors are read when they are used.

    Raises:
        CheckpointError: The file is missing or truncated, has another format, or names a class that is not on
            the closed list. No code in the file was run.
    """
    if not path.is_file():
        raise CheckpointError(f"{path} is missing; copy all files of the checkpoint, or load another tag")
    with torch.serialization.safe_globals([(stand_in, name) for name, stand_in in STAND_INS.items()]):
        try:
            unknown = torch.serialization.get_unsafe_globals_in_checkpoint(str(path))
        except Exception as error:  # A damaged file can raise errors of many kinds.
            raise CheckpointError(_damaged(path, error)) from None
        if unknown:
            raise CheckpointError(
                f"{path} refers to {', '.join(sorted(unknown))}, which a checkpoint of DeepSpeed does not need; no "
                "code of the file was run. If the file is yours, save its content with DeepSpeed as numbers, "
                "strings, lists, dicts and tensors, and load the new file"
            )
        try:
            return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        except Exception as error:
            raise CheckpointError(_damaged(path, error)) from None


def read_dict(path: Path, *keys: str) -> dict[str, Any]:
    """Read a file that must contain a dictionary with ``keys``, in the same way as :func:`read`.

    Raises:
        CheckpointError: :func:`read` fails, or the file contains something else.
    """
    content = read(path)
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__}; expected a dictionary; {_AGAIN}")
    missing = [key for key in keys if key not in content]
    if missing:
        raise CheckpointError(
            f"{path} has no {', '.join(map(repr, missing))}, only {', '.join(map(repr, list(content)[:8]))}; expected "
            "a file "
            f"as DeepSpeed 0.14 to 0.19 writes it; {_AGAIN}"
        )
    return content


def read_weights(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a file of weights, by name. The file has torch.save's format or is a safetensors file.

    Raises:
        CheckpointError: The file has neither format, or contains something else.
    """
    if path.suffix == ".safetensors":
        try:
            tensors = import_module("safetensors.torch").load_file(path)
        except Exception as error:
            raise CheckpointError(_damaged(path, error)) from None
    else:
        tensors = read_dict(path)
    strange = [name for name, value in tensors.items() if not isinstance(value, torch.Tensor)]
    if strange:
        raise CheckpointError(f"{path} holds {strange[0]!r}, which is no tensor; expected weights by name")
    return dict(tensors)


def read_index(path: Path) -> list[str]:
    """Return the names of the weight files that the index ``path`` lists.

    Raises:
        CheckpointError: The file is not an index of weights.
    """
    try:
        places: Mapping[str, str] = json.loads(path.read_text())["weight_map"]
        names = sorted(set(places.values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is no index of weights ({error}); {_AGAIN}") from None
    strange = [name for name in names if Path(name).name != name]
    if strange:
        raise CheckpointError(f"{path} names the file {strange[0]!r}; expected one in the same directory")
    return names


def verify(path: Path) -> None:
    """Read all of ``path`` and compare it with the checksums in it. A file without checksums passes.

    A file in which every checksum is wrong counts as a file without checksums.

    Raises:
        CheckpointError: The file is damaged.
    """
    if path.suffix == ".safetensors":  # This format has no checksums.
        return
    try:
        with zipfile.ZipFile(path) as archive:
            records = [each for each in archive.infolist() if each.file_size]
            wrong = [each.filename for each in records if not _is_whole(archive, each)]
    except (OSError, zipfile.BadZipFile) as error:
        raise CheckpointError(_damaged(path, error)) from None
    if wrong and len(wrong) < len(records):
        raise CheckpointError(
            f"{path} is damaged: {wrong[0]} in it does not agree with its checksum; {_AGAIN}"
        )


def checksum(path: Path) -> int:
    """Return a 32-bit checksum of the names, lengths and checksums of the records in ``path``.

    For a safetensors file, return the CRC-32 of its first bytes (at most ``_CHUNK``).
    """
    if path.suffix == ".safetensors":  # The header names the tensors and their positions.
        with path.open("rb") as opened:
            return zlib.crc32(opened.read(_CHUNK))
    try:
        with zipfile.ZipFile(path) as archive:
            listing = [(each.filename, each.file_size, each.CRC) for each in archive.infolist()]
    except (OSError, zipfile.BadZipFile) as error:
        raise CheckpointError(_damaged(path, error)) from None
    return zlib.crc32(repr(listing).encode())


def _is_whole(archive: zipfile.ZipFile, record: zipfile.ZipInfo) -> bool:
    try:
        with archive.open(record) as file:
            while file.read(_CHUNK):
                pass
    except zipfile.BadZipFile:
        return False
    return True


def _damaged(path: Path, error: Exception) -> str:
    reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
    return (
        f"{path} cannot be read ({reason}); expected a file of torch.save's, as DeepSpeed writes it. It is damaged, was cut "
        f"off, or is something else; {_AGAIN}"
    )

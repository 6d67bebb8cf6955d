"""Consolidation: reads the complete model from a checkpoint as one fp32 state dict, or writes it to a file.

The functions have the names of ``deepspeed.utils.zero_to_fp32``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from zero_runtime.checkpoint.deepspeed.checkpoint import open_folder
from zero_runtime.checkpoint.files.checkpoint_manifest import (
    FILE_NAME,
    LATEST_UNIVERSAL,
    PARTS,
    check_tag,
    read_latest,
)
from zero_runtime.checkpoint.files.checkpoint_reader import Checkpoint
from zero_runtime.checkpoint.files.tensor_file import Entry, discard, write
from zero_runtime.checkpoint.opened import OpenCheckpoint
from zero_runtime.checkpoint.ranks.merged_ranks import open_stages
from zero_runtime.errors import CheckpointError

SAFETENSORS: Final = ".safetensors"
PICKLED: Final = (".bin", ".pt", ".pth")


class _Tensor(NamedTuple):
    name: str
    stored_as: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    is_buffer: bool


def open_checkpoint(directory: str | Path, tag: str | None = None) -> OpenCheckpoint:
    """Open and verify a checkpoint.

    This is the checkpoint ``tag`` in ``directory``, the checkpoint that was saved last, or ``directory``
    itself.

    Raises:
        CheckpointError: There is no checkpoint, or it is damaged.
    """
    directory = Path(directory)
    if tag is None and not (directory / FILE_NAME).is_file():
        tag = read_latest(directory) or read_latest(directory, LATEST_UNIVERSAL)
    if tag is not None:
        check_tag(tag)
        directory = directory / tag
    checkpoint: OpenCheckpoint | None = None
    if (directory / PARTS).is_file():
        checkpoint = open_stages(directory)
    elif not (directory / FILE_NAME).is_file():
        checkpoint = open_folder(directory)
    if checkpoint is None:
        if tag is None and directory.is_dir() and any(each.is_dir() for each in directory.iterdir()):
            raise CheckpointError(
                f"{directory / 'latest'} does not exist, so the last tag is not known; name the tag"
            )
        checkpoint = Checkpoint(directory)
    checkpoint.verify(range(len(checkpoint.manifest.files)))
    return checkpoint


def consolidated_state_dict(
    directory: str | Path, tag: str | None = None, exclude_frozen_parameters: bool = False
) -> dict[str, torch.Tensor]:
    """Return the complete model on the CPU: floating-point parameters in fp32, other parameters and buffers unchanged.

    Tied parameters appear under all their names and are one tensor.

    Args:
        directory: The directory of checkpoints (``save_dir``), or one checkpoint.
        tag: The tag of the checkpoint. None for the checkpoint that was saved last.
        exclude_frozen_parameters: Whether to leave out parameters that were not trainable.

    Raises:
        CheckpointError: There is no checkpoint, or it is damaged.
    """
    return state_dict(open_checkpoint(directory, tag), True, exclude_frozen_parameters)


def state_dict(
    checkpoint: OpenCheckpoint, fp32: bool = True, exclude_frozen: bool = False
) -> dict[str, torch.Tensor]:
    """Return the complete model on the CPU, in fp32 or in the original dtypes of the model."""
    tensors: dict[str, torch.Tensor] = {}
    for each in _tensors(checkpoint, fp32, exclude_frozen):
        tensors[each.name] = tensors[each.stored_as] if each.stored_as in tensors else _read(checkpoint, each)
    return tensors


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | Path,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, torch.Tensor]:
    """Return :func:`consolidated_state_dict`, under its DeepSpeed name. ``lazy_mode`` has no effect."""
    return consolidated_state_dict(checkpoint_dir, tag, exclude_frozen_parameters)


def load_state_dict_from_zero_checkpoint(
    model: torch.nn.Module, checkpoint_dir: str | Path, tag: str | None = None
) -> torch.nn.Module:
    """Load the consolidated state dict into ``model`` on the CPU, and return ``model``."""
    model = model.cpu()
    model.load_state_dict(consolidated_state_dict(checkpoint_dir, tag), strict=False)
    return model


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | Path,
    output_dir: str | Path,
    max_shard_size: int | str | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write the consolidated state dict into ``output_dir``, in files of at most ``max_shard_size``.

    A single file is named ``pytorch_model.bin``, or ``model.safetensors`` with ``safe_serialization``. Several
    files are numbered, and an index names the file of each tensor.

    Args:
        checkpoint_dir: The directory of checkpoints.
        output_dir: The directory for the files. It is created if it is missing. Files with the same names are
            replaced.
        max_shard_size: The largest size of a file, in bytes or as a number with KB, MB or GB. None for one
            file.
        safe_serialization: Whether to write safetensors, tensor by tensor, instead of torch.save's format.
        tag: The tag of the checkpoint. None for the checkpoint that was saved last.
        exclude_frozen_parameters: Whether to leave out parameters that were not trainable.

    Raises:
        CheckpointError: There is no checkpoint, it is damaged, or the files cannot be written.
    """
    checkpoint = open_checkpoint(checkpoint_dir, tag)
    output = Path(output_dir)
    output.mkdir(parents=True, exist_ok=True)
    tensors = list(_tensors(checkpoint, True, exclude_frozen_parameters))
    stem, suffix = ("model", SAFETENSORS) if safe_serialization else ("pytorch_model", ".bin")
    shards = _shards(tensors, _num_bytes(max_shard_size))
    places = {}
    for number, shard in enumerate(shards, 1):
        name = f"{stem}{suffix}" if len(shards) == 1 else f"{stem}-{number:05d}-of-{len(shards):05d}{suffix}"
        _write(checkpoint, shard, output / name)
        places.update(dict.fromkeys((each.name for each in shard), name))
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(map(_size, tensors))}, "weight_map": places}
        (output / f"{stem}{suffix}.index.json").write_text(json.dumps(index, indent=2) + "\n")


def write_state_dict(checkpoint: OpenCheckpoint, path: Path, exclude_frozen: bool = False) -> None:
    """Write the consolidated state dict to one file: safetensors, or torch.save's format for .bin, .pt and .pth."""
    _write(checkpoint, list(_tensors(checkpoint, True, exclude_frozen)), path)


def _write(checkpoint: OpenCheckpoint, tensors: list[_Tensor], path: Path) -> None:
    fresh = path.with_name(f".{path.name}.writing")
    try:
        if path.suffix in PICKLED:
            # torch.save needs all tensors in memory at once.
            read: dict[str, torch.Tensor] = {}
            for each in tensors:
                read[each.name] = read[each.stored_as] if each.stored_as in read else _read(checkpoint, each)
            torch.save(read, fresh)
        else:
            entries = [
                Entry(each.name, each.dtype, each.shape, partial(_read, checkpoint, each)) for each in tensors
            ]
            write(fresh, entries, {"format": "pt"})
        fresh.replace(path)
    except (OSError, RuntimeError) as error:
        discard(fresh)
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            f"{path} could not be written: {error}; make room or choose another place"
        ) from None


def _tensors(checkpoint: OpenCheckpoint, fp32: bool, exclude_frozen: bool) -> Iterator[_Tensor]:
    further: dict[str, list[str]] = {}
    for alias, name in checkpoint.manifest.aliases.items():
        further.setdefault(name, []).append(alias)
    for name, facts in checkpoint.parameters.items():
        if exclude_frozen and not facts.requires_grad:
            continue
        dtype = getattr(torch, facts.dtype)
        dtype = torch.float32 if fp32 and dtype.is_floating_point else dtype
        for each in (name, *further.get(name, ())):
            yield _Tensor(each, name, dtype, facts.shape, False)
    for name in checkpoint.manifest.buffers:
        buffer = checkpoint.buffer(name, 0)
        for each in (name, *further.get(name, ())):
            yield _Tensor(each, name, buffer.dtype, tuple(buffer.shape), True)


def _read(checkpoint: OpenCheckpoint, each: _Tensor) -> torch.Tensor:
    if each.is_buffer:
        return checkpoint.buffer(each.stored_as, 0)
    flat = torch.empty(math.prod(each.shape), dtype=each.dtype)
    checkpoint.read_value(each.stored_as, 0, flat)
    return flat.view(each.shape)


def _size(each: _Tensor) -> int:
    return math.prod(each.shape) * each.dtype.itemsize


def _shards(tensors: list[_Tensor], limit: int | None) -> list[list[_Tensor]]:
    shards: list[list[_Tensor]] = [[]]
    shard_bytes = 0
    for each in tensors:
        if limit is not None and shards[-1] and shard_bytes + _size(each) > limit:
            shards.append([])
            shard_bytes = 0
        shards[-1].append(each)
        shard_bytes += _size(each)
    return shards


def _num_bytes(size: Any) -> int | None:
    units = {"GB": 10**9, "MB": 10**6, "KB": 10**3, "GIB": 1 << 30, "MIB": 1 << 20, "KIB": 1 << 10}
    if size is None or isinstance(size, int):
        return size
    text = str(size).strip().upper()
    for unit, factor in units.items():
        if text.endswith(unit) and text.removesuffix(unit).strip().isdigit():
            return int(text.removesuffix(unit)) * factor
    raise CheckpointError(
        f"max_shard_size is {size!r}; expected bytes, or a number with KB, MB or GB, such as 5GB"
    )

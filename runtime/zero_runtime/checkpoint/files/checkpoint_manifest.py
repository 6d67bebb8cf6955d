"""The manifest of a checkpoint, and the file ``latest``.

A checkpoint is a directory that contains ``manifest.json`` and one file for each rank, which the manifest
names::

    <save_dir>/latest                               the tag that was saved last
    <save_dir>/<tag>/manifest.json
    <save_dir>/<tag>/rank-00000-1.safetensors       rank 0's file of generation 1

A directory is a checkpoint only if it has a manifest. The manifest is written last and replaced atomically.
Each save of a tag is a generation with its own files. The files of the previous generation are removed
afterwards. A save that is interrupted at any point therefore leaves either the old checkpoint or the new
checkpoint.
"""

from __future__ import annotations

import json
import re
import zlib
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final

from zero_runtime.checkpoint.files.tensor_file import replace_file
from zero_runtime.errors import CheckpointError

FORMAT: Final = "zero_runtime checkpoint"
VERSION: Final = 1
FILE_NAME: Final = "manifest.json"
LATEST: Final = "latest"
PARTS: Final = "parts.json"  # This file exists if pipeline stages or tensor-parallel ranks share a model.
# The tag of the last universal folder, as DeepSpeed's ds_to_universal names it.
LATEST_UNIVERSAL: Final = "latest_universal"
_RANK_FILE: Final = re.compile(r"rank-\d{5,}-\d+\.safetensors")
_PART: Final = re.compile(r"part-\d{5,}(-\d+)?")


@dataclass(frozen=True, slots=True)
class RankFile:
    """The file of one rank: its name in the directory, its length in bytes, and its CRC-32."""

    name: str
    num_bytes: int
    crc32: int


@dataclass(frozen=True, slots=True)
class ParameterFacts:
    """The properties of a parameter that are equal on every rank.

    Attributes:
        shape: The shape of the whole parameter.
        dtype: The dtype in the model, such as bfloat16. The checkpoint may store the values in fp32.
        group: The number of the param group. None if no optimizer updates the parameter.
        requires_grad: Whether the parameter was trainable.
        cut_dim: The dimension along which tensor-parallel ranks partition the parameter. None if each rank has
            the complete tensor.
        cut_sections: The extents, along this dimension, of the sections that are partitioned separately. An
            example is the query, key and value of one joint weight. Empty if the extents are not known.
    """

    shape: tuple[int, ...]
    dtype: str
    group: int | None
    requires_grad: bool
    cut_dim: int | None = None
    cut_sections: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything in a checkpoint except its tensors. The type ``Any`` means a value in the form of ``values.Encoder``.

    Attributes:
        tag: The tag of the checkpoint.
        generation: The number of times that this tag has been saved.
        zero_runtime, torch: The versions that wrote the checkpoint.
        stage: The ZeRO stage, for information only. Loading does not depend on it.
        counters: The counters global_steps, global_samples, skipped_steps, micro_steps and
            gradient_accumulation_steps.
        optimizer: The class name of the torch optimizer. None without an optimizer.
        param_groups: The options of each param group.
        lr_scheduler, loss_scale: The states of the schedule and of the loss scale. None if there is no such
            object.
        client_state: The values that the script passed to ``save_checkpoint``.
        parameters: The properties of each parameter, by name.
        aliases: Additional names of tied parameters and shared buffers, and the names under which they are
            stored.
        buffers: The names of the persistent buffers.
        extra_state: The state of modules with ``get_extra_state``, by module name.
        excluded: The names of frozen parameters that were left out.
        files: The files, by rank.
    """

    tag: str
    generation: int
    zero_runtime: str
    torch: str
    stage: int
    counters: dict[str, int]
    optimizer: str | None
    param_groups: Any
    lr_scheduler: Any
    loss_scale: Any
    client_state: Any
    parameters: dict[str, ParameterFacts]
    aliases: dict[str, str]
    buffers: list[str]
    extra_state: Any
    excluded: list[str]
    files: tuple[RankFile, ...]


def rank_file_name(rank: int, generation: int) -> str:
    """Return the name of a rank's file."""
    return f"rank-{rank:05d}-{generation}.safetensors"


def part_name(rank: int, generation: int = 1) -> str:
    """Return the name of the directory of rank ``rank`` among the ranks that share one model."""
    return f"part-{rank:05d}" if generation == 1 else f"part-{rank:05d}-{generation}"


def is_rank_file(name: str) -> bool:
    """Return whether ``name`` has the form of a name from :func:`rank_file_name`."""
    return _RANK_FILE.fullmatch(name) is not None


def is_part(name: str) -> bool:
    """Return whether ``name`` has the form of a name from :func:`part_name`."""
    return _PART.fullmatch(name) is not None


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Make ``directory`` the checkpoint that ``manifest`` describes. Raise CheckpointError if this fails."""
    content = {"format": FORMAT, "version": VERSION, **asdict(manifest)}
    replace_file(
        directory / FILE_NAME, json.dumps({**content, "crc32": _checksum(content)}, indent=1, allow_nan=False)
    )


def read_manifest(directory: Path) -> Manifest:
    """Return the manifest in ``directory``.

    Raises:
        CheckpointError: There is no manifest, it is damaged, or it has another format or another version.
    """
    path = directory / FILE_NAME
    try:
        content = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(describe_foreign(directory)) from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}; look at its permissions") from None
    except (ValueError, RecursionError):
        raise CheckpointError(
            f"{path} is no JSON: it is damaged or was cut off by a copy; copy it again, or load another tag"
        ) from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not the manifest of a zero_runtime checkpoint; load another tag")
    if content.get("version") != VERSION:
        raise CheckpointError(
            f"{path} is of version {content.get('version')!r}, and this zero_runtime reads version {VERSION}; "
            "use a newer zero_runtime"
        )
    if content.pop("crc32", None) != _checksum(content):
        raise CheckpointError(
            f"{path} does not agree with its own checksum: it was changed or damaged after it was written; copy it "
            "again, or load another tag"
        )
    return _from_json(path, content)


def _from_json(path: Path, content: dict[str, Any]) -> Manifest:
    try:
        values = {each.name: content[each.name] for each in fields(Manifest)}
        values["parameters"] = {
            name: ParameterFacts(
                tuple(facts.pop("shape")), cut_sections=tuple(facts.pop("cut_sections", ())), **facts
            )
            for name, facts in content["parameters"].items()
        }
        values["files"] = tuple(RankFile(**each) for each in content["files"])
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path} lacks {error}; it was changed after it was written; load another tag"
        ) from None
    manifest = Manifest(**values)
    strange = [each.name for each in manifest.files if not is_rank_file(each.name)]
    if strange:
        raise CheckpointError(
            f"{path} names the file {strange[0]!r}; expected rank-00000-1.safetensors and the like"
        )
    return manifest


def _checksum(content: dict[str, Any]) -> int:
    # The content passes through JSON first, so that written and read content have the same checksum.
    return zlib.crc32(json.dumps(json.loads(json.dumps(content)), sort_keys=True).encode())


def describe_foreign(directory: Path) -> str:
    """Return the reason why a directory without a manifest is not loaded, and what to do."""
    if not directory.exists():
        parent = directory.parent
        tags = sorted(each.parent.name for each in parent.glob(f"*/{FILE_NAME}")) if parent.is_dir() else []
        if not tags:
            return f"there is no checkpoint {directory}, nor another one in {parent}"
        return f"there is no checkpoint {directory}; {parent} has {', '.join(tags)}"
    if not directory.is_dir():
        return (
            f"{directory} is a file; expected the directory of a checkpoint. A file of torch.save is not loaded here, "
            "because it is pickle; load it with torch.load(..., weights_only=True) and model.load_state_dict"
        )
    names = sorted(each.name for each in directory.iterdir())
    if PARTS in names:
        return (
            f"{directory} holds one checkpoint for each rank that shared the model ({PARTS}); load it with "
            "engine.load_checkpoint, which takes any tp_size and number of stages"
        )
    if not names:
        return f"{directory} is empty: no checkpoint was saved there; load another tag"
    if any(is_rank_file(name) for name in names):
        return (
            f"{directory} was never finished: it has files of ranks and no {FILE_NAME}. The save was cut off; load "
            "the tag before it"
        )
    if any(is_part(name) for name in names):
        return (
            f"{directory} was never finished: it has parts of a model and no {PARTS}. The save was cut off; load the tag "
            "before it"
        )
    return f"{directory} is no checkpoint of zero_runtime: it has {', '.join(names[:3])} and no {FILE_NAME}"


def write_latest(directory: Path, tag: str) -> None:
    """Make ``tag`` the tag that is loaded when no tag is named. Raise CheckpointError if this fails."""
    replace_file(directory / LATEST, tag)


def read_latest(directory: Path, name: str = LATEST) -> str | None:
    """Return the tag that was saved last into ``directory``, or None if the file ``name`` does not exist.

    Raises:
        CheckpointError: The file cannot be read, or does not contain a tag.
    """
    path = directory / name
    try:
        tag = path.read_text(encoding="utf-8").strip()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; name the tag") from None
    check_tag(tag, f"{path} holds the tag")
    return tag


def check_tag(tag: str, subject: str = "the tag is") -> None:
    """Raise CheckpointError if ``tag`` cannot be the name of a directory."""
    if not tag or tag in (".", "..", LATEST) or "/" in tag or "\0" in tag or len(tag.encode()) > 200:
        raise CheckpointError(
            f"{subject} {tag!r}; expected the name of a directory, without slashes, of at most 200 bytes, other than "
            f"{LATEST!r}, such as global_step100"
        )

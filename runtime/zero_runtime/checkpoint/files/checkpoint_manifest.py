"""The manifest of a checkpoint, and the file ``latest``.

A checkpoint is a directory that holds ``manifest.json`` and the files that it names, one of each rank::

    <save_dir>/latest                               the tag that was saved last
    <save_dir>/<tag>/manifest.json
    <save_dir>/<tag>/rank-00000-1.safetensors       rank 0's file of generation 1

A directory is a checkpoint once it has a manifest, which is written last and replaced atomically. Each save of a tag is a
generation with its own files; the files of the previous generation are removed afterwards. So a save that is interrupted
at any point leaves either the old checkpoint or the new one.
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
PARTS: Final = "parts.json"  # of a model that pipeline stages or tensor-parallel ranks share
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
    """What is true of a parameter on every rank.

    Attributes:
        shape: of the whole parameter.
        dtype: the model's, such as bfloat16; the checkpoint may hold its values in fp32.
        group: its param group; None if no optimizer updates it.
        requires_grad: whether it was trainable.
        cut_dim: the dimension along which tensor-parallel ranks partition it; None if each rank has the complete tensor.
        cut_sections: extents along that dimension of the sections that are partitioned separately, such as the query, key
            and value of one joint weight; empty if they are not known.
    """

    shape: tuple[int, ...]
    dtype: str
    group: int | None
    requires_grad: bool
    cut_dim: int | None = None
    cut_sections: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything in a checkpoint but its tensors. ``Any`` stands for values in the form of ``values.Encoder``.

    Attributes:
        tag: of the checkpoint.
        generation: how many times this tag has been saved.
        zero_runtime, torch: versions that wrote it.
        stage: the ZeRO stage, for people; loading does not depend on it.
        counters: global_steps, global_samples, skipped_steps, micro_steps, gradient_accumulation_steps.
        optimizer: the class of the torch optimizer; None without one.
        param_groups: the options of each param group.
        lr_scheduler, loss_scale: their states; None without one.
        client_state: the values that the script passed to ``save_checkpoint``.
        parameters: facts by name.
        aliases: further names of tied parameters and shared buffers, and the names under which they are stored.
        buffers: names of the persistent buffers.
        extra_state: the state of modules with ``get_extra_state``, by module name.
        excluded: frozen parameters that were left out.
        files: by rank.
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
    """The name of a rank's file."""
    return f"rank-{rank:05d}-{generation}.safetensors"


def part_name(rank: int, generation: int = 1) -> str:
    """The directory of rank ``rank`` among the ranks that share one model."""
    return f"part-{rank:05d}" if generation == 1 else f"part-{rank:05d}-{generation}"


def is_rank_file(name: str) -> bool:
    """Whether ``name`` is one that :func:`rank_file_name` makes."""
    return _RANK_FILE.fullmatch(name) is not None


def is_part(name: str) -> bool:
    """Whether ``name`` is one that :func:`part_name` makes."""
    return _PART.fullmatch(name) is not None


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Make ``directory`` the checkpoint that ``manifest`` describes. Raises CheckpointError."""
    content = {"format": FORMAT, "version": VERSION, **asdict(manifest)}
    replace_file(
        directory / FILE_NAME, json.dumps({**content, "crc32": _checksum(content)}, indent=1, allow_nan=False)
    )


def read_manifest(directory: Path) -> Manifest:
    """The manifest in ``directory``.

    Raises:
        CheckpointError: there is none, it is damaged, or it is of another format or a later version.
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
    # Through JSON, so that what was written and what was read give the same.
    return zlib.crc32(json.dumps(json.loads(json.dumps(content)), sort_keys=True).encode())


def describe_foreign(directory: Path) -> str:
    """Why a directory without a manifest is not loaded, and what to do."""
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
    """Make ``tag`` the one that is loaded when none is named. Raises CheckpointError."""
    replace_file(directory / LATEST, tag)


def read_latest(directory: Path, name: str = LATEST) -> str | None:
    """The tag that was saved last into ``directory``, read from the file ``name``; None if there is no such file.

    Raises:
        CheckpointError: the file cannot be read, or holds no tag.
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
    """Refuse a tag that cannot be the name of a directory. Raises CheckpointError."""
    if not tag or tag in (".", "..", LATEST) or "/" in tag or "\0" in tag or len(tag.encode()) > 200:
        raise CheckpointError(
            f"{subject} {tag!r}; expected the name of a directory, without slashes, of at most 200 bytes, other than "
            f"{LATEST!r}, such as global_step100"
        )

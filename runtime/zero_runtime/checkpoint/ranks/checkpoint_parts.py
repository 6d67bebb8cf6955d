"""Checkpoints of a model that several ranks share: one checkpoint for each part, and ``parts.json``.

::

    <save_dir>/latest
    <save_dir>/<tag>/parts.json                     the axes, and the step of the parts
    <save_dir>/<tag>/part-00000/manifest.json       the part of the first rank of each model
    <save_dir>/<tag>/part-00001/manifest.json       the part of the second rank

Each part is a complete checkpoint, which the replicas of that rank save and load among themselves. ``parts.json`` is
written once all parts are complete and names their step, so that parts of two saves are never mixed.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

from zero_runtime.checkpoint.files.checkpoint_manifest import (
    FILE_NAME,
    PARTS,
    check_tag,
    part_name,
    read_latest,
    write_latest,
)
from zero_runtime.checkpoint.files.checkpoint_writer import save
from zero_runtime.checkpoint.files.tensor_file import replace_file
from zero_runtime.checkpoint.loading import Loaded, Others, Wanted, load
from zero_runtime.checkpoint.ranks import save_agreement
from zero_runtime.checkpoint.ranks.merged_ranks import open_stages, saved_axes
from zero_runtime.checkpoint.training import Training, parameters
from zero_runtime.comm import DataParallelGroup
from zero_runtime.errors import CheckpointError
from zero_runtime.groups.parallelism import ModelRanks, is_cut
from zero_runtime.tensor_parallel.cuts import cut_of

_FORMAT: Final = "zero_runtime checkpoint in parts"
_VERSION: Final = 1


def save_parts(
    training: Training,
    model: ModelRanks,
    sizes: Mapping[str, int],
    save_dir: Path,
    tag: str,
    client_state: Mapping[str, Any],
    *,
    tag_validation: str = "Warn",
    save_latest: bool = True,
    exclude_frozen: bool = False,
) -> None:
    """Save ``training`` as ``save_dir/tag``. All ranks must call it; further arguments are those of ``writer.save``.

    Args:
        model: the ranks that share the model.
        sizes: ranks along each axis that partitions it.

    Raises:
        CheckpointError: on every rank, if one of them fails.
    """
    doing = f"saving {save_dir / tag}"
    _, error = save_agreement.attempt(lambda: check_tag(tag))
    save_agreement.agree(model.group, error, doing)
    save_agreement.validate_tag(model.group, tag, tag_validation)
    _, error = save_agreement.attempt(
        lambda: save(
            training,
            save_dir / tag,
            part_name(model.group.rank),
            client_state,
            tag_validation="Ignore",
            save_latest=False,
            exclude_frozen=exclude_frozen,
        )
    )
    save_agreement.agree(model.group, error, doing)
    content = {
        "format": _FORMAT,
        "version": _VERSION,
        "axes": dict(sizes),
        "counters": dict(training.counters),
    }
    if training.group.rank == 0 and model.group.rank == 0:
        _, error = save_agreement.attempt(lambda: _commit(save_dir, tag, content, save_latest))
    save_agreement.agree_all([model.group, training.group], error, doing)


def _commit(save_dir: Path, tag: str, content: Mapping[str, Any], save_latest: bool) -> None:
    replace_file(save_dir / tag / PARTS, json.dumps(content, indent=1))
    if save_latest:
        write_latest(save_dir, tag)


def load_parts(
    training: Training,
    model: ModelRanks,
    sizes: Mapping[str, int],
    load_dir: Path,
    tag: str | None,
    wanted: Wanted,
) -> Loaded | None:
    """Load this rank's part of a checkpoint with as many parts. All ranks must call it; arguments as in ``loading.load``.

    Raises:
        CheckpointError: on every rank, if one of them fails; or the checkpoint has other axes.
    """
    doing = f"loading {load_dir if tag is None else load_dir / tag}"
    named = read_latest(load_dir) if tag is None else tag
    if named is None:
        return load(training, load_dir, None, wanted)
    content, error = save_agreement.attempt(lambda: _read(load_dir / named, sizes))
    save_agreement.agree(model.group, error, doing)
    assert content is not None
    others = Others(model.group, content["counters"])
    loaded, error = save_agreement.attempt(
        lambda: load(training, load_dir / named, part_name(model.group.rank), wanted, others)
    )
    save_agreement.agree(model.group, error, doing)
    return None if loaded is None else loaded._replace(directory=loaded.directory.parent)


def axes_of_saved(load_dir: Path, tag: str | None) -> dict[str, int] | None:
    """The ranks along each axis that partitioned the saved model; None without a checkpoint of this runtime.

    Raises:
        CheckpointError: ``latest`` or ``parts.json`` cannot be read.
    """
    named = read_latest(load_dir) if tag is None else tag
    if named is None:
        return None
    directory = load_dir / named
    if not (directory / PARTS).is_file() and not (directory / FILE_NAME).is_file():
        return None
    return saved_axes(directory)


def load_recut(
    training: Training,
    load_dir: Path,
    tag: str | None,
    wanted: Wanted,
    names: Collection[str] | None,
) -> Loaded | None:
    """Load this rank's shards of a model that was saved with another partition, or complete. All ranks must call it.

    Args:
        training: the engine's parts to load into.
        load_dir, tag, wanted: as in ``loading.load``.
        names: of the parameters, buffers and aliases to load; None for all that were saved.

    Raises:
        CheckpointError: on every rank, if one of them fails.
    """
    cuts = {name: cut for name, each in parameters(training).items() if (cut := cut_of(each)) is not None}
    strange = [name for name, each in parameters(training).items() if is_cut(each) and name not in cuts]
    everyone = DataParallelGroup()
    error = None
    if strange:
        error = CheckpointError(
            f"parameter {strange[0]!r} was partitioned by the script, so its position in the saved tensor is not known; "
            "load a checkpoint of as many ranks for each model"
        )
    save_agreement.agree(everyone, error, f"loading {load_dir}")
    opener = partial(open_stages, names=names, cuts=cuts)
    return load(training._replace(group=everyone), load_dir, tag, wanted, opener=opener)


def _read(directory: Path, sizes: Mapping[str, int]) -> dict[str, Any]:
    path = directory / PARTS
    try:
        content = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        if (directory / FILE_NAME).is_file():
            raise CheckpointError(
                f"{directory} holds the complete model, and here {_shown(sizes)} share one; load it without these axes"
            ) from None
        raise CheckpointError(f"there is no checkpoint {directory} of a model in parts") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; load another tag") from None
    if content.get("format") != _FORMAT or content.get("version") != _VERSION:
        raise CheckpointError(f"{path} is of another format or version; load another tag")
    if content["axes"] != dict(sizes):
        raise CheckpointError(
            f"{directory} was saved with {_shown(content['axes'])}, and here there are {_shown(sizes)}; expected the same "
            "sizes"
        )
    return dict(content)


def _shown(sizes: Mapping[str, int]) -> str:
    names = {"model": "tp_size", "pipe": "pipeline stages"}
    return " x ".join(f"{names.get(axis, axis)} {size}" for axis, size in sizes.items())

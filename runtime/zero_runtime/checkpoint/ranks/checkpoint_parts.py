"""Checkpoints of a model that several ranks share: one checkpoint for each part, and ``parts.json``.

::

    <save_dir>/latest
    <save_dir>/<tag>/parts.json                     the axes, the step and the generation of the parts
    <save_dir>/<tag>/part-00000/manifest.json       the part of the first rank of each model, of generation 1
    <save_dir>/<tag>/part-00001/manifest.json       the part of the second rank

Each part is a complete checkpoint, which the replicas of one rank save and load among themselves.
``parts.json`` is written after all parts are complete. It names the step of the parts, so that parts of two
saves are never mixed (:mod:`~zero_runtime.checkpoint.ranks.parts_file`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from zero_runtime.checkpoint.files.checkpoint_manifest import (
    FILE_NAME,
    PARTS,
    check_tag,
    describe_foreign,
    part_name,
    read_latest,
    write_latest,
)
from zero_runtime.checkpoint.files.checkpoint_writer import save
from zero_runtime.checkpoint.loading import Loaded, Others, Wanted, load
from zero_runtime.checkpoint.ranks import save_agreement
from zero_runtime.checkpoint.ranks.merged_ranks import open_stages, saved_axes
from zero_runtime.checkpoint.ranks.parts_file import (
    Parts,
    commit_parts,
    next_generation,
    read_parts,
    remove_other_parts,
    remove_part,
)
from zero_runtime.checkpoint.training import Training, parameters
from zero_runtime.comm import DataParallelGroup
from zero_runtime.errors import CheckpointError
from zero_runtime.groups.parallelism import ModelRanks, is_cut
from zero_runtime.tensor_parallel.cuts import cut_of


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
    """Save ``training`` as ``save_dir/tag``. All ranks must call this function.

    The arguments that are not listed are the same as those of ``checkpoint_writer.save``.

    Args:
        model: The ranks that share the model.
        sizes: The number of ranks along each axis that partitions the model.

    Raises:
        CheckpointError: A rank fails. Every rank raises the error.
    """
    directory = save_dir / tag
    doing = f"saving {directory}"
    _, error = save_agreement.attempt(lambda: check_tag(tag))
    save_agreement.agree(model.group, error, doing)
    save_agreement.validate_tag(model.group, tag, tag_validation)
    generation = next_generation(directory)
    name = part_name(model.group.rank, generation)
    try:
        _, error = save_agreement.attempt(
            lambda: save(
                training,
                directory,
                name,
                client_state,
                tag_validation="Ignore",
                save_latest=False,
                exclude_frozen=exclude_frozen,
            )
        )
        save_agreement.agree(model.group, error, doing)
        if training.group.rank == 0 and model.group.rank == 0:
            parts = Parts(dict(sizes), dict(training.counters), generation)
            count = model.group.world_size
            _, error = save_agreement.attempt(lambda: _commit(save_dir, tag, parts, count, save_latest))
        save_agreement.agree_all([model.group, training.group], error, doing)
    except CheckpointError:
        # If only writing ``latest`` failed, parts.json already names the part, and the part must stay.
        if training.group.rank == 0 and next_generation(directory) == generation:
            remove_part(directory / name)
            with suppress(OSError):
                directory.rmdir()  # This fails if the directory is not empty.
        raise


def _commit(save_dir: Path, tag: str, parts: Parts, count: int, save_latest: bool) -> None:
    commit_parts(save_dir / tag, parts)
    if save_latest:
        write_latest(save_dir, tag)
    remove_other_parts(save_dir / tag, parts.names(count))


def load_parts(
    training: Training,
    model: ModelRanks,
    sizes: Mapping[str, int],
    load_dir: Path,
    tag: str | None,
    wanted: Wanted,
) -> Loaded | None:
    """Load this rank's part of a checkpoint that has one part for each rank of the model.

    All ranks must call this function. ``model`` and ``sizes`` are the same as in :func:`save_parts`. The other
    arguments are the same as those of ``loading.load``.

    Raises:
        CheckpointError: A rank fails, or the checkpoint has different axes. Every rank raises the error.
    """
    doing = f"loading {load_dir if tag is None else load_dir / tag}"
    named = read_latest(load_dir) if tag is None else tag
    if named is None:
        return load(training, load_dir, None, wanted)
    parts, error = save_agreement.attempt(lambda: _read(load_dir / named, sizes))
    save_agreement.agree(model.group, error, doing)
    assert parts is not None
    others = Others(model.group, parts.counters)
    name = part_name(model.group.rank, parts.generation)
    loaded, error = save_agreement.attempt(lambda: load(training, load_dir / named, name, wanted, others))
    save_agreement.agree(model.group, error, doing)
    return None if loaded is None else loaded._replace(directory=loaded.directory.parent)


def axes_of_saved(load_dir: Path, tag: str | None) -> dict[str, int] | None:
    """Return the number of ranks along each axis that partitioned the saved model.

    The result is None if there is no checkpoint of this runtime.

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
    """Load this rank's shards of a model that was saved complete or with another partition.

    All ranks must call this function.

    Args:
        training: The parts of the engine to load into.
        load_dir, tag, wanted: The same as in ``loading.load``.
        names: The names of the parameters, buffers and aliases to load. None for all that were saved.

    Raises:
        CheckpointError: A rank fails. Every rank raises the error.
    """
    cuts = {name: cut for name, each in parameters(training).items() if (cut := cut_of(each)) is not None}
    strange = [name for name, each in parameters(training).items() if is_cut(each) and name not in cuts]
    everyone = DataParallelGroup()
    error = None
    if strange:
        error = CheckpointError(
            f"parameter {strange[0]!r} was partitioned by the script, so its position in the saved tensor is not known; "
            "load a checkpoint that the same number of ranks per model saved"
        )
    save_agreement.agree(everyone, error, f"loading {load_dir}")
    opener = partial(open_stages, names=names, cuts=cuts)
    return load(training._replace(group=everyone), load_dir, tag, wanted, opener=opener)


def _read(directory: Path, sizes: Mapping[str, int]) -> Parts:
    parts = read_parts(directory)
    if parts is None:
        if (directory / FILE_NAME).is_file():
            raise CheckpointError(
                f"{directory} holds the complete model, and here {_shown(sizes)} share each model; load it in a "
                "run without these axes"
            )
        raise CheckpointError(describe_foreign(directory))
    if parts.axes != dict(sizes):
        raise CheckpointError(
            f"{directory} was saved with {_shown(parts.axes)}, and here there are {_shown(sizes)}; expected the same sizes"
        )
    return parts


def _shown(sizes: Mapping[str, int]) -> str:
    names = {"model": "tp_size", "pipe": "pipeline stages"}
    return " x ".join(f"{names.get(axis, axis)} {size}" for axis, size in sizes.items())

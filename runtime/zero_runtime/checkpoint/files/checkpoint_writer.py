"""Saving of a checkpoint: every rank writes its file, and then rank 0 writes the manifest and ``latest``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from zero_runtime.checkpoint.files import contents
from zero_runtime.checkpoint.files.checkpoint_manifest import (
    FILE_NAME,
    Manifest,
    ParameterFacts,
    RankFile,
    check_tag,
    is_rank_file,
    rank_file_name,
    read_manifest,
    write_latest,
    write_manifest,
)
from zero_runtime.checkpoint.files.tensor_file import Entry, Written, discard, entry_of, sync_directory, write
from zero_runtime.checkpoint.files.values import Encoder
from zero_runtime.checkpoint.ranks import save_agreement
from zero_runtime.checkpoint.ranks.parts_file import end_parts
from zero_runtime.checkpoint.training import Training, aliases, buffers, extra_states, facts
from zero_runtime.errors import CheckpointError
from zero_runtime.version import VERSION


def save(
    training: Training,
    save_dir: Path,
    tag: str,
    client_state: Mapping[str, Any],
    *,
    tag_validation: str = "Warn",
    save_latest: bool = True,
    exclude_frozen: bool = False,
) -> None:
    """Save ``training`` as ``save_dir/tag``.

    All ranks must call this function, with a directory that all of them can access.

    Args:
        training: The parts of the engine to save.
        save_dir: The directory of checkpoints. It is created if it is missing.
        tag: The name of the checkpoint. An older checkpoint with this name stays complete until the new one is
            complete.
        client_state: The values of the script. The values of rank 0 are saved.
        tag_validation: The reaction if ranks disagree on the tag: Ignore, Warn or Fail.
        save_latest: Whether to make this the checkpoint that is loaded when no tag is named.
        exclude_frozen: Whether to leave out frozen parameters.

    Raises:
        CheckpointError: A rank fails. Every rank raises the error, and existing checkpoints are unchanged.
    """
    group = training.group
    training.settle()
    save_agreement.barrier(group)
    save_agreement.validate_tag(group, tag, tag_validation)
    directory = save_dir / tag
    doing = f"saving {directory}"
    more = contents.buffer_entries(training.module, group)
    draft, error = save_agreement.attempt(
        lambda: _Draft(training, save_dir, tag, client_state, exclude_frozen, more)
    )
    written = None
    if draft is not None:
        written, error = save_agreement.attempt(draft.write_rank_file)
    try:
        files = save_agreement.exchange(group, written, error, doing)
        error = None
        if group.rank == 0 and draft is not None:
            _, error = save_agreement.attempt(lambda: draft.commit(files, save_latest))
        save_agreement.agree(group, error, doing)
    except CheckpointError:
        if draft is not None:
            draft.abandon()
        raise
    save_agreement.barrier(group)


class _Draft:
    """A checkpoint that is being written. Existing files are unchanged until :meth:`commit`."""

    def __init__(
        self,
        training: Training,
        save_dir: Path,
        tag: str,
        client_state: Mapping[str, Any],
        exclude_frozen: bool,
        more: Sequence[Entry],
    ) -> None:
        check_tag(tag)
        self._save_dir = save_dir
        self._directory = save_dir / tag
        self._rank = training.group.rank
        encoder = Encoder()
        excluded = _frozen(training) if exclude_frozen else {}
        self._manifest = _manifest(
            training, tag, next_generation(self._directory), encoder, client_state, list(excluded)
        )
        self._path = self._directory / rank_file_name(self._rank, self._manifest.generation)
        entries, self._metadata = contents.entries(training, excluded)
        values = [entry_of(key, tensor) for key, tensor in encoder.tensors.items()] if self._rank == 0 else []
        self._entries = [*entries, *more, *values]

    def write_rank_file(self) -> Written:
        """Write the file of this rank."""
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(
                f"{self._directory} cannot be made: {error.strerror}; choose another directory"
            ) from None
        written = write(self._path, self._entries, self._metadata)
        sync_directory(self._directory)
        return written

    def commit(self, written: Sequence[Written], save_latest: bool) -> None:
        """Write the manifest that names the files of all ranks, and remove the files of the previous generation."""
        generation = self._manifest.generation
        files = [RankFile(rank_file_name(rank, generation), *each) for rank, each in enumerate(written)]
        for rank, each in enumerate(files):
            path = self._directory / each.name
            if not path.is_file() or path.stat().st_size != each.num_bytes:
                raise CheckpointError(
                    f"rank {rank} has written its file, and {path} is not there: the ranks see different directories, or "
                    "saved different tags; save to a file system that all of them share, under one tag"
                )
        sync_directory(self._save_dir)
        write_manifest(self._directory, _with_files(self._manifest, files))
        end_parts(self._directory)
        if save_latest:
            write_latest(self._save_dir, self._manifest.tag)
        named = {each.name for each in files}
        for path in self._directory.iterdir():
            if is_rank_file(path.name) and path.name not in named:
                discard(path)

    def abandon(self) -> None:
        """Remove the file of this rank, unless the manifest already names the file.

        The manifest names the file if only writing ``latest`` failed.
        """
        if next_generation(self._directory) > self._manifest.generation:
            return
        discard(self._path)
        with suppress(OSError):
            self._directory.rmdir()  # This fails if the directory is not empty.


def next_generation(directory: Path) -> int:
    """Return the generation number of the next save to ``directory``.

    All ranks get the same number, because only ``commit`` changes it.
    """
    # The directory may not exist, because another rank may be removing it.
    if not (directory / FILE_NAME).exists():
        return 1
    try:
        return read_manifest(directory).generation + 1
    except CheckpointError:
        return 1


def _manifest(
    training: Training,
    tag: str,
    generation: int,
    encoder: Encoder,
    client_state: Mapping[str, Any],
    excluded: list[str],
) -> Manifest:
    optimizer = training.optimizer
    groups = [] if optimizer is None else optimizer.param_groups
    options = [{name: value for name, value in each.items() if name != "params"} for each in groups]
    extra = {name: child.get_extra_state() for name, child in extra_states(training.module)}
    described: dict[str, ParameterFacts] = facts(training)
    return Manifest(
        tag=tag,
        generation=generation,
        zero_runtime=VERSION,
        torch=str(torch.__version__),
        stage=training.stage,
        counters=dict(training.counters),
        optimizer=None if optimizer is None else type(optimizer.optimizer).__name__,
        param_groups=encoder.encode("optimizer.param_groups", options),
        lr_scheduler=encoder.encode("lr_scheduler", _state(training.scheduler)),
        loss_scale=encoder.encode("loss_scale", _state(training.loss_scale)),
        client_state=encoder.encode("client_state", dict(client_state)),
        parameters=described,
        aliases=aliases(training.module),
        buffers=list(buffers(training.module)),
        extra_state=encoder.encode("extra_state", extra),
        excluded=excluded,
        files=(),
    )


def _with_files(manifest: Manifest, files: Sequence[RankFile]) -> Manifest:
    return dataclasses.replace(manifest, files=tuple(files))


def _state(owner: Any) -> Any:
    return owner.state_dict() if hasattr(owner, "state_dict") else None


def _frozen(training: Training) -> dict[str, None]:
    trained = training.trained
    return {
        name: None for name, each in facts(training).items() if not each.requires_grad and name not in trained
    }

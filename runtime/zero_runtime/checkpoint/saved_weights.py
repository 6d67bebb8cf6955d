"""``save_16bit_model``: the model's weights in its own dtypes, in one file that rank 0 writes.

A name that ends in ``.safetensors`` selects the safetensors format. This file is written while parameters are
gathered: at stage 3, layer by layer. Any other name selects torch.save's format. For this format rank 0 first
collects the model on the CPU, as DeepSpeed does.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from zero_runtime.checkpoint.files.tensor_file import (
    Entry,
    data,
    discard,
    header,
    removed_on_failure,
    sync_directory,
)
from zero_runtime.checkpoint.ranks import save_agreement
from zero_runtime.checkpoint.training import Training, aliases, buffers, whole_shape
from zero_runtime.comm import DataParallelGroup
from zero_runtime.experts.expert_parameters import group_of, is_expert, names_on_ranks
from zero_runtime.sharding.shards import shard_of
from zero_runtime.tensor_parallel.cuts import cut_of
from zero_runtime.tensor_parallel.division import whole_parameter
from zero_runtime.zero import GatheredParameters


def save_weights(training: Training, path: Path, exclude_frozen: bool = False) -> None:
    """Write the model's weights to ``path``. All ranks must call this function.

    Raises:
        CheckpointError: Rank 0 cannot write the file. Every rank raises the error, and an existing file is
            unchanged.
    """
    training.settle()
    doing = f"saving {path}"
    names = names_of(training.module, exclude_frozen)
    sink: Any = None
    error: Exception | None = None
    if is_writing(training):
        sink, error = save_agreement.attempt(lambda: open_sink(path, entries_of(names)))
    for parameters in _layers(training.module):
        # Gathering is collective, so a rank that cannot write still takes part.
        with _gathered(parameters):
            whole_tensors = joined(training, parameters)
            if sink is not None and error is None:
                _, error = save_agreement.attempt(partial(_put, sink, names, whole_tensors))
    if sink is not None:
        rest = {buffer: buffer for buffer in buffers(training.module).values()}
        if error is None:
            _, error = save_agreement.attempt(lambda: _put(sink, names, rest))
        _, closing = save_agreement.attempt(lambda: sink.close(error is None))
        error = error or closing
    save_agreement.agree_all([*slices_of(training), training.group], error, doing)


def collected_weights(training: Training, exclude_frozen: bool = False) -> dict[str, torch.Tensor] | None:
    """Return the model's weights in its own dtypes on the CPU of rank 0, and None on the other ranks.

    All ranks must call this function.
    """
    training.settle()
    names = names_of(training.module, exclude_frozen)
    collected: dict[str, torch.Tensor] = {}
    for parameters in _layers(training.module):
        with _gathered(parameters):
            whole_tensors = joined(training, parameters)
            if is_writing(training):
                _collect(collected, names, whole_tensors)
    if not is_writing(training):
        return None
    _collect(collected, names, {buffer: buffer for buffer in buffers(training.module).values()})
    return {name: collected[name] for all_names in names.values() for name in all_names}


def _collect(
    collected: dict[str, torch.Tensor],
    names: dict[torch.Tensor, list[str]],
    tensors: Mapping[torch.Tensor, torch.Tensor],
) -> None:
    for tensor, gathered in tensors.items():
        for name, value in _named(names, tensor, gathered):
            collected[name] = value.detach().cpu().clone()


def slices_of(training: Training) -> list[DataParallelGroup]:
    """Return a list with the group of tensor-parallel ranks, or an empty list if there is no such group."""
    return [] if training.slices is None else [training.slices]


def is_writing(training: Training) -> bool:
    """Return whether this rank writes: it is the first of the ranks that have this part of the model."""
    return all(group.rank == 0 for group in [*slices_of(training), training.group])


def joined(training: Training, parameters: Sequence[torch.nn.Parameter]) -> dict[torch.Tensor, torch.Tensor]:
    """Return the complete tensor of each parameter, joined from the shards of tensor-parallel ranks.

    For a parameter of an expert, the parameters at the same position on all ranks with different experts are
    stacked. All ranks must call this function.
    """
    if training.slices is None:
        return {parameter: _of_all_experts(training, parameter) for parameter in parameters}
    return {
        parameter: whole_parameter(parameter, training.slices, save_agreement.CHECKPOINT)
        for parameter in parameters
    }


def _of_all_experts(training: Training, parameter: torch.nn.Parameter) -> torch.Tensor:
    if not is_expert(parameter) or training.experts[group_of(parameter)].parallel.world_size == 1:
        return parameter
    ranks = training.experts[group_of(parameter)].parallel
    own = parameter.detach().contiguous()
    stacked = own.new_empty((ranks.world_size, *own.shape))
    ranks.all_gather_single(stacked.view(-1), own.view(-1), why=save_agreement.CHECKPOINT)
    return stacked


def names_of(module: torch.nn.Module, exclude_frozen: bool) -> dict[torch.Tensor, list[str]]:
    """Return all names of each parameter and persistent buffer, in the order of the model.

    A parameter of an expert has the names of the experts at the same position on all ranks, in the order of the
    ranks.
    """
    first = {**dict(module.named_parameters()), **buffers(module)}
    names = {
        tensor: [name]
        for name, tensor in first.items()
        if not (exclude_frozen and isinstance(tensor, torch.nn.Parameter) and not tensor.requires_grad)
    }
    for alias, name in aliases(module).items():
        if first[name] in names:
            names[first[name]].append(alias)
    names.update({tensor: each for tensor, each in names_on_ranks(module).items() if tensor in names})
    return names


def _layers(module: torch.nn.Module) -> Iterator[list[torch.nn.Parameter]]:
    for child in module.modules():
        parameters = list(child.parameters(recurse=False))
        if parameters:
            yield parameters


def _gathered(parameters: list[torch.nn.Parameter]) -> Any:
    return GatheredParameters(parameters, modifier_rank=0, enabled=shard_of(parameters[0]) is not None)


def _put(
    sink: Any, names: dict[torch.Tensor, list[str]], tensors: Mapping[torch.Tensor, torch.Tensor]
) -> None:
    for tensor, gathered in tensors.items():
        for name, value in _named(names, tensor, gathered):
            sink.put(name, value.detach())


def _named(
    names: Mapping[torch.Tensor, Sequence[str]], tensor: torch.Tensor, gathered: torch.Tensor
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the names of ``tensor``, each with its complete tensor."""
    all_names = names.get(tensor, ())
    stacked = is_expert(tensor) and gathered.dim() > tensor.dim()
    yield from zip(all_names, gathered if stacked else [gathered] * len(all_names), strict=False)


def open_sink(path: Path, entries: Sequence[Entry]) -> Any:
    """Return an open file that accepts the tensors of ``entries``.

    ``put`` writes the tensors in any order, until ``close`` is called.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.writing")
    if path.suffix != ".safetensors":
        return _Collected(path, fresh)
    return _Streamed(path, fresh, entries)


def entry(name: str, dtype: torch.dtype, shape: Sequence[int]) -> Entry:
    """Return the entry of a tensor that is written later, with ``put``."""
    return Entry(name, dtype, tuple(shape), _never)


def entries_of(names: Mapping[torch.Tensor, Sequence[str]]) -> list[Entry]:
    """Return the entries of the complete tensors of this rank's tensors or shards, under all their names."""
    entries = []
    for tensor, all_names in names.items():
        shape = whole_shape(tensor) if isinstance(tensor, torch.nn.Parameter) else tuple(tensor.shape)
        how = cut_of(tensor)
        shape = shape if how is None else how.whole_shape(shape)
        entries += [entry(name, tensor.dtype, shape) for name in all_names]
    return entries


def _never() -> torch.Tensor:
    raise AssertionError("the tensor is handed over when it has been gathered")


class _Streamed:
    """A safetensors file whose tensors are written in any order."""

    def __init__(self, path: Path, fresh: Path, entries: Sequence[Entry]) -> None:
        self._path, self._fresh = path, fresh
        self._entries = {entry.key: entry for entry in entries}
        text, self._starts = header(entries, {"format": "pt"})
        with removed_on_failure(fresh):
            self._file = fresh.open("wb")
            self._file.write(text)
            self._file.truncate(
                len(text) + sum(math.prod(entry.shape) * entry.dtype.itemsize for entry in entries)
            )

    def put(self, name: str, tensor: torch.Tensor) -> None:
        entry = self._entries[name]._replace(produce=lambda: tensor)
        with removed_on_failure(self._fresh):
            self._file.seek(self._starts[name])
            self._file.write(data(entry))

    def close(self, complete: bool) -> None:
        with removed_on_failure(self._fresh), self._file:
            self._file.flush()
            os.fsync(self._file.fileno())
        _finish(self._path, self._fresh, complete)


class _Collected:
    """A file in torch.save's format, written after all tensors are collected."""

    def __init__(self, path: Path, fresh: Path) -> None:
        self._path, self._fresh = path, fresh
        self._tensors: dict[str, torch.Tensor] = {}

    def put(self, name: str, tensor: torch.Tensor) -> None:
        self._tensors[name] = tensor.cpu().clone()

    def close(self, complete: bool) -> None:
        if complete:
            with removed_on_failure(self._fresh), self._fresh.open("wb") as file:
                torch.save(self._tensors, file)
                file.flush()
                os.fsync(file.fileno())
        _finish(self._path, self._fresh, complete)


def _finish(path: Path, fresh: Path, complete: bool) -> None:
    if not complete:
        discard(fresh)
        return
    fresh.replace(path)
    sync_directory(path.parent)

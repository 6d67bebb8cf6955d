"""Collection of the weights of all stages on the first stage, in memory or in a file."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from zero_runtime.checkpoint import saved_weights
from zero_runtime.checkpoint.ranks import save_agreement
from zero_runtime.checkpoint.training import Training
from zero_runtime.comm import DataParallelGroup
from zero_runtime.pipeline.stage_grid import PipelineGrid


class WeightEntry(NamedTuple):
    """A parameter or buffer of a stage.

    Attributes:
        name: One of the names of the tensor.
        dtype: The dtype of the tensor.
        shape: The shape of the complete tensor.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


def save_weights(training: Training, grid: PipelineGrid, path: Path, exclude_frozen: bool = False) -> None:
    """Write the weights of all stages to ``path``. All ranks must call this function.

    Raises:
        CheckpointError: The first rank cannot write the file. The error is raised on every rank, and an
            existing file is unchanged.
    """
    training.settle()
    mine = saved_weights.names_of(training.module, exclude_frozen)
    stages = _listed(grid.pipe, mine)
    sink: Any = None
    error: Exception | None = None
    if grid.is_first and saved_weights.is_writing(training):
        entries = [saved_weights.entry(*entry) for stage in stages for entry in stage]
        sink, error = save_agreement.attempt(lambda: saved_weights.open_sink(path, entries))

    def put(entry: WeightEntry, tensor: torch.Tensor) -> None:
        nonlocal error
        if error is None:
            _, error = save_agreement.attempt(lambda: sink.put(entry.name, tensor))

    _bring(training, grid, mine, stages, put)
    if sink is not None:
        _, closing = save_agreement.attempt(lambda: sink.close(error is None))
        error = error or closing
    save_agreement.agree_all([grid.model, training.group], error, f"saving {path}")


def collected_weights(
    training: Training, grid: PipelineGrid, exclude_frozen: bool = False
) -> dict[str, torch.Tensor] | None:
    """Return the weights of all stages, in host memory, on rank 0, and None on the other ranks.

    All ranks must call this function.
    """
    training.settle()
    mine = saved_weights.names_of(training.module, exclude_frozen)
    stages = _listed(grid.pipe, mine)
    collected: dict[str, torch.Tensor] = {}

    def put(entry: WeightEntry, tensor: torch.Tensor) -> None:
        collected[entry.name] = tensor.cpu().clone()

    _bring(training, grid, mine, stages, put)
    return collected if grid.is_first and saved_weights.is_writing(training) else None


def _listed(stages: DataParallelGroup, mine: dict[torch.Tensor, list[str]]) -> list[list[WeightEntry]]:
    """Return the tensors that each stage sends. The first stage of a shared tensor sends it.

    The stages exchange their lists with two all_gathers, one of lengths and one of JSON.
    """
    own_entries = [
        [each.key, str(each.dtype).removeprefix("torch."), each.shape]
        for each in saved_weights.entries_of(mine)
    ]
    text = json.dumps(own_entries).encode()
    length = torch.tensor([len(text)], dtype=torch.int64, device=stages.device)
    lengths = length.new_empty(stages.world_size)
    stages.all_gather_single(lengths, length, why=save_agreement.CHECKPOINT)
    longest = int(lengths.max().item())
    padded = torch.tensor(list(text.ljust(longest)), dtype=torch.uint8, device=stages.device)
    everybody = padded.new_empty(stages.world_size * longest)
    stages.all_gather_single(everybody, padded, why=save_agreement.CHECKPOINT)
    listed_names: set[str] = set()
    stages_entries = []
    for row in everybody.view(stages.world_size, longest).cpu():
        entries = json.loads(bytes(row.tolist()))
        stages_entries.append(
            [
                WeightEntry(name, getattr(torch, dtype), tuple(shape))
                for name, dtype, shape in entries
                if name not in listed_names
            ]
        )
        listed_names.update(name for name, _, _ in entries)
    return stages_entries


def _bring(
    training: Training,
    grid: PipelineGrid,
    mine: dict[torch.Tensor, list[str]],
    stages: Sequence[Sequence[WeightEntry]],
    put: Callable[[WeightEntry, torch.Tensor], None],
) -> None:
    """Call ``put`` on the first stage with each tensor of all stages, one at a time."""
    by_name = {name: tensor for tensor, names in mine.items() for name in names}
    brings = saved_weights.is_writing(training)
    for stage, listed in enumerate(stages):
        for entry in listed:
            if stage == grid.stage:
                gathered = _whole(training, by_name[entry.name])
                if brings and grid.is_first:
                    put(entry, gathered)
                elif brings and gathered.numel():
                    grid.pipe.send(_bytes(gathered), 0, why=save_agreement.CHECKPOINT)
            elif brings and grid.is_first:
                room = torch.empty(entry.shape, dtype=entry.dtype, device=grid.device)
                if room.numel():
                    grid.pipe.receive(_bytes(room), stage, why=save_agreement.CHECKPOINT)
                put(entry, room)


def _whole(training: Training, tensor: torch.Tensor) -> torch.Tensor:
    """Return the complete ``tensor``, joined from the shards of this stage's tensor-parallel ranks."""
    if isinstance(tensor, torch.nn.Parameter):
        return saved_weights.joined(training, [tensor])[tensor].detach()
    return tensor.detach()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor``, or a contiguous copy of it, as uint8, which every backend can send."""
    return tensor.contiguous().view(-1).view(torch.uint8)

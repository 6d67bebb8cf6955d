"""Files with one layer each, as DeepSpeed's pipelines save them: ``layer_03-model_states.pt``.

Such files do not depend on stages, so any number of stages can read them. The engine's checkpoints have another format
(docs/checkpoints.md); these are for scripts that call ``PipelineModule.save_state_dict`` themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from zero_runtime.errors import CheckpointError
from zero_runtime.groups.process_grid import DATA, PIPE, SEQUENCE
from zero_runtime.pipeline.stage_grid import PipelineGrid

# Layers of a stage: the number of each in the complete model, and the layer, a module or a function.
NumberedLayers = Iterable[tuple[int, Any]]


def slice_name(grid: PipelineGrid) -> str:
    """The part of a file name that identifies a tensor-parallel rank: ``-model_00``; empty without tensor parallelism."""
    place = grid.processes.place
    axes = [axis for axis in place if axis not in (DATA, PIPE, SEQUENCE) and grid.topology.size(axis) > 1]
    return "".join(f"-{axis}_{place[axis]:02d}" for axis in axes)


def layer_file(directory: str | Path, number: int, suffix: str) -> Path:
    """The file of layer ``number`` of the complete model; ``suffix`` is its :func:`slice_name`."""
    return Path(directory) / f"layer_{number:02d}{suffix}-model_states.pt"


def layer_files(directory: str | Path, number: int) -> list[Path]:
    """The existing files of a layer, of all tensor-parallel ranks."""
    return sorted(Path(directory).glob(f"layer_{number:02d}-*model_states.pt"))


def save_layers(
    layers: NumberedLayers, grid: PipelineGrid, directory: str | Path, engine: Any, exclude_frozen: bool
) -> None:
    """Write the files of this stage's layers; only the first replica writes.

    Args:
        layers: of this stage.
        grid: the ranks of stages and replicas.
        directory: created if it is missing.
        engine: saves a state dict with ``save(state_dict, path)``; None for torch.save.
        exclude_frozen: leave frozen parameters out.
    """
    processes = grid.processes
    if processes.along(DATA) or processes.along(SEQUENCE):
        return
    Path(directory).mkdir(parents=True, exist_ok=True)
    for number, layer in _with_state(layers):
        frozen = {
            name for name, each in layer.named_parameters() if exclude_frozen and not each.requires_grad
        }
        # Copies, since a view into a flat buffer would be saved with the complete buffer.
        state = {
            name: value.detach().clone() if isinstance(value, torch.Tensor) else value
            for name, value in layer.state_dict().items()
            if name not in frozen
        }
        path = layer_file(directory, number, slice_name(grid))
        if engine is None:
            torch.save(state, path)
        else:
            engine.save(state, str(path))


def load_layers(
    layers: NumberedLayers, grid: PipelineGrid, directory: str | Path, engine: Any, strict: bool
) -> None:
    """Read the files of this stage's layers.

    Args:
        layers: of this stage.
        grid: the ranks of stages and replicas.
        directory: of the files.
        engine: loads a state dict with ``load(path, map_location)``; None for torch.load with ``weights_only``.
        strict: refuse missing and unexpected names.

    Raises:
        CheckpointError: a file is missing.
    """
    for number, layer in _with_state(layers):
        path = layer_file(directory, number, slice_name(grid))
        if not path.is_file():
            present = ", ".join(each.name for each in layer_files(directory, number)) or "none"
            raise CheckpointError(
                f"there is no {path} for layer {number}; of this layer there are: {present}. Give the folder that "
                "save_state_dict wrote, with as many ranks for each tensor"
            )
        if engine is None:
            state = torch.load(path, map_location="cpu", weights_only=True)
        else:
            state = engine.load(str(path), map_location="cpu")
        layer.load_state_dict(state, strict=strict)


def _with_state(layers: NumberedLayers) -> Iterator[tuple[int, torch.nn.Module]]:
    return ((number, layer) for number, layer in layers if isinstance(layer, torch.nn.Module))

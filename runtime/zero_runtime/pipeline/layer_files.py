"""Files that contain one layer each, as DeepSpeed's pipelines save them: ``layer_03-model_states.pt``.

Such files do not depend on stages, so any number of stages can read them. The checkpoints of the engine have
a different format (docs/checkpoints.md). Layer files are for scripts that call
``PipelineModule.save_state_dict`` themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from zero_runtime.errors import CheckpointError
from zero_runtime.groups.process_grid import DATA, PIPE, SEQUENCE
from zero_runtime.pipeline.stage_grid import PipelineGrid

# The layers of a stage, each with its number in the complete model. A layer is a module or a function.
NumberedLayers = Iterable[tuple[int, Any]]


def slice_name(grid: PipelineGrid) -> str:
    """Return the part of a file name that identifies a tensor-parallel rank, such as ``-model_00``.

    The part is empty without tensor parallelism.
    """
    place = grid.processes.place
    axes = [axis for axis in place if axis not in (DATA, PIPE, SEQUENCE) and grid.topology.size(axis) > 1]
    return "".join(f"-{axis}_{place[axis]:02d}" for axis in axes)


def layer_file(directory: str | Path, number: int, suffix: str) -> Path:
    """Return the path of the file of layer ``number`` of the complete model.

    ``suffix`` is the result of :func:`slice_name`.
    """
    return Path(directory) / f"layer_{number:02d}{suffix}-model_states.pt"


def layer_files(directory: str | Path, number: int) -> list[Path]:
    """Return the paths of the existing files of a layer, for all tensor-parallel ranks."""
    return sorted(Path(directory).glob(f"layer_{number:02d}-*model_states.pt"))


def save_layers(
    layers: NumberedLayers, grid: PipelineGrid, directory: str | Path, engine: Any, exclude_frozen: bool
) -> None:
    """Write the files of this stage's layers. Only the first replica writes.

    Args:
        layers: The layers of this stage.
        grid: The ranks of stages and replicas.
        directory: The folder of the files, which is created if it is missing.
        engine: An object that saves a state dict with ``save(state_dict, path)``, or None for torch.save.
        exclude_frozen: Whether to leave out frozen parameters.
    """
    processes = grid.processes
    if processes.along(DATA) or processes.along(SEQUENCE):
        return
    Path(directory).mkdir(parents=True, exist_ok=True)
    for number, layer in _with_state(layers):
        frozen = {
            name for name, each in layer.named_parameters() if exclude_frozen and not each.requires_grad
        }
        # The values are copied, because a view into a flat buffer would be saved with the complete buffer.
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
        layers: The layers of this stage.
        grid: The ranks of stages and replicas.
        directory: The folder of the files.
        engine: An object that loads a state dict with ``load(path, map_location)``, or None for torch.load with
            ``weights_only``.
        strict: Whether to refuse missing and unexpected names.

    Raises:
        CheckpointError: A file is missing.
    """
    for number, layer in _with_state(layers):
        path = layer_file(directory, number, slice_name(grid))
        if not path.is_file():
            present = ", ".join(each.name for each in layer_files(directory, number)) or "none"
            raise CheckpointError(
                f"there is no {path} for layer {number}; the files of this layer are: {present}. Give the folder "
                "that save_state_dict wrote, and use the same number of tensor-parallel ranks"
            )
        if engine is None:
            state = torch.load(path, map_location="cpu", weights_only=True)
        else:
            state = engine.load(str(path), map_location="cpu")
        layer.load_state_dict(state, strict=strict)


def _with_state(layers: NumberedLayers) -> Iterator[tuple[int, torch.nn.Module]]:
    return ((number, layer) for number, layer in layers if isinstance(layer, torch.nn.Module))

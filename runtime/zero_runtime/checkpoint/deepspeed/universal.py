"""Reads DeepSpeed's universal folders, which have a directory for each parameter and a file for each of its tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from zero_runtime.checkpoint.deepspeed.flat_partitions import STATES, Partitions, options_of
from zero_runtime.checkpoint.deepspeed.folder import UNIVERSAL, Folder
from zero_runtime.checkpoint.deepspeed.tensor_runs import Run
from zero_runtime.checkpoint.deepspeed.torch_file import read, read_dict
from zero_runtime.errors import CheckpointError

VALUE: Final = "fp32"
STEP: Final = "step"
PARAMETER: Final = "param"
GLOBAL: Final = "optimizer_state.pt"


def read_universal(folder: Folder, shapes: Sequence[Mapping[str, Sequence[int]]]) -> Partitions:
    """Read the parameters that were trained, with their shapes. The file of a parameter may correct its shape.

    Args:
        folder: The files of the checkpoint.
        shapes: The shapes of the parameters, group by group, as in the model states.

    Raises:
        CheckpointError: A file is missing or damaged, or contains something else.
    """
    below = folder.directory / UNIVERSAL
    common = read_dict(below / GLOBAL)
    sub_groups = common.get(STATES, {}).get("param_groups")
    param_groups = common.get("param_groups") or sub_groups or []
    owners = list(range(len(shapes)))
    if sub_groups:  # The file is of stage 3, which may split one group into several.
        by_index = {
            index: number for number, group in enumerate(param_groups) for index in group.get("params", ())
        }
        owners = [by_index.get(index, 0) for index in owners]
    counted = _counted(common, param_groups)
    runs = []
    groups: dict[str, int] = {}
    shapes_in_files: dict[str, Sequence[int]] = {}
    for owner, named in zip(owners, shapes, strict=True):
        for name, shape in named.items():
            run, shapes_in_files[name] = _parameter(below / name, name, tuple(shape), counted)
            runs.append(run)
            groups[name] = owner
    options = [options_of(each) for each in param_groups]
    return Partitions(runs, groups, options, common, shapes_in_files)


def _counted(common: Mapping[str, Any], param_groups: Sequence[Mapping[str, Any]]) -> Any:
    """Return the step count for parameters without their own step count: the first step count in the file."""
    states = common.get(STATES, {}).get("state", {})
    steps = [state["step"] for state in states.values() if "step" in state]
    steps += [group["step"] for group in param_groups if "step" in group]
    return steps[0] if steps else None


def _parameter(
    directory: Path, name: str, shape: tuple[int, ...], counted: Any
) -> tuple[Run, tuple[int, ...]]:
    if "/" in name or not (directory / f"{VALUE}.pt").is_file():
        raise CheckpointError(
            f"{directory / VALUE}.pt is missing, which has the weights of parameter {name!r}; the conversion was cut off. "
            "Convert the checkpoint again, or load another tag"
        )
    tensors = {}
    scalars = {} if counted is None else {STEP: counted}
    for path in sorted(directory.glob("*.pt")):
        content = read(path)
        if path.stem == STEP:
            scalars[STEP] = content
            continue
        if isinstance(content, dict):
            content = content.get(PARAMETER)
            if path.stem == VALUE and isinstance(content, torch.Tensor):
                shape = tuple(content.shape)
        if not isinstance(content, torch.Tensor):
            raise CheckpointError(
                f"{path} holds no tensor; convert the checkpoint again, or load another tag"
            )
        tensors[path.stem] = content.detach().reshape(-1)
    value = tensors.pop(VALUE)
    strange = [key for key, tensor in tensors.items() if tensor.numel() != value.numel()]
    if strange:
        raise CheckpointError(
            f"{directory / strange[0]}.pt has {tensors[strange[0]].numel()} elements, and {VALUE}.pt {value.numel()}; they "
            "are of different saves; convert the checkpoint again"
        )
    if not tensors:
        scalars = {}
    return Run(name, 0, value, tensors, scalars), shape

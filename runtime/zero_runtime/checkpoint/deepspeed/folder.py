"""Finds the files of a DeepSpeed checkpoint by their names."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from zero_runtime.checkpoint.deepspeed.torch_file import read_index
from zero_runtime.errors import CheckpointError

_MODEL: Final = re.compile(r"(?:bf16_)?(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_OPTIMIZER: Final = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_?optim_states\.pt")
_EXPERT: Final = re.compile(r"layer_(\d+)_expert_(\d+)_mp_rank_00_model_states\.pt")
_EXPERT_OPTIMIZER: Final = re.compile(r"expp_rank_(\d+)_mp_rank_00_optim_states\.pt")
_WEIGHTS: Final = (
    "pytorch_model.bin",
    "model.safetensors",
    "pytorch_model.bin.index.json",
    "model.safetensors.index.json",
)
UNIVERSAL: Final = "zero"
CONVERT: Final = (
    "convert it with DeepSpeed first, python -m deepspeed.checkpoint.ds_to_universal --input_folder ... "
    "--output_folder ..., and load the output"
)


@dataclass(frozen=True, slots=True)
class Folder:
    """The files of one checkpoint.

    Attributes:
        directory: The directory of the checkpoint.
        models: The files of model states, by data-parallel rank. Below stage 3 only rank 0 has such a file.
        optimizers: The files of ZeRO's optimizer states, by data-parallel rank.
        universal: Whether each parameter has a directory in ``zero``.
        weights: The files of a weights-only export.
        model_parallel: The number of ranks that shared one copy of the model.
        experts: The files of experts' weights, by layer and number of the expert.
        expert_optimizers: The files of optimizer states at stage 0 of a model with experts, by expert-parallel
            rank.
    """

    directory: Path
    models: Mapping[int, Path] = field(default_factory=dict)
    optimizers: Mapping[int, Path] = field(default_factory=dict)
    universal: bool = False
    weights: Sequence[Path] = ()
    model_parallel: int = 1
    experts: Mapping[tuple[int, int], Path] = field(default_factory=dict)
    expert_optimizers: Mapping[int, Path] = field(default_factory=dict)

    @property
    def files(self) -> list[Path]:
        """All files that are read, in the same order on every rank."""
        below = self.directory / UNIVERSAL
        parameter_files = sorted(below.rglob("*.pt")) if self.universal else []
        of_experts = [*self.experts.values(), *self.expert_optimizers.values()]
        return [
            *self.models.values(),
            *self.optimizers.values(),
            *of_experts,
            *parameter_files,
            *self.weights,
        ]


def find(directory: Path) -> Folder | None:
    """Return the files of the DeepSpeed checkpoint in ``directory``, or None if there is no such checkpoint.

    Raises:
        CheckpointError: The checkpoint has a kind that cannot be read, or a file is missing.
    """
    if not directory.is_dir():
        return None
    names = sorted(each.name for each in directory.iterdir())
    models = _by_rank(directory, names, _MODEL)
    if not models:
        if any(_OPTIMIZER.fullmatch(name) for name in names):
            raise CheckpointError(
                f"{directory} has optimizer states and no file *model_states.pt of DeepSpeed's; copy all files of the "
                "checkpoint, or load another tag"
            )
        return _exported(directory, names)
    _check_kind(directory, names)
    universal = (directory / UNIVERSAL).is_dir()
    parallel = 1 + max(number for _, number in models)
    if parallel > 1 and not universal:
        raise CheckpointError(
            f"{directory} was saved by {parallel} tensor-parallel ranks (mp_rank_{parallel - 1:02d}), whose shards of the "
            f"parameters only DeepSpeed can join; {CONVERT}"
        )
    optimizers = {} if universal else _by_rank(directory, names, _OPTIMIZER)
    return Folder(
        directory,
        models={rank: path for (rank, number), path in models.items() if number == 0},
        optimizers={rank: path for (rank, number), path in optimizers.items() if number == 0},
        universal=universal,
        model_parallel=parallel,
        experts={
            (int(match[1]), int(match[2])): directory / match[0]
            for match in map(_EXPERT.fullmatch, names)
            if match
        },
        expert_optimizers={
            int(match[1]): directory / match[0] for match in map(_EXPERT_OPTIMIZER.fullmatch, names) if match
        },
    )


def is_exported(directory: Path) -> bool:
    """Return whether ``directory`` has exported weights under their usual names."""
    return any((directory / name).is_file() for name in _WEIGHTS)


def _by_rank(directory: Path, names: Sequence[str], pattern: re.Pattern[str]) -> dict[tuple[int, int], Path]:
    """Return the files whose names match, by data-parallel rank and model-parallel rank."""
    paths = {}
    for name in names:
        match = pattern.fullmatch(name)
        if match:
            paths[int(match[1] or 0), int(match[2])] = directory / name
    return dict(sorted(paths.items()))


def _check_kind(directory: Path, names: Sequence[str]) -> None:
    of_experts = [name for name in names if "expert_" in name]
    others = [name for name in of_experts if not _EXPERT.fullmatch(name)]
    if others or (of_experts and (directory / UNIVERSAL).is_dir()):
        raise CheckpointError(
            f"{directory} is of a model with experts in another form ({(others or [UNIVERSAL])[0]}) than the files "
            "layer_<l>_expert_<n>_mp_rank_00_model_states.pt of DeepSpeed's MoE layer, the only one that is read here; "
            "train on from it with DeepSpeed, or load its weights into the model yourself"
        )
    if any(name.startswith("layer_") and name not in of_experts for name in names):
        raise CheckpointError(
            f"{directory} is of a pipeline, with files for each layer (layer_*), which are not read here; {CONVERT}"
        )
    if "offloaded_tensors" in names:
        raise CheckpointError(
            f"{directory} was saved with optimizer states on NVMe (offloaded_tensors), in raw files whose layout only that "
            "run knows; load it with DeepSpeed at that setting, and save it from offload_optimizer.device none or cpu"
        )


def _exported(directory: Path, names: Sequence[str]) -> Folder | None:
    for name in _WEIGHTS:
        if name in names:
            path = directory / name
            files = [directory / each for each in read_index(path)] if path.suffix == ".json" else [path]
            return Folder(directory, weights=files)
    return None

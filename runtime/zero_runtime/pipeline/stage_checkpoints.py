"""Checkpoints of a pipeline, which any number of stages can load."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from zero_runtime.checkpoint.files.checkpoint_manifest import part_name, read_latest
from zero_runtime.checkpoint.files.checkpoint_reader import Checkpoint
from zero_runtime.checkpoint.loading import Loaded, Wanted, load
from zero_runtime.checkpoint.ranks import save_agreement
from zero_runtime.checkpoint.ranks.checkpoint_parts import axes_of_saved
from zero_runtime.checkpoint.ranks.merged_ranks import open_stages, saved_stages
from zero_runtime.checkpoint.training import Training, aliases, buffers, parameters
from zero_runtime.comm import DataParallelGroup
from zero_runtime.groups.parallelism import Parallelism
from zero_runtime.groups.process_grid import MODEL, PIPE
from zero_runtime.pipeline.model import ties
from zero_runtime.pipeline.model.pipeline_module import PipelineModule
from zero_runtime.pipeline.stage_grid import PipelineGrid
from zero_runtime.pipeline.stage_weights import collected_weights, save_weights
from zero_runtime.training.saving import Saving, folder


class StagedSaving(Saving):
    """The methods of :class:`~zero_runtime.training.saving.Saving` that differ for pipeline stages."""

    module: PipelineModule
    parallelism: Parallelism

    def _load(self, training: Training, load_dir: Path, tag: str | None, wanted: Wanted) -> Loaded | None:
        """Load the layers of this stage, whatever number of stages saved them. All ranks must call it."""
        sizes = self.parallelism.model_sizes()
        everyone = DataParallelGroup()
        cut, error = save_agreement.attempt(lambda: MODEL in (axes_of_saved(load_dir, tag) or {}))
        save_agreement.agree_on(everyone, error, int(bool(cut)), f"loading {load_dir}")
        if cut or sizes.get(MODEL, 1) > 1:
            return super()._load(training, load_dir, tag, wanted)
        names = self._names(training)
        mine = self.module.stage_id if sizes else None
        as_saved, error = save_agreement.attempt(
            lambda: _has_same_stages(load_dir, tag, sizes.get(PIPE, 1), mine, set(parameters(training)))
        )
        doing = f"loading {load_dir if tag is None else load_dir / tag}"
        if save_agreement.agree_on(everyone, error, int(bool(as_saved)), doing) and as_saved:
            return super()._load(training, load_dir, tag, wanted)
        opener = partial(open_stages, names=names)
        loaded = load(training._replace(group=everyone), load_dir, tag, wanted, opener=opener)
        ties.synchronize(self.module.ties)
        return loaded

    def _names(self, training: Training) -> frozenset[str]:
        return frozenset((*parameters(training), *buffers(training.module), *aliases(training.module)))

    def _load_recut(
        self, training: Training, load_dir: Path, tag: str | None, wanted: Wanted
    ) -> Loaded | None:
        loaded = super()._load_recut(training, load_dir, tag, wanted)
        ties.synchronize(self.module.ties)
        return loaded

    def save_16bit_model(
        self,
        save_dir: str | Path,
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save the weights of all stages in the model's own dtypes, in one file that rank 0 writes. All ranks must call it.

        Parameters are named by the number of their layer in the complete model; shared ones by the key of their layers.

        Args:
            save_dir: of the file; created if it is missing.
            save_filename: a name that ends in .safetensors is written tensor by tensor; others are in torch.save's format.
            exclude_frozen_parameters: leave frozen parameters out.

        Returns:
            True.

        Raises:
            CheckpointError: on every rank, if the file cannot be written.
        """
        path = folder(save_dir) / save_filename
        with self._checkpointing() as training:
            save_weights(training, self._grid, path, exclude_frozen_parameters)
        return True

    save_fp16_model = save_16bit_model

    @property
    def _grid(self) -> PipelineGrid:
        assert self.module.grid is not None
        return self.module.grid

    def _zero3_consolidated_16bit_state_dict(
        self, exclude_frozen_parameters: bool = False
    ) -> dict[str, torch.Tensor] | None:
        """The weights of all stages on rank 0, None elsewhere; libraries call it by this name. All ranks must call it."""
        with self._checkpointing() as training:
            return collected_weights(training, self._grid, exclude_frozen_parameters)

    def module_state_dict(
        self, exclude_frozen_parameters: bool = False, whole: bool = False
    ) -> dict[str, torch.Tensor] | None:
        """The state of this stage's layers, by their names in the complete model.

        Args:
            exclude_frozen_parameters: leave frozen parameters out.
            whole: return the state of all stages on the CPU of rank 0, and None elsewhere; all ranks must call it then.
        """
        if whole:
            return self._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters)
        state: dict[str, torch.Tensor] = self.module.state_dict()
        if exclude_frozen_parameters:
            for name, parameter in self.module.named_parameters(remove_duplicate=False):
                if not parameter.requires_grad:
                    state.pop(name, None)
        return state

    def load_module_state_dict(
        self,
        state_dict: Mapping[str, Any],
        strict: bool = True,
        custom_load_fn: Callable[..., Any] | None = None,
    ) -> None:
        """Load the layers of this stage from a state dict of the complete model. All ranks must call it."""
        mine: Mapping[str, torch.Tensor] = self.module.state_dict()
        stage_state = {name: value for name, value in state_dict.items() if name in mine}
        super().load_module_state_dict(stage_state, strict, custom_load_fn)


def _has_same_stages(
    load_dir: Path,
    tag: str | None,
    stages: int,
    stage: int | None,
    names: set[str],
) -> bool:
    """Whether the same stages saved the checkpoint, so that each loads the part with its own number.

    Args:
        load_dir, tag: of the checkpoint.
        stages: number of stages.
        stage: of this rank; None without stages.
        names: of the stage's parameters.
    """
    named = read_latest(load_dir) if tag is None else tag
    if named is None:
        return True
    saved = saved_stages(load_dir / named)
    if saved is None or saved != stages:
        return saved is None
    if stage is None:
        return True
    manifest = Checkpoint(load_dir / named / part_name(stage)).manifest
    return names <= {*manifest.parameters, *manifest.aliases}

"""Checkpoints of a pipeline, which can be loaded with any number of stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from zero_runtime.checkpoint.files.checkpoint_manifest import read_latest
from zero_runtime.checkpoint.files.checkpoint_reader import Checkpoint
from zero_runtime.checkpoint.loading import Loaded, Wanted, load
from zero_runtime.checkpoint.ranks import save_agreement
from zero_runtime.checkpoint.ranks.checkpoint_parts import axes_of_saved
from zero_runtime.checkpoint.ranks.merged_ranks import open_stages, saved_stages
from zero_runtime.checkpoint.ranks.parts_file import read_parts
from zero_runtime.checkpoint.training import Training, aliases, buffers, parameters
from zero_runtime.comm import DataParallelGroup
from zero_runtime.config import RuntimeConfig
from zero_runtime.groups.parallelism import Parallelism
from zero_runtime.groups.process_grid import MODEL, PIPE
from zero_runtime.pipeline.model import ties
from zero_runtime.pipeline.model.pipeline_module import PipelineModule
from zero_runtime.pipeline.stage_grid import PipelineGrid
from zero_runtime.pipeline.stage_weights import collected_weights, save_weights
from zero_runtime.training.engine_checkpoints import Checkpoints, folder
from zero_runtime.training.moved_states import MovedStates


class StageCheckpoints(Checkpoints):
    """The part of a pipeline's engine that saves and loads its checkpoints.

    Args:
        module: The pipeline, with the layers of this stage.
        config, parallelism, moved, settled: The same arguments as for
            :class:`~zero_runtime.training.engine_checkpoints.Checkpoints`.
    """

    def __init__(
        self,
        module: PipelineModule,
        config: RuntimeConfig,
        parallelism: Parallelism,
        moved: MovedStates,
        settled: Callable[[], Training],
    ) -> None:
        super().__init__(config, parallelism, moved, settled)
        self._module = module

    def _load(self, training: Training, load_dir: Path, tag: str | None, wanted: Wanted) -> Loaded | None:
        """Load the layers of this stage, which any number of stages may have saved.

        All ranks must call this method.
        """
        sizes = self._parallelism.model_sizes()
        everyone = DataParallelGroup()
        cut, error = save_agreement.attempt(lambda: MODEL in (axes_of_saved(load_dir, tag) or {}))
        save_agreement.agree_on(everyone, error, int(bool(cut)), f"loading {load_dir}")
        if cut or sizes.get(MODEL, 1) > 1:
            return super()._load(training, load_dir, tag, wanted)
        names = self._names(training)
        mine = self._module.stage_id if sizes else None
        as_saved, error = save_agreement.attempt(
            lambda: _has_same_stages(load_dir, tag, sizes.get(PIPE, 1), mine, set(parameters(training)))
        )
        doing = f"loading {load_dir if tag is None else load_dir / tag}"
        if save_agreement.agree_on(everyone, error, int(bool(as_saved)), doing) and as_saved:
            return super()._load(training, load_dir, tag, wanted)
        opener = partial(open_stages, names=names)
        loaded = load(training._replace(group=everyone), load_dir, tag, wanted, opener=opener)
        ties.synchronize(self._module.ties)
        return loaded

    def _names(self, training: Training) -> frozenset[str]:
        return frozenset((*parameters(training), *buffers(training.module), *aliases(training.module)))

    def _load_recut(
        self, training: Training, load_dir: Path, tag: str | None, wanted: Wanted
    ) -> Loaded | None:
        loaded = super()._load_recut(training, load_dir, tag, wanted)
        ties.synchronize(self._module.ties)
        return loaded

    def save_weights(self, save_dir: str | Path, filename: str, exclude_frozen: bool) -> bool:
        """Save the layers of all stages in one file, which rank 0 writes."""
        path = folder(save_dir) / filename
        with self._training() as training:
            save_weights(training, self._grid, path, exclude_frozen)
        return True

    def collect_weights(self, exclude_frozen: bool) -> dict[str, torch.Tensor] | None:
        """Return the weights of all stages on rank 0, and None on the other ranks."""
        with self._training() as training:
            return collected_weights(training, self._grid, exclude_frozen)

    @property
    def _grid(self) -> PipelineGrid:
        assert self._module.grid is not None
        return self._module.grid

    def load_weights(
        self,
        state_dict: Mapping[str, Any],
        strict: bool,
        custom_load_fn: Callable[..., Any] | None,
    ) -> None:
        """Load the layers of this stage from the state dict of the complete model."""
        mine: Mapping[str, torch.Tensor] = self._module.state_dict()
        stage_state = {name: value for name, value in state_dict.items() if name in mine}
        super().load_weights(stage_state, strict, custom_load_fn)


def _has_same_stages(
    load_dir: Path,
    tag: str | None,
    stages: int,
    stage: int | None,
    names: set[str],
) -> bool:
    """Return whether the same stages saved the checkpoint. Each stage then loads the part with its own number.

    The result is also true if nothing was saved, or if the saved model was also partitioned along axes other than
    the stages.

    Args:
        load_dir, tag: The folder of checkpoints and the name of the checkpoint. None is the checkpoint saved
            last.
        stages: The number of stages.
        stage: The stage of this rank, or None without stages.
        names: The names of the parameters of the stage.
    """
    named = read_latest(load_dir) if tag is None else tag
    if named is None:
        return True
    saved = saved_stages(load_dir / named)
    if saved is None or saved != stages:
        return saved is None
    parts = read_parts(load_dir / named)
    if stage is None or parts is None:
        return stage is None
    manifest = Checkpoint(load_dir / named / parts.names(stages)[stage]).manifest
    return names <= {*manifest.parameters, *manifest.aliases}

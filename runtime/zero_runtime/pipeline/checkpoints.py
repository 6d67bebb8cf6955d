"""Checkpoints of a pipeline, which may be loaded by another number of stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch

from zero_runtime.checkpoint import agreement
from zero_runtime.checkpoint.joined import open_stages, saved_stages
from zero_runtime.checkpoint.loading import Loaded, Wanted, load
from zero_runtime.checkpoint.manifest import read_latest
from zero_runtime.checkpoint.training import Training, aliases, buffers, parameters
from zero_runtime.comm import DataParallelGroup
from zero_runtime.errors import UnsupportedError
from zero_runtime.parallelism import Parallelism
from zero_runtime.pipeline import ties
from zero_runtime.pipeline.module import PipelineModule
from zero_runtime.saving import Saving
from zero_runtime.topology import MODEL, PIPE


class StagedSaving(Saving):
    """The methods of :class:`~zero_runtime.saving.Saving` where they differ for stages."""

    module: PipelineModule
    parallelism: Parallelism

    def _load(self, training: Training, load_dir: Path, tag: str | None, wanted: Wanted) -> Loaded | None:
        """Load what this stage has, whatever stages saved it. All ranks must call it."""
        everyone = DataParallelGroup()
        saved, error = agreement.attempt(lambda: _saved_stages(load_dir, tag))
        doing = f"loading {load_dir if tag is None else load_dir / tag}"
        agreement.agree_on(everyone, error, saved or 0, doing)
        sizes = self.parallelism.model_sizes()
        if saved is None or saved == sizes.get(PIPE, 1) or sizes.get(MODEL, 1) > 1:
            return super()._load(training, load_dir, tag, wanted)
        names = frozenset((*parameters(training), *buffers(training.module), *aliases(training.module)))
        opener = partial(open_stages, names=names)
        found = load(training._replace(group=everyone), load_dir, tag, wanted, opener=opener)
        ties.synchronize(self.module.ties)
        return found

    def save_16bit_model(
        self, save_dir: str | Path, save_filename: str = "", exclude_frozen_parameters: bool = False
    ) -> NoReturn:
        """Refused: each stage has other layers."""
        raise UnsupportedError(
            "save_16bit_model of a pipeline is not in this version, where no rank has all layers; save_checkpoint, and then "
            "python -m zero_runtime.checkpoint DIR makes one file of all stages"
        )

    save_fp16_model = save_16bit_model

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> NoReturn:
        """Refused likewise."""
        self.save_16bit_model("")

    def load_module_state_dict(
        self,
        state_dict: Mapping[str, Any],
        strict: bool = True,
        custom_load_fn: Callable[..., Any] | None = None,
    ) -> None:
        """Load the layers of this stage from a state dict of all of them. All ranks must call it."""
        mine: Mapping[str, torch.Tensor] = self.module.state_dict()
        own = {name: value for name, value in state_dict.items() if name in mine}
        super().load_module_state_dict(own, strict, custom_load_fn)


def _saved_stages(load_dir: Path, tag: str | None) -> int | None:
    named = read_latest(load_dir) if tag is None else tag
    return None if named is None else saved_stages(load_dir / named)

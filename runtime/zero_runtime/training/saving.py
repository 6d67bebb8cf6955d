"""The engine's methods that save and load checkpoints."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from commprof import hooks
from zero_runtime import log
from zero_runtime.checkpoint.files.checkpoint_writer import save
from zero_runtime.checkpoint.loading import Loaded, Wanted, load
from zero_runtime.checkpoint.ranks import save_agreement
from zero_runtime.checkpoint.ranks.checkpoint_parts import axes_of_saved, load_parts, load_recut, save_parts
from zero_runtime.checkpoint.saved_weights import collected_weights, save_weights
from zero_runtime.checkpoint.training import Training
from zero_runtime.comm import DataParallelGroup
from zero_runtime.config import RuntimeConfig
from zero_runtime.errors import ConfigError, UsageError
from zero_runtime.experimental.compression.residuals import Residuals
from zero_runtime.gradient_reduction.loss_scale import LossScale
from zero_runtime.groups.parallelism import Parallelism
from zero_runtime.sharding.gather_schedule.residency import residency_of
from zero_runtime.tensor_parallel.cuts import own_parts
from zero_runtime.training.accumulation import Window
from zero_runtime.training.moved_states import LP_PARAMS, STATES, MovedStates
from zero_runtime.zero import GatheredParameters


class Saving:
    """Checkpoints of an engine. The attributes are the engine's."""

    _config: RuntimeConfig
    module: torch.nn.Module
    optimizer: Any
    lr_scheduler: Any
    global_rank: int
    global_steps: int
    global_samples: int
    skipped_steps: int
    _group: DataParallelGroup
    _scale: LossScale
    _window: Window
    _residuals: Residuals | None
    _moved: MovedStates
    parallelism: Parallelism
    zero_grad: Callable[..., None]
    drain_gradients: Callable[[], int]

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: object = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save everything that is needed to resume the training, as ``save_dir/tag``. All ranks must call it.

        Args:
            save_dir: the folder of checkpoints, on a file system that all ranks share.
            tag: name of this checkpoint; default: ``global_step`` and the number of steps.
            client_state: values that ``load_checkpoint`` returns; those of rank 0 are saved.
            save_latest: make it the default of ``load_checkpoint``.
            exclude_frozen_parameters: leave frozen parameters out.

        Raises:
            CheckpointError: on every rank, if one of them fails; earlier checkpoints are unchanged.
            ConfigError: ``save_dir`` is empty.
        """
        tag = f"global_step{self.global_steps}" if tag is None else str(tag)
        model, write = self.parallelism.model, save
        if model is not None:
            write = partial(save_parts, model=model, sizes=self.parallelism.model_sizes())
        with self._checkpointing() as training:
            write(
                training,
                save_dir=folder(save_dir),
                tag=tag,
                client_state=client_state or {},
                tag_validation=self._config.checkpoint_tag_validation,
                save_latest=save_latest,
                exclude_frozen=exclude_frozen_parameters,
            )
            residency = residency_of(self.module)
            if residency is not None and LP_PARAMS not in self._moved.away:
                # As after a step, even if a script has released everything.
                residency.gather_persistent()
        return True

    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: object = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
    ) -> tuple[str | None, dict[str, Any]]:
        """Load a checkpoint that was saved at any world size and stage. All ranks must call it.

        The checkpoint of a tensor-parallel model is merged and partitioned again.

        Args:
            load_dir: the folder of checkpoints.
            tag: name of the checkpoint; default: the one saved last.
            load_module_strict: refuse a checkpoint of other parameters than the model has.
            load_optimizer_states: the optimizer's state, the loss scale and the random generators too.
            load_lr_scheduler_states: the schedule's state too.
            load_module_only: parameters and buffers, and nothing else.
            custom_load_fn: called with ``src``, a state dict, and ``dst``, the model, instead of loading the model.

        Returns:
            (its directory, the client state), or (None, {}) if nothing was saved and no tag is named.

        Raises:
            CheckpointError: on every rank, if one of them fails; the engine is unchanged.
        """
        wanted = Wanted(
            load_module_strict,
            load_optimizer_states,
            load_lr_scheduler_states,
            load_module_only,
            self._config.zero.load_from_fp32_weights,
            custom_load_fn,
            self._config.checkpoint_load_universal,
        )
        name = None if tag is None else str(tag)
        self._moved.refuse("load_checkpoint", *STATES)
        with self._checkpointing() as training:
            loaded = self._load(training, Path(load_dir), name, wanted)
        if loaded is None:
            return None, {}
        if self.optimizer is not None:
            self.optimizer.loaded()
        self.zero_grad()
        self._window.passes = 0
        if loaded.counters is not None:
            self._count_from(loaded.counters)
        return str(loaded.directory), loaded.client_state

    def _load(self, training: Training, load_dir: Path, tag: str | None, wanted: Wanted) -> Loaded | None:
        model, sizes = self.parallelism.model, self.parallelism.model_sizes()
        saved, error = save_agreement.attempt(lambda: axes_of_saved(load_dir, tag))
        if model is None:
            if not saved:
                return load(training, load_dir, tag, wanted)
            return self._load_recut(training, load_dir, tag, wanted)
        doing = f"loading {load_dir if tag is None else load_dir / tag}"
        number = 0 if saved is None else zlib.crc32(str(sorted(saved.items())).encode())
        save_agreement.agree_on(DataParallelGroup(), error, number, doing)
        if saved is None or saved == sizes:
            return load_parts(training, model, sizes, load_dir, tag, wanted)
        return self._load_recut(training, load_dir, tag, wanted)

    def _load_recut(
        self, training: Training, load_dir: Path, tag: str | None, wanted: Wanted
    ) -> Loaded | None:
        """Load a checkpoint whose model was partitioned differently."""
        return load_recut(training, load_dir, tag, wanted, self._names(training))

    def _names(self, training: Training) -> frozenset[str] | None:
        """Names of the parameters to load of a whole model; None for all of them."""
        return None

    def save_16bit_model(
        self,
        save_dir: str | Path,
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save the model's weights in its own dtypes, in one file. All ranks must call it.

        Args:
            save_dir: of the file; created if it does not exist.
            save_filename: with .safetensors the file is in that format, otherwise in torch.save's.
            exclude_frozen_parameters: leave frozen parameters out.

        Returns:
            Whether they were saved: at stage 3 only if gather_16bit_weights_on_model_save is true.

        Raises:
            CheckpointError: on every rank, if the file cannot be written.
            UsageError: the model has experts on several ranks.
        """
        self._refuse_experts("save_16bit_model")
        path, zero = folder(save_dir) / save_filename, self._config.zero
        if zero.stage.shards_parameters and not zero.sharding.gather_16bit_weights_on_model_save:
            if self.global_rank == 0:
                log.warning(
                    f"{path} was not saved; set "
                    "zero_optimization.stage3_gather_16bit_weights_on_model_save to true to have the model gathered for it"
                )
            return False
        with self._checkpointing() as training:
            save_weights(training, path, exclude_frozen_parameters)
        return True

    save_fp16_model = save_16bit_model

    def _zero3_consolidated_16bit_state_dict(
        self, exclude_frozen_parameters: bool = False
    ) -> dict[str, torch.Tensor] | None:
        """The whole model in its own dtypes on rank 0, None elsewhere. All ranks must call it. Libraries use this name.

        Raises:
            UsageError: gather_16bit_weights_on_model_save is false at stage 3.
        """
        zero = self._config.zero
        if zero.stage.shards_parameters and not zero.sharding.gather_16bit_weights_on_model_save:
            raise UsageError(
                "the model is sharded; set zero_optimization.stage3_gather_16bit_weights_on_model_save to true to gather it"
            )
        self._refuse_experts("_zero3_consolidated_16bit_state_dict")
        with self._checkpointing() as training:
            return collected_weights(training, exclude_frozen_parameters)

    def _refuse_experts(self, method: str) -> None:
        """Raise UsageError where rank 0 lacks experts, which would be missing in what it saves."""
        sizes = [each.parallel.world_size for each in self.parallelism.experts.values()]
        if max(sizes, default=1) > 1:
            raise UsageError(
                f"{method} saves the weights of rank 0, and this model's experts are on {max(sizes)} ranks; use "
                "save_checkpoint, and python -m zero_runtime.checkpoint to make one file with all experts of it"
            )

    def load_module_state_dict(
        self,
        state_dict: Mapping[str, Any],
        strict: bool = True,
        custom_load_fn: Callable[..., Any] | None = None,
    ) -> None:
        """Load the model's weights, from which the optimizer continues. All ranks must call it.

        Args:
            state_dict: whole parameters and buffers, by name; at stage 3 those of rank 0 are used.
            strict: refuse names that differ from the model's.
            custom_load_fn: called with ``src``, the state dict, and ``dst``, the model, instead of loading.
        """
        self._moved.refuse("load_module_state_dict", *STATES)
        with self._checkpointing(), torch.no_grad():
            with GatheredParameters(list(self.module.parameters()), modifier_rank=0):
                if custom_load_fn is not None:
                    custom_load_fn(src=state_dict, dst=self.module)
                else:
                    self.module.load_state_dict(own_parts(self.module, state_dict), strict=strict)
            if self.optimizer is not None:
                self.optimizer.adopt()

    @contextmanager
    def _checkpointing(self) -> Iterator[Training]:
        self.drain_gradients()
        self._moved.settle()
        hooks.phase("checkpoint")
        try:
            yield Training(
                self.module,
                self.optimizer,
                self.lr_scheduler,
                self._scale,
                self._group,
                self._config.zero.stage.number,
                self._config.zero.stage.shards_optimizer,
                {
                    "global_steps": self.global_steps,
                    "global_samples": self.global_samples,
                    "skipped_steps": self.skipped_steps,
                    "micro_steps": self._window.micro_steps,
                    "gradient_accumulation_steps": self._config.gradient_accumulation_steps,
                },
                self._residuals,
                self.parallelism.tensor_group,
                self.parallelism.experts,
            )
        finally:
            hooks.phase("other")

    def _count_from(self, counters: Mapping[str, int]) -> None:
        self.global_steps = counters["global_steps"]
        self.global_samples = counters["global_samples"]
        self.skipped_steps = counters["skipped_steps"]
        # A checkpoint has no gradients of an unfinished window, so the window restarts.
        windows = counters["micro_steps"] // counters["gradient_accumulation_steps"]
        self._window.restart(windows * self._config.gradient_accumulation_steps)


def folder(path: str | Path | None) -> Path:
    """``path`` as a Path. Raises ConfigError if it is missing or empty."""
    if path is None or not str(path):
        raise ConfigError(f"save_dir is {path!r}; expected a folder, such as checkpoints")
    return Path(path)

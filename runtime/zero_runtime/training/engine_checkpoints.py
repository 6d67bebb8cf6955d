"""Saving and loading of an engine's checkpoints and of its model's weights."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from commprof import hooks
from zero_runtime import comm, log
from zero_runtime.checkpoint.files.checkpoint_writer import save
from zero_runtime.checkpoint.loading import Loaded, Wanted, load
from zero_runtime.checkpoint.ranks import save_agreement
from zero_runtime.checkpoint.ranks.checkpoint_parts import axes_of_saved, load_parts, load_recut, save_parts
from zero_runtime.checkpoint.saved_weights import collected_weights, save_weights
from zero_runtime.checkpoint.training import Training
from zero_runtime.comm import DataParallelGroup
from zero_runtime.config import RuntimeConfig
from zero_runtime.errors import ConfigError, UsageError
from zero_runtime.experts.expert_parameters import experts_of
from zero_runtime.groups.parallelism import Parallelism
from zero_runtime.sharding.gather_schedule.residency import residency_of
from zero_runtime.tensor_parallel.cuts import own_parts
from zero_runtime.training.moved_states import LP_PARAMS, STATES, MovedStates
from zero_runtime.zero import GatheredParameters


class Checkpoints:
    """The part of an engine that saves and loads its checkpoints. All ranks must call each method.

    Args:
        config: The configuration of the engine.
        parallelism: The axes of the ranks.
        moved: The states that are in host memory.
        settled: A function that finishes the pending operations of the engine and returns the state that a
            checkpoint saves.
    """

    def __init__(
        self,
        config: RuntimeConfig,
        parallelism: Parallelism,
        moved: MovedStates,
        settled: Callable[[], Training],
    ) -> None:
        self._zero = config.zero
        self._tag_validation = config.checkpoint_tag_validation
        self._parallelism = parallelism
        self._moved = moved
        self._settled = settled

    def save(
        self,
        save_dir: str | Path,
        tag: str,
        client_state: Mapping[str, Any],
        save_latest: bool,
        exclude_frozen: bool,
    ) -> None:
        """Save a checkpoint; see :meth:`zero_runtime.training.engine.Engine.save_checkpoint`."""
        model, write = self._parallelism.model, save
        if model is not None:
            write = partial(save_parts, model=model, sizes=self._parallelism.model_sizes())
        with self._training() as training:
            write(
                training,
                save_dir=folder(save_dir),
                tag=tag,
                client_state=client_state,
                tag_validation=self._tag_validation,
                save_latest=save_latest,
                exclude_frozen=exclude_frozen,
            )
            residency = residency_of(training.module)
            if residency is not None and LP_PARAMS not in self._moved.away:
                # After a step the persistent parameters are gathered. A script may have released them.
                residency.gather_persistent()

    def load(self, load_dir: Path, tag: str | None, wanted: Wanted) -> Loaded | None:
        """Load a checkpoint, and return the values that the engine must take over; None if nothing was saved.

        See :meth:`zero_runtime.training.engine.Engine.load_checkpoint`.
        """
        self._moved.refuse("load_checkpoint", *STATES)
        with self._training() as training:
            loaded = self._load(training, load_dir, tag, wanted)
        if loaded is not None and training.optimizer is not None:
            training.optimizer.loaded()
        return loaded

    def _load(self, training: Training, load_dir: Path, tag: str | None, wanted: Wanted) -> Loaded | None:
        model, sizes = self._parallelism.model, self._parallelism.model_sizes()
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
        """Return the names of the parameters to load from a complete model, or None to load all of them."""
        return None

    def save_weights(self, save_dir: str | Path, filename: str, exclude_frozen: bool) -> bool:
        """Save only the weights of the model; see :meth:`zero_runtime.training.engine.Engine.save_16bit_model`."""
        path = folder(save_dir) / filename
        if self._zero.stage.shards_parameters and not self._zero.sharding.gather_16bit_weights_on_model_save:
            if comm.get_rank() == 0:
                log.warning(
                    f"{path} was not saved; set "
                    "zero_optimization.stage3_gather_16bit_weights_on_model_save to true to have the model gathered for it"
                )
            return False
        with self._training() as training:
            _refuse_buffers(training.module, "save_16bit_model")
            save_weights(training, path, exclude_frozen)
        return True

    def collect_weights(self, exclude_frozen: bool) -> dict[str, torch.Tensor] | None:
        """Return the weights of the complete model in their own dtypes on rank 0, and None on the other ranks.

        Raises:
            UsageError: gather_16bit_weights_on_model_save is false at stage 3.
        """
        if self._zero.stage.shards_parameters and not self._zero.sharding.gather_16bit_weights_on_model_save:
            raise UsageError(
                "the model is sharded; set zero_optimization.stage3_gather_16bit_weights_on_model_save to true to gather it"
            )
        with self._training() as training:
            _refuse_buffers(training.module, "_zero3_consolidated_16bit_state_dict")
            return collected_weights(training, exclude_frozen)

    def load_weights(
        self,
        state_dict: Mapping[str, Any],
        strict: bool,
        custom_load_fn: Callable[..., Any] | None,
    ) -> None:
        """Load only the model's weights; see :meth:`zero_runtime.training.engine.Engine.load_module_state_dict`."""
        self._moved.refuse("load_module_state_dict", *STATES)
        with self._training() as training, torch.no_grad():
            module = training.module
            with GatheredParameters(list(module.parameters()), modifier_rank=0):
                if custom_load_fn is not None:
                    custom_load_fn(src=state_dict, dst=module)
                else:
                    module.load_state_dict(own_parts(module, state_dict), strict=strict)
            if training.optimizer is not None:
                training.optimizer.adopt()

    @contextmanager
    def _training(self) -> Iterator[Training]:
        training = self._settled()
        hooks.phase("checkpoint")
        try:
            yield training
        finally:
            hooks.phase("other")


def folder(path: str | Path | None) -> Path:
    """Return ``path`` as a Path.

    Raises:
        ConfigError: ``path`` is None or empty.
    """
    if path is None or not str(path):
        raise ConfigError(f"save_dir is {path!r}; expected a folder, such as checkpoints")
    return Path(path)


def _refuse_buffers(module: torch.nn.Module, method: str) -> None:
    """Raise UsageError if experts on other ranks have buffers, which rank 0 could not save."""
    spread = [each for each in experts_of(module).values() if each.total > each.num_local_experts]
    names = [name for each in spread for name, _ in each.named_buffers()]
    if names:
        raise UsageError(
            f"{method} gathers the parameters of experts, and those of this model have buffers ({names[0]}), which "
            "differ between ranks; use save_checkpoint, or experts without buffers"
        )

"""The engine: DeepSpeed's methods around one model."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Final

import torch
from torch.utils._pytree import tree_leaves

from commprof import hooks
from zero_runtime import comm
from zero_runtime.assembly import Assembly
from zero_runtime.checkpoint.loading import Wanted, load
from zero_runtime.checkpoint.training import Training
from zero_runtime.checkpoint.weights import save_weights
from zero_runtime.checkpoint.writer import save
from zero_runtime.clock import Clock
from zero_runtime.config import RuntimeConfig
from zero_runtime.errors import UsageError
from zero_runtime.fp32_modules import cast_floating
from zero_runtime.linear import memory_efficient_linear
from zero_runtime.precision import autocast

_NEVER: Final = (-1, -1)


class Engine(torch.nn.Module):
    """A model that trains under ZeRO. Made by :func:`zero_runtime.initialize`.

    Attributes:
        module: the model.
        optimizer: the sharded optimizer, or at stage 0 the torch optimizer itself; None without one.
        lr_scheduler: the learning-rate schedule, or None.
        training_dataloader: batches of this rank's share of ``training_data``, or None.
        global_steps: optimizer steps taken, skipped ones included.
        micro_steps: calls of ``step``.
        skipped_steps: steps skipped because a gradient overflowed.
        device: of the parameters.
        local_rank: this process's number on its host.
        config: the checked configuration.
    """

    def __init__(self, config: RuntimeConfig, assembly: Assembly, lr_scheduler: Any, dataloader: Any) -> None:
        super().__init__()
        self.config = config
        self.module = assembly.module
        self.optimizer = assembly.optimizer
        self.basic_optimizer = assembly.torch_optimizer
        self.lr_scheduler = lr_scheduler
        self.training_dataloader = dataloader
        self.device = assembly.device
        self.local_rank = comm.get_local_rank()
        self.global_rank = comm.get_rank()
        self.world_size = assembly.group.world_size
        self.global_steps = 0
        self.global_samples = 0
        self.micro_steps = 0
        self.skipped_steps = 0
        self._group = assembly.group
        self._gradients = assembly.gradients
        self._residency = assembly.residency
        efficient = config.zero.stage.shards_parameters and config.zero.sharding.memory_efficient_linear
        self._linear: Callable[[], AbstractContextManager[None]] = (
            memory_efficient_linear if efficient else nullcontext
        )
        self._precision = assembly.precision
        self._scale = assembly.loss_scale
        self._boundary: bool | None = None
        self._micro_batches = 0  # backward passes since the last step
        self._announced = _NEVER
        self._stepping = False
        self._step_applied = False
        self._paused = False
        self._differentiating = False
        self._direct = False  # loss.backward() is running, not engine.backward(loss)
        self._scaled = False  # the loss of that was given to scale()
        self._clock = Clock(config.wall_clock_breakdown and self.global_rank == 0)
        assembly.boundary.ask = self.is_gradient_accumulation_boundary

    def __getattr__(self, name: str) -> Any:
        """Names that the engine has not are the model's."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)

    # Training.

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the model. In training mode this begins a micro-batch."""
        if self.training:
            self._announce()
        hooks.phase("forward")
        if self._precision.inputs is not None:
            inputs, kwargs = cast_floating((inputs, kwargs), self._precision.inputs)
        with self._clock("forward"), autocast(self._precision.autocast, self.device), self._linear():
            outputs = self.module(*inputs, **kwargs)
        if self.training:
            for leaf in tree_leaves(outputs):
                if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
                    leaf.register_hook(self._on_output_gradient)
        hooks.phase("other")
        return outputs

    def backward(
        self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True
    ) -> torch.Tensor:
        """Accumulate the gradients of ``loss``, and reduce them when the stage says so.

        Without an optimizer they stay until the next accumulation window begins: in each parameter's ``grad``, on all ranks
        alike, also at stages 1 and 2, where there is nothing to shard; at stage 3 in slices.

        The loss is multiplied by the loss scale before it is differentiated.

        Args:
            loss: 0-D or one-element tensor of this rank's micro-batch.
            retain_graph: keep the graph for another backward.
            scale_wrt_gas: divide the loss by the number of accumulation steps.

        Returns:
            The loss divided by the accumulation steps; not scaled.
        """
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            shown = f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else repr(loss)
            raise UsageError(f"backward expects a loss of one element, found {shown}; take its mean or sum")
        shared = loss / self.config.gradient_accumulation_steps if scale_wrt_gas else loss
        scale = self._scale.value
        self._scaled = False
        with self._clock("backward"):
            self._begin_backward()
            try:
                with self._linear():  # for what activation checkpointing runs again
                    (shared if scale == 1.0 else shared * scale).backward(retain_graph=retain_graph)
            finally:
                self._differentiating = False
            self._finish_backward()
        return shared

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """``loss`` times the loss scale, for ``engine.scale(loss).backward()`` in place of ``engine.backward(loss)``."""
        self._scaled = True
        return loss * self._scale.value

    def _begin_backward(self) -> None:
        hooks.phase("backward")
        self._differentiating = True
        if self._micro_batches == 0:
            if self.optimizer is None:
                self._gradients.clear()
            self._gradients.begin_step()

    @torch.no_grad()
    def _finish_backward(self) -> None:
        self._differentiating = False
        self._micro_batches += 1
        self._gradients.finish_backward()
        if self._residency is not None:
            self._residency.finish_backward()
        if self.optimizer is None:
            self._count_backward()
        hooks.phase("other")

    def _count_backward(self) -> None:
        """Without an optimizer nobody calls ``step``: the last backward pass of a window ends it, and its gradients stay."""
        if self.is_gradient_accumulation_boundary():
            self.global_steps += 1
            self._micro_batches = 0
        self.micro_steps += 1

    def _on_output_gradient(self, gradient: torch.Tensor) -> torch.Tensor | None:
        """The gradient of an output of ``forward``, in ``loss.backward()`` as well as in ``engine.backward(loss)``.

        In the former nothing else says that a backward pass begins, and its end is known to autograd alone.
        """
        if self._differentiating and not self._direct:
            return None
        if not self.zero_optimization():
            raise UsageError(
                "loss.backward() was called at stage 0, where its end cannot be seen; call engine.backward(loss)"
            )
        if self._scale.value != 1.0 and not self._scaled:
            raise UsageError(
                f"loss.backward() was called with a loss scale of {self._scale.value:g}, which the loss has not been "
                "multiplied by; call engine.backward(loss), or engine.scale(loss).backward()"
            )
        if not self._direct:
            self._direct = True
            self._begin_backward()
            torch.autograd.Variable._execution_engine.queue_callback(self._finish_direct_backward)
        return gradient / self.config.gradient_accumulation_steps

    def _finish_direct_backward(self) -> None:
        self._direct = self._scaled = False
        self._finish_backward()

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """Take an optimizer step if the micro-batch is the last of its accumulation window; otherwise only count it.

        With managed_gradient_accumulation false every call takes a step.
        """
        if self.optimizer is None:
            where = "in slices" if self._residency is not None else "in the grad of each parameter"
            raise UsageError(
                f"step needs an optimizer, and there is none: the gradients of the last backward pass are kept {where}, "
                "reduced over the ranks; name an optimizer in the config, or pass one to initialize"
            )
        if self._paused:
            raise UsageError("step was called inside no_sync, where gradients are not reduced; call it after")
        self._step_applied = False
        self._stepping = True
        try:
            if self.is_gradient_accumulation_boundary():
                hooks.phase("optimizer")
                with self._clock("step"):
                    self._take_step(lr_kwargs or {})
                self._clock.report(self.global_steps)
                hooks.phase("other")
        finally:
            self._stepping = False
        self.micro_steps += 1

    def _take_step(self, lr_kwargs: dict[str, Any]) -> None:
        assert self.optimizer is not None
        if not self.config.managed_gradient_accumulation and not self.config.zero.stage.shards_gradients:
            with torch.no_grad():
                self._gradients.finish_backward()
        self.optimizer.step()
        self._step_applied = not getattr(self.optimizer, "overflow", False)
        if self._step_applied:
            if self.lr_scheduler is not None:
                self.lr_scheduler.step(**lr_kwargs)
        else:
            self.skipped_steps += 1
        self.global_steps += 1
        per_micro_batch = self.config.train_micro_batch_size_per_gpu * self.world_size
        self.global_samples += per_micro_batch * self._micro_batches
        self._micro_batches = 0
        every = self.config.steps_per_print
        if every and self.global_steps % every == 0 and self.global_rank == 0:
            print(
                f"step={self.global_steps}, skipped={self.skipped_steps}, lr={self.get_lr()}",
                file=sys.stderr,
                flush=True,
            )

    def _announce(self) -> None:
        """Say which step and micro-batch this is, once for each."""
        now = (self.global_steps, self._micro_batches)
        if now != self._announced:
            self._announced = now
            hooks.step(*now)
            hooks.metric("samples", float(self.config.train_micro_batch_size_per_gpu))

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the micro-batch at hand is the last of its step. Without managed accumulation: only during step()."""
        if self._boundary is not None:
            return self._boundary
        if not self.config.managed_gradient_accumulation:
            return self._stepping or self.optimizer is None
        return (self.micro_steps + 1) % self.config.gradient_accumulation_steps == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Say whether the coming micro-batch is the last of its step, instead of counting."""
        if not self.config.managed_gradient_accumulation:
            raise UsageError(
                "set_gradient_accumulation_boundary was called with managed_gradient_accumulation false, where "
                "every step() is a boundary; remove the call"
            )
        self._boundary = is_boundary

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, gradients only accumulate on each rank. Not at stage 2, which frees them as they come."""
        if self.config.zero.stage.shards_gradients:
            raise UsageError(
                f"no_sync means nothing at ZeRO stage {self.zero_optimization_stage()}, which reduces and frees "
                "gradients in every micro-batch; use stage 0 or 1"
            )
        if self._paused:
            raise UsageError("no_sync was entered inside no_sync; leave the inner one out")
        self._paused = True
        self._gradients.pause(True)
        try:
            yield
        finally:
            self._paused = False
            self._gradients.pause(False)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients; ``set_to_none`` is accepted for torch's signature."""
        self._gradients.clear()

    def was_step_applied(self) -> bool:
        """Whether the last call of ``step`` changed the parameters."""
        return self._step_applied

    # What it is doing.

    def get_global_grad_norm(self) -> torch.Tensor | None:
        """The norm of all gradients in the last step, before clipping; None where it is not computed (stage 0 in fp32)."""
        return getattr(self.optimizer, "grad_norm", None)

    def get_lr(self) -> list[float]:
        """The learning rate of each param group."""
        return [] if self.optimizer is None else [group["lr"] for group in self.optimizer.param_groups]

    def get_mom(self) -> list[Any]:
        """The betas of each param group, or its momentum with SGD and RMSprop; 0.0 for a group without them."""
        if self.optimizer is None:
            return []
        name = "momentum" if type(self.basic_optimizer).__name__ in ("SGD", "RMSprop") else "betas"
        return [group.get(name, 0.0) for group in self.optimizer.param_groups]

    def zero_optimization_stage(self) -> int:
        """0, 1 or 2."""
        return self.config.zero.stage.number

    def zero_optimization(self) -> bool:
        """Whether anything is sharded."""
        return self.config.zero.stage.shards_optimizer

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches in a step."""
        return self.config.gradient_accumulation_steps

    def train_batch_size(self) -> int:
        """Samples in a step, over all ranks."""
        return self.config.train_batch_size

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples in a micro-batch of one rank."""
        return self.config.train_micro_batch_size_per_gpu

    def gradient_clipping(self) -> float:
        """The largest norm of gradients; 0 where they are not clipped."""
        return self.config.gradient_clipping

    def bfloat16_enabled(self) -> bool:
        """Whether parameters are bf16."""
        return self.config.precision.bf16

    def fp16_enabled(self) -> bool:
        """Whether parameters are fp16."""
        return self.config.precision.fp16

    def fp16_auto_cast(self) -> bool:
        """Whether floating-point inputs are cast to fp16."""
        return self.config.precision.auto_cast

    def dynamic_loss_scale(self) -> bool:
        """Whether overflows change the loss scale."""
        return self._scale.dynamic

    def loss_scale(self) -> float:
        """The loss scale of the configuration, 0 where it is dynamic; ``optimizer.cur_scale`` is the one in use."""
        return 0.0 if self._scale.dynamic else self._scale.rules.value

    def _get_optimizer_loss_scale(self) -> float | None:
        """The loss scale in use, by the name under which DeepSpeed's users read it."""
        return None if self.optimizer is None else self._scale.value

    def module_state_dict(self) -> dict[str, Any]:
        """The model's state, by the model's own names."""
        return self.module.state_dict()

    @property
    def communication_data_type(self) -> torch.dtype:
        """The dtype of gradient messages."""
        return self._precision.communication

    # Checkpoints.

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: object = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save all that the training needs to go on, as ``save_dir/tag``. All ranks must call it.

        Args:
            save_dir: where checkpoints are; all ranks see it.
            tag: name of this one; default: ``global_step`` and the number of steps.
            client_state: values that ``load_checkpoint`` gives back; those of rank 0 are kept.
            save_latest: make it the one that is loaded when no tag is named.
            exclude_frozen_parameters: leave frozen parameters out.

        Raises:
            CheckpointError: on every rank, if one of them cannot; earlier checkpoints are as they were.
        """
        tag = f"global_step{self.global_steps}" if tag is None else str(tag)
        with self._checkpointing() as training:
            save(
                training,
                Path(save_dir),
                tag,
                client_state or {},
                tag_validation=self.config.checkpoint_tag_validation,
                save_latest=save_latest,
                exclude_frozen=exclude_frozen_parameters,
            )
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

        Args:
            load_dir: where checkpoints are.
            tag: which one; default: the one saved last.
            load_module_strict: refuse a checkpoint of other parameters than the model has.
            load_optimizer_states: the optimizer's state, the loss scale and the random generators too.
            load_lr_scheduler_states: the schedule's state too.
            load_module_only: parameters and buffers, and nothing else.
            custom_load_fn: called with ``src``, a state dict, and ``dst``, the model, in place of loading the model.

        Returns:
            (its directory, the client state), or (None, {}) where nothing was saved and no tag is named.

        Raises:
            CheckpointError: on every rank, if one of them cannot; the engine is as it was.
        """
        wanted = Wanted(
            load_module_strict,
            load_optimizer_states,
            load_lr_scheduler_states,
            load_module_only,
            self.config.zero.load_from_fp32_weights,
            custom_load_fn,
        )
        with self._checkpointing() as training:
            loaded = load(training, Path(load_dir), None if tag is None else str(tag), wanted)
        if loaded is None:
            return None, {}
        self.zero_grad()
        self._micro_batches = 0
        if loaded.counters is not None:
            self._count_from(loaded.counters)
        return str(loaded.directory), loaded.client_state

    def save_16bit_model(
        self,
        save_dir: str | Path,
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save the model's weights in its own dtypes, in one file. All ranks must call it.

        Args:
            save_dir: of the file; made if need be.
            save_filename: ending in .safetensors, or else of torch.save's format.
            exclude_frozen_parameters: leave frozen parameters out.

        Returns:
            Whether they were saved; not at stage 3, unless gather_16bit_weights_on_model_save is true.

        Raises:
            CheckpointError: on every rank, if the file cannot be written.
        """
        path, zero = Path(save_dir) / save_filename, self.config.zero
        if zero.stage.shards_parameters and not zero.sharding.gather_16bit_weights_on_model_save:
            if self.global_rank == 0:
                print(
                    f"zero_runtime: {path} was not saved; set "
                    "zero_optimization.stage3_gather_16bit_weights_on_model_save to true to have the model gathered for it",
                    file=sys.stderr,
                    flush=True,
                )
            return False
        with self._checkpointing() as training:
            save_weights(training, path, exclude_frozen_parameters)
        return True

    @contextmanager
    def _checkpointing(self) -> Iterator[Training]:
        hooks.phase("checkpoint")
        try:
            yield Training(
                self.module,
                self.optimizer,
                self.lr_scheduler,
                self._scale,
                self._group,
                self.config.zero.stage.number,
                self.config.zero.stage.shards_optimizer,
                {
                    "global_steps": self.global_steps,
                    "global_samples": self.global_samples,
                    "skipped_steps": self.skipped_steps,
                    "micro_steps": self.micro_steps,
                    "gradient_accumulation_steps": self.config.gradient_accumulation_steps,
                },
            )
        finally:
            hooks.phase("other")

    def _count_from(self, counters: Mapping[str, int]) -> None:
        self.global_steps = counters["global_steps"]
        self.global_samples = counters["global_samples"]
        self.skipped_steps = counters["skipped_steps"]
        # Gradients of a window that was not finished are not kept, so it begins again.
        windows = counters["micro_steps"] // counters["gradient_accumulation_steps"]
        self.micro_steps = windows * self.config.gradient_accumulation_steps

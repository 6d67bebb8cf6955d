"""The training engine, which trains one model and has the methods of DeepSpeed's engine."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Final

import torch
from torch.utils._pytree import tree_leaves

from commprof import hooks
from zero_runtime import comm
from zero_runtime.checkpoint.loading import Wanted
from zero_runtime.checkpoint.training import Training
from zero_runtime.config import RuntimeConfig
from zero_runtime.errors import ConfigError, UsageError
from zero_runtime.experimental.compression.residual_watch import ResidualWatch
from zero_runtime.experimental.delayed_steps import DelayedSteps
from zero_runtime.groups.timed import clock_of
from zero_runtime.groups.traffic_contract import OFF, STOP, TrafficContract, Verdict
from zero_runtime.optimizer_step.dtypes import autocast, cast_tensors
from zero_runtime.optimizer_step.fp32_modules import cast_floating
from zero_runtime.schedules import advance
from zero_runtime.sequence_parallel import name_attention, sequence_group
from zero_runtime.sharding.linear import memory_efficient_linear
from zero_runtime.sharding.shards import shard_of
from zero_runtime.startup.assembly import Assembly, close
from zero_runtime.training.accumulation import Window
from zero_runtime.training.data_loading import TRAIN, RankLoader, rank_loader
from zero_runtime.training.direct_passes import watch
from zero_runtime.training.engine_accessors import Accessors
from zero_runtime.training.engine_checkpoints import Checkpoints
from zero_runtime.training.input_dtypes import mismatch
from zero_runtime.training.moved_states import BACKWARD, LP_PARAMS, STATES, Movable, MovedStates
from zero_runtime.training.reporting import Progress, Report
from zero_runtime.training.step_batches import Batches, evaluate_step, train_step
from zero_runtime.training.throughput import ThroughputTimer

_NEVER: Final = (-1, -1)


class Engine(Accessors):
    """A model that trains under ZeRO. :func:`zero_runtime.initialize` creates the engine.

    Attributes:
        module: The model.
        optimizer: The sharded optimizer. At stage 0 the torch optimizer itself. None without an optimizer.
        lr_scheduler: The learning-rate schedule, or None.
        training_dataloader: The loader of this rank's share of ``training_data``, or None.
        global_steps: The number of optimizer steps, including skipped steps.
        skipped_steps: The number of steps that were skipped because a gradient overflowed.
        tput_timer: The timer that measures samples per second.
        pipeline_parallelism: Whether the model is a pipeline.
        device: The device of the parameters.
        local_rank: The number of this process on its host.
        config: The configuration passed to ``initialize``, in which new names replace the old names of keys.
        parallelism: The axes of the ranks. ``parallelism.replica`` is the number of this rank's replica, where
            different replicas train on different samples.
    """

    pipeline_parallelism = False

    def __init__(self, config: RuntimeConfig, assembly: Assembly, lr_scheduler: Any, dataloader: Any) -> None:
        super().__init__(config, assembly.module, assembly.parallelism)
        self.config = config.given
        self.optimizer = assembly.optimizer
        self.basic_optimizer = assembly.torch_optimizer
        self.lr_scheduler = lr_scheduler
        self.training_dataloader = dataloader
        self.collate_fn: Callable[[list[Any]], Any] | None = None
        self.device = assembly.device
        self.local_rank = comm.get_local_rank()
        self.global_rank = comm.get_rank()
        self.mpu = assembly.parallelism.mpu
        self.world_size = self.dp_world_size = assembly.parallelism.replicas
        self.mp_world_size = (
            1 if assembly.parallelism.model is None else assembly.parallelism.model.group.world_size
        )
        self.sequence_parallel_size = assembly.parallelism.sequence_size
        if self.sequence_parallel_size > 1:
            self.seq_parallel_group = sequence_group().group
            name_attention(self.module)
        self.global_steps = 0
        self.global_samples = 0
        self.skipped_steps = 0
        self._group = assembly.group
        self._contracts: list[TrafficContract] = []
        self._gradients = assembly.gradients
        self._delayed = DelayedSteps(assembly.gradients, self.global_rank)
        self._residuals = assembly.residuals
        self._residual_watch = ResidualWatch(assembly.residuals, self.global_rank)
        self._residency = assembly.residency
        self._moved = MovedStates(
            Movable(self.module, self.optimizer, self._gradients, self._residency),
            config.zero.sharding.residency.offload.device != "none",
            self.global_rank,
        )
        self._checkpoints = self._checkpoints_of(config)
        self._watch = assembly.installed.watch
        efficient = config.zero.stage.shards_parameters and config.zero.sharding.memory_efficient_linear
        self._linear: Callable[[], AbstractContextManager[None]] = (
            memory_efficient_linear if efficient else nullcontext
        )
        self._precision = assembly.precision
        self._scale = assembly.loss_scale
        self._window = Window(config.managed_gradient_accumulation, assembly.optimizer is not None)
        self._announced = _NEVER
        self._in_batch = False  # train_batch is running, and ends the step
        self._numbers = hooks.StepNumbers()
        self._step_applied = False
        self._differentiating = False
        self._direct = ExitStack()  # contexts that end with a loss.backward()
        self._is_direct = False  # loss.backward() is running, not engine.backward(loss)
        self._scaled = False  # scale() was called for the loss of this backward pass
        self._batches = Batches()
        self._clock = clock_of(assembly.group)
        self._clock.read()  # Communication before the first step is not part of a step.
        self._report = Report(config, self._clock, self.global_rank)
        watch(self.module)
        self.tput_timer = ThroughputTimer(
            config.throughput, config.train_batch_size, steps_per_output=config.steps_per_print
        )
        if config.disable_python_gc:
            gc.collect()
            gc.disable()
        assembly.boundary.ask = self.is_gradient_accumulation_boundary
        assembly.boundary.steps = lambda: self.global_steps

    def __getattr__(self, name: str) -> Any:
        """Return the attribute ``name`` of the wrapped model if the engine has no such attribute."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)

    # Training.

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the model. In training mode this begins a micro-batch."""
        self._moved.refuse("forward", LP_PARAMS)
        training = self._trains() and torch.is_grad_enabled()
        if training:
            self._announce()
            self.tput_timer.start()
        evaluates = not training and self._is_between_steps()
        hooks.phase("evaluation" if evaluates else "forward")
        if evaluates and self._residency is not None:
            self._residency.publish_released("evaluation_released_share")
        if self._precision.inputs is not None:
            inputs, kwargs = cast_floating((inputs, kwargs), self._precision.inputs)
        with (
            self._clock("forward" if training else "evaluation"),
            autocast(self._precision.autocast, self.device),
            self._linear(),
        ):
            try:
                outputs = self.module(*inputs, **kwargs)
            except RuntimeError as error:
                stated = mismatch(error, (inputs, kwargs), self._precision.model)
                if stated is None:
                    raise
                raise stated from error
        if training:
            for leaf in tree_leaves(outputs):
                if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
                    leaf.register_hook(self._on_output_gradient)
        hooks.phase("other")
        self._report.see_memory("after forward")
        return outputs

    def backward(
        self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True
    ) -> torch.Tensor:
        """Accumulate the gradients of ``loss``, and reduce them at the point that the stage prescribes.

        Without an optimizer, the gradients stay until the next accumulation window begins. At stages 0 to 2
        they are replicated in each parameter's ``grad``, and at stage 3 they are sharded.

        The loss is multiplied by the loss scale before it is differentiated.

        Args:
            loss: The loss of this rank's micro-batch, a 0-D or one-element tensor.
            retain_graph: Whether to keep the graph for another backward pass.
            scale_wrt_gas: Whether to divide the loss by the number of gradient accumulation steps.

        Returns:
            The loss divided by the number of gradient accumulation steps (undivided if ``scale_wrt_gas`` is
            false), without the loss scale.
        """
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            shown = f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else repr(loss)
            raise UsageError(f"backward expects a loss of one element, found {shown}; take its mean or sum")
        shared = loss / self._config.gradient_accumulation_steps if scale_wrt_gas else loss
        scale = self._scale.value
        self._scaled = False
        with self._clock("backward"):
            self._begin_backward()
            try:
                with self._linear():  # Activation checkpointing runs forward passes again.
                    (shared if scale == 1.0 else shared * scale).backward(retain_graph=retain_graph)
            finally:
                self._differentiating = False
            self._finish_backward()
        self._report.see_loss(loss)
        self._report.see_memory("after backward")
        return shared

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return ``loss`` times the loss scale.

        ``engine.scale(loss).backward()`` replaces ``engine.backward(loss)``.

        Raises:
            UsageError: ``loss`` is not a scalar tensor with a ``grad_fn``.
        """
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or loss.grad_fn is None:
            received: object = type(loss)
            if isinstance(loss, torch.Tensor):
                received = f"a tensor of shape {list(loss.shape)}{'' if loss.grad_fn is not None else ' without grad_fn'}"
            raise UsageError(
                f"scale got {received}; expected the loss, a scalar tensor with grad_fn; for any other tensor, pass "
                "(tensor * gradient).sum()"
            )
        self._scaled = True
        return loss * self._scale.value

    def _begin_backward(self) -> None:
        self._moved.refuse("backward", *BACKWARD)
        hooks.phase("backward")
        self._differentiating = True
        if self._window.passes == 0:
            if self.optimizer is None:
                self._gradients.clear()
            self._gradients.begin_step()

    @torch.no_grad()
    def _finish_backward(self) -> None:
        self._differentiating = False
        self._window.passes += 1
        if self._residency is not None:
            # The residency is first, because it compares the end of the pass with the other ranks before it
            # waits for their gradients.
            self._residency.finish_backward()
        self._gradients.finish_backward()
        if self.optimizer is None:
            self._count_backward()
        hooks.phase("other")

    def _count_backward(self) -> None:
        """Count a backward pass, and end the accumulation window after its last pass. The gradients stay.

        Only an engine without an optimizer calls this method, because such an engine has no calls of ``step``.
        """
        self.tput_timer.stop(
            global_step=self.is_gradient_accumulation_boundary(), report_speed=self.global_rank == 0
        )
        if self.is_gradient_accumulation_boundary():
            self.global_steps += 1
            self._window.passes = 0
            if not self._in_batch:
                hooks.end_step()
        self._window.micro_steps += 1

    def _on_output_gradient(self, gradient: torch.Tensor) -> torch.Tensor | None:
        """Detect the start of a direct ``loss.backward()``, and divide its gradient by the accumulation steps.

        Autograd calls this hook with the gradient of an output of ``forward``, both in ``loss.backward()``
        and in ``engine.backward(loss)``. A callback of autograd detects the end of ``loss.backward()``.
        """
        if self._differentiating and not self._is_direct:
            return None
        if not self.zero_optimization():
            raise UsageError(
                "loss.backward() was called at stage 0, where its end cannot be detected; call engine.backward(loss)"
            )
        if self._scale.value != 1.0 and not self._scaled:
            raise UsageError(
                f"Loss scaling is required: loss.backward() was called with a loss scale of {self._scale.value:g}, which "
                "the loss has not been multiplied by; call engine.backward(loss), or engine.scale(loss).backward()"
            )
        if not self._is_direct:
            self._is_direct = True
            self._direct.enter_context(self._clock("backward"))
            self._begin_backward()
            torch.autograd.Variable._execution_engine.queue_callback(self._finish_direct_backward)
        return gradient / self._config.gradient_accumulation_steps

    def _finish_direct_backward(self) -> None:
        self._is_direct = self._scaled = False
        self._finish_backward()
        self._direct.close()
        self._report.see_memory("after backward")

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """Count the micro-batch, and take an optimizer step if it is the last of its accumulation window.

        If managed_gradient_accumulation is false, every call takes a step.
        """
        if self.optimizer is None:
            where = "in shards" if self._residency is not None else "in the grad of each parameter"
            raise UsageError(
                f"step needs an optimizer, and there is none: the gradients of the last backward pass are kept {where}, "
                "reduced over the ranks; name an optimizer in the config, or pass one to initialize"
            )
        if self._window.paused:
            raise UsageError(
                "step was called inside no_sync or coalesce_grad_reduction, where gradients are not reduced; call it "
                "after the block"
            )
        self._step_applied = False
        self._window.stepping = True
        try:
            last = self.is_gradient_accumulation_boundary()
            if last:
                self._moved.refuse("step", *STATES)
                hooks.phase("optimizer")
                with self._clock("optimizer"):
                    self._take_step(lr_kwargs or {})
                hooks.phase("other")
        finally:
            self._window.stepping = False
        self._window.count_step(self._config.gradient_accumulation_steps)
        if last:
            if self._watch is not None:
                self._watch.see_step(self.global_steps)
            self._report.see_memory("after step")
            self._report.see_step(self._progress())
        self.tput_timer.stop(global_step=last, report_speed=self.global_rank == 0)
        if last and not self._in_batch:
            hooks.end_step()

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> torch.Tensor:
        """Run a complete training step: forward, backward and ``step`` for each of its micro-batches.

        Args:
            data_iter: An iterator of batches (see :func:`zero_runtime.training.step_batches.loss_of`). The
                default is the training data, repeated.

        Returns:
            The mean loss of the micro-batches of all ranks, a 0-D tensor.
        """
        if not self.training:
            raise UsageError("train_batch was called in eval mode; call engine.train() first")
        batches = self._batches.of(data_iter, self.training_dataloader)
        self._in_batch = True
        try:
            loss = train_step(self, batches, self._group)
        finally:
            self._in_batch = False
        hooks.end_step()
        return loss

    def eval_batch(self, data_iter: Iterator[Any] | None = None) -> torch.Tensor:
        """Return the mean loss over all ranks of as many micro-batches as a step has, a 0-D tensor.

        The model does not change.
        """
        return evaluate_step(self, self._batches.of(data_iter, self.training_dataloader), self._group)

    def _take_step(self, lr_kwargs: dict[str, Any]) -> None:
        assert self.optimizer is not None
        if (
            not self._config.managed_gradient_accumulation
            and not self._config.zero.stage.reduces_every_micro_batch
        ):
            with torch.no_grad():
                self._gradients.finish_backward()
        self._step_applied = self._apply_gradients(lr_kwargs)
        self.global_steps += 1
        self._residual_watch.see_step(self.global_steps)
        per_micro_batch = self._config.train_micro_batch_size_per_gpu * self.world_size
        self.global_samples += per_micro_batch * self._window.passes
        self._window.passes = 0

    def _apply_gradients(self, lr_kwargs: dict[str, Any]) -> bool:
        """Take an optimizer step with the reduced gradients.

        Returns:
            Whether the parameters changed. False if a delayed step has no gradients yet, or if a gradient
            overflowed.
        """
        if not self._delayed.due:
            return False
        assert self.optimizer is not None
        self.optimizer.step()
        if getattr(self.optimizer, "overflow", False):
            self.skipped_steps += 1
            return False
        if self.lr_scheduler is not None:
            advance(self.lr_scheduler, lr_kwargs, self._config.train_batch_size)
        return True

    @torch.no_grad()
    def drain_gradients(self) -> int:
        """Take the optimizer steps that ``communication.bounded_delay`` has delayed. All ranks must call this method.

        Afterwards no gradient is in flight. The next steps change no weights until the same delay has passed
        again. The learning-rate schedule advances. ``global_steps`` has already counted the delayed steps.
        Gradients that have accumulated for an incomplete step stay.

        Returns:
            The number of delayed steps, or 0 without a delay.
        """
        return self._delayed.drain(lambda: self._apply_gradients({}))

    def _progress(self) -> Progress:
        return Progress(
            self.global_steps,
            self.skipped_steps,
            self.global_samples,
            self.get_lr(),
            self.get_mom(),
            self._scale.value if self.fp16_enabled() else None,
        )

    def _announce(self) -> None:
        """Report the numbers of the current step and micro-batch to the recorder, once per micro-batch."""
        now = (self.global_steps, self._window.passes)
        if now != self._announced:
            is_first, self._announced = self._announced == _NEVER, now
            hooks.step(self._numbers.of(self.global_steps), self._window.passes)
            hooks.metric("samples", float(self._config.train_micro_batch_size_per_gpu))
            if self.skipped_steps:
                hooks.metric("skipped_steps", float(self.skipped_steps))
            if self._residency is not None and not is_first and not self._window.passes:
                self._residency.publish_released("released_share", always=self.skipped_steps > 0)

    def _trains(self) -> bool:
        """Return whether the engine or its model is in training mode.

        The mode of the model counts too, because Lightning sets only the mode of the model.
        """
        return self.training or any(child.training for child in self.children())

    def _is_between_steps(self) -> bool:
        """Return whether a step has ended and no forward pass of the next step has begun."""
        return self._announced != _NEVER and self._announced[0] < self.global_steps

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return whether the current micro-batch is the last of its step.

        If managed_gradient_accumulation is false, the result is true only during ``step``, or always without an
        optimizer.
        """
        return self._window.is_last(self._config.gradient_accumulation_steps)

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Set whether the next micro-batch is the last of its step. The setting replaces the count."""
        self._window.say(is_boundary)

    @property
    def micro_steps(self) -> int:
        """The number of micro-batches that ``step`` has counted."""
        return self._window.micro_steps

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Return a context in which gradients accumulate on each rank and are not reduced.

        The context is not available at stages 2 and 3 with gradient_accumulation_reduce ``each``, because these
        stages free gradients in every micro-batch.
        """
        if self._config.zero.stage.reduces_every_micro_batch:
            raise UsageError(
                f"no_sync has no effect at ZeRO stage {self.zero_optimization_stage()}, which reduces and frees "
                "gradients in every micro-batch; use stage 0 or 1, or zero_optimization.gradient_accumulation_reduce "
                "boundary"
            )
        with self._paused_reduction("no_sync"):
            yield

    @contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """Return a context in which gradients only accumulate on each rank. They are reduced once when it exits.

        One block makes one step, for any number of backward passes. The context is available at stages 1 to 3.
        """
        if not self.zero_optimization():
            raise UsageError(
                "coalesce_grad_reduction works at stages 1 to 3, and the stage is 0, which reduces gradients once a step "
                "anyway; remove it, or use no_sync"
            )
        if not self._config.managed_gradient_accumulation:
            raise UsageError(
                "coalesce_grad_reduction was called with managed_gradient_accumulation false, where step() reduces once "
                "anyway; remove one of the two"
            )
        with self._paused_reduction("coalesce_grad_reduction"):
            yield
        self._moved.refuse("coalesce_grad_reduction", *BACKWARD)
        hooks.phase("backward")
        with self._clock("backward"), torch.no_grad():
            self._gradients.reduce_accumulated()
        hooks.phase("other")
        self._window.complete()

    @contextmanager
    def _paused_reduction(self, name: str) -> Iterator[None]:
        if self._window.paused:
            raise UsageError(
                f"{name} was entered inside another block that defers the gradient reduction; leave one out"
            )
        self._window.paused = True
        self._gradients.pause(True)
        try:
            yield
        finally:
            self._window.paused = False
            self._gradients.pause(False)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients. ``set_to_none`` has no effect and exists for compatibility with torch's signature."""
        self._gradients.clear()

    def was_step_applied(self) -> bool:
        """Return whether the last call of ``step`` changed the parameters."""
        return self._step_applied

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = TRAIN,
        pin_memory: bool = True,
        data_sampler: Any = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_local_io_workers: int | None = None,
    ) -> RankLoader:
        """Return a loader of this rank's share of ``dataset``.

        Args:
            dataset: The dataset.
            batch_size: The number of samples of a batch. The default is the size of a micro-batch.
            route: ``train`` shuffles the samples; ``eval`` and ``predict`` do not.
            pin_memory: Whether to use page-locked host memory if there is a GPU.
            data_sampler: A sampler that replaces the default choice of this rank's samples.
            collate_fn: The function that makes a batch from a list of samples. The default is the function
                passed to ``initialize``.
            num_local_io_workers: The number of processes that load samples. The default is none.
        """
        return rank_loader(
            dataset,
            batch_size or self._config.train_micro_batch_size_per_gpu,
            drop_last=self._config.dataloader_drop_last,
            shuffle=route == TRAIN,
            sampler=data_sampler,
            collate_fn=collate_fn or self.collate_fn,
            workers=num_local_io_workers or 0,
            pin_memory=pin_memory,
            replicas=self.parallelism.replicas,
            replica=self.parallelism.replica,
        )

    def allreduce_gradients(self, bucket_size: int = 500_000_000) -> None:
        """Do nothing: ``backward`` has already reduced the gradients of the last micro-batch."""

    def clip_fp32_gradients(self) -> None:
        """Do nothing: ``step`` clips the gradients, as the key gradient_clipping requests."""

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the number of samples of a step by changing its number of micro-batches, from the next step on.

        Raises:
            ConfigError: ``train_batch_size`` is not a multiple of the samples of one micro-batch of all ranks.
        """
        at_once = self._config.train_micro_batch_size_per_gpu * self.world_size
        if train_batch_size < at_once or train_batch_size % at_once:
            raise ConfigError(
                f"train_batch_size {train_batch_size} is not a multiple of {at_once}, the samples of one micro-batch of "
                f"{self.world_size} ranks; choose a multiple of {at_once}"
            )
        self._config = dataclasses.replace(
            self._config,
            train_batch_size=train_batch_size,
            gradient_accumulation_steps=train_batch_size // at_once,
        )

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the number of samples of a micro-batch, and thus of a step. The number of micro-batches stays."""
        steps = self._config.gradient_accumulation_steps
        self._config = dataclasses.replace(
            self._config,
            train_micro_batch_size_per_gpu=micro_batch_size,
            train_batch_size=micro_batch_size * steps * self.world_size,
        )

    # Checkpoints.

    def _checkpoints_of(self, config: RuntimeConfig) -> Checkpoints:
        return Checkpoints(config, self.parallelism, self._moved, self._settled_state)

    def _settled_state(self) -> Training:
        """Finish delayed steps and copies to host memory, and return the state that a checkpoint saves.

        All ranks must call this method.
        """
        self.drain_gradients()
        self._moved.settle()
        return Training(
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

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: object = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save everything that is needed to resume the training, as ``save_dir/tag``. All ranks must call this method.

        Args:
            save_dir: The folder of checkpoints, on a file system that all ranks share.
            tag: The name of this checkpoint. The default is ``global_step`` and the number of steps.
            client_state: Values that ``load_checkpoint`` returns. The values of rank 0 are saved.
            save_latest: Whether ``load_checkpoint`` loads this checkpoint by default.
            exclude_frozen_parameters: Whether to leave out frozen parameters.

        Raises:
            CheckpointError: A rank fails. The error is raised on every rank, and earlier checkpoints are
                unchanged.
            ConfigError: ``save_dir`` is empty.
        """
        name = f"global_step{self.global_steps}" if tag is None else str(tag)
        self._checkpoints.save(save_dir, name, client_state or {}, save_latest, exclude_frozen_parameters)
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
        """Load a checkpoint that was saved at any world size and stage. All ranks must call this method.

        The checkpoint of a tensor-parallel model is merged and partitioned again.

        Args:
            load_dir: The folder of checkpoints.
            tag: The name of the checkpoint. The default is the checkpoint saved last.
            load_module_strict: Whether to refuse a checkpoint whose parameters differ from those of the model.
            load_optimizer_states: Whether to load the state of the optimizer, the loss scale and the random
                generators.
            load_lr_scheduler_states: Whether to load the state of the learning-rate schedule.
            load_module_only: Whether to load only parameters and buffers.
            custom_load_fn: A function that replaces the loading of the model. It is called with ``src``, a
                state dict, and ``dst``, the model.

        Returns:
            The directory of the checkpoint and the client state. (None, {}) if nothing was saved and no tag
            is named.

        Raises:
            CheckpointError: A rank fails. The error is raised on every rank, and the engine is unchanged.
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
        loaded = self._checkpoints.load(Path(load_dir), None if tag is None else str(tag), wanted)
        if loaded is None:
            return None, {}
        self.zero_grad()
        self._window.passes = 0
        if loaded.counters is not None:
            self._count_from(loaded.counters)
        return str(loaded.directory), loaded.client_state

    def _count_from(self, counters: Mapping[str, int]) -> None:
        self.global_steps = counters["global_steps"]
        self.global_samples = counters["global_samples"]
        self.skipped_steps = counters["skipped_steps"]
        # A checkpoint has no gradients of an unfinished window, so the window restarts.
        windows = counters["micro_steps"] // counters["gradient_accumulation_steps"]
        self._window.restart(windows * self._config.gradient_accumulation_steps)

    def save_16bit_model(
        self,
        save_dir: str | Path,
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save the weights of the model in their own dtypes, in one file. All ranks must call this method.

        Parameters of a pipeline are named by the number of their layer in the complete model. Shared
        parameters are named by the key of their layers.

        Args:
            save_dir: The folder of the file, which is created if it does not exist.
            save_filename: The name of the file. A name that ends with .safetensors selects the safetensors
                format; any other name selects the format of torch.save.
            exclude_frozen_parameters: Whether to leave out frozen parameters.

        Returns:
            Whether the weights were saved. At stage 3 they are saved only if
            gather_16bit_weights_on_model_save is true.

        Raises:
            CheckpointError: The file cannot be written. The error is raised on every rank.
            UsageError: experts on several ranks have buffers.
        """
        return self._checkpoints.save_weights(save_dir, save_filename, exclude_frozen_parameters)

    save_fp16_model = save_16bit_model

    def _zero3_consolidated_16bit_state_dict(
        self, exclude_frozen_parameters: bool = False
    ) -> dict[str, torch.Tensor] | None:
        """Return the weights of the complete model in their own dtypes on rank 0, and None on the other ranks.

        All ranks must call this method. Other libraries call the engine by this name.

        Raises:
            UsageError: gather_16bit_weights_on_model_save is false at stage 3.
        """
        return self._checkpoints.collect_weights(exclude_frozen_parameters)

    def load_module_state_dict(
        self,
        state_dict: Mapping[str, Any],
        strict: bool = True,
        custom_load_fn: Callable[..., Any] | None = None,
    ) -> None:
        """Load the weights of the model, from which the optimizer continues. All ranks must call this method.

        Args:
            state_dict: The complete parameters and buffers, by name. At stage 3 the values of rank 0 are used.
            strict: Whether to refuse names that differ from those of the model.
            custom_load_fn: A function that replaces the loading of the model. It is called with ``src``, the
                state dict, and ``dst``, the model.
        """
        self._checkpoints.load_weights(state_dict, strict, custom_load_fn)

    # State of the training.

    def get_global_grad_norm(self) -> torch.Tensor | None:
        """Return the gradient norm of the last step, before clipping.

        The result is None if the norm is not computed (stage 0 in fp32).
        """
        return getattr(self.optimizer, "grad_norm", None)

    def get_residual_norm(self) -> float | None:
        """Return the norm of this rank's residuals, the part of its gradients that compression has not sent yet.

        The result is None without error feedback.
        """
        return self._residual_watch.norm

    def get_lr(self) -> list[float]:
        """Return the learning rate of each param group."""
        return [] if self.optimizer is None else [group["lr"] for group in self.optimizer.param_groups]

    def get_mom(self) -> list[Any]:
        """Return the betas of each param group. With SGD and RMSprop, return the momentum of each param group.

        The value is 0.0 for a group that has no such entry.
        """
        if self.optimizer is None:
            return []
        name = "momentum" if type(self.basic_optimizer).__name__ in ("SGD", "RMSprop") else "betas"
        return [group.get(name, 0.0) for group in self.optimizer.param_groups]

    def dynamic_loss_scale(self) -> bool:
        """Return whether overflows change the loss scale."""
        return self._scale.dynamic

    def loss_scale(self) -> float:
        """Return the loss scale of the configuration, or 0 if the loss scale is dynamic.

        ``optimizer.cur_scale`` is the loss scale in use.
        """
        return 0.0 if self._scale.dynamic else self._scale.rules.value

    def _get_optimizer_loss_scale(self) -> float | None:
        """Return the loss scale in use. DeepSpeed has a method of the same name."""
        return None if self.optimizer is None else self._scale.value

    def destroy(self) -> None:
        """Detach the engine from the model: remove the hooks and gather the sharded parameters."""
        self._delayed.give_up()
        self.end_contract()
        close(self.module)
        if self._config.disable_python_gc:
            gc.enable()

    def keep_contract(self, verdict: Verdict | None = None) -> None:
        """Compare the messages of all ranks from now on, if the key ``traffic_contract`` requests this.

        Args:
            verdict: The verdict object that was used during startup. The default is a new verdict, which all
                ranks must create.
        """
        mode = self._config.traffic_contract
        if mode == OFF:
            return
        verdict = verdict or Verdict()
        own_groups = () if self._residency is None else self._residency.own_groups
        for number, group in enumerate((self._group, *own_groups)):
            if group.world_size > 1:
                contract = TrafficContract(group, mode == STOP, verdict, str(number))
                self._contracts.append(contract)
                group.observe(contract)

    def end_contract(self) -> None:
        """Stop the comparison of messages. All ranks must call this method between two steps."""
        for contract in self._contracts:
            contract.close()
        self._contracts.clear()

    def get_wall_clock_timers(self) -> dict[str, float]:
        """Return the time of each part of the last step in milliseconds; empty without wall_clock_breakdown."""
        return dict(self._report.milliseconds)

    def compile(
        self, *arguments: Any, compile_kwargs: Mapping[str, Any] | None = None, **options: Any
    ) -> None:
        """Compile the model with torch.compile, to which all arguments are passed."""
        self.module.compile(*arguments, **options, **(compile_kwargs or {}))

    @property
    def is_compiled(self) -> bool:
        """Whether ``compile`` was called."""
        return getattr(self.module, "_compiled_call_impl", None) is not None

    def _cast_module_mixed_precision(
        self, param_dtype: torch.dtype | None, buffer_dtype: torch.dtype | None, is_zero_init_model: bool
    ) -> None:
        """Cast the parameters and buffers of the model. A dtype of None leaves the tensors unchanged.

        Parameters of a model that was sharded at its construction (``is_zero_init_model``) are not cast.
        """
        if param_dtype is not None and not is_zero_init_model:
            cast_tensors(self.module.parameters(), param_dtype)
        if buffer_dtype is not None:
            cast_tensors(self.module.buffers(), buffer_dtype)

    def empty_partition_cache(self) -> None:
        """Release the gathered parameters (stage 3)."""
        if self._residency is not None:
            self._residency.release_all()

    def module_state_dict(self) -> dict[str, Any]:
        """Return the state dict of the model, by the names that the model uses.

        Raises:
            UsageError: Parameters are sharded (stage 3), and would be empty in the state dict.
        """
        self._refuse_sharded()
        return self.module.state_dict()

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the engine's state dict: the model's state under names that begin with ``module.``.

        Raises:
            UsageError: Parameters are sharded (stage 3), and would be empty in the state dict.
        """
        self._refuse_sharded()
        state: dict[str, Any] = super().state_dict(*args, **kwargs)
        return state

    def _refuse_sharded(self) -> None:
        for name, parameter in self.module.named_parameters():
            shard = shard_of(parameter)
            if shard is not None and not shard.available:
                raise UsageError(
                    f"{name} is sharded between its uses (stage 3), so that the state of the module would be empty; "
                    "call save_16bit_model, or save_checkpoint and python -m zero_runtime.checkpoint, or do this within "
                    "zero_runtime.zero.GatheredParameters(list(engine.module.parameters())) on all ranks"
                )

    def offload_states(
        self,
        include: Container[str] | None = None,
        device: str = "cpu",
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Move states from the device to host memory, where they stay until :meth:`reload_states`.

        Tensors that are already in host memory stay there, so that nothing is copied on a CPU.

        Args:
            include: The states to move. The default is all states: ``optim_states`` (the state of the
                optimizer), ``hp_params`` (the master weights), ``lp_params`` (the parameters of the model, at
                stage 3 their shards), ``lp_grads`` (the gradients), and ``contiguous_grad_buffer`` (the
                buffers of gradient buckets, which are dropped and allocated again when needed).
            device: ``cpu``. With ``none``, nothing is moved.
            pin_memory: Whether to use page-locked memory if there is a GPU.
            non_blocking: Whether to return before the copies have ended. Checkpoints wait for the copies. Other
                readers of the tensors must wait too.

        Raises:
            UsageError: There is no optimizer, or ``offload_param`` keeps the shards off the device.
            ConfigError: The device is neither ``cpu`` nor ``none``, or a state is unknown.
            UnsupportedError: The optimizer is a 1-bit optimizer.
        """
        self._moved.offload(include, device, pin_memory, non_blocking)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Move all states that :meth:`offload_states` has moved back to the device. The training is not affected.

        Args:
            non_blocking: Whether to start all copies before waiting for the first copy. The method returns
                when all copies have ended.

        Raises:
            UsageError: There is no optimizer.
        """
        self._moved.reload(non_blocking)

    def state_devices(self, state: str) -> set[torch.device]:
        """Return the devices of the tensors of one state; see :meth:`offload_states`."""
        return self._moved.devices(state)

    @property
    def communication_data_type(self) -> torch.dtype:
        """The dtype in which gradients are communicated."""
        return self._precision.communication

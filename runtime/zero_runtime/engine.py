"""The engine: DeepSpeed's methods around one model."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch.utils._pytree import tree_leaves

from commprof import hooks
from zero_runtime import comm
from zero_runtime.assembly import Assembly
from zero_runtime.clock import Clock
from zero_runtime.config import RuntimeConfig
from zero_runtime.errors import UnsupportedError, UsageError
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
        self._gradients = assembly.gradients
        self._precision = assembly.precision
        self._boundary: bool | None = None
        self._micro_batches = 0  # backward passes since the last step
        self._announced = _NEVER
        self._stepping = False
        self._step_applied = False
        self._paused = False
        self._differentiating = False
        self._direct = False  # loss.backward() is running, not engine.backward(loss)
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
        with self._clock("forward"), autocast(self._precision.autocast, self.device):
            outputs = self.module(*inputs, **kwargs)
        if self.training and self._gradients is not None:
            for leaf in tree_leaves(outputs):
                if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
                    leaf.register_hook(self._on_output_gradient)
        hooks.phase("other")
        return outputs

    def backward(
        self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True
    ) -> torch.Tensor:
        """Accumulate the gradients of ``loss``, and reduce them when the stage says so.

        Args:
            loss: 0-D or one-element tensor of this rank's micro-batch.
            retain_graph: keep the graph for another backward.
            scale_wrt_gas: divide the loss by the number of accumulation steps.

        Returns:
            The loss as it was differentiated, divided by the accumulation steps.
        """
        if self._gradients is None:
            raise UsageError("backward needs an optimizer; name one in the config, or pass one to initialize")
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            shown = f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else repr(loss)
            raise UsageError(f"backward expects a loss of one element, found {shown}; take its mean or sum")
        scaled = loss / self.config.gradient_accumulation_steps if scale_wrt_gas else loss
        with self._clock("backward"):
            self._begin_backward()
            try:
                scaled.backward(retain_graph=retain_graph)
            finally:
                self._differentiating = False
            self._finish_backward()
        return scaled

    def _begin_backward(self) -> None:
        assert self._gradients is not None
        hooks.phase("backward")
        self._differentiating = True
        if self._micro_batches == 0:
            self._gradients.begin_step()

    @torch.no_grad()
    def _finish_backward(self) -> None:
        assert self._gradients is not None
        self._differentiating = False
        self._micro_batches += 1
        self._gradients.finish_backward()
        hooks.phase("other")

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
        if not self._direct:
            self._direct = True
            self._begin_backward()
            torch.autograd.Variable._execution_engine.queue_callback(self._finish_direct_backward)
        return gradient / self.config.gradient_accumulation_steps

    def _finish_direct_backward(self) -> None:
        self._direct = False
        self._finish_backward()

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """Take an optimizer step if the micro-batch is the last of its accumulation window; otherwise only count it.

        With managed_gradient_accumulation false every call takes a step.
        """
        if self.optimizer is None or self._gradients is None:
            raise UsageError("step needs an optimizer; name one in the config, or pass one to initialize")
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
        assert self.optimizer is not None and self._gradients is not None
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
            return self._stepping
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
        if self._gradients is None or self._paused:
            raise UsageError("no_sync needs an optimizer, and cannot be nested")
        self._paused = True
        self._gradients.pause(True)
        try:
            yield
        finally:
            self._paused = False
            self._gradients.pause(False)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients; ``set_to_none`` is accepted for torch's signature."""
        if self._gradients is not None:
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
        """Whether parameters are fp16: never in this version."""
        return False

    def module_state_dict(self) -> dict[str, Any]:
        """The model's state, by the model's own names."""
        return self.module.state_dict()

    @property
    def communication_data_type(self) -> torch.dtype:
        """The dtype of gradient messages."""
        return self._precision.communication

    # Not in this version.

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> bool:
        """Not in this version."""
        raise UnsupportedError(_NO_CHECKPOINTS)

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> tuple[str | None, dict[str, Any]]:
        """Not in this version."""
        raise UnsupportedError(_NO_CHECKPOINTS)


_NO_CHECKPOINTS: Final = (
    "checkpoints of the engine are not in this version yet; torch.save(engine.module.state_dict(), path) on rank 0 saves "
    "the parameters, which are whole on every rank at stages 0 to 2"
)

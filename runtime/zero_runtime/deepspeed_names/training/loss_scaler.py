"""``deepspeed.runtime.fp16.loss_scaler``: standalone loss scales. ``engine.optimizer`` has the engine's loss scale."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import torch

from zero_runtime.errors import LossScaleError

INITIAL_LOSS_SCALE: Final = "init_scale"
SCALE_WINDOW: Final = "scale_window"
DELAYED_SHIFT: Final = "delayed_shift"
CONSECUTIVE_HYSTERESIS: Final = "consecutive_hysteresis"
MIN_LOSS_SCALE: Final = "min_scale"


class LossScalerBase:
    """The base class of both loss scales.

    Attributes:
        cur_scale: The factor in use.
        dynamic: Whether overflows change the factor.
    """

    dynamic = False

    def __init__(self, cur_scale: float) -> None:
        self.cur_scale = cur_scale

    @property
    def loss_scale(self) -> float:
        """The factor in use."""
        return self.cur_scale

    def scale_gradient(
        self, module: Any, grad_in: Iterable[torch.Tensor], grad_out: Any
    ) -> tuple[torch.Tensor, ...]:
        """Return the gradients multiplied by the factor. This method can be used as a hook of a module."""
        return tuple(self.loss_scale * gradient for gradient in grad_in)

    def update_scale(self, overflow: bool) -> None:
        """Count a step. For a fixed scale, this has no effect."""

    def has_overflow(self, params: Iterable[torch.nn.Parameter]) -> bool:
        """Return whether a gradient is infinite or NaN. For a fixed scale, the result is always False."""
        return False

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss multiplied by the factor."""
        return loss * self.loss_scale

    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> None:
        """Run the backward pass of the scaled loss."""
        self.scale_loss(loss).backward(retain_graph=retain_graph)


class LossScaler(LossScalerBase):
    """A fixed loss scale.

    Args:
        scale: The factor.
    """

    def __init__(self, scale: float = 1) -> None:
        super().__init__(scale)


class DynamicLossScaler(LossScalerBase):
    """A loss scale that falls when gradients overflow, and rises after a window without overflows.

    Args:
        init_scale: The loss scale at the start.
        scale_factor: The factor by which the loss scale rises and falls.
        scale_window: The number of steps without an overflow after which the loss scale rises.
        min_scale: The smallest loss scale.
        delayed_shift: The number of overflows after which the loss scale falls.
        consecutive_hysteresis: Whether the count of overflows starts again after each step without an overflow.
        raise_error_at_min_scale: Whether an overflow at the smallest loss scale raises an error.
        dtype: The dtype of the gradients. This argument has no effect.
    """

    dynamic = True

    def __init__(
        self,
        init_scale: float = 2**32,
        scale_factor: float = 2.0,
        scale_window: int = 1000,
        min_scale: float = 1,
        delayed_shift: int = 1,
        consecutive_hysteresis: bool = False,
        raise_error_at_min_scale: bool = True,
        dtype: torch.dtype = torch.half,
    ) -> None:
        super().__init__(init_scale)
        self.cur_iter = 0
        self.last_overflow_iter = -1
        self.scale_factor, self.scale_window, self.min_scale = scale_factor, scale_window, min_scale
        self.delayed_shift = self.cur_hysteresis = delayed_shift
        self.consecutive_hysteresis = consecutive_hysteresis
        self.raise_error_at_min_scale = raise_error_at_min_scale

    def has_overflow(self, params: Iterable[torch.nn.Parameter]) -> bool:
        """Return whether a gradient is infinite or NaN."""
        return any(not bool(torch.isfinite(each.grad).all()) for each in params if each.grad is not None)

    has_overflow_serial = has_overflow

    def update_scale(self, overflow: bool) -> None:
        """Count a step, and adjust the loss scale.

        Args:
            overflow: Whether the gradients of the step overflowed.

        Raises:
            LossScaleError: Gradients overflow at the smallest loss scale.
        """
        if overflow:
            self._fall()
            self.last_overflow_iter = self.cur_iter
        else:
            if self.consecutive_hysteresis:
                self.cur_hysteresis = self.delayed_shift
            stable = self.cur_iter - self.last_overflow_iter - 1
            if stable > 0 and stable % self.scale_window == 0:
                self.cur_hysteresis = self.delayed_shift
                self.cur_scale *= self.scale_factor
        self.cur_iter += 1

    def _fall(self) -> None:
        if self.delayed_shift > 1 and self.cur_hysteresis > 1:
            self.cur_hysteresis -= 1
            return
        if self.cur_scale == self.min_scale and self.raise_error_at_min_scale:
            raise LossScaleError(
                f"gradients overflow at the smallest loss scale, {self.min_scale:g}; look for infinite or NaN activations, "
                "or lower min_scale"
            )
        self.cur_scale = max(self.cur_scale / self.scale_factor, self.min_scale)


def make_loss_scaler(
    dtype: torch.dtype,
    static_loss_scale: float,
    dynamic_scaling: bool,
    dynamic_loss_args: Mapping[str, Any] | None,
) -> LossScalerBase:
    """Return the configured loss scale; 1 for dtypes other than fp16. DeepSpeed's name is CreateLossScaler."""
    if dtype is torch.half and dynamic_scaling:
        return DynamicLossScaler(dtype=dtype, **(dynamic_loss_args or {}))
    return LossScaler(static_loss_scale if dtype is torch.half else 1.0)


def to_python_float(t: Any) -> float:
    """Return the value of a tensor with one element."""
    return float(t.item() if hasattr(t, "item") else t[0])

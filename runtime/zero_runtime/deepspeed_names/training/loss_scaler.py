"""``deepspeed.runtime.fp16.loss_scaler``: standalone loss scales. The engine's own is in ``engine.optimizer``."""

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
        cur_scale: the factor in use.
        dynamic: whether overflows change it.
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
        """Gradients times the factor, as a hook of a module."""
        return tuple(self.loss_scale * gradient for gradient in grad_in)

    def update_scale(self, overflow: bool) -> None:
        """Count a step."""

    def has_overflow(self, params: Iterable[torch.nn.Parameter]) -> bool:
        """Whether a gradient is infinite or NaN; False for a fixed scale."""
        return False

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss times the factor."""
        return loss * self.loss_scale

    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> None:
        """Differentiate the scaled loss."""
        self.scale_loss(loss).backward(retain_graph=retain_graph)


class LossScaler(LossScalerBase):
    """A fixed loss scale.

    Args:
        scale: the factor.
    """

    def __init__(self, scale: float = 1) -> None:
        super().__init__(scale)


class DynamicLossScaler(LossScalerBase):
    """A loss scale that falls when gradients overflow, and rises after a window without overflows.

    Args:
        init_scale: at the beginning.
        scale_factor: by which it rises and falls.
        scale_window: steps without an overflow until it rises.
        min_scale: it never falls below.
        delayed_shift: overflows until it falls.
        consecutive_hysteresis: count these anew after each step without one.
        raise_error_at_min_scale: whether an overflow at the minimum is an error.
        dtype: dtype of the gradients; accepted, without an effect.
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
        """Whether a gradient is infinite or NaN."""
        return any(not bool(torch.isfinite(each.grad).all()) for each in params if each.grad is not None)

    has_overflow_serial = has_overflow

    def update_scale(self, overflow: bool) -> None:
        """Count a step, and whether it overflowed.

        Raises:
            LossScaleError: gradients overflow at the minimum.
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
    """The configured loss scale; 1 for other dtypes than fp16. DeepSpeed's name is CreateLossScaler."""
    if dtype is torch.half and dynamic_scaling:
        return DynamicLossScaler(dtype=dtype, **(dynamic_loss_args or {}))
    return LossScaler(static_loss_scale if dtype is torch.half else 1.0)


def to_python_float(t: Any) -> float:
    """The value of a tensor of one element."""
    return float(t.item() if hasattr(t, "item") else t[0])

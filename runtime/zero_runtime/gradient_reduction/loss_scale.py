"""The loss scale, which keeps small fp16 gradients from underflowing.

The loss is multiplied by the scale before backward, and the step divides the gradients by the scale. When a
gradient overflows, a dynamic scale halves and the step is skipped. The scale doubles after ``window`` steps
without an overflow. These are DeepSpeed 0.19.8's rules for its ZeRO optimizers. zero_runtime also applies them
at stage 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from zero_runtime.errors import ConfigError, LossScaleError

_FACTOR: Final = 2.0
_STATE: Final = ("value", "steps", "last_overflow", "overflows_left")


class ScaleRules(NamedTuple):
    """The initial value of a loss scale, and the rules by which it adapts.

    Attributes:
        value: The initial scale.
        dynamic: Whether overflows change the scale. The other attributes apply only to a dynamic scale.
        window: The number of steps without an overflow after which the scale doubles.
        hysteresis: The number of overflows until the scale halves for the first time. Each later overflow
            halves the scale, until the hysteresis is reset.
        consecutive_hysteresis: Whether the hysteresis is reset in every step without an overflow, not only when
            the scale doubles.
        minimum: The smallest value of the scale; any positive number.
    """

    value: float = 1.0
    dynamic: bool = False
    window: int = 1000
    hysteresis: int = 2
    consecutive_hysteresis: bool = False
    minimum: float = 1.0


UNSCALED: Final = ScaleRules()


class LossScale:
    """A factor on the loss, fixed or adapted to overflows.

    The scale is equal on all ranks, because all ranks call ``update`` with equal values.

    Args:
        rules: The rules of the scale. By default it is fixed at 1.0, which scales nothing.

    Attributes:
        rules: The rules of the scale.
    """

    def __init__(self, rules: ScaleRules = UNSCALED) -> None:
        self.rules = rules
        self._value = float(rules.value)
        self._steps = 0
        self._last_overflow = -1
        self._overflows_left = rules.hysteresis  # until the scale halves, including the last overflow
        self._override: float | None = None

    @property
    def dynamic(self) -> bool:
        """Whether ``update`` changes the scale."""
        return self.rules.dynamic

    @property
    def value(self) -> float:
        """The factor on the loss of the next step; 1.0 if the loss is not scaled."""
        return self._value if self._override is None else self._override

    @value.setter
    def value(self, value: float) -> None:
        self._value = float(value)

    def override(self, value: float | None) -> None:
        """Use ``value`` instead of the value that ``update`` computes. None returns to the rules of the scale."""
        self._override = None if value is None else float(value)

    def update(self, overflow: bool) -> None:
        """Count a step. ``overflow`` is true if a gradient of any rank was infinite or NaN in this step.

        Raises:
            LossScaleError: The scale should halve, but is at its minimum. The scale does not change.
        """
        if not self.rules.dynamic:
            return
        if overflow:
            self._shrink()
            self._last_overflow = self._steps
        else:
            self._grow()
        self._steps += 1

    def _shrink(self) -> None:
        if self._overflows_left != 1:  # an initial value below 1 never reaches 1, as in DeepSpeed
            self._overflows_left -= 1
            return
        if self._value == self.rules.minimum:
            raise LossScaleError(
                f"gradients still overflow at the loss scale {self._value:g}, which is the smallest allowed "
                "(fp16.min_loss_scale; 1 with torch_autocast); look for infinite or NaN activations, lower the learning "
                "rate or fp16.min_loss_scale (1e-5 works), or use bf16"
            )
        self._value = max(self._value / _FACTOR, self.rules.minimum)

    def _grow(self) -> None:
        if self.rules.consecutive_hysteresis:
            self._overflows_left = self.rules.hysteresis
        stable = self._steps - self._last_overflow - 1
        if stable > 0 and stable % self.rules.window == 0:
            self._overflows_left = self.rules.hysteresis
            self._value *= _FACTOR

    # DeepSpeed's names of ``optimizer.loss_scaler``.

    dynamic_loss_scale = dynamic
    cur_scale = value
    loss_scale = value

    @property
    def cur_iter(self) -> int:
        """The number of steps that a dynamic scale has counted."""
        return self._steps

    @property
    def last_overflow_iter(self) -> int:
        """The number of the last step with an overflow; -1 if there was none."""
        return self._last_overflow

    @property
    def scale_window(self) -> int:
        """The number of steps without an overflow after which the scale doubles."""
        return self.rules.window

    @property
    def min_scale(self) -> float:
        """The smallest value of the scale."""
        return self.rules.minimum

    @property
    def cur_hysteresis(self) -> int:
        """The number of overflows until the scale halves."""
        return self._overflows_left

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as plain numbers. The rules are included for readers."""
        rules = {name: value for name, value in self.rules._asdict().items() if name != "value"}
        return {**{name: getattr(self, f"_{name}") for name in _STATE}, **rules}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state``.

        The rules of this scale do not change, and a fixed scale does not change at all.

        A dynamic scale ignores the state of a fixed scale. Without fp16 a fixed scale is 1, at which small fp16
        gradients underflow.

        Raises:
            ConfigError: ``state`` is not the state of a loss scale.
        """
        missing = [name for name in _STATE if not isinstance(state.get(name), int | float)]
        if missing:
            raise ConfigError(
                f"the state of a loss scale has no number for {', '.join(missing)}; expected {', '.join(_STATE)}"
            )
        if self.rules.dynamic and state.get("dynamic", state["steps"] > 0):
            self._value = float(state["value"])
            self._steps = int(state["steps"])
            self._last_overflow = int(state["last_overflow"])
            self._overflows_left = int(state["overflows_left"])

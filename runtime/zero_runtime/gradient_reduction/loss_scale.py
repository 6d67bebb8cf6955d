"""The loss scale, which keeps small fp16 gradients from underflowing.

The loss is multiplied by the scale before backward, and the step divides the gradients by it. When a gradient overflows,
a dynamic scale halves and the step is skipped. It doubles after ``window`` steps without an overflow. These are DeepSpeed
0.19.8's rules for its ZeRO optimizers; here they hold at stage 0 too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from zero_runtime.errors import ConfigError, LossScaleError

_FACTOR: Final = 2.0
_STATE: Final = ("value", "steps", "last_overflow", "overflows_left")


class ScaleRules(NamedTuple):
    """How a loss scale begins, and how it adapts.

    Attributes:
        value: the scale at the beginning.
        dynamic: whether overflows change it; the other attributes need this.
        window: steps without an overflow until the scale doubles.
        hysteresis: overflows until the scale halves for the first time; each one after that halves it, until the
            hysteresis is refilled.
        consecutive_hysteresis: refill it in every step without an overflow, not only when the scale doubles.
        minimum: the scale never falls below; any positive number.
    """

    value: float = 1.0
    dynamic: bool = False
    window: int = 1000
    hysteresis: int = 2
    consecutive_hysteresis: bool = False
    minimum: float = 1.0


UNSCALED: Final = ScaleRules()


class LossScale:
    """A factor on the loss, fixed or adapted to overflows. All ranks call ``update`` with equal values, so they agree.

    Args:
        rules: by default 1.0, which scales nothing.

    Attributes:
        rules: as given.
    """

    def __init__(self, rules: ScaleRules = UNSCALED) -> None:
        self.rules = rules
        self._value = float(rules.value)
        self._steps = 0
        self._last_overflow = -1
        self._overflows_left = rules.hysteresis  # until the scale halves, that one included
        self._override: float | None = None

    @property
    def dynamic(self) -> bool:
        """Whether ``update`` changes the scale."""
        return self.rules.dynamic

    @property
    def value(self) -> float:
        """The factor on the loss of the next step; 1.0 where the loss is not scaled."""
        return self._value if self._override is None else self._override

    @value.setter
    def value(self, value: float) -> None:
        self._value = float(value)

    def override(self, value: float | None) -> None:
        """Use ``value``, whatever ``update`` does; None returns to the scale's own rules."""
        self._override = None if value is None else float(value)

    def update(self, overflow: bool) -> None:
        """Count a step, and whether a gradient of any rank was infinite or NaN in it.

        Raises:
            LossScaleError: the scale should halve, but is at its minimum. It stays unchanged.
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
        if self._overflows_left != 1:  # below 1 from the start it is never reached, in DeepSpeed either
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
        """Steps that a dynamic scale has counted."""
        return self._steps

    @property
    def last_overflow_iter(self) -> int:
        """The last step with an overflow; -1 without one."""
        return self._last_overflow

    @property
    def scale_window(self) -> int:
        """Steps without an overflow until the scale doubles."""
        return self.rules.window

    @property
    def min_scale(self) -> float:
        """The smallest value that the scale can fall to."""
        return self.rules.minimum

    @property
    def cur_hysteresis(self) -> int:
        """Overflows until the scale halves."""
        return self._overflows_left

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint: plain numbers; the rules are included for readers."""
        rules = {name: value for name, value in self.rules._asdict().items() if name != "value"}
        return {**{name: getattr(self, f"_{name}") for name in _STATE}, **rules}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state``. The rules of this scale stay; a fixed scale does not change.

        The state of a fixed scale is not adopted: without fp16 it is 1, at which small fp16 gradients underflow.

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

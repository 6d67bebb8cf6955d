"""The loss scale: what keeps small fp16 gradients from vanishing.

The loss is multiplied by the scale before backward, and the gradients are divided by it in the step. A dynamic scale halves
when a gradient overflows, in which case the step is skipped, and doubles after ``window`` steps without an overflow. These
are DeepSpeed 0.19.8's rules for its ZeRO optimizers; here they hold at stage 0 too.
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
        dynamic: whether overflows change it; what follows acts only then.
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
    """A factor on the loss, fixed or adapted to overflows. All ranks call ``update`` alike, so they agree on it.

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
        """What the loss of the coming step is multiplied by; 1.0 where nothing is scaled."""
        return self._value if self._override is None else self._override

    @value.setter
    def value(self, value: float) -> None:
        self._value = float(value)

    def override(self, value: float | None) -> None:
        """Use ``value`` whatever ``update`` finds; None goes back to the scale's own rules."""
        self._override = None if value is None else float(value)

    def update(self, overflow: bool) -> None:
        """Take note of a step: whether a gradient of any rank was infinite or NaN.

        Raises:
            LossScaleError: the scale should halve, and is at its minimum already. It is unchanged then.
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

    # By DeepSpeed's names, for who looks at ``optimizer.loss_scaler``.

    dynamic_loss_scale = dynamic
    cur_scale = value
    loss_scale = value

    @property
    def cur_iter(self) -> int:
        """Steps that a dynamic scale has taken note of."""
        return self._steps

    @property
    def last_overflow_iter(self) -> int:
        """The last of them with an overflow; -1 where there was none."""
        return self._last_overflow

    @property
    def scale_window(self) -> int:
        """Steps without an overflow until the scale doubles."""
        return self.rules.window

    @property
    def min_scale(self) -> float:
        """The scale never falls below."""
        return self.rules.minimum

    @property
    def cur_hysteresis(self) -> int:
        """Overflows until the scale halves."""
        return self._overflows_left

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps: plain numbers, and for readers the rules by which the scale adapts."""
        rules = {name: value for name, value in self.rules._asdict().items() if name != "value"}
        return {**{name: getattr(self, f"_{name}") for name in _STATE}, **rules}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state``. The rules stay those of this scale; a fixed scale stays as it is.

        Raises:
            ConfigError: ``state`` is not that of a loss scale.
        """
        missing = [name for name in _STATE if not isinstance(state.get(name), int | float)]
        if missing:
            raise ConfigError(
                f"the state of a loss scale has no number for {', '.join(missing)}; expected {', '.join(_STATE)}"
            )
        if self.rules.dynamic:
            self._value = float(state["value"])
            self._steps = int(state["steps"])
            self._last_overflow = int(state["last_overflow"])
            self._overflows_left = int(state["overflows_left"])

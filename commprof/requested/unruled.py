"""Wrappers of which no rule says what they send: their messages are labelled, not predicted, with the reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from commprof.requested.expectation import Expectation
from commprof.requested.wrapped import Wrapper
from commprof.schema import Purpose

_SIZES: Final = "the sizes of activations are no argument of parallelize_module"
_REASONS: Final[dict[str, dict[Purpose, str]]] = {
    "tensor_parallel": {
        Purpose.ACTIVATION: _SIZES,
        Purpose.PARAMETER_BROADCAST: "how parallelize_module distributes parameters is no part of the rules",
        Purpose.GRADIENT_NORM: "norms over several meshes are no part of the rules",
    },
    "zero_redundancy_optimizer": {
        Purpose.PARAMETER_BROADCAST: "which rank updates which parameter is no part of the rules",
    },
}


@dataclass(frozen=True)
class Unruled:
    """A wrapper without rules.

    Attributes:
        wrapper: what was given.
    """

    wrapper: Wrapper

    @property
    def unpredicted(self) -> dict[str, str]:
        """Purposes of which no rule knows what is sent, and why."""
        return {str(purpose): why for purpose, why in _REASONS.get(self.wrapper.kind, {}).items()}

    def construction(self) -> list[Expectation]:
        """Nothing that a rule knows."""
        return []

    def passes(self, passes: str, state: Any) -> tuple[list[Expectation], Any]:
        """Nothing that a rule knows."""
        return [], None

"""Errors about configs and parameter lists that the rules cannot use."""

from __future__ import annotations

from commprof.errors import UsageError


class RequestedError(UsageError):
    """An error in a config or a parameter list that prevents a prediction."""


class UnsupportedError(RequestedError):
    """The config requests a feature that the rules do not cover.

    Args:
        key: The dotted name of the key, for example ``"zero_optimization.stage"``.
        value: The value of the key in the config.
        reason: The reason why the value changes the messages, as the end of a sentence.
    """

    def __init__(self, key: str, value: object, reason: str) -> None:
        super().__init__(
            f"{key} is {value!r}: {reason}. commprof has no rules for what this sends; "
            f"the recorded collectives of the run are complete nevertheless."
        )
        self.key = key
        self.value = value

"""Errors about configs and parameter lists that the rules cannot use."""

from __future__ import annotations

from commprof.errors import UsageError


class RequestedError(UsageError):
    """A config or a parameter list cannot be used as it is."""


class UnsupportedError(RequestedError):
    """The config asks for something whose rules are not stated here.

    Args:
        key: dotted name of the key, for example ``"zero_optimization.stage"``.
        value: its value in the config.
        reason: why that changes what is sent, as the end of a sentence.
    """

    def __init__(self, key: str, value: object, reason: str) -> None:
        super().__init__(
            f"{key} is {value!r}: {reason}. commprof has no rules for what this sends; "
            f"the recorded collectives of the run are complete nevertheless."
        )
        self.key = key
        self.value = value

"""The names of sharded parameters (stage 3), which this version does not have: using one says so."""

from __future__ import annotations

from typing import Any

from zero_runtime.errors import UnsupportedError


class Init:
    """Would make a model whose parameters are sharded from the start; stage 3."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise UnsupportedError(_message("zero.Init"))


class GatheredParameters:
    """Would gather sharded parameters for a while; stage 3."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise UnsupportedError(_message("zero.GatheredParameters"))


def register_external_parameter(*args: Any, **kwargs: Any) -> None:
    """Would tell stage 3 of a parameter used outside its module."""
    raise UnsupportedError(_message("zero.register_external_parameter"))


def _message(name: str) -> str:
    return (
        f"{name} belongs to stage 3 (sharded parameters), which is not in this version yet; at stages 0 to 2 "
        "parameters are whole on every rank, so remove it"
    )

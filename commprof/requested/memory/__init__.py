"""The memory that the states of a training need, and what moves between device, host and disk."""

from typing import Any

from commprof.moved import attribute


def __getattr__(name: str) -> Any:
    """What the module had that was ``commprof.requested.memory``."""
    return attribute(__name__, name)

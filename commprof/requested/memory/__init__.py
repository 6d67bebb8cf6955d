"""The memory that the training states need, and the traffic between device, host and disk."""

from typing import Any

from commprof.moved import attribute


def __getattr__(name: str) -> Any:
    """Return an attribute of the former module ``commprof.requested.memory``."""
    return attribute(__name__, name)

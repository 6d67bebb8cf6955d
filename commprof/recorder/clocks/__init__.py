"""Clocks of processes and hosts, and the offsets between them."""

from typing import Any

from commprof.moved import attribute


def __getattr__(name: str) -> Any:
    """What the module had that was ``commprof.recorder.clocks``."""
    return attribute(__name__, name)

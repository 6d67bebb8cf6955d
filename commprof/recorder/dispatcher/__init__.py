"""Kernels in front of torch's operators, for collectives that no method of ProcessGroup shows."""

from typing import Any

from commprof.moved import attribute


def __getattr__(name: str) -> Any:
    """What the module had that was ``commprof.recorder.dispatcher``."""
    return attribute(__name__, name)

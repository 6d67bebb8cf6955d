"""Kernels in front of torch's operators, for collectives that do not pass through a method of ProcessGroup."""

from typing import Any

from commprof.moved import attribute


def __getattr__(name: str) -> Any:
    """Return an attribute of the module that was called ``commprof.recorder.dispatcher`` before it moved."""
    return attribute(__name__, name)

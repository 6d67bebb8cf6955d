"""Clocks of processes and hosts, and the offsets between them."""

from typing import Any

from commprof.moved import attribute


def __getattr__(name: str) -> Any:
    """Return an attribute that the former module ``commprof.recorder.clocks`` had."""
    return attribute(__name__, name)

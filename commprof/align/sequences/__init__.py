"""Align two sequences: longest common subsequences, bounds, and the groups of rows on which they work."""

from typing import Any

from commprof.moved import attribute


def __getattr__(name: str) -> Any:
    """Return a name of the former module ``commprof.align.sequences``."""
    return attribute(__name__, name)

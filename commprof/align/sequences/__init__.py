"""Two sequences aligned: longest common subsequences, bounds, and the groups of rows that they work on."""

from typing import Any

from commprof.moved import attribute


def __getattr__(name: str) -> Any:
    """What the module had that was ``commprof.align.sequences``."""
    return attribute(__name__, name)

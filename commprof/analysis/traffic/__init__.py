"""What was sent: operations, pairs of ranks, gradient buckets, and the four levels."""

from typing import Any

from commprof.moved import attribute


def __getattr__(name: str) -> Any:
    """What the module had that was ``commprof.analysis.traffic``."""
    return attribute(__name__, name)

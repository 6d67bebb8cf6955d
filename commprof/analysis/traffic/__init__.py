"""Traffic: operations, pairs of ranks, gradient buckets, and the four levels."""

from typing import Any

from commprof.moved import attribute


def __getattr__(name: str) -> Any:
    """Return a name of the former module ``commprof.analysis.traffic``."""
    return attribute(__name__, name)

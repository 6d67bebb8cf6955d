"""ZeRO stages 0 to 3: partitions, buckets, reductions and gathers."""

from typing import Any

from commprof.moved import attribute


def __getattr__(name: str) -> Any:
    """What the module had that was ``commprof.requested.zero``."""
    return attribute(__name__, name)

"""ZeRO stages 0 to 3: partitions, buckets, reductions and gathers."""

from typing import Any

from commprof.moved import attribute


def __getattr__(name: str) -> Any:
    """Return an attribute of the former module ``commprof.requested.zero``."""
    return attribute(__name__, name)

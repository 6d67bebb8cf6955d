"""``commprof export``."""


def export() -> int:
    """To be written."""
    raise NotImplementedError

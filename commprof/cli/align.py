"""``commprof align``."""


def align() -> int:
    """To be written."""
    raise NotImplementedError

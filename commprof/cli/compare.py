"""``commprof compare``."""


def compare() -> int:
    """To be written."""
    raise NotImplementedError

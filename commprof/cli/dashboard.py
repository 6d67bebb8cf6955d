"""``commprof dashboard``."""


def dashboard() -> int:
    """To be written."""
    raise NotImplementedError

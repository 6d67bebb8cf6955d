"""``commprof report``."""


def report() -> int:
    """To be written."""
    raise NotImplementedError

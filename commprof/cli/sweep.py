"""``commprof sweep``."""


def sweep() -> int:
    """To be written."""
    raise NotImplementedError

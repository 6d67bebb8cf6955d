"""``commprof doctor``."""


def doctor() -> int:
    """To be written."""
    raise NotImplementedError

"""Types of command-line options: counts, and numbers of bytes with a unit."""

from __future__ import annotations

import argparse
from typing import Final

_SUFFIXES: Final = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


def size(text: str) -> int:
    """Return a number of bytes. The suffix k, m or g multiplies the number by 1024, 1024^2 or 1024^3."""
    unit = _SUFFIXES.get(text[-1:].lower(), 1)
    return count(text[:-1] if unit > 1 else text) * unit


def count(text: str) -> int:
    """Return a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)

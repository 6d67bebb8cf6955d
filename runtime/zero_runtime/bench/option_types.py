"""Types of command-line options: counts, and bytes with a unit."""

from __future__ import annotations

import argparse
from typing import Final

_SUFFIXES: Final = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


def size(text: str) -> int:
    """A number of bytes, with k, m or g for 1024, 1024^2 or 1024^3 of them."""
    unit = _SUFFIXES.get(text[-1:].lower(), 1)
    return count(text[:-1] if unit > 1 else text) * unit


def count(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)

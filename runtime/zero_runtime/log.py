"""Log lines on stderr, from the level in ZERO_RUNTIME_LOG_LEVEL, or else in DEEPSPEED_LOG_LEVEL.

The levels are debug, info (the default), warning, error and critical. Fatal errors are raised as exceptions,
not logged.
"""

from __future__ import annotations

import logging
import os
import sys
from functools import cache
from typing import Final

VARIABLES: Final = ("ZERO_RUNTIME_LOG_LEVEL", "DEEPSPEED_LOG_LEVEL")
LEVELS: Final = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
}


def level() -> int:
    """Return the lowest level that is printed, as a number of :mod:`logging`. An unknown level is reported once."""
    for variable in VARIABLES:
        named = os.environ.get(variable)
        if named:
            return _number(variable, named)
    return logging.INFO


@cache
def _number(variable: str, named: str) -> int:
    number = LEVELS.get(named.lower())
    if number is None:
        _print(f"{variable} is {named!r}; expected one of {', '.join(LEVELS)}; info is used")
        return logging.INFO
    return number


def info(sentence: str) -> None:
    """Print a progress line."""
    if level() <= logging.INFO:
        _print(sentence)


def warning(sentence: str) -> None:
    """Print a warning."""
    if level() <= logging.WARNING:
        _print(sentence)


def _print(sentence: str) -> None:
    print(f"zero_runtime: {sentence}", file=sys.stderr, flush=True)

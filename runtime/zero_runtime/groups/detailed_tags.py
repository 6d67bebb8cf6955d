"""Whether tags contain buckets and parameters.

A recorder and a traffic contract need these details. Without a reader they only cost time.
"""

from __future__ import annotations

from commprof import hooks

_readers = 0


def detailed() -> bool:
    """Return whether the details of tags are read."""
    return _readers > 0 or hooks.recording()


def add_reader(number: int = 1) -> None:
    """Add ``number`` readers in addition to the recorder; -1 removes a reader."""
    global _readers
    _readers += number

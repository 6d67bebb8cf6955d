"""Whether tags carry buckets and parameters: for a recorder, or for a traffic contract. Otherwise that only costs time."""

from __future__ import annotations

from commprof import hooks

_readers = 0


def detailed() -> bool:
    """Whether somebody reads the details of tags."""
    return _readers > 0 or hooks.recording()


def add_reader(number: int = 1) -> None:
    """Count a reader beside the recorder; -1 when it leaves."""
    global _readers
    _readers += number

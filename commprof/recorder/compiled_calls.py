"""The compiled wrappers (``_calls.c``), where they were built: each does the usual, and leaves all else to one in Python."""

from __future__ import annotations

from types import ModuleType
from typing import Any, Final

from commprof.compiled import compiled
from commprof.trace import segments

_VERSION: Final = 2  # of _calls.c, that does what is said here
MODULE: Final[ModuleType | None] = (
    compiled("commprof.recorder._calls", _VERSION) if segments.IS_COMPILED else None
)


class CompiledCalls:
    """The compiled wrappers of one recording."""

    def __init__(self) -> None:
        self._made: list[Any] = []
        self._shows_frames = False

    def make(self, kind: str, python: Any, **held: Any) -> Any:
        """A wrapper before ``python``, the function that does all of it; ``python`` itself where none was built.

        Args:
            kind: ``DirectCall`` or ``GeneralCall``.
            python: takes any call.
            held: what the wrapper needs, by the names that it has in ``python``.
        """
        if MODULE is None:
            return python
        made = getattr(MODULE, kind)(python=python, **held)
        self._made.append(made)
        if self._shows_frames:
            made.give_way()
        return made

    def show_frames(self) -> None:
        """From now on each call has a frame of ours among those of its thread: somebody looks for it there."""
        self._shows_frames = True
        for made in self._made:
            made.give_way()

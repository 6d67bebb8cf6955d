"""The compiled wrappers (``_calls.c``), if built: each handles the common case and calls the Python wrapper otherwise."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, Final

from commprof.compiled import compiled
from commprof.trace.rank_files import segments

_VERSION: Final = 5  # of _calls.c, that does what is said here
MODULE: Final[ModuleType | None] = (
    compiled("commprof.recorder._calls", _VERSION) if segments.IS_COMPILED else None
)
# Whether a compiled wrapper that records its call runs on this thread: it has no frame of Python's to be seen by. bool()
# is False.
is_running: Final[Callable[[], bool]] = bool if MODULE is None else MODULE.is_running


def compiled_call(kind: str, python: Callable[..., Any], **state: Any) -> Callable[..., Any]:
    """Return a compiled wrapper in front of ``python``, which handles every call; ``python`` itself if none is built.

    Args:
        kind: ``DirectCall``, ``GeneralCall`` or ``WaitCall``.
        python: takes any call.
        state: the objects that the wrapper needs, by their names in ``python``.
    """
    if MODULE is None:
        return python
    call: Callable[..., Any] = getattr(MODULE, kind)(python=python, **state)
    return call

"""The compiled wrappers (``_calls.c``), if built. Each handles the common case, or else calls the Python wrapper."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, Final

from commprof.compiled import compiled
from commprof.trace.rank_files import segments

_VERSION: Final = 5  # the version of _calls.c that matches this Python code
MODULE: Final[ModuleType | None] = (
    compiled("commprof.recorder._calls", _VERSION) if segments.IS_COMPILED else None
)
# Returns whether a compiled wrapper that records its call runs on this thread. Such a wrapper has no Python frame that
# shows this. Without compiled wrappers the function is bool, because bool() is False.
is_running: Final[Callable[[], bool]] = bool if MODULE is None else MODULE.is_running


def compiled_call(kind: str, python: Callable[..., Any], **state: Any) -> Callable[..., Any]:
    """Return a compiled wrapper that calls ``python`` for uncommon calls; ``python`` itself if none is built.

    Args:
        kind: ``DirectCall``, ``GeneralCall`` or ``WaitCall``.
        python: The Python wrapper, which accepts every call.
        state: The objects that the compiled wrapper needs, by their names in ``python``.
    """
    if MODULE is None:
        return python
    call: Callable[..., Any] = getattr(MODULE, kind)(python=python, **state)
    return call

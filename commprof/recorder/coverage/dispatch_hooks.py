"""Counts the calls that a process group dispatches, through torch's pre-hooks (torch 2.14 and newer).

torch calls the hooks for each call of a ProcessGroup by any caller, including DDP's reducer, functional
collectives and compiled collectives. torch does not call them for methods that are called directly on a
backend, or for ``monitored_barrier``. docs/decisions/0005-dispatch-hooks.md explains why the hooks do not
replace the layers.
"""

from __future__ import annotations

import itertools
from typing import Any, Final

from torch._C import _distributed_c10d

from commprof.trace.rank_files.segments import count_of

_HOOK: Final = 0x636F_6D6D  # torch identifies a hook by a number that the caller chooses
_OPERATIONS: Final[Any] = getattr(_distributed_c10d, "HookOpName", None)
# These are enum members, because comparing their names takes a microsecond longer.
_NO_COLLECTIVES: Final = frozenset(
    getattr(_OPERATIONS, name) for name in ("SPLIT", "NEW_WINDOW", "UNKNOWN") if hasattr(_OPERATIONS, name)
)


class DispatchCount:
    """Counts the calls that one group dispatches. Keeps no reference to a tensor or group."""

    __slots__ = ("_calls", "hook")

    def __init__(self) -> None:
        calls = self._calls = itertools.count()

        # This is a closure, because calling a closure is faster than calling a method.
        def hook(event: Any) -> None:
            """Count a call that torch is about to dispatch. An exception here would reach the training."""
            try:
                if event.name not in _NO_COLLECTIVES:
                    next(calls)
            except Exception:
                next(calls)

        self.hook = hook

    @property
    def calls(self) -> int:
        """The number of calls so far."""
        return count_of(self._calls)


def watch(pg: Any) -> DispatchCount | None:
    """Start to count the calls that ``pg`` dispatches.

    torch's table of hooks is not thread-safe. So no thread may call ``pg`` at the same time.

    Returns:
        The count; None if this version of torch has no such hooks.
    """
    try:
        unwatch(pg)
        count = DispatchCount()
        pg.register_pre_hook(_HOOK, count.hook)
    except Exception:
        return None
    return count


def unwatch(pg: Any) -> None:
    """Stop counting the calls of ``pg``.

    A group may outlive the interpreter, and could not release a Python function at that time.
    """
    try:
        pg.unregister_pre_hook(_HOOK)
    except Exception:
        return

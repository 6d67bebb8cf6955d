"""Counts the calls of a group that torch's dispatcher sees, through its pre-hooks (torch 2.14 and newer).

They fire for each call of a ProcessGroup, whoever makes it: DDP's reducer, functional and compiled collectives too. They
do not for methods called directly on a backend, and not for ``monitored_barrier``. docs/decisions/0005-dispatch-hooks.md
says why they do not replace the layers.
"""

from __future__ import annotations

import itertools
from typing import Any, Final

from torch._C import _distributed_c10d

from commprof.trace.rank_files.segments import count_of

_HOOK: Final = 0x636F_6D6D  # torch keeps hooks by a number that whoever registers one chooses
_OPERATIONS: Final[Any] = getattr(_distributed_c10d, "HookOpName", None)
# The members themselves: their names cost a microsecond more.
_NO_COLLECTIVES: Final = frozenset(
    getattr(_OPERATIONS, name) for name in ("SPLIT", "NEW_WINDOW", "UNKNOWN") if hasattr(_OPERATIONS, name)
)


class DispatchCount:
    """Counts what one group dispatches. Holds no tensor and no group."""

    __slots__ = ("_calls", "hook")

    def __init__(self) -> None:
        calls = self._calls = itertools.count()

        # A closure, which is called faster than a method.
        def hook(event: Any) -> None:
            """torch is about to dispatch a call. An exception here would reach the training."""
            try:
                if event.name not in _NO_COLLECTIVES:
                    next(calls)
            except Exception:
                next(calls)

        self.hook = hook

    @property
    def calls(self) -> int:
        """How many there have been."""
        return count_of(self._calls)


def watch(pg: Any) -> DispatchCount | None:
    """Count what ``pg`` dispatches from here on; None where this torch has no such hooks.

    torch does not guard its table of hooks, so this is for a group that nobody is calling.
    """
    try:
        unwatch(pg)
        count = DispatchCount()
        pg.register_pre_hook(_HOOK, count.hook)
    except Exception:
        return None
    return count


def unwatch(pg: Any) -> None:
    """Count no longer. A group may live until the interpreter has ended, and then cannot let go of a function of Python."""
    try:
        pg.unregister_pre_hook(_HOOK)
    except Exception:
        return

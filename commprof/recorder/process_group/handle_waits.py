"""Times the first wait for a handle, and writes the begin and end of the wait into the record of the collective."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from commprof.recorder.process.journal import Journal
from commprof.recorder.process_group.compiled_calls import compiled_call
from commprof.trace.rank_files.segments import WAIT_BEGIN_WORD, WAIT_END_WORD, Token

_MISSING: Final = object()
_MOST_PENDING: Final = 4096  # the most handles without a wait that are remembered

# How to wait for handles of a class without calling the recorder's wrapper: the methods of the class that defines
# ``wait``, the wrapper that ``wait`` must still be, and the function that the wrapper calls.
Direct = tuple[Mapping[str, Any], Any, Callable[[Any], Any]]


class Waits:
    """The pending handles by address, with the positions of their records. No reference to a handle is kept.

    Args:
        journal: The journal, which counts faults.
        pending: The table of pending handles, if it is shared with other wrappers; None for a new table.
    """

    def __init__(self, journal: Journal, pending: dict[int, Token] | None = None) -> None:
        self.pending: dict[int, Token] = {} if pending is None else pending
        self.direct: dict[type, Direct] = {}
        self._journal = journal
        # By wrapper: the function that the wrapper calls.
        self._functions: dict[Any, Callable[[Any], Any]] = {}

    def evict(self) -> None:
        """Forget the oldest handles if there are too many."""
        pending = self.pending
        while len(pending) > _MOST_PENDING:
            pending.pop(next(iter(pending)), None)

    def wrap(self, owner: type, original: Any) -> Any:
        """Return a wrapper for ``original``, the ``wait`` of ``owner``. It times the first wait for each handle."""
        journal, take = self._journal, self.pending.pop
        begin_word, end_word = WAIT_BEGIN_WORD, WAIT_END_WORD

        def wait(work: Any, timeout: Any = _MISSING) -> Any:
            token = take(id(work), None)
            if token is None:
                return original(work) if timeout is _MISSING else original(work, timeout)
            segment, base, is_async = token
            try:
                if is_async:
                    try:
                        segment.stamp(base + begin_word)
                    except Exception as error:
                        journal.fault(error)
                return original(work) if timeout is _MISSING else original(work, timeout)
            finally:
                try:
                    segment.stamp(base + end_word)
                except Exception as error:
                    journal.fault(error)

        function = unbound(original)
        wrapper = compiled_call(
            "WaitCall",
            wait,
            issue=function,
            journal=journal,
            pending=self.pending,
            owner=owner,
            wait_begin_word=begin_word,
            wait_end_word=end_word,
        )
        self._functions[wrapper] = function
        return wrapper

    def find_direct(self, kind: type) -> Direct:
        """Return how to wait for handles of class ``kind`` without calling the recorder's wrapper.

        If the recorder has not wrapped the ``wait`` of this class, the condition in the result is never true.
        """
        owner = next((each for each in kind.__mro__ if vars(each).get("wait") in self._functions), None)
        methods = {"wait": None} if owner is None else vars(owner)
        wrapper = methods["wait"] or _MISSING
        entry = self.direct[kind] = methods, wrapper, self._functions.get(wrapper, _cannot_wait)
        return entry


def _cannot_wait(work: Any) -> None:
    raise TypeError(f"{type(work).__name__} has no wait method that commprof wraps")


def unbound(method: Any) -> Any:
    """Return the function behind a method that pybind created. Calling the function takes less time."""
    return getattr(method, "__func__", method)

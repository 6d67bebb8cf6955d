"""Times the first wait for a handle, and writes its begin and end into the record of the collective."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from commprof.recorder.process.journal import Journal
from commprof.recorder.process_group.compiled_calls import compiled_call
from commprof.trace.rank_files.segments import WAIT_BEGIN_WORD, WAIT_END_WORD, Token

_MISSING: Final = object()
_MOST_PENDING: Final = 4096  # handles that nobody waited for, remembered at most

# How a class of handles is waited for without going through our wrapper: the methods of the class that has ``wait``, what
# that must still be, and the function beneath it.
Direct = tuple[Mapping[str, Any], Any, Callable[[Any], Any]]


class Waits:
    """The handles that may be waited for, by address, each with the place of its record. No handle is held.

    Args:
        journal: counts faults.
        pending: the table itself, where others share it.
    """

    def __init__(self, journal: Journal, pending: dict[int, Token] | None = None) -> None:
        self.pending: dict[int, Token] = {} if pending is None else pending
        self.direct: dict[type, Direct] = {}
        self._journal = journal
        self._functions: dict[Any, Callable[[Any], Any]] = {}  # by our wrapper: what it calls

    def evict(self) -> None:
        """Forget the oldest handles where there are too many."""
        pending = self.pending
        while len(pending) > _MOST_PENDING:
            pending.pop(next(iter(pending)), None)

    def wrap(self, owner: type, original: Any) -> Any:
        """What stands in for ``original``, the ``wait`` of ``owner``: the first wait of each handle is timed."""
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
        """How handles of class ``kind`` are waited for; of a class without a ``wait`` of ours the condition never holds."""
        owner = next((each for each in kind.__mro__ if vars(each).get("wait") in self._functions), None)
        methods = {"wait": None} if owner is None else vars(owner)
        wrapper = methods["wait"] or _MISSING
        entry = self.direct[kind] = methods, wrapper, self._functions.get(wrapper, _cannot_wait)
        return entry


def _cannot_wait(work: Any) -> None:
    raise TypeError(f"{type(work).__name__} has no wait of ours")


def unbound(method: Any) -> Any:
    """The function behind a method that pybind made: calling it takes less time."""
    return getattr(method, "__func__", method)

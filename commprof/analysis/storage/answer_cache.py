"""A cache of answers in memory, by the state of a run and the question. It evicts the least recently used answers.

The state of a run is the key of its fingerprint, so the cache never returns an answer about files that have changed. A
run that is being written has no such key. Instead, every time it is opened it has a new state.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Final, TypeVar
from weakref import ref

from commprof.analysis.relations.memory import limit_bytes
from commprof.trace.fingerprint import fingerprint

Answer = TypeVar("Answer")

_LEAST_BYTES: Final = 256 << 20
_SHARE: Final = 8
_MOST_ANSWERS: Final = 4096
_OTHER_BYTES: Final = 200  # assumed size of a value that is neither a table nor an array


class AnswerCache:
    """A cache of answers by state and question, safe for several threads.

    Args:
        most_bytes: The maximum size of all answers in bytes. Default: an eighth of the engine's memory limit, but at
            least 256 MiB. The newest answer is always cached, whatever its size.
        most_answers: The maximum number of answers.
    """

    def __init__(self, most_bytes: int | None = None, most_answers: int = _MOST_ANSWERS) -> None:
        self._most_bytes, self._most_answers = most_bytes, most_answers
        self._lock = threading.Lock()
        self.clear()

    def get(
        self,
        state: Hashable,
        question: Hashable,
        answer: Callable[[], Answer],
        is_final: Callable[[Answer], bool] | None = None,
    ) -> Answer:
        """Return the cached answer to ``question`` about a run in ``state``, or else the result of ``answer``.

        Args:
            state: A text or a tuple of texts. Any other object is compared by identity, and its answers are removed
                when the object is deleted.
            question: The question and everything else that the answer depends on.
            answer: A function that computes the answer.
            is_final: A function that returns whether an answer may be cached. Default: all answers may be cached. The
                answer None is never cached, because it means that the answer is not known yet.
        """
        key = (state if isinstance(state, str | tuple) else ref(state), question)
        with self._lock:
            if key in self._entries:
                self._entries.move_to_end(key)
                cached: Answer = self._entries[key][0]
                return cached
        new_answer = answer()
        if new_answer is not None and (is_final is None or is_final(new_answer)):
            self._hold(key, new_answer, bytes_of(new_answer))
        return new_answer

    def of_files(
        self,
        runs: Sequence[Path],
        question: Hashable,
        answer: Callable[[], Answer],
        is_final: Callable[[Answer], bool] | None = None,
    ) -> Answer:
        """Return :meth:`get` for run directories, by the state of their files.

        Answers about runs that are being written are not cached.
        """
        states = [fingerprint(run) for run in runs]
        if not all(state.is_still for state in states):
            return answer()
        return self.get(tuple(state.key for state in states), question, answer, is_final)

    def clear(self) -> None:
        """Remove all answers."""
        with self._lock:
            self._entries: OrderedDict[tuple[Any, Hashable], tuple[Any, int]] = OrderedDict()
            self._bytes = 0

    def _hold(self, key: tuple[Any, Hashable], answer: Any, size: int) -> None:
        with self._lock:
            self._bytes += size - self._entries.pop(key, (None, 0))[1]
            self._entries[key] = (answer, size)
            gone = [each for each in self._entries if isinstance(each[0], ref) and each[0]() is None]
            for each in gone:
                self._bytes -= self._entries.pop(each)[1]
            while len(self._entries) > 1 and self._is_full():
                self._bytes -= self._entries.popitem(last=False)[1][1]

    def _is_full(self) -> bool:
        if len(self._entries) > self._most_answers:
            return True
        if self._most_bytes is None:
            return self._bytes > _LEAST_BYTES and self._bytes > limit_bytes() // _SHARE
        return self._bytes > self._most_bytes

    def __len__(self) -> int:
        return len(self._entries)


def bytes_of(answer: Any) -> int:
    """Return the approximate size of ``answer`` in bytes, which is that of its tables, frames and arrays."""
    if hasattr(answer, "memory_usage"):
        return int(answer.memory_usage().sum())
    if hasattr(answer, "nbytes"):
        return int(answer.nbytes)
    members: Iterable[Any] = ()
    if isinstance(answer, Mapping):
        members = answer.values()
    elif isinstance(answer, list | tuple | set):
        members = answer
    elif is_dataclass(answer):
        members = (getattr(answer, field.name) for field in fields(answer))
    return _OTHER_BYTES + sum(map(bytes_of, members))


answer_cache: Final = AnswerCache()

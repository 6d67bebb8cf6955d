"""The one cache of answers in memory: by the state of a run and the question. The least recently used answers go.

The state of a run is the key of its fingerprint, so an answer about files that have changed is not found again. A run that
is being written has no such key: each time that it is opened is a state of its own.
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
_OTHER_BYTES: Final = 200  # that what is neither a table nor an array is taken to have


class AnswerCache:
    """Answers by state and question, for several threads.

    Args:
        most_bytes: that are held; default: an eighth of what the engine may take, and 256 MiB at least. The newest answer
            is held, however large it is.
        most_answers: that are held.
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
        """What ``answer`` says to ``question`` about a run in ``state``, unless it is held already.

        Args:
            state: a text, or texts; any other object stands for itself, and its answers go with it.
            question: what is asked, and whatever else the answer depends on.
            is_final: whether an answer may be held; default: all may. None never is: it is not known yet.
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
        """:meth:`get` of directories, by their files as they are now; of a run that is being written nothing is held."""
        states = [fingerprint(run) for run in runs]
        if not all(state.is_still for state in states):
            return answer()
        return self.get(tuple(state.key for state in states), question, answer, is_final)

    def clear(self) -> None:
        """Hold nothing any more."""
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
    """About how many bytes ``answer`` takes: those of its tables, frames and arrays."""
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

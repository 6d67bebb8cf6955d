"""Small answers about runs, kept for as long as no file of the run changes, comes or goes.

Only of runs that are still: what is known of one that is being written depends on more than its files' sizes and times.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

from commprof.analysis.fingerprint import Stamp, is_growing, stamp

Answer = TypeVar("Answer")

_MOST: Final = 2048  # answers


class _Kept:
    def __init__(self) -> None:
        self._answers: OrderedDict[tuple[str, Path], tuple[Stamp, Any]] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, key: tuple[str, Path], held: Stamp) -> tuple[Any] | None:
        with self._lock:
            found = self._answers.get(key)
            if found is None or found[0] != held:
                return None
            self._answers.move_to_end(key)
            return (found[1],)

    def keep(self, key: tuple[str, Path], held: Stamp, answer: Any) -> None:
        with self._lock:
            self._answers[key] = (held, answer)
            self._answers.move_to_end(key)
            while len(self._answers) > _MOST:
                self._answers.popitem(last=False)


_kept: Final = _Kept()


def kept(
    run: Path, question: str, answer: Callable[[], Answer], is_final: Callable[[Answer], bool] | None = None
) -> Answer:
    """What ``answer`` says of ``run``; the same again for as long as its files are what they were.

    Args:
        question: what is asked, and whatever else the answer depends on.
        is_final: whether an answer may be kept; default: all may.
    """
    path = run.resolve()
    try:
        before = stamp(path)
    except OSError:
        return answer()
    key = (question, path)
    if not is_growing(before):
        found = _kept.find(key, before)
        if found is not None:
            held: Answer = found[0]
            return held
    said = answer()
    try:
        after = stamp(path)  # a run that ends meanwhile is finalised, which changes its files
    except OSError:
        return said
    if (
        not is_growing(after)
        and (is_final is None or is_final(said))
        and (after == before or is_growing(before))
    ):
        _kept.keep(key, after, said)
    return said

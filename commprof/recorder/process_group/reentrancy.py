"""Detects, from the frames of the thread, that an outer function of the recorder already records a collective."""

from __future__ import annotations

from types import CodeType, FrameType
from typing import Final

from commprof.recorder.process_group.compiled_calls import is_running

_FILES: Final = tuple(
    f"commprof/recorder/{module}.py"
    for module in ("process_group/wrappers", "process_group/fast_path", "dispatcher/kernels")
)
_NAMES: Final = frozenset({"call", "kernel"})
_MOST_CODES: Final = 20_000


class RecorderFrames:
    """Detects whether a function that records is among the frames of the current thread.

    The compiled functions have no frames. They report themselves that they are running. The Python functions are
    identified by file and name, not by identity, because torch's compiler may run a copy of a function.
    """

    def __init__(self) -> None:
        self._known: dict[int, bool] = {}
        self._codes: list[CodeType] = []  # references, so that the addresses of these objects are not reused

    def among(self, frame: FrameType | None) -> bool:
        """Return whether ``frame`` or one of its callers records collectives."""
        if is_running():
            return True
        known = self._known
        while frame is not None:
            code = frame.f_code
            records = known.get(id(code))
            if records is None:
                records = self._learn(code)
            if records:
                return True
            frame = frame.f_back
        return False

    def _learn(self, code: CodeType) -> bool:
        records = code.co_name in _NAMES and code.co_filename.endswith(_FILES)
        if len(self._codes) < _MOST_CODES:
            self._codes.append(code)
            self._known[id(code)] = records
        return records

"""Records collectives in CUDA graphs: they are issued once, while the graph is captured, and run at each replay.

A record from a capture is marked (``captured``), and later receives the number of replays (``replays``).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, Final

from commprof.schema import record_offset
from commprof.trace.rank_files.segments import Words

# The word whose upper half is the record's ``replays``. torch supports CUDA on little-endian machines only.
_REPLAYS_WORD: Final = record_offset("replays") // 8
_REPLAYS_SHIFT: Final = 8 * (record_offset("replays") % 8)
_LARGEST: Final = (1 << 31) - 1


class CapturedGraph:
    """The records of one graph, and the number of its replays."""

    def __init__(self) -> None:
        self.records: list[tuple[Words, int]] = []
        self.replays = 0
        self.written = 0

    def write(self) -> None:
        """Write the current number of replays into the records."""
        if self.written != self.replays:
            self.written = self.replays
            for words, base in self.records:
                set_replays(words, base, self.replays)


class CapturedGraphs:
    """Follows captures and replays of CUDA graphs.

    Args:
        on_fault: A function that is called with exceptions of the recorder's own code.
    """

    def __init__(self, on_fault: Callable[[Exception], None]) -> None:
        self._on_fault = on_fault
        self._open: CapturedGraph | None = None
        self._graphs: list[CapturedGraph] = []
        self._of: weakref.WeakKeyDictionary[Any, CapturedGraph] = weakref.WeakKeyDictionary()
        self._patched: list[tuple[type, str, Any, Any]] = []

    def install(self, kind: type) -> None:
        """Wrap ``capture_begin``, ``capture_end`` and ``replay`` of ``kind``, torch's class of graphs."""
        for name, listener in (
            ("capture_begin", self._begin),
            ("capture_end", self._end),
            ("replay", self._replay),
        ):
            original = vars(kind).get(name)
            if original is not None:
                wrapper = self._wrap(original, listener)
                setattr(kind, name, wrapper)
                self._patched.append((kind, name, original, wrapper))

    def remove(self) -> None:
        """Remove the wrappers, unless other code has wrapped them since."""
        for kind, name, original, wrapper in self._patched:
            if vars(kind).get(name) is wrapper:
                setattr(kind, name, original)
        self._patched.clear()

    def add(self, words: Words, base: int) -> None:
        """Add a record that was written while a stream was being captured."""
        if self._open is not None:
            self._open.records.append((words, base))

    def write(self) -> None:
        """Write the number of replays into the records of all graphs; called once per step and at the end."""
        for graph in self._graphs:
            graph.write()

    def _wrap(self, original: Any, listener: Callable[[Any], None]) -> Any:
        @functools.wraps(original)
        def wrapper(graph: Any, /, *args: Any, **kwargs: Any) -> Any:
            result = original(graph, *args, **kwargs)
            try:
                listener(graph)
            except Exception as error:
                self._on_fault(error)
            return result

        return wrapper

    def _begin(self, graph: Any) -> None:
        self._open = self._of[graph] = CapturedGraph()

    def _end(self, graph: Any) -> None:
        captured, self._open = self._open, None
        if captured is not None and captured.records:
            self._graphs.append(captured)

    def _replay(self, graph: Any) -> None:
        captured = self._of.get(graph)
        if captured is not None:
            captured.replays += 1


def set_replays(words: Words, base: int, replays: int) -> None:
    """Set the record's ``replays``, and keep the neighboring field in the same word unchanged."""
    index = base + _REPLAYS_WORD
    other = words[index] & ((1 << _REPLAYS_SHIFT) - 1)
    words[index] = min(replays, _LARGEST) << _REPLAYS_SHIFT | other

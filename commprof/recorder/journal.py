"""What the interception writes to: the rank's two files, the interned values, and where the training is.

A journal exists from the moment recording is asked for; its files are opened when the process turns out to be a rank.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, Final

from commprof import hooks
from commprof.schema import LAYERS, OPS, PHASES, PURPOSES, Layer, Phase, Purpose
from commprof.trace.writer import EventFile, RecordFile, position_word, state_word

_MOST_INTERNED: Final = 200_000
_PROCESS_GROUP_LAYER: Final = LAYERS.index(Layer.PROCESS_GROUP)
_STATE_WORDS: Final = {name: state_word(number, _PROCESS_GROUP_LAYER) for number, name in enumerate(PHASES)}


class Journal:
    """One rank's recording. Every method may be called from any thread and none raises."""

    def __init__(self) -> None:
        self.key = object()  # stands for this journal in a tag's cache
        self.records: RecordFile | None = None
        self.events: EventFile | None = None
        self.position = position_word(hooks.position.step, hooks.position.micro_step)
        self.state = _STATE_WORDS.get(hooks.position.phase, _STATE_WORDS[Phase.OTHER])
        self.faults = 0
        self.first_fault: str | None = None
        self.raised = 0
        self.refused_metrics = 0  # metrics that were no Python numbers
        self.refused: str | None = None  # why no file could be opened
        self.cost_samples = 0
        self.cost_ns = 0
        self.local = threading.local()
        self._lock = threading.RLock()
        self._interned: dict[tuple[Any, ...], int] = {}
        self._next_id = 1

    def open(self, records: RecordFile, events: EventFile) -> None:
        """Keep everything from now on in these files."""
        self.records, self.events = records, events

    def refuse(self, reason: str) -> None:
        """No file could be opened: count what comes as lost."""
        self.refused = reason

    def move(self, step: int, micro_step: int) -> None:
        """The training is at this step now."""
        self.position = position_word(step, micro_step)

    def enter_phase(self, name: str) -> None:
        """The training is in this phase now; one that the schema does not know counts as ``other``."""
        self.state = _STATE_WORDS.get(name, _STATE_WORDS[Phase.OTHER])

    def write(self, kind: str, row: Mapping[str, Any]) -> None:
        """Append a line to the events file. When that fails no record is kept either: nobody could read it."""
        events, records = self.events, self.records
        if events is None:
            return
        if not events.write(kind, row) and records is not None and events.stopped_reason is not None:
            records.stop(events.stopped_reason)

    def intern(self, kind: str, row: Mapping[str, Any]) -> int:
        """The number of a row of values, written to the events file at its first appearance."""
        key = (kind, *row.values())
        with self._lock:
            number = self._interned.get(key)
            if number is None:
                if len(self._interned) > _MOST_INTERNED:
                    self._interned.clear()  # numbers go on, so old ones stay right
                number = self._next_id
                self._next_id += 1
                self.write(kind, {"id": number, **row})
                self._interned[key] = number
            return number

    def intern_tag(self, tag: hooks.tag) -> int:
        """The number of a tag's content."""
        purpose = tag.purpose if tag.purpose in PURPOSES else Purpose.OTHER.value
        number = self.intern(
            "tag",
            {
                "purpose": str(purpose),
                "intended_op": str(tag.intended_op) if tag.intended_op in OPS else None,
                "bucket": tag.bucket,
                "bucket_bytes": tag.bucket_bytes,
                "owner": tag.owner,
                "parameters": ",".join(tag.parameters) or None,
            },
        )
        tag.interned = (self.key, number)
        return number

    def intern_thread(self) -> int:
        """The number of the current thread's name."""
        number = self.intern("thread", {"name": threading.current_thread().name})
        self.local.number = number
        return number

    def fault(self, error: BaseException) -> None:
        """Our own code failed: count it. The training never hears of it."""
        self.faults += 1
        if self.first_fault is None:
            self.first_fault = f"{type(error).__name__}: {error}"

    def close(self) -> None:
        """Let go of the files."""
        if self.records is not None:
            self.records.close()
        if self.events is not None:
            self.events.close()

    def drop(self) -> None:
        """Let go of the files in a forked child, without touching their content."""
        if self.records is not None:
            self.records.drop()
        if self.events is not None:
            self.events.close()

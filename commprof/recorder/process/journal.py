"""The journal of a rank: its two files, the interned values, and the position of the training.

A journal exists from the moment recording is requested. Its files are opened when the process is known to be a rank.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import torch

from commprof import hooks
from commprof.program_exceptions import pass_on
from commprof.recorder.device.completion import Completions
from commprof.recorder.device.device_times import DeviceTimes
from commprof.recorder.process.threads import ThreadNames
from commprof.recorder.process_group.groups import Group
from commprof.schema import LAYERS, OPS, PHASES, PURPOSES, Layer, Phase, Purpose
from commprof.trace.rank_files.segments import (
    NO_WORDS,
    RETURN_WORD,
    Segment,
    Token,
    Words,
    mark_raised,
    pack_tail,
)
from commprof.trace.rank_files.writer import EventFile, RecordFile, encode_row

_MOST_INTERNED: Final = 200_000
# The most characters in the texts of interned rows: about 50 MB for calls with splits among 8 ranks.
_MOST_LETTERS: Final = 8_000_000
_MOST_ON_THEIR_WAY: Final = 256
PROCESS_GROUP: Final = LAYERS.index(Layer.PROCESS_GROUP)
_C10D: Final = LAYERS.index(Layer.C10D)
_PHASE_NUMBERS: Final = {name: number for number, name in enumerate(PHASES)}
_is_capturing: Final = getattr(torch._C, "_cuda_isCurrentStreamCapturing", None)

Place = tuple[Segment, bytes]


class Once(NamedTuple):
    """An all_to_all whose splits do not repeat.

    Attributes:
        like: The number of a signature that is equal except for the splits and the bytes.
        input_bytes: The bytes of the input.
        output_bytes: The bytes of the output.
    """

    like: int
    input_bytes: int
    output_bytes: int


class Journal:
    """The records, events and interned values of one rank.

    Every method may be called from any thread. No method raises an exception, except that :meth:`fault` and
    :meth:`pass_on` raise exceptions of the program again.

    Args:
        completion_every: Record the completion time of every Nth sampled CPU call. 0 disables completion times on all
            devices.
    """

    def __init__(self, completion_every: int = 1) -> None:
        self.key = object()  # identifies this journal in a tag's cache
        self.records: RecordFile | None = None
        self.events: EventFile | None = None
        self._step, self._micro_step = hooks.position.step, hooks.position.micro_step
        self._phase = _phase_number(hooks.position.phase)
        self.step_ends = 0  # the number of reported ends of steps
        self.ran_outside = False  # whether an evaluation or a checkpoint has begun since the last step end
        self._coalescing: set[str] = set()  # groups with an open coalescing block
        self._has_accelerator = False  # whether a group has transferred tensors of an accelerator
        # The data that the hot path needs, in one attribute: the open segment, and the current tail of all records. The
        # tuple is replaced as a whole when one of the two changes.
        self.place: Place = (NO_WORDS, b"")
        # If calls are also timed on a device: the same data, and a function that returns to a compiled call where to
        # write its times.
        self.timed_place: tuple[Segment, bytes, Callable[[int, Segment], Segment | bool | None]] | None = None
        self.tails: dict[int, bytes] = {}  # by layer: the current tail of all records of this layer
        self.is_closing = False  # while True, no exception may interrupt the closing
        self.faults = 0
        self.first_fault: str | None = None
        self.raised = 0
        self.lost = 0  # collectives that were issued while no file was open
        self.refused_metrics = 0  # metrics whose value was not a Python number
        self.cost_samples = 0
        self.cost_ns = 0
        self.completion = Completions(completion_every)
        self.device_times = DeviceTimes(completion_every > 0, self.fault)
        # A function that is called for each record of a CUDA graph.
        self.on_captured: Callable[[Words, int], None] | None = None
        self._lock = threading.RLock()
        self.allows_line: Callable[[str], bool] | None = None  # whether a line of this kind may be written
        # Interned rows by number, for the aggregation.
        self.rows: dict[int, Mapping[str, Any]] | None = None
        self.once: dict[int, Once] | None = None  # signatures with only one record, for the aggregation
        self._notes: list[str] = []  # notes from before the files were opened
        self._thread_names = ThreadNames()
        # The states of the threads that have a number. The references are weak.
        self._threads: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._interned: dict[tuple[Any, ...], int] = {}
        self._interned_letters = 0
        self._next_id = 1

    def open(self, records: RecordFile, events: EventFile) -> None:
        """Write everything from now on to these files."""
        self.records, self.events = records, events
        records.on_segment = self._refresh
        self._refresh()
        for text in self._notes:
            self.write("note", {"text": text})
        self._notes.clear()

    def _refresh(self) -> None:
        segment = NO_WORDS if self.records is None or self._coalescing else self.records.segment
        tail = pack_tail(self._step, self._micro_step, 0, self._phase, PROCESS_GROUP)
        timed = self._has_accelerator
        self.place = NO_WORDS if timed else segment, tail
        self.timed_place = (segment, tail, self._times_of) if timed else None
        self.tails = {}

    def _times_of(self, signature: int, segment: Segment) -> Segment | bool | None:
        """Return where a compiled call writes its times; None if :meth:`append` must write the record."""
        # A record in a CUDA graph has a different tail, whether or not it has device events.
        return None if is_capturing() else self.device_times.begin(signature, segment)

    def moment(self) -> dict[str, int]:
        """Return the position of the training that new records get, and the current time."""
        return {
            "step": self._step,
            "micro_step": self._micro_step,
            "phase": self._phase,
            "time_ns": time.perf_counter_ns(),
        }

    def tail_of(self, layer: int) -> bytes:
        """Return the current tail of all records of ``layer``, and store it in ``tails``."""
        tails = self.tails
        tails[layer] = pack_tail(self._step, self._micro_step, 0, self._phase, layer)
        return tails[layer]

    def append(self, group: Group, *fields: int, layer: int = PROCESS_GROUP) -> tuple[Segment, int]:
        """Write one record, or count it as lost if no file is open.

        The hot path calls this method if the open segment is full, or if a group needs special treatment. All layers
        other than ``process_group`` always call it.

        Args:
            group: The process group of the collective.
            fields: The fields of a record before the tail.
            layer: The layer that recorded the collective, as a position in ``LAYERS``.

        Returns:
            The segment of the record, and the position of the record in this segment.
        """
        if self.records is None:
            self.lost += 1
            return NO_WORDS, 0
        tail = self.place[-1]
        captured = group.accelerated and is_capturing()
        if group.coalesce_id or captured:
            tail = pack_tail(self._step, self._micro_step, group.coalesce_id, self._phase, layer, captured)
        elif layer != PROCESS_GROUP:
            tail = self.tails.get(layer) or self.tail_of(layer)
        segment, base = self.records.append(*fields, tail)
        if captured and self.on_captured is not None:
            self.on_captured(segment, base)
        if group.accelerated:
            segment = self.device_times.follow(segment, base, fields[2], captured, layer == _C10D)
        return segment, base

    def mark_raised(self, token: Token) -> None:
        """Mark a record because its call raised, and write an event for readers of only the last records."""
        words, base, _ = token
        words[base + RETURN_WORD] = time.perf_counter_ns()
        signature, number = mark_raised(token)
        if signature:
            self.write("raised", {"signature": signature, "pg_seq": number})

    def look_closer(self, group: Group) -> None:
        """Update the state after ``group`` opened or closed a coalescing block, or first used an accelerator."""
        self._has_accelerator = self._has_accelerator or group.accelerated
        if group.coalesce_id:
            self._coalescing.add(group.name)
        else:
            self._coalescing.discard(group.name)
        self._refresh()

    def move(self, step: int, micro_step: int) -> None:
        """Set the step and micro-batch of the next records."""
        self.device_times.end_step()
        self._step, self._micro_step = step, micro_step
        self._refresh()

    @property
    def step(self) -> int:
        """The step of new records."""
        return self._step

    def end_step(self, step: int) -> None:
        """End the step before ``step``; the next records belong to ``step``."""
        self.step_ends += 1
        self.ran_outside = False
        self.move(step, 0)

    def enter_micro_step(self, micro_step: int) -> None:
        """Set the micro-batch of the next records, within the same step."""
        self._micro_step = micro_step
        self._refresh()

    def enter_phase(self, name: str) -> None:
        """Set the phase of the next records. A phase that is not in the schema counts as ``other``."""
        self._phase = _phase_number(name)
        self.ran_outside = self.ran_outside or name in (Phase.EVALUATION, Phase.CHECKPOINT)
        self._refresh()

    def write(self, kind: str, row: Mapping[str, Any]) -> bool:
        """Append a line to the events file; return whether it was written.

        If the file cannot be written, no further records are written either, because they would not be readable.
        """
        return self.events is not None and self.write_line(kind, encode_row(kind, row))

    def write_line(self, kind: str, line: bytes) -> bool:
        """Append one or more encoded lines of ``kind`` to the events file, in the same way as :meth:`write`."""
        events, records = self.events, self.records
        if events is None or (self.allows_line is not None and not self.allows_line(kind)):
            return False
        if events.write_line(line):
            return True
        if records is not None and events.stopped_reason is not None:
            records.stop(events.stopped_reason)
        return False

    def note(self, text: str) -> None:
        """Write a note for the reader of the trace."""
        if self.events is None:
            self._notes.append(text)
        else:
            self.write("note", {"text": text})

    def intern(self, kind: str, row: Mapping[str, Any]) -> int:
        """Return the number of a row of values. A new row is written to the events file."""
        key = (kind, *row.values())
        with self._lock:
            number = self._interned.get(key)
            if number is None:
                self._interned_letters += sum(len(value) for value in row.values() if isinstance(value, str))
                if len(self._interned) > _MOST_INTERNED or self._interned_letters > _MOST_LETTERS:
                    self._interned.clear()  # the numbering continues, so old numbers remain valid
                    self._interned_letters = 0
                number = self._next_id
                self._next_id += 1
                self.write(kind, {"id": number, **row})
                self._interned[key] = number
                if self.rows is not None:
                    self.rows[number] = row
            return number

    def add_signature(self, like: int, line: str, input_bytes: int, output_bytes: int) -> int:
        """Write a signature that is not kept in memory, and return its number.

        Args:
            like: The number of a signature that is equal except for the splits and the bytes.
            line: The rest of the signature's line in the events file, after the number.
            input_bytes: The bytes of the input.
            output_bytes: The bytes of the output.
        """
        with self._lock:
            number = self._next_id
            self._next_id += 1
        once = self.once
        if once is not None:
            once[number] = Once(like, input_bytes, output_bytes)
            if self.records is not None and self.records.spills:
                return number  # only sums are written, and sums do not contain splits
            # Older entries are not needed: their records are in the file, except for calls that are in progress.
            if len(once) > _MOST_ON_THEIR_WAY:
                with self._lock:
                    once.pop(next(iter(once)), None)
        if not self.write_line("signature", f'{{"kind":"signature","id":{number},{line}'.encode()) and once:
            once.pop(number, None)
        return number

    def may_repeat(self, signature: int) -> bool:
        """Return whether more than one record may have this signature."""
        return self.once is None or signature not in self.once

    def intern_tag(self, tag: hooks.tag) -> int:
        """Return the number of a tag's content, and cache it in the tag."""
        purpose = tag.purpose if tag.purpose in PURPOSES else Purpose.OTHER.value
        number = self.intern(
            "tag",
            {
                "purpose": str(purpose),
                "intended_op": str(tag.intended_op) if tag.intended_op in OPS else None,
                "bucket": tag.bucket,
                "bucket_bytes": tag.bucket_bytes,
                "padding_bytes": tag.padding_bytes,
                "owner": tag.owner,
                "parameters": ",".join(tag.parameters) or None,
                "module": tag.module,
            },
        )
        tag.interned = (self.key, number)
        return number

    def intern_thread(self) -> int:
        """Return the number of the current thread's name, and cache it in the thread's state."""
        with self._lock:
            number = self.intern("thread", self._thread_names.row())
            state = hooks._thread.state
            state.recorder_number = number
            self._threads[id(state)] = state
        return number

    def fault(self, error: BaseException) -> None:
        """Count an exception of the recorder's own code, which never reaches the training.

        An exception of the program is raised again, unless the journal is closing.
        """
        if not self.is_closing:
            pass_on(error)
        self.faults += 1
        if self.first_fault is None:
            self.first_fault = f"{type(error).__name__}: {error}"

    def pass_on(self, error: BaseException) -> None:
        """Raise ``error`` again if it is an exception of the program; do not count it."""
        pass_on(error)

    def close(self, totals: Mapping[str, Any]) -> None:
        """Write the totals and close the files."""
        timed = self.device_times.finish()
        if timed is not None:
            self.note(timed)
        self._forget_threads()
        if self.records is not None:
            self.records.close(totals)
        if self.events is not None:
            self.events.close()

    def _forget_threads(self) -> None:
        for reference in self._threads.valuerefs():  # without the lock, which may be locked in a forked child
            state = reference()
            if state is not None:
                state.recorder_number = 0
        self._threads.clear()

    def drop(self) -> None:
        """Close the files in a forked child, without changing their content."""
        self._forget_threads()
        if self.records is not None:
            self.records.drop()
        if self.events is not None:
            self.events.close()


def _phase_number(name: str) -> int:
    return _PHASE_NUMBERS.get(name, _PHASE_NUMBERS[Phase.OTHER])


def is_capturing() -> bool:
    """Return whether the current stream is capturing a CUDA graph."""
    return _is_capturing is not None and torch.cuda.is_initialized() and bool(_is_capturing())

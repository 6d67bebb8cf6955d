"""The journal of a rank: its two files, the interned values, and the position of the training.

A journal exists as soon as recording is requested; its files are opened when the process is known to be a rank.
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
_MOST_LETTERS: Final = 8_000_000  # in their texts: some 50 MB of calls with splits among 8 ranks
_MOST_ON_THEIR_WAY: Final = 256
PROCESS_GROUP: Final = LAYERS.index(Layer.PROCESS_GROUP)
_C10D: Final = LAYERS.index(Layer.C10D)
_PHASE_NUMBERS: Final = {name: number for number, name in enumerate(PHASES)}
_is_capturing: Final = getattr(torch._C, "_cuda_isCurrentStreamCapturing", None)

Place = tuple[Segment, bytes]


class Once(NamedTuple):
    """The bytes of an all_to_all whose splits do not repeat, and the signature that says all else."""

    like: int
    input_bytes: int
    output_bytes: int


class Journal:
    """One rank's recording. Every method may be called from any thread and none raises. What is the program's leaves
    :meth:`fault`.

    Args:
        completion_every: of the calls that may be asked when they ended, one in so many is; 0: none, on no device.
    """

    def __init__(self, completion_every: int = 1) -> None:
        self.key = object()  # stands for this journal in a tag's cache
        self.records: RecordFile | None = None
        self.events: EventFile | None = None
        self._step, self._micro_step = hooks.position.step, hooks.position.micro_step
        self._phase = _phase_number(hooks.position.phase)
        self.step_ends = 0  # how many ends of steps were told
        self.ran_outside = False  # an evaluation or a checkpoint has begun since the last of them
        self._coalescing: set[str] = set()  # groups with an open coalescing block
        self._has_accelerator = False  # some group has carried tensors of one
        # What the hot path needs in one attribute: the open segment, and the tail that all records have now. Replaced as a
        # whole when one of them changes.
        self.place: Place = (NO_WORDS, b"")
        # Where calls are timed on a device too: the same, and what a compiled call asks for where to write its times.
        self.timed_place: tuple[Segment, bytes, Callable[[int, Segment], Segment | bool | None]] | None = None
        self.tails: dict[int, bytes] = {}  # by layer: the tail that all records of it have now
        self.is_closing = False  # nothing may stop it then
        self.faults = 0
        self.first_fault: str | None = None
        self.raised = 0
        self.lost = 0  # collectives for which there was no file
        self.refused_metrics = 0  # metrics that were no Python numbers
        self.cost_samples = 0
        self.cost_ns = 0
        self.completion = Completions(completion_every)
        self.device_times = DeviceTimes(completion_every > 0, self.fault)
        self.on_captured: Callable[[Words, int], None] | None = None  # told of each record of a CUDA graph
        self._lock = threading.RLock()
        self.allows_line: Callable[[str], bool] | None = None  # whether a line of this kind may be written
        # Interned rows by number, for the aggregation.
        self.rows: dict[int, Mapping[str, Any]] | None = None
        self.once: dict[int, Once] | None = None  # signatures of one record each, for the same
        self._notes: list[str] = []  # said before there was a file
        self._thread_names = ThreadNames()
        # States of the threads that were given a number, as long as these live.
        self._threads: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._interned: dict[tuple[Any, ...], int] = {}
        self._interned_letters = 0
        self._next_id = 1

    def open(self, records: RecordFile, events: EventFile) -> None:
        """Keep everything from now on in these files."""
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
        """What a compiled call writes its times into; None: :meth:`append` has to make its record."""
        # The tail of a record in a CUDA graph is another one, whether events are made or not.
        return None if is_capturing() else self.device_times.begin(signature, segment)

    def moment(self) -> dict[str, int]:
        """The position of the training as records have it now, and the time."""
        return {
            "step": self._step,
            "micro_step": self._micro_step,
            "phase": self._phase,
            "time_ns": time.perf_counter_ns(),
        }

    def tail_of(self, layer: int) -> bytes:
        """The tail that all records of ``layer`` have now."""
        tails = self.tails
        tails[layer] = pack_tail(self._step, self._micro_step, 0, self._phase, layer)
        return tails[layer]

    def append(self, group: Group, *fields: int, layer: int = PROCESS_GROUP) -> tuple[Segment, int]:
        """Keep one record (the fields of a slot before the tail), or count it as lost.

        For where the open segment has no room, while some group needs a closer look, and for the other layers.

        Args:
            layer: which mechanism saw the collective, as a position in ``LAYERS``.
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
        """The call of this record raised. A line says so, for those who read only the end of the records."""
        words, base, _ = token
        words[base + RETURN_WORD] = time.perf_counter_ns()
        signature, number = mark_raised(token)
        if signature:
            self.write("raised", {"signature": signature, "pg_seq": number})

    def look_closer(self, group: Group) -> None:
        """``group`` has opened or closed a coalescing block, or was seen to carry tensors of an accelerator."""
        self._has_accelerator = self._has_accelerator or group.accelerated
        if group.coalesce_id:
            self._coalescing.add(group.name)
        else:
            self._coalescing.discard(group.name)
        self._refresh()

    def move(self, step: int, micro_step: int) -> None:
        """The training is at this step now."""
        self.device_times.end_step()
        self._step, self._micro_step = step, micro_step
        self._refresh()

    @property
    def step(self) -> int:
        """The step that records have now."""
        return self._step

    def end_step(self, step: int) -> None:
        """The step before ``step`` has ended."""
        self.step_ends += 1
        self.ran_outside = False
        self.move(step, 0)

    def enter_micro_step(self, micro_step: int) -> None:
        """The training is at another micro-batch of the same step now."""
        self._micro_step = micro_step
        self._refresh()

    def enter_phase(self, name: str) -> None:
        """The training is in this phase now; one that the schema does not know counts as ``other``."""
        self._phase = _phase_number(name)
        self.ran_outside = self.ran_outside or name in (Phase.EVALUATION, Phase.CHECKPOINT)
        self._refresh()

    def write(self, kind: str, row: Mapping[str, Any]) -> bool:
        """Append a line to the events file. When that fails no record is kept either: nobody could read it."""
        return self.events is not None and self.write_line(kind, encode_row(kind, row))

    def write_line(self, kind: str, line: bytes) -> bool:
        """The same for a row of ``kind`` that is a line already, or several of them."""
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
        """The number of a row of values, written to the events file at its first appearance."""
        key = (kind, *row.values())
        with self._lock:
            number = self._interned.get(key)
            if number is None:
                self._interned_letters += sum(len(value) for value in row.values() if isinstance(value, str))
                if len(self._interned) > _MOST_INTERNED or self._interned_letters > _MOST_LETTERS:
                    self._interned.clear()  # numbers go on, so old ones stay right
                    self._interned_letters = 0
                number = self._next_id
                self._next_id += 1
                self.write(kind, {"id": number, **row})
                self._interned[key] = number
                if self.rows is not None:
                    self.rows[number] = row
            return number

    def add_signature(self, like: int, line: str, input_bytes: int, output_bytes: int) -> int:
        """The number of a signature that is not kept in memory: all but its splits is that of number ``like``.

        Args:
            line: what the events file says of it, after its number.
        """
        with self._lock:
            number = self._next_id
            self._next_id += 1
        once = self.once
        if once is not None:
            once[number] = Once(like, input_bytes, output_bytes)
            if self.records is not None and self.records.spills:
                return number  # nobody will ask for its splits
            if len(once) > _MOST_ON_THEIR_WAY:  # the file has their records, but for those of calls under way
                with self._lock:
                    once.pop(next(iter(once)), None)
        if not self.write_line("signature", f'{{"kind":"signature","id":{number},{line}'.encode()) and once:
            once.pop(number, None)
        return number

    def may_repeat(self, signature: int) -> bool:
        """Whether another record may have this signature."""
        return self.once is None or signature not in self.once

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
                "padding_bytes": tag.padding_bytes,
                "owner": tag.owner,
                "parameters": ",".join(tag.parameters) or None,
                "module": tag.module,
            },
        )
        tag.interned = (self.key, number)
        return number

    def intern_thread(self) -> int:
        """The number of the current thread's name."""
        with self._lock:
            number = self.intern("thread", self._thread_names.row())
            state = hooks._thread.state
            state.recorder_number = number
            self._threads[id(state)] = state
        return number

    def fault(self, error: BaseException) -> None:
        """The recorder's own code failed: count it. It never reaches the training; what the program raised does."""
        if not self.is_closing:
            pass_on(error)
        self.faults += 1
        if self.first_fault is None:
            self.first_fault = f"{type(error).__name__}: {error}"

    def pass_on(self, error: BaseException) -> None:
        """Raise ``error`` again if it is the program's, without counting anything."""
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
        for reference in self._threads.valuerefs():  # without a lock, which a forked child might find taken
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
    """Whether the current stream records a CUDA graph."""
    return _is_capturing is not None and torch.cuda.is_initialized() and bool(_is_capturing())

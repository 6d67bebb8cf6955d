"""Tracks the creation and destruction of communicators in the order of the log, and updates the registry.

Operations with the same address between two events of this address belong to one communicator. The registry is
therefore queried once for each such set of rows, and not for each line.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from commprof.nccl.grammar import lines as nccl_lines
from commprof.nccl.grammar.line_prefix import Origin
from commprof.nccl.grammar.topology import Topology
from commprof.nccl.grammar.tuning import TuningLine, TuningModelLine
from commprof.nccl.grammar.warnings import Message
from commprof.nccl.scan import Scan
from commprof.nccl.state.communicators import Process, Registry
from commprof.nccl.tables.bincount import numbered
from commprof.nccl.tables.op_buffer import NONE, WHOLE, Rows
from commprof.nccl.tables.remark_tables import MessageRows, TuningRows
from commprof.nccl.tables.topology_tables import TopologyRows

# The place of a message is the number of its line times PER_LINE, plus the number of the message in the line.
PER_LINE: Final = 1 << 12
Numbers = npt.NDArray[np.int64]
_NOBODY: Final = Origin(b"", 0, 0, None, True)
_MOST_REMEMBERED: Final = 20_000
_LIFE: Final = (nccl_lines.InitLine, nccl_lines.EndLine)
_TUNING_RECORDS: Final = (TuningLine, TuningModelLine)
_PLACES: Final = 1 << 40  # larger than any place in a block


class Event(NamedTuple):
    """A message that is not a complete operation, and its place in its block."""

    place: int
    message: nccl_lines.Line


class _CommunicatorRows(NamedTuple):
    """Operation rows of one block that belong to one communicator."""

    place: int
    process: int
    comm: int
    nranks: int | None
    rows: Numbers


class _Remark(NamedTuple):
    """A warning or a trace, or a line about topology or tuning from the line reader."""

    place: int
    origin: Origin
    record: Topology | TuningLine | TuningModelLine | Message
    times: int
    form: str | None


class _Links(NamedTuple):
    """Lines about topology that one thread printed between two events of its process.

    ``begin`` and ``end`` are the range of the lines in the sorted lines about topology of the block.
    """

    place: int
    process: Process
    tid: int
    begin: int
    end: int


class _RemarksOfTexts:
    """The distinct remarks of a block by number, in one list for each kind. Remarks of other kinds are None."""

    def __init__(self, remarks: Sequence[nccl_lines.RemarkLine | None]) -> None:
        self.forms = [None if remark is None else remark.form for remark in remarks]
        self.tuning: list[TuningLine | TuningModelLine | None] = []
        self.messages: list[Message | None] = []
        self.topology: list[Topology | None] = []
        for remark in remarks:
            record = None if remark is None else remark.record
            self.tuning.append(record if isinstance(record, _TUNING_RECORDS) else None)
            self.messages.append(record if isinstance(record, Message) else None)
            others = (Message, *_TUNING_RECORDS)
            self.topology.append(None if isinstance(record, others) else record)  # type: ignore[arg-type]


def _rows(scan: Scan, of_kind: Sequence[object]) -> list[Numbers]:
    """Return line, head, text and times of the remarks of a block whose entry in ``of_kind`` is not None."""
    chosen = np.array([record is not None for record in of_kind], bool)[scan.remarks["text"]]
    return [scan.remarks[name][chosen] for name in ("line", "head", "text", "times")]


class Chronicle:
    """Tracks the communicators of a parse, and collects the lines about topology, tuning and errors."""

    def __init__(self, registry: Registry, counts: Counter[str]) -> None:
        """
        Args:
            registry: The processes and communicators of the parse.
            counts: The counter for the lines about topology and tuning, and for messages.
        """
        self.registry, self.counts = registry, counts
        self.topology, self.tuning, self.messages = TopologyRows(), TuningRows(), MessageRows()
        self.file, self.lines = -1, 0
        self._remark_of_text: dict[bytes, nccl_lines.RemarkLine | None] = {}

    def begin_block(self, file: int, lines: int) -> None:
        """Set the position of the next block, which is in ``file`` after ``lines`` lines."""
        self.file, self.lines = file, lines

    def _messages(self, scan: Scan, heads: list[Origin], remarks: _RemarksOfTexts) -> list[_Remark]:
        """Return the warnings and traces of regular lines."""
        columns = (column.tolist() for column in _rows(scan, remarks.messages))
        return [
            _Remark(line * PER_LINE, heads[head], message, times, remarks.forms[text])
            for line, head, text, times in zip(*columns, strict=True)
            if (message := remarks.messages[text]) is not None
        ]

    def _writers(
        self, head: Numbers, text: Numbers, heads: list[Origin], remarks: _RemarksOfTexts
    ) -> dict[int, Process]:
        """Return the processes of some heads by number of the head, and add the forms of the remarks to the processes.

        The forms restrict the possible NCCL versions of a process.
        """
        writers = {number: self.registry.process(heads[number], self.file) for number in numbered(head)[0]}
        for code in numbered(head * len(remarks.forms) + text)[0]:
            form = remarks.forms[code % len(remarks.forms)]
            if form is not None:
                writers[code // len(remarks.forms)].forms.add(form)
        return writers

    def _tune(self, scan: Scan, heads: list[Origin], remarks: _RemarksOfTexts) -> None:
        """Add all remarks about tuning. They do not depend on the begin and end of communicators."""
        line, head, text, times = _rows(scan, remarks.tuning)
        if not len(line):
            return
        self.counts["tuning"] += int(times.sum())
        process, tid = np.zeros((2, len(heads)), np.int64)
        for number, owner in self._writers(head, text, heads, remarks).items():
            process[number], tid[number] = owner.index, heads[number].tid
        numbers = (-1 if record is None else self.tuning.number(record) for record in remarks.tuning)
        number_of = np.fromiter(numbers, np.int64)
        numbered_rows = np.repeat(np.flatnonzero(number_of[text] >= 0), times[number_of[text] >= 0])
        files = np.full(len(numbered_rows), self.file)
        lines = line[numbered_rows] + self.lines + 1
        self.tuning.extend(
            process[head[numbered_rows]],
            tid[head[numbered_rows]],
            files,
            lines,
            number_of[text[numbered_rows]],
        )

    def _remark(self, text: bytes) -> nccl_lines.RemarkLine | None:
        """Return the remark in a message, without its writer; None if the message is not a remark."""
        if text not in self._remark_of_text:
            if len(self._remark_of_text) >= _MOST_REMEMBERED:
                self._remark_of_text.clear()
            line = nccl_lines.read_message(_NOBODY, text, b"INFO")
            self._remark_of_text[text] = line if isinstance(line, nccl_lines.RemarkLine) else None
        return self._remark_of_text[text]

    def communicators(
        self,
        columns: Rows,
        comms: Mapping[bytes, int],
        events: list[Event],
        scan: Scan,
        heads: list[Origin],
    ) -> Numbers:
        """Update the registry in the order of the log, and return the number of the communicator of each row.

        Args:
            columns: The operation rows of a block.
            comms: The addresses of communicators, with the numbers that the rows use for them.
            events: The other messages of the block.
            scan: The scan of the block, whose remarks are added to the tables.
            heads: The heads of the block.
        """
        remarks_of_texts = _RemarksOfTexts([self._remark(text) for text in scan.texts])
        self._tune(scan, heads, remarks_of_texts)
        lives = [event for event in events if isinstance(event.message, _LIFE)]
        communicator = np.full(len(columns["line"]), -1, np.int64)
        communicator_rows = self._rows_of_communicators(columns, comms, lives)
        remarks = self._messages(scan, heads, remarks_of_texts) + [
            _Remark(event.place, event.message.origin, event.message.record, 1, event.message.form)
            for event in events
            if isinstance(event.message, nccl_lines.RemarkLine)
        ]
        topology = _Topology(self, scan, heads, remarks_of_texts, [*communicator_rows, *lives])
        entries: list[_CommunicatorRows | Event | _Remark | _Links]
        entries = [*communicator_rows, *lives, *remarks, *topology.links]
        entries.sort(key=lambda entry: entry.place)
        texts = list(comms)
        for entry in entries:
            if isinstance(entry, _Links):
                topology.find_owners(entry)
                continue
            line = entry.place // PER_LINE + self.lines + 1
            if isinstance(entry, _CommunicatorRows):
                process = self.registry.processes[entry.process]
                owner = self.registry.operation(process, texts[entry.comm], entry.nranks, self.file, line)
                owner.operations += len(entry.rows) - 1
                communicator[entry.rows] = owner.index
                continue
            if isinstance(entry, _Remark):
                self._keep(entry, line)
                continue
            message = entry.message
            if isinstance(message, nccl_lines.InitLine):
                process = self.registry.process(message.origin, self.file)
                self.registry.init(process, message, self.file, line)
            elif isinstance(message, nccl_lines.EndLine):
                self.registry.end(self.registry.process(message.origin, self.file), message)
        topology.keep()
        return communicator

    def _keep(self, remark: _Remark, line: int) -> None:
        """Add a remark to the table of its kind."""
        process, tid = self.registry.process(remark.origin, self.file), remark.origin.tid
        record, times, file = remark.record, remark.times, self.file
        if remark.form is not None:
            process.forms.add(remark.form)
        if isinstance(record, Message):
            self.counts["message"] += times
            self.messages.add(process.index, None, record, file, line, times, tid, remark.origin.device)
        elif isinstance(record, _TUNING_RECORDS):
            self.counts["tuning"] += times
            self.tuning.add(process.index, None, record, file, line, times, tid)
        else:
            self.counts["topology"] += times
            owner = self.registry.current_initialization(process, tid, record)
            number = None if owner is None else owner.index
            self.topology.add(process.index, number, record, file, line, times, tid)

    def _address(self, life: Event, comms: Mapping[bytes, int]) -> int:
        """Return a number for the process and the address of an Init line or an end.

        The rows with the same process and address have the same number. The number is -1 if no row has the address.
        """
        message = life.message
        code = comms.get(message.comm) if isinstance(message, _LIFE) else None
        if code is None or not isinstance(message, _LIFE):
            return -1
        return self.registry.process(message.origin, self.file).index * len(comms) + code

    def place_in_process(self, event: _CommunicatorRows | Event) -> int:
        """Return a number that increases with the process, and then with the place of the event."""
        if isinstance(event, _CommunicatorRows):
            return event.process * _PLACES + event.place
        origin = getattr(event.message, "origin", None)
        index = 0 if origin is None else self.registry.process(origin, self.file).index
        return index * _PLACES + event.place

    def _rows_of_communicators(
        self, columns: Rows, comms: Mapping[bytes, int], lives: list[Event]
    ) -> list[_CommunicatorRows]:
        """Return the rows of each communicator.

        The rows with one process and address are divided at each begin or end of a communicator at this address, and if
        the number of ranks changes.
        """
        rows = np.flatnonzero(columns["state"] == WHOLE)
        if not len(rows):
            return []
        key = columns["process"][rows].astype(np.int64) * len(comms) + columns["comm"][rows]
        order = np.argsort(key, kind="stable")
        rows, key = rows[order], key[order]
        place, nranks = columns["place"][rows], columns["nranks"][rows]
        cut = np.append(True, key[1:] != key[:-1])
        # Find the first row with the address of an event after this event, by one number for address and row.
        step = len(columns["place"]) + 1
        wanted = np.array([self._address(event, comms) for event in lives], np.int64)
        behind = np.searchsorted(columns["place"], np.array([event.place for event in lives], np.int64))
        at = np.searchsorted(key * step + rows, (wanted * step + behind)[wanted >= 0])
        at = at[at < len(key)]
        cut[at] = True
        # CALL lines have no number of ranks. They take the number of ranks from the COLL line before them.
        with_size = np.where(cut | (nranks != NONE), np.arange(len(rows)), 0)
        size = nranks[np.maximum.accumulate(with_size)]
        cut[1:] |= size[1:] != size[:-1]
        begins = np.flatnonzero(cut)
        return [
            _CommunicatorRows(
                int(place[begin]),
                int(columns["process"][rows[begin]]),
                int(columns["comm"][rows[begin]]),
                None if size[begin] == NONE else int(size[begin]),
                rows[begin:end],
            )
            for begin, end in zip(begins, np.append(begins[1:], len(rows)), strict=True)
        ]


class _Topology:
    """The lines about topology of a block, which belong to the communicators that are initialized at that time."""

    def __init__(
        self,
        chronicle: Chronicle,
        scan: Scan,
        heads: list[Origin],
        remarks: _RemarksOfTexts,
        events: Sequence[_CommunicatorRows | Event],
    ) -> None:
        """
        Args:
            chronicle: The object that receives the lines.
            scan: The scan of the block.
            heads: The heads of the block.
            remarks: The remarks of the block.
            events: The events that change the communicators of a process.
        """
        self._chronicle, self._remarks = chronicle, remarks
        line, head, text, times = _rows(scan, remarks.topology)
        writers = chronicle._writers(head, text, heads, remarks)
        process = np.zeros(len(heads), np.int64)
        process[list(writers)] = [writer.index for writer in writers.values()]
        # These numbers increase with the process, and then with the place of the event.
        changes = np.sort(np.array([chronicle.place_in_process(event) for event in events], np.int64))
        stage = np.searchsorted(changes, process[head] * _PLACES + line * PER_LINE)
        key = stage * len(heads) + head
        order = np.argsort(key, kind="stable")
        self._line, self._text, self._times = line[order], text[order], times[order]
        self._process, self._tid = (
            process[head[order]],
            np.array([h.tid for h in heads], np.int64)[head[order]],
        )
        self._owner = np.full(len(order), -1, np.int64)
        begins = np.flatnonzero(np.diff(key[order], prepend=-1))
        self.links = [
            _Links(at * PER_LINE, writers[number], heads[number].tid, begin, end)
            for at, number, begin, end in zip(
                self._line[begins].tolist(),
                head[order][begins].tolist(),
                begins.tolist(),
                np.append(begins[1:], len(order))[: len(begins)].tolist(),
                strict=True,
            )
        ]

    def find_owners(self, links: _Links) -> None:
        """Find the communicator of each line of ``links``.

        Call this method after the registry was updated with all earlier lines.
        """
        registry = self._chronicle.registry
        running = registry.running_initialization(links.process, links.tid)
        if running is not None:
            self._owner[links.begin : links.end] = running.index
            return
        for place in range(links.begin, links.end):
            record = self._remarks.topology[self._text[place]]
            owner = registry.current_initialization(links.process, links.tid, record)
            self._owner[place] = -1 if owner is None else owner.index

    def keep(self) -> None:
        """Add all lines about topology to the tables."""
        if not len(self._line):
            return
        chronicle = self._chronicle
        chronicle.counts["topology"] += int(self._times.sum())
        topology = chronicle.topology
        numbers = (-1 if record is None else topology.number(record) for record in self._remarks.topology)
        number_of = np.fromiter(numbers, np.int64)
        files, lines = np.full(len(self._line), chronicle.file), self._line + chronicle.lines + 1
        number = number_of[self._text]
        topology.extend(self._process, self._owner, self._tid, files, lines, self._times, number)

"""The lives of communicators, told to the registry in the order of the log.

Operations that name one address between two events of that address belong to one communicator, so the registry is
asked once for each such stretch and not for each line.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from commprof.nccl import lines as nccl_lines
from commprof.nccl.communicators import Registry
from commprof.nccl.heads import Origin
from commprof.nccl.messages import Message, MessageRows
from commprof.nccl.repeats import numbered
from commprof.nccl.rows import NONE, WHOLE, Rows
from commprof.nccl.scan import Scan
from commprof.nccl.topology import Topology
from commprof.nccl.topology_tables import TopologyRows
from commprof.nccl.tuning import TuningLine, TuningModelLine, TuningRows

# A place is the line times this, plus the number of the message in the line.
PER_LINE: Final = 1 << 12
Numbers = npt.NDArray[np.int64]
_NOBODY: Final = Origin(b"", 0, 0, None, True)
_MOST_REMEMBERED: Final = 20_000
_LIFE: Final = (nccl_lines.InitLine, nccl_lines.EndLine)


class Event(NamedTuple):
    """A message that is no whole operation, and where it stands in its block."""

    place: int
    message: nccl_lines.Line


class _Stretch(NamedTuple):
    """Rows of one block that name one communicator."""

    place: int
    process: int
    comm: int
    nranks: int | None
    rows: Numbers


class Remark(NamedTuple):
    """What a line without a communicator says, and how often."""

    place: int
    origin: Origin
    record: Topology | TuningLine | TuningModelLine | Message
    times: int
    form: str | None


class Chronicle:
    """Follows the communicators of a parse, and collects what lines say about topology, tuning and errors."""

    def __init__(self, registry: Registry, counts: Counter[str]) -> None:
        """
        Args:
            registry: the processes and communicators of the parse.
            counts: gets the lines of topology and tuning, and the messages.
        """
        self.registry, self.counts = registry, counts
        self.topology, self.tuning, self.messages = TopologyRows(), TuningRows(), MessageRows()
        self.file, self.lines = -1, 0
        self._said: dict[bytes, nccl_lines.RemarkLine | None] = {}

    def begin_block(self, file: int, lines: int) -> None:
        """The block to come stands in ``file`` behind so many lines."""
        self.file, self.lines = file, lines

    def repeated(self, scan: Scan, heads: list[Origin]) -> list[Remark]:
        """The remarks of regular lines, each read once."""
        records = [self._remark(text.rstrip(b"\r\n")) for text in scan.texts]
        others = self._tune(scan, heads, records)
        columns = (scan.remarks[name][others].tolist() for name in ("line", "head", "text", "times"))
        return [
            Remark(line * PER_LINE, heads[head], remark.record, times, remark.form)
            for line, head, text, times in zip(*columns, strict=True)
            if (remark := records[text]) is not None
        ]

    def _tune(
        self, scan: Scan, heads: list[Origin], records: list[nccl_lines.RemarkLine | None]
    ) -> npt.NDArray[np.bool_]:
        """Keep all remarks about tuning, which no communicator's life has to do with; says which remarks are others."""
        is_tuning = [
            remark is not None and isinstance(remark.record, TuningLine | TuningModelLine)
            for remark in records
        ]
        chosen = np.array(is_tuning, bool)[scan.remarks["text"]]
        if not chosen.any():
            return ~chosen
        line, head, text, times = (scan.remarks[name][chosen] for name in ("line", "head", "text", "times"))
        self.counts["tuning"] += int(times.sum())
        owners = {number: self.registry.process(heads[number], self.file) for number in numbered(head)[0]}
        for code in numbered(head.astype(np.int64) * len(records) + text)[0]:
            remark = records[code % len(records)]
            if remark is not None and remark.form is not None:
                owners[code // len(records)].forms.add(remark.form)
        process, tid = np.zeros((2, len(heads)), np.int64)
        for number, owner in owners.items():
            process[number], tid[number] = owner.index, heads[number].tid
        number_of = np.array(
            [
                self.tuning.number(remark.record)
                if remark is not None and isinstance(remark.record, TuningLine | TuningModelLine)
                else -1
                for remark in records
            ]
        )
        kept = np.repeat(np.flatnonzero(number_of[text] >= 0), times[number_of[text] >= 0])
        files = np.full(len(kept), self.file)
        lines = line[kept] + self.lines + 1
        self.tuning.extend(process[head[kept]], tid[head[kept]], files, lines, number_of[text[kept]])
        return ~chosen

    def _remark(self, text: bytes) -> nccl_lines.RemarkLine | None:
        """What a message says, whoever prints it."""
        if text not in self._said:
            if len(self._said) >= _MOST_REMEMBERED:
                self._said.clear()
            line = nccl_lines.read_message(_NOBODY, text, b"INFO")
            self._said[text] = line if isinstance(line, nccl_lines.RemarkLine) else None
        return self._said[text]

    def communicators(
        self, columns: Rows, comms: Mapping[bytes, int], events: list[Event], remarks: list[Remark]
    ) -> Numbers:
        """The communicator of each row, after the registry was told everything in the order of the log.

        Args:
            columns: rows of a block.
            comms: addresses of communicators by text, with the numbers that the rows have for them.
            events: the other messages of the block.
            remarks: what its regular lines say about no communicator.
        """
        lives = [event for event in events if isinstance(event.message, _LIFE)]
        communicator = np.full(len(columns["line"]), -1, np.int64)
        stretches = self._stretches(columns, comms, lives)
        remarks = remarks + [
            Remark(event.place, event.message.origin, event.message.record, 1, event.message.form)
            for event in events
            if isinstance(event.message, nccl_lines.RemarkLine)
        ]
        entries: list[_Stretch | Event | Remark] = [*stretches, *lives, *remarks]
        entries.sort(key=lambda entry: entry.place)
        texts = list(comms)
        for entry in entries:
            line = entry.place // PER_LINE + self.lines + 1
            if isinstance(entry, _Stretch):
                process = self.registry.processes[entry.process]
                owner = self.registry.operation(process, texts[entry.comm], entry.nranks, self.file, line)
                owner.operations += len(entry.rows) - 1
                communicator[entry.rows] = owner.index
                continue
            if isinstance(entry, Remark):
                self._keep(entry, line)
                continue
            message = entry.message
            if isinstance(message, nccl_lines.InitLine):
                process = self.registry.process(message.origin, self.file)
                self.registry.init(process, message, self.file, line)
            elif isinstance(message, nccl_lines.EndLine):
                self.registry.end(self.registry.process(message.origin, self.file), message)
        return communicator

    def _keep(self, remark: Remark, line: int) -> None:
        """Put a remark where those of its kind are collected."""
        process, tid = self.registry.process(remark.origin, self.file), remark.origin.tid
        record, times, file = remark.record, remark.times, self.file
        if remark.form is not None:
            process.forms.add(remark.form)
        if isinstance(record, Message):
            self.counts["message"] += times
            self.messages.add(process.index, None, record, file, line, times, tid, remark.origin.device)
        elif isinstance(record, TuningLine | TuningModelLine):
            self.counts["tuning"] += times
            self.tuning.add(process.index, None, record, file, line, times, tid)
        else:
            self.counts["topology"] += times
            owner = self.registry.current_initialisation(process, tid, record)
            number = None if owner is None else owner.index
            self.topology.add(process.index, number, record, file, line, times, tid)

    def _stretches(self, columns: Rows, comms: Mapping[bytes, int], lives: list[Event]) -> list[_Stretch]:
        """The rows of each communicator, cut where it may become another one."""
        rows = np.flatnonzero(columns["state"] == WHOLE)
        if not len(rows):
            return []
        key = columns["process"][rows].astype(np.int64) * len(comms) + columns["comm"][rows]
        order = np.argsort(key, kind="stable")
        rows, key = rows[order], key[order]
        place, nranks = columns["place"][rows], columns["nranks"][rows]
        cut = np.append(True, key[1:] != key[:-1])
        for event in lives:
            message = event.message
            code = comms.get(message.comm) if isinstance(message, _LIFE) else None
            if code is None or not isinstance(message, _LIFE):
                continue
            wanted = self.registry.process(message.origin, self.file).index * len(comms) + code
            low, high = np.searchsorted(key, wanted), np.searchsorted(key, wanted, "right")
            at = low + np.searchsorted(place[low:high], event.place)
            if at < high:
                cut[at] = True
        # CALL lines do not say how many ranks there are: they go with the COLL line in front of them.
        told = np.where(cut | (nranks != NONE), np.arange(len(rows)), 0)
        size = nranks[np.maximum.accumulate(told)]
        cut[1:] |= size[1:] != size[:-1]
        begins = np.flatnonzero(cut)
        return [
            _Stretch(
                int(place[begin]),
                int(columns["process"][rows[begin]]),
                int(columns["comm"][rows[begin]]),
                None if size[begin] == NONE else int(size[begin]),
                rows[begin:end],
            )
            for begin, end in zip(begins, np.append(begins[1:], len(rows)), strict=True)
        ]

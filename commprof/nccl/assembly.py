"""Blocks put together in the order of the log: communicators followed through their lives, rows numbered and kept.

Operations that name one address between two events of that address belong to one communicator, so the registry is
asked once for each such stretch and not for each line.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from commprof.nccl import lines as nccl_lines
from commprof.nccl.calls import Groups, Launches, Twins
from commprof.nccl.census import Census
from commprof.nccl.communicators import Registry, note_operation_form
from commprof.nccl.heads import KnownHosts, Origin
from commprof.nccl.layouts import Tail
from commprof.nccl.messages import Message, MessageRows
from commprof.nccl.rows import CALL, COLL, KINDS, NONE, OP_NUMBER, TORN, WHOLE, Rows, RowStore
from commprof.nccl.scan import Scan
from commprof.nccl.topology import Topology
from commprof.nccl.topology_tables import TopologyRows
from commprof.nccl.tuning import TuningLine, TuningModelLine, TuningRows
from commprof.nccl.versions import BYTE_TYPED_OPS

_NOBODY: Final = Origin(b"", 0, 0, None, True)
_MOST_REMEMBERED: Final = 20_000
# A place is the line times this, plus the number of the message in the line.
_PER_LINE: Final = 1 << 12
Numbers = npt.NDArray[np.int64]
OperationLine = nccl_lines.CollLine | nccl_lines.CallLine | nccl_lines.TornLine
_BYTE_TYPED: Final = [OP_NUMBER[op] for op in BYTE_TYPED_OPS]
_LIFE: Final = (nccl_lines.InitLine, nccl_lines.EndLine)
_KIND_OF: Final = {nccl_lines.CollLine: "coll", nccl_lines.CallLine: "call"}
_COUNT_OF: Final = {
    nccl_lines.InitLine: "init",
    nccl_lines.EndLine: "end",
    nccl_lines.GroupLine: "group",
    nccl_lines.FragmentLine: "fragment",
}


class _Event(NamedTuple):
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


class _Remark(NamedTuple):
    """What a line without a communicator says, and how often."""

    place: int
    origin: Origin
    record: Topology | TuningLine | TuningModelLine | Message
    times: int
    form: str | None


class Assembly:
    """The state of one parse."""

    def __init__(self, scratch: Path | None = None) -> None:
        self.hosts = KnownHosts()
        self.registry = Registry()
        self.rows = RowStore(scratch)
        self.counts: Counter[str] = Counter()
        self.unknown_ops: Counter[str] = Counter()
        self.census = Census()
        self.topology, self.tuning, self.messages = TopologyRows(), TuningRows(), MessageRows()
        self.banners: dict[int, set[str]] = {}
        self.streams: dict[bytes, int] = {}
        self._remarks: dict[bytes, nccl_lines.RemarkLine | None] = {}
        self._comms: dict[bytes, int] = {}
        self._threads: dict[tuple[int, int], int] = {}
        self._twins, self._launches = Twins(), Launches()
        self.has_heads = False
        self._int8: set[int] = set()
        self.file = -1
        self.lines = 0

    def begin_file(self) -> None:
        """The blocks to come are those of the next log."""
        self.file += 1
        self.lines = 0
        self._twins.forget()
        self._launches.forget()

    def add(self, scan: Scan) -> None:
        """Add the next block."""
        heads = [self._resolved(head.origin) for head in scan.heads]
        self.census.add(scan.tallies, self.file, self.lines)
        operations, events = self._messages(scan)
        self.counts["understood"] += len(scan.operations["line"]) + len(scan.groups["line"])
        self.counts["understood"] += int(scan.remarks["times"].sum())
        self.counts["lines"] += scan.lines
        self.has_heads |= bool(scan.heads or scan.hosts or any(line.raw is not None for line in scan.slow))
        self._meet_processes(scan, heads, operations, events)
        columns = self._columns(scan, heads, operations)
        int8 = (columns["datatype"] == 0) & np.isin(columns["op"], _BYTE_TYPED) & (columns["state"] == WHOLE)
        self._int8.update(np.unique(columns["process"][int8]).tolist())
        self._count(columns, events, len(scan.groups["line"]))
        self._note_forms(scan, heads, operations)
        self._apply(columns, events, self._repeated(scan, heads))
        columns["twin_line"], late = self._twins.join(columns, columns["thread"], self.rows.num_rows)
        for row, line in late:
            self.rows.set_twin(row, line)
        groups = self._groups(scan, heads, events)
        columns["launch"] = self._launches.number(columns["thread"], columns["place"], groups)
        self.rows.append(columns)
        self.lines += scan.lines

    def _meet_processes(
        self,
        scan: Scan,
        heads: list[Origin],
        operations: list[tuple[int, OperationLine]],
        events: list[_Event],
    ) -> None:
        """Number the processes in the order in which they say something."""
        met: list[tuple[int, Origin]] = []
        for columns in (scan.operations, scan.groups, scan.remarks):
            used, first = np.unique(columns["head"], return_index=True)
            places = columns["line"][first] * _PER_LINE
            met += [
                (int(place), heads[head]) for head, place in zip(used.tolist(), places.tolist(), strict=True)
            ]
        for place, message in [*operations, *events]:
            origin = getattr(message, "origin", None)
            if origin is not None:
                met.append((place, origin))
        for _, origin in sorted(met, key=lambda entry: entry[0]):
            self.registry.process(origin, self.file)

    def _resolved(self, origin: Origin) -> Origin:
        """``origin`` with the host that is known, where it is not certain where the host begins."""
        known = None if origin.clean else self.hosts.end_of(origin.host, origin.pid, any_process=False)
        return origin if known is None else origin._replace(host=known, clean=True)

    def _messages(self, scan: Scan) -> tuple[list[tuple[int, OperationLine]], list[_Event]]:
        """The messages of lines that were read by themselves: operations, and all others; hosts become known."""
        operations: list[tuple[int, OperationLine]] = []
        events: list[_Event] = []
        hosts = iter([*scan.hosts, (scan.lines, b"", 0)])
        seen = next(hosts)
        for line in [*scan.slow, None]:
            while seen[0] <= (scan.lines - 1 if line is None else line.line):
                self.hosts.add(seen[1], seen[2])
                seen = next(hosts)
            if line is None:
                break
            messages = line.messages if line.raw is None else nccl_lines.read_line(line.raw, self.hosts)
            self.counts["understood"] += bool(messages)
            if line.raw is not None:
                self.census.add_line(line.raw, messages, self.file, self.lines + line.line + 1)
            for number, message in enumerate(messages):
                place = line.line * _PER_LINE + min(number, _PER_LINE - 1)
                if isinstance(message, OperationLine):
                    operations.append((place, message))
                else:
                    events.append(_Event(place, message))
        return operations, events

    def _columns(self, scan: Scan, heads: list[Origin], operations: list[tuple[int, OperationLine]]) -> Rows:
        """All operation lines of the block as columns, in order."""
        fast = scan.operations
        by_head = self._by_head(scan, heads)
        columns: Rows = {name: fast[name] for name in ("opcount", "sendbuff", "recvbuff", "elements")}
        columns |= {name: values[fast["tail"]] for name, values in self._by_tail(scan.tails).items()}
        columns["place"] = fast["line"] * _PER_LINE
        columns |= {name: values[fast["head"]] for name, values in by_head.items()}
        columns["state"] = np.full(len(fast["line"]), WHOLE)
        if operations:
            slow = [self._row(place, message) for place, message in operations]
            for name, column in columns.items():
                kind = np.uint64 if name in ("sendbuff", "recvbuff") else np.int64
                more = np.array([row.get(name, 0 if kind is np.uint64 else NONE) for row in slow], kind)
                columns[name] = np.concatenate([column.astype(kind), more])
            order = np.argsort(columns["place"], kind="stable")
            columns = {name: column[order] for name, column in columns.items()}
        columns["line"] = columns["place"] // _PER_LINE + self.lines + 1
        columns["file"] = np.full(len(columns["line"]), self.file)
        return columns

    def _by_tail(self, tails: list[Tail]) -> dict[str, Numbers]:
        """What a tail says, as columns by its number."""
        columns = {
            name: np.array([getattr(tail, name) for tail in tails], np.int64)
            for name in ("datatype", "reduction", "root", "nranks", "global_rank")
        }
        for name, known in (("comm", self._comms), ("stream", self.streams)):
            texts = (getattr(tail, name) for tail in tails)
            columns[name] = np.array([known.setdefault(text, len(known)) for text in texts], np.int64)
        return columns

    def _by_head(self, scan: Scan, heads: list[Origin]) -> dict[str, Numbers]:
        """What a head says, as columns by its number."""
        speaking = [scan.operations["head"], scan.groups["head"], scan.remarks["head"]]
        used = set(np.unique(np.concatenate(speaking)).tolist())
        processes = [self._process(head) if number in used else -1 for number, head in enumerate(heads)]
        threads = [self._thread(process, head) for process, head in zip(processes, heads, strict=True)]
        return {
            "process": np.array(processes, np.int64),
            "thread": np.array(threads, np.int64),
            "tid": np.array([head.tid for head in heads], np.int64),
            "device": np.array([NONE if h.device is None else h.device for h in heads], np.int64),
            "op": np.array([NONE if h.op is None else OP_NUMBER[h.op] for h in scan.heads], np.int64),
            "kind": np.array([CALL if head.is_call else COLL for head in scan.heads], np.int64),
        }

    def _process(self, origin: Origin) -> int:
        return self.registry.process(origin, self.file).index

    def _thread(self, process: int, origin: Origin) -> int:
        return -1 if process < 0 else self._threads.setdefault((process, origin.tid), len(self._threads))

    def _row(self, place: int, line: OperationLine) -> dict[str, int]:
        """A line that was read by itself, as a row of columns."""
        torn = isinstance(line, nccl_lines.TornLine)
        origin = line.origin
        process = -1 if origin is None else self._process(origin)
        kind = line.kind if isinstance(line, nccl_lines.TornLine) else _KIND_OF[type(line)]
        row = {
            "place": place,
            "process": process,
            "thread": -1 if origin is None else self._thread(process, origin),
            "tid": NONE if origin is None else origin.tid,
            "device": NONE if origin is None or origin.device is None else origin.device,
            "op": OP_NUMBER[line.op],
            "kind": KINDS.index(kind),
            "state": TORN if torn else WHOLE,
        }
        if isinstance(line, nccl_lines.TornLine):
            return row
        row |= {name: getattr(line, name) for name in ("elements", "datatype", "reduction", "root")}
        row |= {name: _address(getattr(line, name)) for name in ("sendbuff", "recvbuff")}
        row["comm"] = self._comms.setdefault(line.comm, len(self._comms))
        row["stream"] = self.streams.setdefault(line.stream, len(self.streams))
        if isinstance(line, nccl_lines.CollLine):
            row |= {"opcount": line.opcount, "nranks": line.nranks}
            row |= {} if line.global_rank is None else {"global_rank": line.global_rank}
        return row

    def _count(self, columns: Rows, events: list[_Event], groups: int) -> None:
        """Count messages by kind, and keep what belongs to no communicator."""
        whole = columns["state"] == WHOLE
        self.counts["coll"] += int((whole & (columns["kind"] == COLL)).sum())
        self.counts["call"] += int((whole & (columns["kind"] == CALL)).sum())
        self.counts["torn"] += len(whole) - int(whole.sum())
        self.counts["group"] += groups
        for _, message in events:
            match message:
                case nccl_lines.VersionLine():
                    self.counts["banner"] += 1
                    self.banners.setdefault(self.file, set()).add(message.version)
                    if message.origin is not None:
                        self.registry.process(message.origin, self.file).banner = message.version
                case nccl_lines.TorchCommLine():
                    self.counts["torch"] += 1
                    self.registry.torch_line(message, self.file)
                case nccl_lines.UnknownOpLine():
                    self.unknown_ops[message.name] += 1
                case nccl_lines.RemarkLine():
                    pass  # counted where it is kept
                case _:
                    self.counts[_COUNT_OF[type(message)]] += 1

    def hides_types(self, prints_bytes: Sequence[bool]) -> bool:
        """Whether some operation line says int8 where that may stand for any type."""
        return any(prints_bytes[process] for process in self._int8)

    def _note_forms(
        self, scan: Scan, heads: list[Origin], operations: list[tuple[int, OperationLine]]
    ) -> None:
        """Remember what operation lines tell about the version of NCCL."""
        fast = scan.operations
        typed = np.array([tail.datatype != 0 for tail in scan.tails], bool)[fast["tail"]]
        combined = fast["head"].astype(np.int64) * 4 + typed * 2 + (fast["sendbuff"] == 0)
        lines: list[nccl_lines.CollLine | nccl_lines.CallLine]
        lines = [message for _, message in operations if not isinstance(message, nccl_lines.TornLine)]
        for code in np.flatnonzero(np.bincount(combined)).tolist():
            head, origin = scan.heads[code // 4], heads[code // 4]
            if head.op is not None:
                text = b"(nil)" if code % 2 else b"0x1"
                opcount, datatype = NONE if head.is_call else 0, code // 2 % 2
                lines.append(
                    nccl_lines.CollLine(
                        origin, head.op, opcount, text, text, 0, datatype, 0, 0, b"", 0, b"", None
                    )
                )
        for line in lines:
            process = self.registry.process(line.origin, self.file)
            if isinstance(line, nccl_lines.CallLine) or line.opcount == NONE:
                process.forms.add("call")
            else:
                note_operation_form(process, line, line.op in BYTE_TYPED_OPS)

    def _groups(self, scan: Scan, heads: list[Origin], events: list[_Event]) -> Groups:
        """Threads, places and steps of the lines that begin and end groups."""
        fast = scan.groups
        by_head = {
            n: self._thread(self._process(heads[n]), heads[n]) for n in np.unique(fast["head"]).tolist()
        }
        threads = [by_head[number] for number in fast["head"].tolist()]
        places, steps = (fast["line"] * _PER_LINE).tolist(), fast["step"].tolist()
        for place, message in events:
            if isinstance(message, nccl_lines.GroupLine):
                threads.append(self._thread(self._process(message.origin), message.origin))
                places.append(place)
                steps.append(message.step)
        order = np.argsort(np.array(places, np.int64), kind="stable")
        columns = [np.array(column, np.int64)[order] for column in (threads, places, steps)]
        return Groups(columns[0], columns[1], columns[1] // _PER_LINE + self.lines + 1, columns[2])

    def _repeated(self, scan: Scan, heads: list[Origin]) -> list[_Remark]:
        """The remarks of regular lines, each read once."""
        records = [self._remark(text.rstrip(b"\r\n")) for text in scan.texts]
        columns = (scan.remarks[name].tolist() for name in ("line", "head", "text", "times"))
        return [
            _Remark(line * _PER_LINE, heads[head], remark.record, times, remark.form)
            for line, head, text, times in zip(*columns, strict=True)
            if (remark := records[text]) is not None
        ]

    def _remark(self, text: bytes) -> nccl_lines.RemarkLine | None:
        """What a message says, whoever prints it."""
        if text not in self._remarks:
            if len(self._remarks) >= _MOST_REMEMBERED:
                self._remarks.clear()
            line = nccl_lines.read_message(_NOBODY, text, b"INFO")
            self._remarks[text] = line if isinstance(line, nccl_lines.RemarkLine) else None
        return self._remarks[text]

    def _apply(self, columns: Rows, events: list[_Event], remarks: list[_Remark]) -> None:
        """Tell the registry, in the order of the log, and give each row its communicator."""
        lives = [event for event in events if isinstance(event.message, _LIFE)]
        communicator = np.full(len(columns["line"]), -1, np.int64)
        stretches = self._stretches(columns, lives)
        remarks += [
            _Remark(event.place, event.message.origin, event.message.record, 1, event.message.form)
            for event in events
            if isinstance(event.message, nccl_lines.RemarkLine)
        ]
        entries: list[_Stretch | _Event | _Remark] = [*stretches, *lives, *remarks]
        entries.sort(key=lambda entry: entry.place)
        comms = list(self._comms)
        for entry in entries:
            line = entry.place // _PER_LINE + self.lines + 1
            if isinstance(entry, _Stretch):
                process = self.registry.processes[entry.process]
                owner = self.registry.operation(process, comms[entry.comm], entry.nranks, self.file, line)
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
        columns["communicator"] = communicator

    def _keep(self, remark: _Remark, line: int) -> None:
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

    def _stretches(self, columns: Rows, lives: list[_Event]) -> list[_Stretch]:
        """The rows of each communicator, cut where it may become another one."""
        rows = np.flatnonzero(columns["state"] == WHOLE)
        if not len(rows):
            return []
        key = columns["process"][rows].astype(np.int64) * len(self._comms) + columns["comm"][rows]
        order = np.argsort(key, kind="stable")
        rows, key = rows[order], key[order]
        place, nranks = columns["place"][rows], columns["nranks"][rows]
        cut = np.append(True, key[1:] != key[:-1])
        for event in lives:
            message = event.message
            code = self._comms.get(message.comm) if isinstance(message, _LIFE) else None
            if code is None or not isinstance(message, _LIFE):
                continue
            wanted = self._process(message.origin) * len(self._comms) + code
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


def _address(text: bytes) -> int:
    return 0 if text == b"(nil)" else int(text, 16)

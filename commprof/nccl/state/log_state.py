"""The state of a parse. Numbers processes and threads, and completes, counts and stores the rows of blocks in order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from commprof.nccl.grammar import lines as nccl_lines
from commprof.nccl.grammar.lexicon import Tail
from commprof.nccl.grammar.line_prefix import KnownHosts, Origin
from commprof.nccl.grammar.versions import BYTE_TYPED_OPS
from commprof.nccl.scan import Scan
from commprof.nccl.state.communicator_lifecycle import PER_LINE, Chronicle, Event
from commprof.nccl.state.communicators import Registry, note_operation_form
from commprof.nccl.state.launches import Groups, Launches, Twins
from commprof.nccl.tables.bincount import first_of_each, numbered
from commprof.nccl.tables.census import Census
from commprof.nccl.tables.op_buffer import CALL, COLL, KINDS, NONE, OP_NUMBER, TORN, WHOLE, Rows, RowStore

Numbers = npt.NDArray[np.int64]
OperationLine = nccl_lines.CollLine | nccl_lines.CallLine | nccl_lines.TornLine
_BYTE_TYPED: Final = [OP_NUMBER[op] for op in BYTE_TYPED_OPS]
_KIND_OF: Final = {nccl_lines.CollLine: "coll", nccl_lines.CallLine: "call"}
_COUNT_OF: Final = {
    nccl_lines.InitLine: "init",
    nccl_lines.EndLine: "end",
    nccl_lines.GroupLine: "group",
    nccl_lines.FragmentLine: "fragment",
}


class Assembly:
    """The state of one parse, to which the scans of blocks are added in the order of the logs."""

    def __init__(self, scratch: Path | None = None) -> None:
        self.hosts = KnownHosts()
        self.registry = Registry()
        self.rows = RowStore(scratch)
        self.counts: Counter[str] = Counter()
        self.unknown_ops: Counter[str] = Counter()
        self.census = Census()
        self.chronicle = Chronicle(self.registry, self.counts)
        self.banners: dict[int, set[str]] = {}
        self.streams: dict[bytes, int] = {}
        self._comms: dict[bytes, int] = {}
        self._threads: dict[tuple[int, int], int] = {}
        self._twins, self._launches = Twins(), Launches()
        self.has_heads = False
        self._int8: set[int] = set()
        self.file = -1
        self.lines = 0

    def begin_file(self) -> None:
        """Begin the next log, which the following blocks belong to."""
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
        self._int8.update(numbered(columns["process"][int8])[0])
        self._count(columns, events, len(scan.groups["line"]))
        self._note_forms(scan, heads, operations)
        self.chronicle.begin_block(self.file, self.lines)
        columns["communicator"] = self.chronicle.communicators(columns, self._comms, events, scan, heads)
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
        events: list[Event],
    ) -> None:
        """Register the processes in the order of their first lines."""
        met: list[tuple[int, Origin]] = []
        for columns in (scan.operations, scan.groups, scan.remarks):
            used, first, _ = first_of_each(columns["head"])
            places = columns["line"][first] * PER_LINE
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
        """Return ``origin`` with a known host if it is uncertain where the host name begins."""
        known = None if origin.clean else self.hosts.end_of(origin.host, origin.pid, any_process=False)
        return origin if known is None else origin._replace(host=known, clean=True)

    def _messages(self, scan: Scan) -> tuple[list[tuple[int, OperationLine]], list[Event]]:
        """Return the messages from the line reader, operations and other messages separately.

        Lines that depend on earlier hosts are read here, after the hosts of all earlier lines were added.
        """
        operations: list[tuple[int, OperationLine]] = []
        events: list[Event] = []
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
                place = line.line * PER_LINE + min(number, PER_LINE - 1)
                if isinstance(message, OperationLine):
                    operations.append((place, message))
                else:
                    events.append(Event(place, message))
        return operations, events

    def _columns(self, scan: Scan, heads: list[Origin], operations: list[tuple[int, OperationLine]]) -> Rows:
        """Return all operation lines of the block as columns, in order."""
        fast = scan.operations
        by_head = self._by_head(scan, heads)
        columns: Rows = {name: fast[name] for name in ("opcount", "sendbuff", "recvbuff", "elements")}
        columns |= {name: values[fast["tail"]] for name, values in self._by_tail(scan.tails).items()}
        columns["place"] = fast["line"] * PER_LINE
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
        columns["line"] = columns["place"] // PER_LINE + self.lines + 1
        columns["file"] = np.full(len(columns["line"]), self.file)
        return columns

    def _by_tail(self, tails: list[Tail]) -> dict[str, Numbers]:
        """Return the values of tails as columns, by the number of the tail."""
        columns = {
            name: np.array([getattr(tail, name) for tail in tails], np.int64)
            for name in ("datatype", "reduction", "root", "nranks", "global_rank")
        }
        for name, known in (("comm", self._comms), ("stream", self.streams)):
            texts = (getattr(tail, name) for tail in tails)
            columns[name] = np.array([known.setdefault(text, len(known)) for text in texts], np.int64)
        return columns

    def _by_head(self, scan: Scan, heads: list[Origin]) -> dict[str, Numbers]:
        """Return the values of heads as columns, by the number of the head."""
        speaking = [scan.operations["head"], scan.groups["head"], scan.remarks["head"]]
        used = set(numbered(np.concatenate(speaking))[0])
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
        """Return an operation line from the line reader as a row. Missing keys are absent values."""
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

    def _count(self, columns: Rows, events: list[Event], groups: int) -> None:
        """Count messages by kind, and store banners, lines of torch and unknown operations."""
        is_complete = columns["state"] == WHOLE
        self.counts["coll"] += int((is_complete & (columns["kind"] == COLL)).sum())
        self.counts["call"] += int((is_complete & (columns["kind"] == CALL)).sum())
        self.counts["torn"] += len(is_complete) - int(is_complete.sum())
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
                    pass  # counted when the chronicle adds it to a table
                case _:
                    self.counts[_COUNT_OF[type(message)]] += 1

    def hides_types(self, prints_bytes: Sequence[bool]) -> bool:
        """Return whether some operation line has int8 although the type may be any other type.

        Args:
            prints_bytes: For each process, whether its version of NCCL may print int8 for any type.
        """
        return any(prints_bytes[process] for process in self._int8)

    def _note_forms(
        self, scan: Scan, heads: list[Origin], operations: list[tuple[int, OperationLine]]
    ) -> None:
        """Add the evidence of operation lines on the version of NCCL to their processes."""
        fast = scan.operations
        typed = np.array([tail.datatype != 0 for tail in scan.tails], bool)[fast["tail"]]
        combined = fast["head"].astype(np.int64) * 4 + typed * 2 + (fast["sendbuff"] == 0)
        lines: list[nccl_lines.CollLine | nccl_lines.CallLine]
        lines = [message for _, message in operations if not isinstance(message, nccl_lines.TornLine)]
        for code in numbered(combined)[0]:
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

    def _groups(self, scan: Scan, heads: list[Origin], events: list[Event]) -> Groups:
        """Return the lines of the block that begin and end groups, in order."""
        fast = scan.groups
        by_head = {n: self._thread(self._process(heads[n]), heads[n]) for n in numbered(fast["head"])[0]}
        threads = [by_head[number] for number in fast["head"].tolist()]
        places, steps = (fast["line"] * PER_LINE).tolist(), fast["step"].tolist()
        for place, message in events:
            if isinstance(message, nccl_lines.GroupLine):
                threads.append(self._thread(self._process(message.origin), message.origin))
                places.append(place)
                steps.append(message.step)
        order = np.argsort(np.array(places, np.int64), kind="stable")
        columns = [np.array(column, np.int64)[order] for column in (threads, places, steps)]
        return Groups(columns[0], columns[1], columns[1] // PER_LINE + self.lines + 1, columns[2])


def _address(text: bytes) -> int:
    return 0 if text == b"(nil)" else int(text, 16)

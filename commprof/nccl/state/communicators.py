"""Tracks the communicators of a log: intervals in which an address refers to one communicator in one process.

NCCL never prints a rank with an operation. The only link is the address of the communicator. An Init line of the same
process has the rank and the number of ranks for this address. They are valid until the communicator is destroyed or
the address is reused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import pyarrow as pa

from commprof.nccl.grammar.topology import Link, RingNeighbours, RingOrder
from commprof.nccl.tables.arrow_columns import from_values
from commprof.trace.tables import arrow_schema

if TYPE_CHECKING:
    from commprof.nccl.grammar.line_prefix import Origin
    from commprof.nccl.grammar.lines import CollLine, EndLine, InitLine, TorchCommLine
    from commprof.nccl.grammar.topology import Topology


@dataclass(slots=True)
class Process:
    """One process of one file, identified by host and pid, and the evidence on its NCCL version.

    Several processes can have the same host and pid, because containers on one machine can share host names and pids.
    The files of a rotated log have the same host and pid too.

    Attributes:
        index: The number of the process in the registry.
        host: The host.
        pid: The process id.
        files: The numbers of the files with lines of the process.
        banner: The version in the banner of the process; None without a banner.
        forms: The forms of the lines of the process, which are keys of versions.FORMS.
        typed_bytewise_op_seen: Whether the process printed an AllGather or Broadcast with a type other than int8.
        namesake: The index of the first process with the same host and pid, which may be the process itself.
    """

    index: int
    host: str
    pid: int
    files: set[int] = field(default_factory=set)
    banner: str | None = None
    forms: set[str] = field(default_factory=set)
    typed_bytewise_op_seen: bool = False
    namesake: int = 0


class Place(NamedTuple):
    """The position of a line: number of the file, number of the line, and the thread that printed the line."""

    file: int
    line: int
    tid: int


@dataclass(slots=True)
class Communicator:
    """One use of one communicator address in one process.

    ``index`` is the number of this entry. ``process``, ``file`` and ``parent`` are the numbers of the process, of the
    file and of the entry of the parent communicator. ``epoch`` is the number of earlier uses of the address in the
    process. ``rank`` is None if no line contains the rank.
    """

    index: int
    process: int
    comm: str
    epoch: int
    file: int
    line: int
    rank: int | None = None
    nranks: int | None = None
    cuda_device: int | None = None
    comm_id: str | None = None
    parent: int | None = None
    split: str | None = None
    color: int | None = None
    stages: set[str] = field(default_factory=set)
    completed: Place | None = None
    namesake: int = 0
    host: str = ""
    api: str | None = None
    bus_id: str | None = None
    parent_missing: bool = False
    parent_comm: str | None = None
    family_reason: str | None = None
    global_rank_reason: str | None = None
    ended: str | None = None
    operations: int = 0
    pg: str | None = None
    pg_description: str | None = None
    global_rank: int | None = None
    family: int | None = None


class Registry:
    """Tracks the begin and the end of every communicator while a log is parsed, in the order of the log."""

    def __init__(self) -> None:
        self.processes: list[Process] = []
        self.communicators: list[Communicator] = []
        self._by_name: dict[tuple[bytes, int], list[Process]] = {}
        self._by_file: dict[tuple[bytes, int, int], Process] = {}
        self._continued: dict[int, int] = {}
        self._open: dict[tuple[int, bytes], Communicator] = {}
        self._uses: dict[tuple[int, bytes], int] = {}
        self._torch: dict[tuple[int, bytes], list[TorchCommLine]] = {}
        self._alive: dict[int, dict[bytes, Communicator]] = {}
        self._initialising: dict[int, list[tuple[int, Communicator]]] = {}

    def process(self, origin: Origin, file: int) -> Process:
        """Return the process that wrote a message.

        Equal host and pid in two files are two processes, until a line shows that one file continues the other.
        """
        process = self._by_file.get((origin.host, origin.pid, file))
        if process is None:
            process = Process(len(self.processes), origin.host.decode("utf-8", "replace"), origin.pid)
            namesakes = self._by_name.setdefault((origin.host, origin.pid), [])
            namesakes.append(process)
            process.namesake = namesakes[0].index
            process.files.add(file)
            self.processes.append(process)
            self._by_file[origin.host, origin.pid, file] = process
        return process

    def operation(
        self, process: Process, comm: bytes, nranks: int | None, file: int, line: int
    ) -> Communicator:
        """Return the communicator of an operation line of ``process``, and count the operation.

        A new communicator is registered if no communicator is open at this address, or if its number of ranks differs.
        """
        communicator = self._find(process, comm)
        if communicator is None or (
            nranks is not None and communicator.nranks is not None and communicator.nranks != nranks
        ):
            communicator = self._begin(process, comm, file, line)
        if nranks is not None and communicator.nranks is None:
            communicator.nranks = nranks
        communicator.operations += 1
        return communicator

    def init(self, process: Process, line: InitLine, file: int, number: int) -> Communicator:
        """Register the communicator of an Init line, or update it if an earlier line of its initialization exists.

        Return the communicator.
        """
        comm_id = None if line.comm_id is None else line.comm_id.decode()
        communicator = self._open.get((self._number(process), line.comm))
        if communicator is None or not _same_initialization(communicator, line, comm_id):
            communicator = self._begin(process, line.comm, file, number)
        communicator.stages.add(line.stage)
        self._follow(communicator, Place(file, number, line.origin.tid), line.stage)
        communicator.rank, communicator.nranks = line.rank, line.nranks
        communicator.comm_id = communicator.comm_id or comm_id
        if line.cuda_device is not None:
            communicator.cuda_device = line.cuda_device
        communicator.api = communicator.api or (None if line.api is None else line.api.decode())
        if line.bus_id is not None:
            communicator.bus_id = line.bus_id.decode()
        if line.parent is not None and communicator.parent is None:
            parent = self._find(process, line.parent)
            communicator.parent = None if parent is None else parent.index
            communicator.parent_missing = parent is None
            communicator.parent_comm = None if line.parent == b"(nil)" else line.parent.decode()
        if line.split is not None:
            communicator.split = line.split.decode()
        if line.color is not None:
            communicator.color = line.color
        process.forms.add(line.form)
        return communicator

    def current_initialization(
        self, process: Process, tid: int, record: Topology | None = None
    ) -> Communicator | None:
        """Return the communicator of a line about topology, which does not name it; None if it is not certain.

        The communicator is the one whose initialization began last in the thread and has not completed. Without such an
        initialization in the thread, the initializations that are running in other threads of the process are
        candidates. NCCL also prints connections after an initialization, from any thread. If no initialization is
        running, all open communicators of the process are therefore candidates, provided that the process prints the
        start of initializations. A candidate is returned if it is the only one whose rank in this process may print
        such a line.

        Args:
            process: The process that printed the line.
            tid: The thread that printed the line.
            record: The content of the line. Without the content, a candidate is returned only if there is no other one.
        """
        communicator = self.running_initialization(process, tid)
        if communicator is not None:
            return communicator
        running = self._initialising.get(self._number(process), [])
        if running:
            rivals = [communicator for _, communicator in running]
        else:
            rivals = list(self._alive.get(self._number(process), {}).values())
            if any("start" not in communicator.stages for communicator in rivals):
                return None
        fitting = [communicator for communicator in rivals if _may_print(communicator, record)]
        return fitting[0] if len(fitting) == 1 else None

    def running_initialization(self, process: Process, tid: int) -> Communicator | None:
        """Return the communicator whose initialization began last in a thread and has not completed; None if none."""
        for thread, communicator in reversed(self._initialising.get(self._number(process), [])):
            if thread == tid:
                return communicator
        return None

    def _follow(self, communicator: Communicator, place: Place, stage: str) -> None:
        """Update the list of the initializations that are running, with their threads."""
        running = self._initialising.setdefault(communicator.process, [])
        if stage == "start":
            running.append((place.tid, communicator))
        elif stage == "complete":
            communicator.completed = place
            running[:] = [entry for entry in running if entry[1] is not communicator]

    def end(self, process: Process, line: EndLine) -> None:
        """Mark the communicator at the address of ``line`` as ended, if a communicator is open there."""
        if line.form is not None:
            process.forms.add(line.form)
        communicator = self._find(process, line.comm)
        if communicator is not None:
            del self._open[communicator.process, line.comm]
            communicator.ended = line.how
            self._forget(communicator)

    def torch_line(self, line: TorchCommLine, file: int) -> None:
        """Store a line of torch until all lines are read, because it names an address but no process."""
        self._torch.setdefault((file, line.comm), []).append(line)

    def apply_torch_lines(self) -> None:
        """Set the process group that torch named on communicators, if address and order are unambiguous."""
        by_address: dict[tuple[int, bytes], list[Communicator]] = {}
        for communicator in self.communicators:
            by_address.setdefault((communicator.file, communicator.comm.encode()), []).append(communicator)
        for address, lines in self._torch.items():
            communicators = by_address.get(address, [])
            if len(communicators) != len(lines) or len({c.process for c in communicators}) > 1:
                continue
            for communicator, line in zip(communicators, lines, strict=True):
                _apply_torch_line(communicator, line)

    def _number(self, process: Process) -> int:
        """Return the number of the process that ``process`` continues, or its own number."""
        return self._continued.get(process.index, process.index)

    def _find(self, process: Process, comm: bytes) -> Communicator | None:
        """Return the communicator that is open at this address; None if there is none.

        If only a namesake in an earlier file has initialized the address, ``process`` is merged into this namesake. The
        log of the namesake continues in the later file.
        """
        communicator = self._open.get((self._number(process), comm))
        if communicator is not None or process.namesake == process.index:
            return communicator
        origin = (process.host.encode(), process.pid)
        numbers = {self._number(namesake) for namesake in self._by_name.get(origin, ())} - {process.index}
        open_at_address = [self._open[number, comm] for number in numbers if (number, comm) in self._open]
        if len(open_at_address) != 1 or not open_at_address[0].stages:
            return None
        self._continue(process, open_at_address[0].process)
        return open_at_address[0]

    def _continue(self, process: Process, earlier: int) -> None:
        """Merge ``process`` into the process with number ``earlier``, with all its communicators."""
        late = self._number(process)
        for number, known in self._continued.items():
            if known == late:
                self._continued[number] = earlier
        self._continued[late] = earlier
        for communicator in self.communicators:
            if communicator.process == late:
                communicator.process = earlier
        for _, comm in [key for key in self._open if key[0] == late]:
            self._open[earlier, comm] = self._open.pop((late, comm))
        self._alive.setdefault(earlier, {}).update(self._alive.pop(late, {}))
        self._initialising.setdefault(earlier, []).extend(self._initialising.pop(late, []))

    def _begin(self, process: Process, comm: bytes, file: int, line: int) -> Communicator:
        number = self._number(process)
        # Namesakes share the count, so that host, pid, address and epoch identify one communicator of the logs.
        epoch = self._uses.get((process.namesake, comm), 0)
        self._uses[process.namesake, comm] = epoch + 1
        communicator = Communicator(len(self.communicators), number, comm.decode(), epoch, file, line)
        communicator.namesake, communicator.host = process.namesake, process.host
        self.communicators.append(communicator)
        if (number, comm) in self._open:
            self._forget(self._open[number, comm])
        self._open[number, comm] = communicator
        self._alive.setdefault(number, {})[comm] = communicator
        return communicator

    def _forget(self, communicator: Communicator) -> None:
        """Remove a communicator from the lists of open communicators, because its address is free again."""
        self._alive.get(communicator.process, {}).pop(communicator.comm.encode(), None)
        running = self._initialising.get(communicator.process, [])
        running[:] = [entry for entry in running if entry[1] is not communicator]


class Completions:
    """Initializations that print their end and not their start (2.4.6 to 2.18.1), by thread.

    The lines of such a thread before the end of an initialization, and after the previous end, belong to this
    initialization.
    """

    def __init__(self, communicators: Sequence[Communicator]) -> None:
        self._ends: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
        for communicator in communicators:
            if communicator.completed is not None and "start" not in communicator.stages:
                file, line, tid = communicator.completed
                self._ends.setdefault((communicator.process, tid, file), []).append(
                    (line, communicator.index)
                )
        for ends in self._ends.values():
            ends.sort()

    def owners(self, process: int, tid: int, file: int, lines: np.ndarray) -> np.ndarray:
        """Return for each line the number of the communicator whose initialization ends next in the thread.

        The number is -1 if no initialization ends after the line.
        """
        ends = self._ends.get((process, tid, file), [])
        numbers = np.array([*(communicator for _, communicator in ends), -1], np.int64)
        return numbers[np.searchsorted(np.array([line for line, _ in ends], np.int64), lines)]


def note_operation_form(process: Process, line: CollLine, bytewise: bool) -> None:
    """Add the evidence of an operation line on the version of NCCL to ``process``.

    Args:
        process: The process that wrote the line.
        line: The operation line.
        bytewise: Whether some versions print this operation as bytes.
    """
    if bytewise and line.datatype != 0:
        process.typed_bytewise_op_seen = True
    elif line.op == "send":
        process.forms.add("send_in_recvbuff" if line.sendbuff == b"(nil)" else "send_in_sendbuff")
    elif line.op == "all_to_all":
        process.forms.add("single_all_to_all")


def _may_print(communicator: Communicator, record: Topology | None) -> bool:
    """Return whether the rank of ``communicator`` may print ``record``.

    Each rank prints only its own position and links.
    """
    rank, nranks = communicator.rank, communicator.nranks
    if record is None or rank is None or nranks is None:
        return True
    match record:
        case Link():
            ends = {None: (record.from_rank, record.to_rank), "send": (record.from_rank,)}
            return rank in ends.get(record.direction, (record.to_rank,)) and (
                max(record.from_rank, record.to_rank) < nranks
            )
        case RingNeighbours():
            return record.rank == rank
        case RingOrder():
            return rank == 0 and len(record.ranks) <= nranks
    return all(tree.rank == rank for tree in record)


def _same_initialization(communicator: Communicator, line: InitLine, comm_id: str | None) -> bool:
    """Return whether ``line`` belongs to the initialization of ``communicator``, and not to a later one."""
    if not communicator.stages or communicator.operations or line.stage in communicator.stages:
        return False
    if (communicator.rank, communicator.nranks) != (line.rank, line.nranks):
        return False
    # A new start always means a new communicator, even if a communicator was registered at this address.
    if line.stage == "start":
        return False
    return comm_id is None or communicator.comm_id is None or communicator.comm_id == comm_id


def _apply_torch_line(communicator: Communicator, line: TorchCommLine) -> None:
    description = None if line.description is None else line.description.decode("utf-8", "replace")
    communicator.pg = None if line.pg is None else line.pg.decode("utf-8", "replace")
    communicator.pg_description = description
    if communicator.rank is None and line.pg is not None:
        communicator.rank = line.rank
    # Old builds of torch print a prefix without a group, which has the global rank. The ranks of the default group are
    # global too.
    if line.pg is None or description == "default_pg":
        communicator.global_rank = line.rank


NO_INIT_LINE: Final = (
    "no init line for this communicator: NCCL_DEBUG_SUBSYS had COLL without INIT, or the log begins late"
)
NO_WORLD: Final = (
    "no communicator in the log contains every process once, so the ranks of the job are not known"
)


def _reason(communicator: Communicator) -> str | None:
    """Return the reasons why rank, family or global_rank is null; None if none of them is null."""
    if communicator.rank is None:
        return NO_INIT_LINE
    reasons = []
    if communicator.family is None and communicator.family_reason is not None:
        reasons.append(f"family: {communicator.family_reason}")
    if communicator.global_rank is None:
        reasons.append(f"global_rank: {communicator.global_rank_reason or NO_WORLD}")
    return "; ".join(reasons) or None


def communicators_table(
    entries: Sequence[Communicator],
    processes: Sequence[Process],
    files: Sequence[str],
    versions: Sequence[str | None] | None = None,
) -> pa.Table:
    """Return the table ``nccl_communicators``: one row per use of an address in a process.

    Args:
        entries: The communicators.
        processes: The processes, by number.
        files: The files, by number.
        versions: The version of each process as text. The default is the version in its banner.
    """
    owners = [processes[entry.process] for entry in entries]
    names = versions if versions is not None else [process.banner for process in processes]
    columns: dict[str, list[object]] = {
        "host": [process.host for process in owners],
        "pid": [process.pid for process in owners],
        "comm_epoch": [c.epoch for c in entries],
        "parent": [c.parent_comm for c in entries],
        "version": [names[c.process] for c in entries],
        "reason": [_reason(c) for c in entries],
        "file": [files[c.file] for c in entries],
    }
    for name in (
        "comm", "comm_id", "family", "rank", "nranks", "global_rank", "cuda_device", "color", "pg", "pg_description",
        "operations", "ended", "line",
    ):  # fmt: skip
        columns[name] = [getattr(c, name) for c in entries]
    schema = arrow_schema("nccl_communicators")
    return pa.table([from_values(columns[field.name], field.type) for field in schema], schema=schema)

"""The tables of rings, trees and links, from the lines that :mod:`commprof.nccl.topology` reads.

A log may hold millions of such lines. Equal ones share one entry, which keeps eight bytes for each line.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from commprof.nccl.columns import from_values, taken
from commprof.nccl.communicators import Communicator, Completions, Process
from commprof.nccl.topology import Link, RingNeighbours, RingOrder, Topology, TreeLine
from commprof.trace.tables import conform


class _Key(NamedTuple):
    """What equal lines have in common; ``communicator`` is None where it was not known when they were read."""

    process: int
    communicator: int | None
    tid: int | None
    file: int
    record: Topology


class _Group(NamedTuple):
    """Lines of one process and communicator that say the same. ``lines`` are sorted, ``unlisted`` are but counted."""

    process: int
    owner: Communicator | None
    file: int
    record: Topology
    lines: np.ndarray
    unlisted: int


class TopologyRows:
    """Collects the lines of :func:`commprof.nccl.topology.read_topology` for the tables of rings, trees and links."""

    def __init__(self) -> None:
        self._lines: dict[_Key, array[int]] = {}
        self._unlisted: dict[_Key, int] = {}

    def add(
        self,
        process: int,
        communicator: int | None,
        record: Topology,
        file: int,
        line: int,
        lines: int = 1,
        tid: int | None = None,
    ) -> None:
        """Add one line, or ``lines`` equal ones of which this is the first.

        Args:
            process: its number in the registry.
            communicator: number of the communicator that it belongs to; None where that is not known yet: then the
                thread decides once all lines are read (see :class:`commprof.nccl.communicators.Completions`).
            record: what :func:`commprof.nccl.topology.read_topology` returned.
            file: number of the file.
            line: number of the line in it.
            lines: how many lines say the same.
            tid: the thread that printed it.
        """
        key = _Key(process, communicator, tid if communicator is None else None, file, record)
        known = self._lines.get(key)
        if known is None:
            known = self._lines[key] = array("q")
        known.append(line)
        if lines > 1:
            self._unlisted[key] = self._unlisted.get(key, 0) + lines - 1

    def tables(
        self, processes: Sequence[Process], communicators: Sequence[Communicator], files: Sequence[str]
    ) -> dict[str, pa.Table]:
        """The tables ``nccl_rings``, ``nccl_trees`` and ``nccl_links``."""
        rings, trees, links = _Rings(), _Trees(), _Links()
        for group in self._groups(communicators):
            if isinstance(group.record, Link):
                links.add(group, group.record)
            elif isinstance(group.record, RingOrder | RingNeighbours):
                rings.add(group, group.record)
            else:
                for tree in group.record:
                    trees.add(group, tree)
        return {
            "nccl_rings": rings.table(processes, files),
            "nccl_trees": trees.table(processes, files),
            "nccl_links": links.table(processes, files),
        }

    def _groups(self, communicators: Sequence[Communicator]) -> Iterator[_Group]:
        completions = Completions(communicators)
        for key, collected in self._lines.items():
            lines = np.frombuffer(collected, np.int64)
            if len(lines) > 1:
                lines = np.sort(lines)
            unlisted = self._unlisted.get(key, 0)
            if key.communicator is not None or key.tid is None:
                owner = None if key.communicator is None else communicators[key.communicator]
                yield _Group(key.process, owner, key.file, key.record, lines, unlisted)
                continue
            owners = completions.owners(key.process, key.tid, key.file, lines)
            for number in (np.flatnonzero(np.bincount(owners + 1)) - 1).tolist():
                owner = None if number < 0 else communicators[number]
                yield _Group(key.process, owner, key.file, key.record, lines[owners == number], unlisted)
                unlisted = 0


class _Shared:
    """The columns that the three tables share, one entry per row."""

    def __init__(self) -> None:
        self.processes: list[int] = []
        self.owners: list[Communicator | None] = []
        self.files: list[int] = []
        self.lines: list[int] = []

    def append(self, group: _Group, line: int) -> None:
        """Add the place of one row."""
        self.processes.append(group.process)
        self.owners.append(group.owner)
        self.files.append(group.file)
        self.lines.append(line)

    def columns(self, processes: Sequence[Process], files: Sequence[str]) -> dict[str, pa.Array]:
        """The shared columns by name."""
        hosts, pids = [process.host for process in processes], [process.pid for process in processes]
        return {
            "host": taken(hosts, pa.string(), np.array(self.processes, np.int64)),
            "pid": taken(pids, pa.int64(), np.array(self.processes, np.int64)),
            "comm": from_values([None if o is None else o.comm for o in self.owners], pa.string()),
            "comm_epoch": from_values([None if o is None else o.epoch for o in self.owners], pa.int64()),
            "file": taken(files, pa.string(), np.array(self.files, np.int64)),
            "line": from_values(self.lines, pa.int64()),
        }


class _Rings:
    """One row per line."""

    def __init__(self) -> None:
        self._shared = _Shared()
        self._records: list[RingOrder | RingNeighbours] = []
        self._ranks: list[str | None] = []

    def add(self, group: _Group, ring: RingOrder | RingNeighbours) -> None:
        """Add the rows of ``group``."""
        ranks = None
        if isinstance(ring, RingOrder):
            size = None if group.owner is None else group.owner.nranks
            # NCCL cuts long lines, and the first ranks of a ring in natural order look like a smaller ring.
            ranks = _join(ring.ranks) if size in (None, len(ring.ranks)) else None
        for line in group.lines.tolist():
            self._shared.append(group, line)
            self._records.append(ring)
            self._ranks.append(ranks)

    def table(self, processes: Sequence[Process], files: Sequence[str]) -> pa.Table:
        """The table ``nccl_rings``."""
        columns = self._shared.columns(processes, files)
        columns["ranks"] = from_values(self._ranks, pa.string())
        for name in ("channel", "channels", "rank", "previous", "next"):
            columns[name] = from_values([getattr(ring, name, None) for ring in self._records], pa.int64())
        return _in_order("nccl_rings", columns)


class _Trees:
    """One row per tree and rank of a communicator, however many lines and forms say it."""

    def __init__(self) -> None:
        self._first: dict[tuple[object, ...], tuple[_Group, TreeLine]] = {}

    def add(self, group: _Group, tree: TreeLine) -> None:
        """Add one rank of one tree."""
        known = self._first.setdefault(_identity(group, tree), (group, tree))
        if _begins_before(group, known[0]):
            self._first[_identity(group, tree)] = (group, tree)

    def table(self, processes: Sequence[Process], files: Sequence[str]) -> pa.Table:
        """The table ``nccl_trees``."""
        shared, trees = _Shared(), [tree for _, tree in self._first.values()]
        for group, _ in self._first.values():
            shared.append(group, int(group.lines[0]))
        columns = shared.columns(processes, files)
        for name in ("tree", "rank", "parent"):
            columns[name] = from_values([getattr(tree, name) for tree in trees], pa.int64())
        columns["children"] = from_values([_join(tree.children) for tree in trees], pa.string())
        return _in_order("nccl_trees", columns)


class _Links:
    """One row per link of a communicator, with the number of lines that say it."""

    def __init__(self) -> None:
        self._first: dict[tuple[object, ...], tuple[_Group, Link]] = {}
        self._counts: dict[tuple[object, ...], int] = {}

    def add(self, group: _Group, link: Link) -> None:
        """Add the lines of ``group``."""
        identity = _identity(group, link)
        known = self._first.setdefault(identity, (group, link))
        if _begins_before(group, known[0]):
            self._first[identity] = (group, link)
        self._counts[identity] = self._counts.get(identity, 0) + len(group.lines) + group.unlisted

    def table(self, processes: Sequence[Process], files: Sequence[str]) -> pa.Table:
        """The table ``nccl_links``."""
        shared, links = _Shared(), [link for _, link in self._first.values()]
        for group, _ in self._first.values():
            shared.append(group, int(group.lines[0]))
        columns = shared.columns(processes, files)
        for name in ("channel", "connection", "from_rank", "to_rank"):
            columns[name] = from_values([getattr(link, name) for link in links], pa.int64())
        for name in ("from_device", "to_device", "transport", "kind", "direction"):
            columns[name] = from_values([getattr(link, name) for link in links], pa.string())
        columns["lines"] = from_values(list(self._counts.values()), pa.int64())
        return _in_order("nccl_links", columns)


def _identity(group: _Group, record: TreeLine | Link) -> tuple[object, ...]:
    return (group.process, None if group.owner is None else group.owner.index, record)


def _begins_before(group: _Group, other: _Group) -> bool:
    return (group.file, group.lines[0]) < (other.file, other.lines[0])


def _in_order(name: str, columns: dict[str, pa.Array]) -> pa.Table:
    """The table ``name``, its rows in the order of files and lines."""
    return conform(name, pa.table(columns).sort_by([("file", "ascending"), ("line", "ascending")]))


def _join(ranks: tuple[int, ...]) -> str:
    return " ".join(map(str, ranks))

"""Builds the tables of rings, trees and links, from the lines that :mod:`commprof.nccl.grammar.topology` reads.

A log may contain millions of such lines. Equal records are stored once, and each line takes a few numbers.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from commprof.nccl.grammar.topology import Link, RingNeighbours, RingOrder, Topology, TreeLine
from commprof.nccl.state.communicators import Communicator, Completions, Process
from commprof.nccl.tables.arrow_columns import as_arrow, taken
from commprof.trace.tables import conform

Numbers = npt.NDArray[np.int64]
_Rows = dict[str, Numbers]
_NONE: Final = -1
_COLUMNS: Final = ("process", "owner", "tid", "file", "line", "times", "record")


class TopologyRows:
    """Collects the lines of ``topology.read_topology`` for the tables of rings, trees and links."""

    def __init__(self) -> None:
        self._numbers = array("q")  # one number per column for each line
        self._records: dict[Topology, int] = {}

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
        """Add one line, or ``lines`` equal lines of which this line is the first.

        Args:
            process: The number of the process in the registry.
            communicator: The number of the communicator of the line; None if unknown. In this case the thread
                determines the communicator after all lines were read (see
                :class:`commprof.nccl.state.communicators.Completions`).
            record: The result of :func:`commprof.nccl.grammar.topology.read_topology`.
            file: The number of the file.
            line: The number of the line in the file.
            lines: The number of equal lines.
            tid: The thread that printed the line; None if unknown.
        """
        owner, thread = _NONE if communicator is None else communicator, _NONE if tid is None else tid
        self._numbers.extend((process, owner, thread, file, line, lines, self.number(record)))

    def number(self, record: Topology) -> int:
        """Return the number of a record for :meth:`extend`."""
        return self._records.setdefault(record, len(self._records))

    def extend(self, *columns: Numbers) -> None:
        """Add many lines, given as columns.

        The columns are process, communicator, thread, file, line, number of equal lines, and number of the record. An
        unknown communicator or thread is -1.
        """
        self._numbers.frombytes(np.stack(columns, axis=1).astype(np.int64).tobytes())

    def tables(
        self, processes: Sequence[Process], communicators: Sequence[Communicator], files: Sequence[str]
    ) -> dict[str, pa.Table]:
        """Return the tables ``nccl_rings``, ``nccl_trees`` and ``nccl_links``, by name."""
        numbers = np.array(self._numbers, np.int64).reshape(-1, len(_COLUMNS))
        rows = {name: numbers[:, place] for place, name in enumerate(_COLUMNS)}
        rows = _chosen(rows, np.lexsort((rows["line"], rows["file"])))
        rows["owner"] = _owners(rows, communicators)
        records = list(self._records)
        makers = {"nccl_rings": _rings, "nccl_trees": _trees, "nccl_links": _links}
        tables = {}
        for name, make in makers.items():
            table_rows, columns = make(rows, records, communicators)
            tables[name] = _table(name, table_rows, columns, (processes, communicators, files))
        return tables


def _chosen(rows: _Rows, places: npt.NDArray[Any]) -> _Rows:
    return {name: column[places] for name, column in rows.items()}


def _owners(rows: _Rows, communicators: Sequence[Communicator]) -> Numbers:
    """Return the number of the communicator of each line; -1 if unknown."""
    owners = rows["owner"].copy()
    completions = Completions(communicators)
    left = np.flatnonzero((owners == _NONE) & (rows["tid"] != _NONE))
    threads = np.stack([rows[name][left] for name in ("process", "tid", "file")], axis=1)
    distinct, number = np.unique(threads, axis=0, return_inverse=True)
    for place, (process, tid, file) in enumerate(distinct.tolist()):
        members = left[number.reshape(-1) == place]
        owners[members] = completions.owners(process, tid, file, rows["line"][members])
    return owners


def _of_kind(records: Sequence[Topology], kinds: type | tuple[type, ...], rows: _Rows) -> _Rows:
    """Return the rows whose records are of some kinds."""
    return _chosen(rows, np.array([isinstance(record, kinds) for record in records], bool)[rows["record"]])


def _first_of_each(rows: _Rows, records: int) -> tuple[_Rows, Numbers]:
    """Return the first row of each record of a process and communicator, and the number of lines with this record."""
    owners = int(rows["owner"].max(initial=0)) + 2
    key = (rows["process"] * owners + rows["owner"] + 1) * max(records, 1) + rows["record"]
    _, first, number = np.unique(key, return_index=True, return_inverse=True)
    times = np.zeros(len(first), np.int64)
    np.add.at(times, number.reshape(-1), rows["times"])
    order = np.argsort(first)
    return _chosen(rows, first[order]), times[order]


def _fields(
    records: Sequence[Any], kind: pa.DataType, names: Sequence[str], number: Numbers
) -> dict[str, pa.Array]:
    """Return fields of records as columns, by the number of the record; null if a record lacks the field."""
    return {name: taken([getattr(record, name, None) for record in records], kind, number) for name in names}


def _rings(
    rows: _Rows, records: Sequence[Topology], communicators: Sequence[Communicator]
) -> tuple[_Rows, dict[str, pa.Array]]:
    """Return the rows and columns of the table of rings: one row per line."""
    rows = _of_kind(records, (RingOrder, RingNeighbours), rows)
    sizes = np.array([*(c.nranks if c.nranks is not None else _NONE for c in communicators), _NONE], np.int64)
    orders = [record.ranks if isinstance(record, RingOrder) else None for record in records]
    lengths = np.array([_NONE if order is None else len(order) for order in orders], np.int64)
    size, number = sizes[rows["owner"]], rows["record"]
    # NCCL truncates long lines, and the first ranks of a ring in natural order look like a smaller ring.
    ordered = np.where((size == _NONE) | (size == lengths[number]), number, _NONE)
    columns = _fields(records, pa.int64(), ("channel", "channels", "rank", "previous", "next"), number)
    texts = [None if order is None else _join(order) for order in orders]
    return rows, columns | {"ranks": taken(texts, pa.string(), ordered)}


def _trees(
    rows: _Rows, records: Sequence[Topology], communicators: Sequence[Communicator]
) -> tuple[_Rows, dict[str, pa.Array]]:
    """Return the rows and columns of the table of trees: one row per tree and rank of a communicator.

    Several lines, also in different forms, may describe the same tree and rank.
    """
    del communicators
    numbers: dict[TreeLine, int] = {}
    members: list[list[int]] = []
    for record in records:
        lines = () if isinstance(record, Link | RingOrder | RingNeighbours) else record
        members.append([numbers.setdefault(tree, len(numbers)) for tree in lines])
    times = np.array([len(trees) for trees in members], np.int64)
    begins, trees = np.cumsum(times) - times, np.array([n for trees in members for n in trees], np.int64)
    repeats = times[rows["record"]]
    within = np.arange(int(repeats.sum())) - np.repeat(np.cumsum(repeats) - repeats, repeats)
    each = _chosen(rows, np.repeat(np.arange(len(repeats)), repeats))
    each["record"] = trees[begins[each["record"]] + within] if len(trees) else each["record"]
    tree_rows, _ = _first_of_each(each, len(numbers))
    columns = _fields(list(numbers), pa.int64(), ("tree", "rank", "parent"), tree_rows["record"])
    children = [_join(tree.children) for tree in numbers]
    return tree_rows, columns | {"children": taken(children, pa.string(), tree_rows["record"])}


def _links(
    rows: _Rows, records: Sequence[Topology], communicators: Sequence[Communicator]
) -> tuple[_Rows, dict[str, pa.Array]]:
    """Return the rows and columns of the table of links: one row per link of a communicator.

    The column ``lines`` is the number of lines with this link.
    """
    del communicators
    link_rows, times = _first_of_each(_of_kind(records, Link, rows), len(records))
    number = link_rows["record"]
    columns = _fields(records, pa.int64(), ("channel", "connection", "from_rank", "to_rank"), number)
    texts = ("from_device", "to_device", "transport", "kind", "direction")
    columns |= _fields(records, pa.string(), texts, number)
    return link_rows, columns | {"lines": as_arrow(times, pa.int64())}


def _table(
    name: str,
    rows: _Rows,
    columns: dict[str, pa.Array],
    known: tuple[Sequence[Process], Sequence[Communicator], Sequence[str]],
) -> pa.Table:
    """Return the table ``name``, in the order of files and lines."""
    processes, communicators, files = known
    shared = {
        "host": taken([process.host for process in processes], pa.string(), rows["process"]),
        "pid": taken([process.pid for process in processes], pa.int64(), rows["process"]),
        "comm": taken([c.comm for c in communicators], pa.string(), rows["owner"]),
        "comm_epoch": taken([c.epoch for c in communicators], pa.int64(), rows["owner"]),
        "file": taken(files, pa.string(), rows["file"]),
        "line": as_arrow(rows["line"], pa.int64()),
    }
    table = pa.table(shared | columns)
    return conform(name, table.sort_by([("file", "ascending"), ("line", "ascending")]))


def _join(ranks: tuple[int, ...]) -> str:
    return " ".join(map(str, ranks))

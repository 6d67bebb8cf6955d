"""Converts operation lines to rows of the table ``nccl_ops``.

The rows are read from a buffer as numbers, in batches. Ranks, versions and sizes of communicators are known only after
the whole log was read. They are joined here, by the number of the communicator or of the process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq

from commprof.nccl.grammar.spelling import (
    COUNTED_PER_RANK,
    DATATYPES,
    POINT_TO_POINT,
    PRE_MULTIPLIED,
    REDUCING,
    REDUCTIONS,
    ROOTED,
)
from commprof.nccl.grammar.versions import BYTE_TYPED_OPS
from commprof.nccl.state.communicators import Communicator, Process
from commprof.nccl.tables.arrow_columns import Column, as_arrow, from_values
from commprof.nccl.tables.op_buffer import COLL, KINDS, NONE, OPS, STATES, TORN, WHOLE, Rows, RowStore
from commprof.schema import NCCL_OPS, Op
from commprof.trace.tables import arrow_schema, conform, empty_table

_INT64_MAX: Final = 2**63 - 1
_SHIFTS: Final = (0, 21, 42)
_PART: Final = (1 << 21) - 1
Numbers = npt.NDArray[np.int64]


class Versions(NamedTuple):
    """The version of NCCL of each process as text, and whether int8 on AllGather and Broadcast may mean any type."""

    texts: Sequence[str | None]
    prints_bytes: Sequence[bool]


class Totals(NamedTuple):
    """Sums over complete lines, by operation and kind of line.

    Attributes:
        lines: The number of lines.
        unsized: The number of lines with unknown size.
        bytes: The sum of the full message sizes of the other lines, in bytes.
    """

    lines: Counter[tuple[str, str]]
    unsized: Counter[tuple[str, str]]
    bytes: Counter[tuple[str, str]]


class OperationTable:
    """Builds the table ``nccl_ops`` from rows of numbers, batch by batch.

    Strings are dictionary-encoded, because there are few distinct strings, which are repeated millions of times.
    """

    def __init__(
        self,
        files: Sequence[str],
        processes: Sequence[Process],
        communicators: Sequence[Communicator],
        versions: Versions,
        streams: Sequence[str],
    ) -> None:
        self._files, self._processes, self._communicators = files, processes, communicators
        self._versions, self._streams = versions, streams
        self._nranks = np.array(
            [NONE if c.nranks is None else c.nranks for c in communicators] + [NONE], np.int64
        )

    def table(self, rows: Rows, names: Sequence[str] = NCCL_OPS.names) -> pa.Table:
        """Return the columns ``names`` of ``nccl_ops`` for some rows. The default is all columns."""
        process, owner = rows["process"].astype(np.int64), rows["communicator"].astype(np.int64)
        columns: dict[str, pa.Array] = {}
        for make in (self._places, self._owners, self._printed, self._interpreted):
            if not columns.keys() >= set(names):
                columns |= make(rows, process, owner)
        return pa.table({name: columns[name] for name in names})

    def _places(self, rows: Rows, process: Numbers, owner: Numbers) -> dict[str, pa.Array]:
        """Return the columns with the kind and the position of a line, and its writer."""
        del owner
        processes = self._processes
        return {
            "op": _taken([str(op) for op in OPS], rows["op"]),
            "kind": _taken(KINDS, rows["kind"]),
            "state": _taken(STATES, rows["state"]),
            "host": _taken([p.host for p in processes], process),
            "pid": _nullable(_numbers([p.pid for p in processes])[process], pa.int32()),
            "tid": _nullable(rows["tid"], pa.int32()),
            "device": _nullable(rows["device"], pa.int32()),
            "version": _taken(self._versions.texts, process),
            "file": _taken(self._files, rows["file"]),
            "line": as_arrow(rows["line"], pa.int64()),
            "twin_line": _nullable(rows["twin_line"], pa.int64(), -1),
            "launch": _nullable(rows["launch"], pa.int64(), -1),
        }

    def _owners(self, rows: Rows, process: Numbers, owner: Numbers) -> dict[str, pa.Array]:
        """Return the columns with the communicator and the rank."""
        del process
        communicators = self._communicators
        ranks = _numbers([c.rank for c in communicators])[owner]
        printed = rows["global_rank"].astype(np.int64)
        world = _numbers([c.global_rank for c in communicators])[owner]
        global_ranks = np.where(printed == NONE, world, printed)
        return {
            "rank": _nullable(ranks, pa.int32()),
            "global_rank": _nullable(global_ranks, pa.int32()),
            "rank_reason": self._reasons(rows, owner, ranks == NONE, global_ranks == NONE),
            "comm": _taken([c.comm for c in communicators], owner),
            "comm_id": _taken([c.comm_id for c in communicators], owner),
            "comm_epoch": _nullable(_numbers([c.epoch for c in communicators])[owner], pa.int32()),
            "nranks": _nullable(self._nranks[owner], pa.int32()),
        }

    def _printed(self, rows: Rows, process: Numbers, owner: Numbers) -> dict[str, pa.Array]:
        """Return the columns with printed values. Numbers of types and reductions are replaced by names."""
        op, code = rows["op"], _type_codes(rows)
        bytewise = np.array([*self._versions.prints_bytes, False], bool)[process]
        hidden = bytewise & (code == 0) & _IS_BYTE_TYPED[op]
        reduction = np.clip(rows["reduction"], -1, len(REDUCTIONS))
        root, is_complete = rows["root"], rows["state"] == WHOLE
        del owner
        return {
            "count": _nullable(rows["elements"], pa.int64()),
            "opcount": _nullable(rows["opcount"], pa.int64()),
            "stream": _taken(self._streams, rows["stream"]),
            "dtype": _taken([datatype.name for datatype in DATATYPES], np.where(hidden, -1, code)),
            "reduce_op": _taken(_REDUCTION_NAMES, np.where(_IS_REDUCING[op] & is_complete, reduction, -1)),
            "root": _nullable(np.where(_IS_ROOTED[op], root, NONE), pa.int32()),
            "peer": _nullable(np.where(_IS_POINT_TO_POINT[op], root, NONE), pa.int32()),
        }

    def _interpreted(self, rows: Rows, process: Numbers, owner: Numbers) -> dict[str, pa.Array]:
        """Return the columns with sizes in bytes."""
        del process
        sizes, messages = self._sizes(rows, owner)
        return {"bytes": _nullable(sizes, pa.int64()), "message_bytes": _nullable(messages, pa.int64())}

    def _sizes(self, rows: Rows, owner: Numbers) -> tuple[Numbers, Numbers]:
        """Return the bytes that a line prints, and the bytes of the full message; NONE for unknown values."""
        code = _type_codes(rows)
        sizes = np.where(code >= 0, rows["elements"] * _ITEM_BYTES[code], NONE)
        factor = np.where(_IS_COUNTED_PER_RANK[rows["op"]], self._nranks[owner], 1)
        # A damaged or edited line may have numbers so large that the product would overflow.
        fits = (code >= 0) & (factor != NONE) & (sizes <= _INT64_MAX // np.maximum(factor, 1))
        return sizes, np.where(fits, sizes * np.where(fits, factor, 1), NONE)

    def add_up(self, rows: Rows, totals: Totals) -> None:
        """Add the complete lines of ``rows`` to ``totals``."""
        complete_rows = np.flatnonzero(rows["state"] == WHOLE)
        _, messages = self._sizes(rows, rows["communicator"].astype(np.int64))
        size = np.maximum(messages[complete_rows], 0)
        key = rows["op"][complete_rows].astype(np.int64) * len(KINDS) + rows["kind"][complete_rows]
        times = np.bincount(key)
        unsized = np.bincount(key, messages[complete_rows] == NONE)
        # Three partial sums are used, because bincount sums floating point numbers, which are exact only up to 2 ** 53.
        partial_sums = [np.bincount(key, (size >> shift) & _PART).astype(np.int64) for shift in _SHIFTS]
        for number in np.flatnonzero(times).tolist():
            name = str(OPS[number // len(KINDS)]), KINDS[number % len(KINDS)]
            totals.lines[name] += int(times[number])
            totals.unsized[name] += int(unsized[number])
            totals.bytes[name] += sum(
                int(partial[number]) << shift for partial, shift in zip(partial_sums, _SHIFTS, strict=True)
            )

    def _reasons(
        self, rows: Rows, owner: Numbers, no_rank: npt.NDArray[np.bool_], no_world: npt.NDArray[np.bool_]
    ) -> pa.Array:
        """Return for each row the reason why ``rank`` or ``global_rank`` is null."""
        has_init = np.array([*(bool(c.stages) for c in self._communicators), False], bool)[owner]
        conditions = [rows["state"] == TORN, no_rank & ~has_init, no_world]
        return _taken((TORN_LINE, NO_INIT_LINE, NO_WORLD), np.select(conditions, [0, 1, 2], -1))


class Operations:
    """The operation lines of a parse, which can be read or written as table ``nccl_ops``."""

    def __init__(self, rows: RowStore, table: OperationTable) -> None:
        self._rows, self._table = rows, table
        self._all_rows: pa.Table | None = None
        self._totals: Totals | None = None
        self.num_rows = rows.num_rows

    def batches(self, names: Sequence[str] = NCCL_OPS.names) -> Iterator[pa.Table]:
        """Yield the rows in order, in batches. Strings are dictionary-encoded."""
        for rows in self._rows.batches():
            yield self._table.table(rows, names)

    def calls(self, processes: Sequence[int], names: Sequence[str]) -> Iterator[pa.Table]:
        """Yield the complete COLL lines of some processes, in order.

        Args:
            processes: The numbers of the processes.
            names: The columns to return.
        """
        wanted = np.array(processes, np.int64)
        for rows in self._rows.batches():
            chosen = (rows["kind"] == COLL) & (rows["state"] == WHOLE) & np.isin(rows["process"], wanted)
            if chosen.any():
                yield self._table.table({name: column[chosen] for name, column in rows.items()}, names)

    def totals(self) -> Totals:
        """Return the numbers of complete lines and their bytes, by operation and kind of line."""
        if self._totals is None:
            self._totals = Totals(Counter(), Counter(), Counter())
            for rows in self._rows.batches():
                self._table.add_up(rows, self._totals)
        return self._totals

    def table(self) -> pa.Table:
        """Return all rows in memory. The table is built once."""
        if self._all_rows is None:
            batches = [conform("nccl_ops", part) for part in self.batches()]
            self._all_rows = pa.concat_tables(batches) if batches else empty_table("nccl_ops")
        return self._all_rows

    def write(self, path: Path) -> None:
        """Write the rows as Parquet, in batches."""
        schema = arrow_schema("nccl_ops")
        texts = [item.name for item in schema if pa.types.is_string(item.type)]
        # Differences of consecutive integers take few bits, so little is left to compress.
        deltas = {item.name: "DELTA_BINARY_PACKED" for item in schema if pa.types.is_integer(item.type)}
        with ExitStack() as opened:
            writer = None
            for part in _one_ahead(self.batches()):
                if writer is None:
                    writer = opened.enter_context(
                        pq.ParquetWriter(
                            path, part.schema, compression="lz4", use_dictionary=texts, column_encoding=deltas,
                            store_schema=False, write_statistics=False,
                        )
                    )  # fmt: skip
                writer.write_table(part)
            if writer is None:
                pq.write_table(empty_table("nccl_ops"), path)

    def write_csv(self, path: Path) -> None:
        """Write the rows as CSV, in batches."""
        with pa_csv.CSVWriter(path, arrow_schema("nccl_ops")) as writer:
            for part in self.batches():
                writer.write_table(conform("nccl_ops", part))


def _one_ahead(batches: Iterator[pa.Table]) -> Iterator[pa.Table]:
    """Yield ``batches``. A thread computes the next batch while the caller uses the current one."""
    with ThreadPoolExecutor(1) as thread:
        coming = thread.submit(next, batches, None)
        while (batch := coming.result()) is not None:
            coming = thread.submit(next, batches, None)
            yield batch


def _type_codes(rows: Rows) -> Numbers:
    """Return the number of the element type of each line; -1 for an unknown type."""
    datatype = rows["datatype"].astype(np.int64)
    return np.where((datatype >= 0) & (datatype < len(DATATYPES)), datatype, -1)


def _numbers(values: Sequence[int | None]) -> Numbers:
    """Return ``values`` as an array with NONE for None. An additional last element is NONE, for the number -1."""
    return np.array([*(NONE if value is None else value for value in values), NONE], np.int64)


def _nullable(values: Column, kind: pa.DataType, none: int = NONE) -> pa.Array:
    return as_arrow(values, kind, values == none)


def _taken(texts: Sequence[str | None], numbers: Column) -> pa.DictionaryArray:
    """Return a dictionary array with the element of ``texts`` for each number; null for negative numbers."""
    distinct = list(dict.fromkeys(text for text in texts if text is not None))
    place = {text: number for number, text in enumerate(distinct)}
    codes = np.array([*(-1 if text is None else place[text] for text in texts), -1], np.int32)
    # The number -1 selects the last code, which is -1.
    text_codes = codes[np.maximum(numbers, -1)]
    indices = as_arrow(text_codes, pa.int32(), text_codes < 0)
    return pa.DictionaryArray.from_arrays(indices, from_values(distinct, pa.string()))


def _flags(ops: Collection[Op]) -> npt.NDArray[np.bool_]:
    return np.array([op in ops for op in OPS], bool)


_IS_BYTE_TYPED, _IS_COUNTED_PER_RANK = _flags(BYTE_TYPED_OPS), _flags(COUNTED_PER_RANK)
_IS_REDUCING, _IS_ROOTED, _IS_POINT_TO_POINT = _flags(REDUCING), _flags(ROOTED), _flags(POINT_TO_POINT)
_ITEM_BYTES: Final = np.array([*(datatype.size for datatype in DATATYPES), 0], np.int64)
_REDUCTION_NAMES: Final = (*REDUCTIONS, PRE_MULTIPLIED)

NO_INIT_LINE: Final = "no init line for this communicator: NCCL_DEBUG_SUBSYS had COLL without INIT"
NO_WORLD: Final = (
    "no communicator in the log contains every process once, so the ranks of the job are not known"
)
TORN_LINE: Final = "the line is truncated"

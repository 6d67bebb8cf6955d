"""Operation lines as rows of the ``nccl_ops`` table.

Rows come as numbers, some ten thousand at a time. Ranks, versions and sizes of communicators, which only the
complete log shows, are joined here by the number of the communicator.
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
    """By process: the version as text, and whether int8 on AllGather and Broadcast may be any type."""

    texts: Sequence[str | None]
    prints_bytes: Sequence[bool]


class Totals(NamedTuple):
    """Sums by operation and kind of line: complete lines, those of unknown size, and the bytes of the others' messages."""

    lines: Counter[tuple[str, str]]
    unsized: Counter[tuple[str, str]]
    bytes: Counter[tuple[str, str]]


class OperationTable:
    """Makes the table ``nccl_ops`` from rows of numbers, some ten thousand rows at a time.

    Strings are dictionaries: they are few, and repeated millions of times.
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
        """Columns of ``nccl_ops``, all by default, for some rows."""
        process, owner = rows["process"].astype(np.int64), rows["communicator"].astype(np.int64)
        columns: dict[str, pa.Array] = {}
        for make in (self._places, self._owners, self._printed, self._interpreted):
            if not columns.keys() >= set(names):
                columns |= make(rows, process, owner)
        return pa.table({name: columns[name] for name in names})

    def _places(self, rows: Rows, process: Numbers, owner: Numbers) -> dict[str, pa.Array]:
        """The position of a line and its writer."""
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
        """Columns of the communicator."""
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
        """Columns of the printed values, with names for numbers."""
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
        """Sizes."""
        del process
        sizes, messages = self._sizes(rows, owner)
        return {"bytes": _nullable(sizes, pa.int64()), "message_bytes": _nullable(messages, pa.int64())}

    def _sizes(self, rows: Rows, owner: Numbers) -> tuple[Numbers, Numbers]:
        """Bytes that a line prints, and bytes of the full message; NONE where they are not known."""
        code = _type_codes(rows)
        sizes = np.where(code >= 0, rows["elements"] * _ITEM_BYTES[code], NONE)
        factor = np.where(_IS_COUNTED_PER_RANK[rows["op"]], self._nranks[owner], 1)
        # An edited line may print numbers that no communicator has.
        fits = (code >= 0) & (factor != NONE) & (sizes <= _INT64_MAX // np.maximum(factor, 1))
        return sizes, np.where(fits, sizes * np.where(fits, factor, 1), NONE)

    def add_up(self, rows: Rows, totals: Totals) -> None:
        """Add complete lines, by operation and kind of line."""
        complete_rows = np.flatnonzero(rows["state"] == WHOLE)
        _, messages = self._sizes(rows, rows["communicator"].astype(np.int64))
        size = np.maximum(messages[complete_rows], 0)
        key = rows["op"][complete_rows].astype(np.int64) * len(KINDS) + rows["kind"][complete_rows]
        times = np.bincount(key)
        unsized = np.bincount(key, messages[complete_rows] == NONE)
        # In partial sums, as sums of floating point numbers are exact only up to 2 ** 53.
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
        """Why ``rank`` or ``global_rank`` is null, row by row."""
        has_init = np.array([*(bool(c.stages) for c in self._communicators), False], bool)[owner]
        conditions = [rows["state"] == TORN, no_rank & ~has_init, no_world]
        return _taken((TORN_LINE, NO_INIT_LINE, NO_WORLD), np.select(conditions, [0, 1, 2], -1))


class Operations:
    """The operation lines of a parse, as table ``nccl_ops``."""

    def __init__(self, rows: RowStore, table: OperationTable) -> None:
        self._rows, self._table = rows, table
        self._all_rows: pa.Table | None = None
        self._totals: Totals | None = None
        self.num_rows = rows.num_rows

    def batches(self, names: Sequence[str] = NCCL_OPS.names) -> Iterator[pa.Table]:
        """The rows in order, some ten thousand at a time; strings are dictionaries."""
        for rows in self._rows.batches():
            yield self._table.table(rows, names)

    def calls(self, processes: Sequence[int], names: Sequence[str]) -> Iterator[pa.Table]:
        """The complete COLL lines of some processes, by number, in order."""
        wanted = np.array(processes, np.int64)
        for rows in self._rows.batches():
            chosen = (rows["kind"] == COLL) & (rows["state"] == WHOLE) & np.isin(rows["process"], wanted)
            if chosen.any():
                yield self._table.table({name: column[chosen] for name, column in rows.items()}, names)

    def totals(self) -> Totals:
        """Complete lines and their bytes."""
        if self._totals is None:
            self._totals = Totals(Counter(), Counter(), Counter())
            for rows in self._rows.batches():
                self._table.add_up(rows, self._totals)
        return self._totals

    def table(self) -> pa.Table:
        """All rows, in memory; built once."""
        if self._all_rows is None:
            batches = [conform("nccl_ops", part) for part in self.batches()]
            self._all_rows = pa.concat_tables(batches) if batches else empty_table("nccl_ops")
        return self._all_rows

    def write(self, path: Path) -> None:
        """Write the rows as Parquet, some ten thousand at a time."""
        schema = arrow_schema("nccl_ops")
        texts = [item.name for item in schema if pa.types.is_string(item.type)]
        # Differences are few bits, which leaves little to compress.
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
        """Write the rows as CSV, some ten thousand at a time."""
        with pa_csv.CSVWriter(path, arrow_schema("nccl_ops")) as writer:
            for part in self.batches():
                writer.write_table(conform("nccl_ops", part))


def _one_ahead(batches: Iterator[pa.Table]) -> Iterator[pa.Table]:
    """``batches``, each computed while the one before it is used."""
    with ThreadPoolExecutor(1) as thread:
        coming = thread.submit(next, batches, None)
        while (batch := coming.result()) is not None:
            coming = thread.submit(next, batches, None)
            yield batch


def _type_codes(rows: Rows) -> Numbers:
    """The number of each line's type, -1 for a number that no type has."""
    datatype = rows["datatype"].astype(np.int64)
    return np.where((datatype >= 0) & (datatype < len(DATATYPES)), datatype, -1)


def _numbers(values: Sequence[int | None]) -> Numbers:
    """``values`` with one more entry for the number -1; NONE for unknown values."""
    return np.array([*(NONE if value is None else value for value in values), NONE], np.int64)


def _nullable(values: Column, kind: pa.DataType, none: int = NONE) -> pa.Array:
    return as_arrow(values, kind, values == none)


def _taken(texts: Sequence[str | None], numbers: Column) -> pa.DictionaryArray:
    """``texts`` by number, null for negative numbers."""
    distinct = list(dict.fromkeys(text for text in texts if text is not None))
    place = {text: number for number, text in enumerate(distinct)}
    codes = np.array([*(-1 if text is None else place[text] for text in texts), -1], np.int32)
    # The number -1 takes the last code.
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
NO_WORLD: Final = "no communicator of the log holds every process once, so no rank in it is a rank of the job"
TORN_LINE: Final = "the line is truncated"

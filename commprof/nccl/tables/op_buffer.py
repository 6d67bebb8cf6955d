"""Buffers the rows of operation lines as numbers, in memory or, if there are many rows, on disk."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import pyarrow as pa

from commprof.errors import LogError
from commprof.nccl.tables.arrow_columns import Column, as_arrow, as_numpy
from commprof.schema import Op

# The number of an operation is its position in this tuple.
OPS: Final[tuple[Op, ...]] = tuple(Op)
OP_NUMBER: Final = {op: number for number, op in enumerate(OPS)}
COLL, CALL = range(2)
KINDS: Final = ("coll", "call")
WHOLE, TORN = range(2)
STATES: Final = ("whole", "torn")
# The number for an absent value. No line prints this number in any of the fields.
NONE: Final = -(2**31)

ROW_TYPES: Final[dict[str, pa.DataType]] = {
    "file": pa.int32(),
    "line": pa.int64(),
    "process": pa.int32(),
    "communicator": pa.int32(),
    "tid": pa.int32(),
    "device": pa.int32(),
    "op": pa.int8(),
    "kind": pa.int8(),
    "state": pa.int8(),
    "opcount": pa.int64(),
    "elements": pa.int64(),
    "datatype": pa.int32(),
    "reduction": pa.int64(),
    "root": pa.int32(),
    "stream": pa.int32(),
    "global_rank": pa.int32(),
    "twin_line": pa.int64(),
    "launch": pa.int64(),
}
_SCHEMA: Final = pa.schema(list(ROW_TYPES.items()))
_MOST_IN_MEMORY: Final = 1 << 15
Rows = dict[str, Column]


class RowStore:
    """A buffer that stores batches of rows in order.

    More than ``_MOST_IN_MEMORY`` rows are stored in a temporary file, which is deleted together with the buffer.
    """

    def __init__(self, scratch: Path | None = None) -> None:
        """
        Args:
            scratch: An existing directory for the file. The default is the system's directory for temporary files.
        """
        self.num_rows = 0
        self._scratch = scratch
        self._pending: list[pa.RecordBatch] = []
        self._pending_rows = 0
        self._directory: Path | None = None
        self._writer: pa.RecordBatchFileWriter | None = None
        self._late: dict[int, int] = {}
        self._is_finished = False

    def append(self, rows: Mapping[str, Column]) -> None:
        """Add rows, given as one column for each of ``ROW_TYPES``."""
        arrays = [as_arrow(rows[name], kind) for name, kind in ROW_TYPES.items()]
        batch = pa.RecordBatch.from_arrays(arrays, schema=_SCHEMA)
        if not batch.num_rows:
            return
        self._pending.append(batch)
        self._pending_rows += batch.num_rows
        self.num_rows += batch.num_rows
        if self._pending_rows >= _MOST_IN_MEMORY:
            self._spill()

    def set_twin(self, row: int, line: int) -> None:
        """Set the twin line of a row that is already in the buffer."""
        self._late[row] = line

    def batches(self) -> Iterator[Rows]:
        """Yield all rows in order, in batches. No rows can be added after this method was called."""
        start = 0
        for batch in self._batches():
            rows: Rows = {
                name: as_numpy(column) for name, column in zip(ROW_TYPES, batch.columns, strict=True)
            }
            late = [
                (row - start, line) for row, line in self._late.items() if 0 <= row - start < batch.num_rows
            ]
            if late:
                rows["twin_line"] = rows["twin_line"].copy()
                for row, line in late:
                    rows["twin_line"][row] = line
            start += batch.num_rows
            yield rows

    def finish(self) -> None:
        """Finish the buffer. No more rows can be added, and several threads may read the rows."""
        if self._writer is not None and not self._is_finished:
            if self._pending:
                self._spill()
            self._writer.close()
        self._is_finished = True

    def _batches(self) -> Iterator[pa.RecordBatch]:
        self.finish()
        if self._writer is not None:
            # The file is not mapped, because its pages would count as memory of this process.
            with pa.OSFile(str(self._path()), "rb") as source, pa.ipc.open_file(source) as reader:
                for number in range(reader.num_record_batches):
                    yield reader.get_batch(number)
        elif self._pending:
            yield pa.Table.from_batches(self._pending).combine_chunks().to_batches()[0]

    def _path(self) -> Path:
        if self._directory is None:
            self._directory = Path(tempfile.mkdtemp(prefix="commprof-", dir=self._scratch))
            # The directory is removed when the buffer is garbage-collected.
            weakref.finalize(self, shutil.rmtree, self._directory, ignore_errors=True)
        return self._directory / "rows.arrow"

    def _spill(self) -> None:
        try:
            if self._writer is None:
                self._writer = pa.ipc.new_file(str(self._path()), _SCHEMA)
            table = pa.Table.from_batches(self._pending).combine_chunks()
            self._writer.write_table(table)
        except OSError as error:
            raise LogError(
                f"cannot write rows to {self._path().parent}: {error}; free space there, or name another directory "
                "with TMPDIR"
            ) from error
        self._pending, self._pending_rows = [], 0

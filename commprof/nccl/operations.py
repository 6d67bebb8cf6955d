"""Operation lines as rows of the ``nccl_ops`` table.

Rows are collected as plain tuples and packed into Arrow batches as they come. What only the whole log can tell (ranks,
versions, sizes of communicators) is joined at the end, by the number of the communicator.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from commprof.nccl.communicators import Communicator, Process
from commprof.nccl.spelling import DATATYPES, POINT_TO_POINT, ROOTED, message_bytes, reduction_name
from commprof.nccl.versions import BYTE_TYPED_OPS
from commprof.schema import Op
from commprof.trace.tables import conform

BATCH_ROWS: Final = 65_536
_INT64_MAX: Final = 2**63 - 1


class OperationRow(NamedTuple):
    """One operation line: numbers of its file, process and communicator (-1: not known), and what it prints."""

    file: int
    line: int
    process: int
    communicator: int
    tid: int | None
    device: int | None
    op: str
    kind: str
    state: str
    opcount: int | None = None
    elements: int | None = None
    datatype: int | None = None
    reduction: int | None = None
    root: int | None = None
    stream: str | None = None
    global_rank: int | None = None


_ROW_SCHEMA: Final = pa.schema(
    [
        ("file", pa.int32()),
        ("line", pa.int64()),
        ("process", pa.int32()),
        ("communicator", pa.int32()),
        ("tid", pa.int32()),
        ("device", pa.int32()),
        ("op", pa.dictionary(pa.int32(), pa.string())),
        ("kind", pa.dictionary(pa.int32(), pa.string())),
        ("state", pa.dictionary(pa.int32(), pa.string())),
        ("opcount", pa.int64()),
        ("elements", pa.int64()),
        ("datatype", pa.int32()),
        ("reduction", pa.int64()),
        ("root", pa.int32()),
        ("stream", pa.dictionary(pa.int32(), pa.string())),
        ("global_rank", pa.int32()),
    ]
)


class OperationRows:
    """Collects rows; holds Arrow batches and at most ``BATCH_ROWS`` tuples."""

    def __init__(self) -> None:
        self._batches: list[pa.RecordBatch] = []
        self._rows: list[OperationRow] = []

    def append(self, row: OperationRow) -> None:
        """Add one row."""
        self._rows.append(row)
        if len(self._rows) == BATCH_ROWS:
            self._pack()

    def table(self) -> pa.Table:
        """All rows so far, in order, with the numbers of files, processes and communicators still in them."""
        if self._rows:
            self._pack()
        return pa.Table.from_batches(self._batches, schema=_ROW_SCHEMA)

    def _pack(self) -> None:
        columns = zip(*self._rows, strict=True)
        arrays = [
            pa.array(column, type=field.type) for column, field in zip(columns, _ROW_SCHEMA, strict=True)
        ]
        self._batches.append(pa.RecordBatch.from_arrays(arrays, schema=_ROW_SCHEMA))
        self._rows = []


class Versions(NamedTuple):
    """By process: the version as text, and whether int8 on AllGather and Broadcast may stand for any type."""

    texts: Sequence[str | None]
    prints_bytes: Sequence[bool]


def nccl_ops_table(
    rows: pa.Table,
    files: Sequence[str],
    processes: Sequence[Process],
    communicators: Sequence[Communicator],
    versions: Versions,
) -> pa.Table:
    """Join ``rows`` with what the log tells about processes and communicators: a table of ``schema.NCCL_OPS``."""
    process = _Lookup(rows["process"])
    communicator = _Lookup(rows["communicator"])
    nranks = [c.nranks for c in communicators]
    columns = {
        "rank": communicator.take([c.rank for c in communicators], pa.int32()),
        "global_rank": pc.coalesce(
            rows["global_rank"], communicator.take([c.global_rank for c in communicators], pa.int32())
        ),
        "comm": communicator.take([c.comm for c in communicators], pa.string()),
        "comm_id": communicator.take([c.comm_id for c in communicators], pa.string()),
        "comm_epoch": communicator.take([c.epoch for c in communicators], pa.int32()),
        "op": rows["op"].cast(pa.string()),
        "kind": rows["kind"].cast(pa.string()),
        "count": rows["elements"],
        "opcount": rows["opcount"],
        "nranks": communicator.take(nranks, pa.int32()),
        "stream": rows["stream"].cast(pa.string()),
        "host": process.take([p.host for p in processes], pa.string()),
        "pid": process.take([p.pid for p in processes], pa.int32()),
        "tid": rows["tid"],
        "device": rows["device"],
        "version": process.take(versions.texts, pa.string()),
        "file": _Lookup(rows["file"]).take(files, pa.string()),
        "line": rows["line"],
        "state": rows["state"].cast(pa.string()),
    }
    columns |= _interpreted(rows, nranks, versions)
    columns["rank_reason"] = _reasons(columns, [bool(c.stages) for c in communicators], communicator)
    return conform("nccl_ops", pa.table(columns))


class _Lookup:
    """Takes values by a column of numbers, where -1 means none."""

    def __init__(self, numbers: pa.ChunkedArray) -> None:
        self.numbers = numbers.to_numpy().astype(np.int64)

    def take(self, values: Sequence[object], arrow_type: pa.DataType) -> pa.Array:
        padded = pa.array([*values, None], type=arrow_type)
        return padded.take(pa.array(np.where(self.numbers < 0, len(values), self.numbers)))


class _Meaning(NamedTuple):
    """What one combination of operation, type, reduction and root means; equal for all lines that print it."""

    dtype: str | None
    item_bytes: int | None
    reduce_op: str | None
    root: int | None
    peer: int | None


def _meaning(
    op: Op, datatype: int | None, reduction: int | None, root: int | None, bytewise: bool
) -> _Meaning:
    if datatype is None or reduction is None:
        return _Meaning(None, None, None, None, None)
    known = DATATYPES[datatype] if datatype < len(DATATYPES) else None
    hidden = bytewise and datatype == 0 and op in BYTE_TYPED_OPS
    return _Meaning(
        None if known is None or hidden else known.name,
        None if known is None else known.size,
        reduction_name(op, reduction),
        root if op in ROOTED else None,
        root if op in POINT_TO_POINT else None,
    )


def _interpreted(rows: pa.Table, nranks: Sequence[int | None], versions: Versions) -> dict[str, pa.Array]:
    """The columns that follow from what a line prints, its version and the size of its communicator."""
    cache: dict[tuple[object, ...], _Meaning] = {}
    meanings, sizes, messages = [], [], []
    numbers = (rows[name].to_pylist() for name in ("op", "datatype", "reduction", "root", "process"))
    for op, datatype, reduction, root, process, count, communicator in zip(
        *numbers, rows["elements"].to_pylist(), rows["communicator"].to_pylist(), strict=True
    ):
        key = (op, datatype, reduction, root, process)
        meaning = cache.get(key)
        if meaning is None:
            bytewise = process >= 0 and versions.prints_bytes[process]
            meaning = cache[key] = _meaning(Op(op), datatype, reduction, root, bytewise)
        meanings.append(meaning)
        size = None if meaning.item_bytes is None else count * meaning.item_bytes
        message = None
        if size is not None:
            message = message_bytes(op, size, nranks[communicator] if communicator >= 0 else None)
        sizes.append(size)
        # An edited line may print numbers that no communicator has.
        messages.append(message if message is None or message <= _INT64_MAX else None)
    return {
        "dtype": pa.array([m.dtype for m in meanings], pa.string()),
        "bytes": pa.array(sizes, pa.int64()),
        "message_bytes": pa.array(messages, pa.int64()),
        "reduce_op": pa.array([m.reduce_op for m in meanings], pa.string()),
        "root": pa.array([m.root for m in meanings], pa.int32()),
        "peer": pa.array([m.peer for m in meanings], pa.int32()),
    }


NO_INIT_LINE: Final = "no init line for this communicator: NCCL_DEBUG_SUBSYS had COLL without INIT"
NO_WORLD: Final = "no communicator of the log holds every process once, so no rank in it is a rank of the job"
TORN: Final = "the line is torn"


def _reasons(columns: dict[str, pa.Array], has_init: Sequence[bool], communicator: _Lookup) -> pa.Array:
    """Why ``rank`` or ``global_rank`` is null, row by row."""
    torn = pc.equal(columns["state"], "torn")
    no_rank = pc.is_null(columns["rank"])
    no_init = pc.and_(no_rank, pc.invert(pc.fill_null(communicator.take(has_init, pa.bool_()), False)))
    no_world = pc.is_null(columns["global_rank"])
    return pc.case_when(
        pc.make_struct(torn, no_init, no_world),
        pa.scalar(TORN),
        pa.scalar(NO_INIT_LINE),
        pa.scalar(NO_WORLD),
        pa.scalar(None, pa.string()),
    )

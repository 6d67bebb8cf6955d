"""Attributes choices of algorithms to operations in windows, so that the operations need not fit into memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np
import pyarrow as pa

from commprof.nccl.state.tuning_attribution import attribute_tuning
from commprof.nccl.tables.arrow_columns import codes_of, numbers_of

# The number of operations before a window that are searched again. A choice follows its operation closely.
_OVERLAP: Final = 4096
NEEDED: Final = (
    "op", "kind", "state", "host", "pid", "tid", "file", "line", "rank", "comm", "bytes", "message_bytes",
)  # fmt: skip


def attribute_in_windows(tuning: pa.Table, operations: Iterable[pa.Table]) -> pa.Table:
    """Return ``tuning`` with ``comm`` and ``op_line`` filled in the same way as by :func:`attribute_tuning`.

    Args:
        tuning: The table ``nccl_tuning``, in the order of files and lines.
        operations: Batches of the COLL lines of the processes that print choices, in order, with the columns
            ``NEEDED``.
    """
    if not tuning.num_rows:
        return tuning
    done, tables = 0, []
    before: pa.Table | None = None
    files = codes_of(tuning["file"])[1]
    places = _places(tuning, files)
    for part in operations:
        window = part if before is None else pa.concat_tables([before, part])
        last = _places(part.slice(part.num_rows - 1), files)[0]
        end = int(np.searchsorted(places, last)) if last >= 0 else done
        tables.append(_attributed(tuning, done, max(end, done), window))
        done, before = max(end, done), window.slice(max(window.num_rows - _OVERLAP, 0))
    tables.append(
        tuning.slice(done) if before is None else _attributed(tuning, done, tuning.num_rows, before)
    )
    return pa.concat_tables(tables)


def _attributed(tuning: pa.Table, begin: int, end: int, operations: pa.Table) -> pa.Table:
    """Return the choices from ``begin`` to ``end``, attributed to ``operations``.

    Some earlier choices are attributed again first, because they compete for the same operations.
    """
    first = max(begin - _OVERLAP, 0)
    return attribute_tuning(tuning.slice(first, end - first), operations).slice(begin - first)


def _places(table: pa.Table, files: list[str]) -> np.ndarray:
    """Return a number for each row that increases with file and line; -1 for files without a choice."""
    number = {file: place for place, file in enumerate(files)}
    codes, texts = codes_of(table["file"])
    place = np.array([*(number.get(text, -1) for text in texts), -1], np.int64)[codes]
    return np.where(place < 0, -1, (place << 40) + numbers_of(table["line"], 0))

"""Converts between Arrow columns and plain values, without :func:`pyarrow.array`, which imports pandas first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Column = npt.NDArray[Any]


def as_arrow(values: Column, kind: pa.DataType, missing: npt.NDArray[np.bool_] | None = None) -> pa.Array:
    """Return ``values`` as an Arrow array of numbers. Elements are null if ``missing`` is set."""
    data = np.ascontiguousarray(values, kind.to_pandas_dtype())
    return pa.Array.from_buffers(kind, len(data), [_valid(missing), pa.py_buffer(data)])


def from_values(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """Return numbers or strings as an Arrow array. None becomes null."""
    missing = np.array([value is None for value in values], bool)
    if not pa.types.is_string(kind):
        numbers = np.array([0 if value is None else value for value in values], kind.to_pandas_dtype())
        return as_arrow(numbers, kind, missing)
    texts = [b"" if value is None else value.encode() for value in values]
    offsets = np.zeros(len(texts) + 1, np.int32)
    np.cumsum([len(text) for text in texts], out=offsets[1:])
    buffers = [_valid(missing), pa.py_buffer(offsets), pa.py_buffer(b"".join(texts))]
    return pa.Array.from_buffers(kind, len(texts), buffers)


def taken(values: Sequence[Any], kind: pa.DataType, numbers: Column) -> pa.Array:
    """Return an Arrow array with the element of ``values`` for each number; null for negative numbers."""
    places = as_arrow(numbers, pa.int64(), numbers < 0)
    return from_values(values, kind).take(places)


def codes_of(column: pa.ChunkedArray) -> tuple[npt.NDArray[np.int64], list[Any]]:
    """Return ``column`` as the numbers of its distinct values, -1 for null, and the distinct values by number."""
    encoded = column.combine_chunks()
    if not pa.types.is_dictionary(encoded.type):
        encoded = encoded.dictionary_encode()
    codes, values = numbers_of(encoded.indices, -1), encoded.dictionary.to_pylist()
    distinct: dict[Any, int] = {}
    place = [distinct.setdefault(value, len(distinct)) for value in values]
    if len(distinct) < len(values):  # a dictionary may contain a value twice
        codes, values = np.array([*place, -1], np.int64)[codes], list(distinct)
    return codes, values


def as_numpy(column: pa.Array) -> Column:
    """Return the numbers of ``column`` without a copy. The column must not contain null."""
    kind = np.dtype(column.type.to_pandas_dtype())
    return np.frombuffer(column.buffers()[1], kind)[column.offset : column.offset + len(column)]


def numbers_of(column: pa.Array, none: int) -> npt.NDArray[np.int64]:
    """Return the integers of ``column``. Null becomes ``none``."""
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    if column.buffers()[1] is None:
        return np.full(len(column), none, np.int64)
    values = as_numpy(column).astype(np.int64)
    if column.null_count:
        values[is_null(column)] = none
    return values


def is_null(column: pa.Array) -> npt.NDArray[np.bool_]:
    """Return for each element of ``column`` whether it is null."""
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    valid = column.buffers()[0]
    if valid is None or not column.null_count:
        return np.zeros(len(column), bool)
    bits = np.unpackbits(np.frombuffer(valid, np.uint8), bitorder="little")
    null: npt.NDArray[np.bool_] = bits[column.offset : column.offset + len(column)] == 0
    return null


def _valid(missing: npt.NDArray[np.bool_] | None) -> pa.Buffer | None:
    if missing is None or not missing.any():
        return None
    return pa.py_buffer(np.packbits(~missing, bitorder="little"))

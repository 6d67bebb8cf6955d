"""Number the distinct rows of a table by some of its columns, so that equal rows are processed once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from commprof.align.sequences.edits import Codes

_MOST_CODES: Final = 1 << 40
_FEW: Final = 1 << 15


def numbered(rows: pa.Table) -> tuple[Codes, Codes]:
    """Return a number for each row, and the first row of each number.

    Rows have the same number if all their columns are equal. The function hashes and does not sort. Columns
    of numbers and flags are processed last, because a comparison suffices if the texts determine their
    values.
    """
    columns = [_one_chunk(column) for column in rows.unify_dictionaries().columns]
    texts = [column for column in columns if not _is_plain(column)]
    codes, bound = np.zeros(len(rows), np.int64), 1
    for column in texts:
        codes, bound = _distinguished(codes, bound, column)
        if bound > _MOST_CODES:
            codes, bound = renumbered(codes)
    codes, count = renumbered(codes)
    first = first_of_each(codes, count)
    for column in columns:
        if _is_plain(column) and not _is_determined(column, codes, first):
            codes, _ = _distinguished(codes, count, column)
            codes, count = renumbered(codes)
            first = first_of_each(codes, count)
    return codes, first


def _distinguished(codes: Codes, bound: int, column: pa.Array) -> tuple[Codes, int]:
    """Return ``codes`` (below ``bound``), refined so that rows with different values of ``column`` differ."""
    encoded = column if pa.types.is_dictionary(column.type) else pc.dictionary_encode(column)
    values = len(encoded.dictionary)
    if (values < 2 and not encoded.null_count) or encoded.null_count == len(encoded):
        return codes, bound
    indices = pc.fill_null(encoded.indices, values) if encoded.null_count else encoded.indices
    return codes * (values + 1) + indices.to_numpy(zero_copy_only=False), bound * (values + 1)


def _is_plain(column: pa.Array) -> bool:
    return bool(pa.types.is_integer(column.type) or pa.types.is_boolean(column.type))


def _is_determined(column: pa.Array, codes: Codes, first: Codes) -> bool:
    """Return whether the values of ``column`` are equal in all rows with the same number."""
    if column.null_count == len(column):
        return True
    if column.null_count:
        known = column.is_valid().to_numpy(zero_copy_only=False)
        if not np.array_equal(known, known[first][codes]):
            return False
        column = pc.fill_null(column, False if pa.types.is_boolean(column.type) else 0)
    plain = column.to_numpy(zero_copy_only=False)
    return np.array_equal(plain, plain[first][codes])


def _one_chunk(column: pa.ChunkedArray) -> pa.Array:
    chunk = column.combine_chunks()
    if isinstance(chunk, pa.ChunkedArray):
        chunk = chunk.chunk(0) if chunk.num_chunks else pa.array([], chunk.type)
    return chunk


def first_of_each(codes: Codes, count: int) -> Codes:
    """Return the first row of each number below ``count``. All these numbers must be in ``codes``."""
    first = np.empty(count, np.int64)
    first[codes[::-1]] = np.arange(len(codes) - 1, -1, -1)  # the last write remains, which is the first row
    return first


def renumbered(codes: Codes) -> tuple[Codes, int]:
    """Return ``codes`` as numbers from 0 without gaps, and the number of distinct codes."""
    encoded = pc.dictionary_encode(pa.array(codes))
    return encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64), len(encoded.dictionary)


def distinct_rows(table: pa.Table, columns: Sequence[str]) -> tuple[Codes, Codes]:
    """Return a number for each row, equal if ``columns`` are equal, and one row for each number."""
    codes = np.zeros(table.num_rows, np.int64)
    first = np.zeros(min(table.num_rows, 1), np.int64)
    for name in columns:
        encoded = pc.dictionary_encode(table[name].combine_chunks(), null_encoding="encode")
        values = len(encoded.dictionary)
        if values < 2 and len(first):
            continue
        _, first, codes = np.unique(
            codes * values + encoded.indices.to_numpy(zero_copy_only=False),
            return_index=True,
            return_inverse=True,
        )
    return codes.astype(np.int64), first.astype(np.int64)


def placed_by(keys: Codes) -> Codes:
    """Return the positions of ``keys`` in sorted order. The sort is stable."""
    if len(keys) and keys.max() < _FEW and keys.min() >= 0:
        keys = keys.astype(np.int16)  # numpy sorts 16-bit integers by radix, not by comparison
    return np.argsort(keys, kind="stable")


def split_by(keys: Codes, rows: Codes) -> list[Codes]:
    """Return ``rows`` divided into lists of equal key.

    The rows of a list are in their original order. The lists are in the order of their first rows.
    """
    if not len(rows):
        return []
    own = keys[rows]
    order = placed_by(own)
    bounds = np.flatnonzero(np.diff(own[order])) + 1
    groups = np.split(order, bounds)
    groups.sort(key=lambda group: int(group[0]))
    return [rows[group] for group in groups]

"""Rows of a table told apart by some of its columns, as numbers: what is equal is looked at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from commprof.align.edits import Codes

_MOST_CODES: Final = 1 << 40
_FEW: Final = 1 << 15


def numbered(rows: pa.Table) -> tuple[Codes, Codes]:
    """A number for each row, equal where all its columns are, and the first row of each number. By hashing, not sorting."""
    codes, bound = np.zeros(len(rows), np.int64), 1
    for column in rows.unify_dictionaries().columns:
        if len(rows) and not pa.types.is_dictionary(column.type):
            column = pc.dictionary_encode(column)
        encoded = column.combine_chunks()
        if isinstance(encoded, pa.ChunkedArray):
            encoded = encoded.chunk(0) if encoded.num_chunks else None
        if encoded is None or not len(encoded):
            continue
        values = len(encoded.dictionary)
        if values < 2 and not encoded.null_count:
            continue
        indices = pc.fill_null(encoded.indices.cast(pa.int64()), values).to_numpy(zero_copy_only=False)
        codes, bound = codes * (values + 1) + indices, bound * (values + 1)
        if bound > _MOST_CODES:
            codes, bound = _renumbered(codes)
    codes, count = _renumbered(codes)
    first = np.empty(count, np.int64)
    first[codes[::-1]] = np.arange(len(codes) - 1, -1, -1)  # the last one written stays: the first row
    return codes, first


def _renumbered(codes: Codes) -> tuple[Codes, int]:
    """``codes`` as numbers from 0 without gaps, and how many there are."""
    encoded = pc.dictionary_encode(pa.array(codes))
    return encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64), len(encoded.dictionary)


def distinct_rows(table: pa.Table, columns: Sequence[str]) -> tuple[Codes, Codes]:
    """A number for each row, equal where ``columns`` are equal, and one row for each number."""
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
    """The places of ``keys`` in their order, equal ones as they stand."""
    if len(keys) and keys.max() < _FEW and keys.min() >= 0:
        keys = keys.astype(np.int16)  # which are counted, not compared
    return np.argsort(keys, kind="stable")


def split_by(keys: Codes, rows: Codes) -> list[Codes]:
    """``rows`` in lists of equal key, each in the order given, the lists in that of their first row."""
    if not len(rows):
        return []
    own = keys[rows]
    order = placed_by(own)
    bounds = np.flatnonzero(np.diff(own[order])) + 1
    groups = np.split(order, bounds)
    groups.sort(key=lambda group: int(group[0]))
    return [rows[group] for group in groups]

"""Rows of a table told apart by some of its columns, as numbers: what is equal is looked at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from commprof.align.edits import Codes


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


def split_by(keys: Codes, rows: Codes) -> list[Codes]:
    """``rows`` in lists of equal key, each in the order given, the lists in that of their first row."""
    if not len(rows):
        return []
    own = keys[rows]
    order = np.argsort(own, kind="stable")
    bounds = np.flatnonzero(np.diff(own[order])) + 1
    groups = np.split(order, bounds)
    groups.sort(key=lambda group: int(group[0]))
    return [rows[group] for group in groups]

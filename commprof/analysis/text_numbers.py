"""Text columns as numbers in the order of their text: an engine groups and compares numbers far more quickly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Texts = Mapping[str, pa.Array]


def numbered_texts(tables: Mapping[str, pa.Table], names: Sequence[str]) -> tuple[dict[str, pa.Table], Texts]:
    """``tables`` with int32 in their text columns ``names``: equal where the text is, greater where it is; null as before.

    Columns of one name are numbered alike in all tables. Also gives the texts of each column, for :func:`with_texts`.
    """
    found, texts = dict(tables), {}
    for name in names:
        encoded = {
            table: encoded_text(rows[name]) for table, rows in tables.items() if name in rows.column_names
        }
        texts[name] = _in_order(pa.concat_arrays([column.dictionary for column in encoded.values()]))
        for table, column in encoded.items():
            rows = found[table]
            numbers = _numbers(column, texts[name])
            found[table] = rows.set_column(rows.column_names.index(name), name, numbers)
    return found, texts


def ranked(column: pa.ChunkedArray) -> pa.DictionaryArray:
    """Texts as numbers into their distinct values, which are in order; null as before."""
    encoded = encoded_text(column)
    texts = _in_order(encoded.dictionary)
    return pa.DictionaryArray.from_arrays(_numbers(encoded, texts), texts)


def among(column: pa.ChunkedArray, texts: Sequence[str]) -> npt.NDArray[np.bool_]:
    """Which rows have one of ``texts``; null has none."""
    encoded = encoded_text(column)
    fits = pc.is_in(encoded.dictionary, pa.array(texts, pa.string())).take(encoded.indices)
    found: npt.NDArray[np.bool_] = pc.fill_null(fits, False).to_numpy(zero_copy_only=False)
    return found


def with_texts(rows: pa.Table, texts: Texts) -> pa.Table:
    """``rows`` with the text for each number in the columns of ``texts`` that it has."""
    for place, name in enumerate(rows.column_names):
        if name in texts:
            rows = rows.set_column(place, name, texts[name].take(rows[name].combine_chunks()))
    return rows


def _in_order(values: pa.Array) -> pa.Array:
    distinct = values.unique()
    return distinct.take(pc.sort_indices(distinct))


def _numbers(column: pa.DictionaryArray, texts: pa.Array) -> pa.Array:
    return pc.index_in(column.dictionary, texts).take(column.indices)


def encoded_text(column: pa.ChunkedArray) -> pa.DictionaryArray:
    """Text as numbers into its distinct values, in one piece."""
    if not pa.types.is_dictionary(column.type):
        column = column.cast(pa.string()).dictionary_encode()
    whole = column.unify_dictionaries().combine_chunks()
    if isinstance(whole, pa.ChunkedArray):
        whole = whole.chunk(0) if whole.num_chunks else pa.array([], pa.string()).dictionary_encode()
    return whole

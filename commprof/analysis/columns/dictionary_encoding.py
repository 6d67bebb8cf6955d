"""Dictionary encoding of text columns: engines group and compare numbers far faster than texts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc


def ranked(column: pa.ChunkedArray) -> pa.DictionaryArray:
    """Texts as indices into their sorted distinct values; null stays null."""
    encoded = encoded_text(column)
    texts = _in_order(encoded.dictionary)
    return pa.DictionaryArray.from_arrays(_numbers(encoded, texts), texts)


def among(column: pa.ChunkedArray, texts: Sequence[str]) -> npt.NDArray[np.bool_]:
    """Which rows have one of ``texts``; null has none."""
    encoded = encoded_text(column)
    fits = pc.is_in(encoded.dictionary, pa.array(texts, pa.string())).take(encoded.indices)
    matches: npt.NDArray[np.bool_] = pc.fill_null(fits, False).to_numpy(zero_copy_only=False)
    return matches


def _in_order(values: pa.Array) -> pa.Array:
    distinct = values.unique()
    return distinct.take(pc.sort_indices(distinct))


def _numbers(column: pa.DictionaryArray, texts: pa.Array) -> pa.Array:
    return pc.index_in(column.dictionary, texts).take(column.indices)


def encoded_text(column: pa.ChunkedArray) -> pa.DictionaryArray:
    """Text as indices into its distinct values, in one chunk."""
    if not pa.types.is_dictionary(column.type):
        column = column.cast(pa.string()).dictionary_encode()
    encoded = column.unify_dictionaries().combine_chunks()
    if isinstance(encoded, pa.ChunkedArray):
        encoded = encoded.chunk(0) if encoded.num_chunks else pa.array([], pa.string()).dictionary_encode()
    return encoded

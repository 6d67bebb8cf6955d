"""Numbers for the distinct combinations of repeating columns, so that each combination is stored once."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from commprof.align.sequences.group_ids import numbered

Numbers = npt.NDArray[np.int64]
KIND: Final = "kind"


class Combinations:
    """The distinct combinations of columns, numbered in order of appearance.

    Args:
        schema: the columns.
    """

    def __init__(self, schema: pa.Schema) -> None:
        self._schema = schema
        self._values = [_Values(field.type) for field in schema]
        self._numbers: dict[bytes, int] = {}  # by the numbers of the values

    def number(self, rows: pa.Table) -> Numbers:
        """The number of each row's combination."""
        rows = rows.select(self._schema.names)
        codes, first = numbered(rows)
        distinct = rows.take(pa.array(first))
        values = [of.number(column) for of, column in zip(self._values, distinct.columns, strict=True)]
        value_numbers = np.stack(values, axis=1).astype(np.int32)
        numbers = [self._numbers.setdefault(one.tobytes(), len(self._numbers)) for one in value_numbers]
        return np.array(numbers, np.int64)[codes]

    def table(self) -> pa.Table:
        """One row per combination: ``kind`` (int32) and the columns."""
        numbers = np.frombuffer(b"".join(self._numbers), np.int32).reshape(-1, len(self._schema))
        columns = [of.take(numbers[:, place]) for place, of in enumerate(self._values)]
        kinds = pa.array(range(len(numbers)), pa.int32())
        return pa.table([kinds, *columns], schema=self._schema.insert(0, pa.field(KIND, pa.int32())))


class _Values:
    """The distinct values of a column, numbered from 1 in order of appearance; 0 is null."""

    def __init__(self, kind: pa.DataType) -> None:
        self._known = pa.array([], kind)

    def number(self, column: pa.ChunkedArray) -> Numbers:
        """The number of each value."""
        encoded = column if pa.types.is_dictionary(column.type) else pc.dictionary_encode(column)
        encoded = encoded.unify_dictionaries().combine_chunks()
        if isinstance(encoded, pa.ChunkedArray):
            encoded = encoded.chunk(0) if encoded.num_chunks else pa.array([], encoded.type)
        places = pc.index_in(encoded.dictionary, self._known)
        if places.null_count:
            self._known = pa.concat_arrays([self._known, encoded.dictionary.filter(places.is_null())])
            places = pc.index_in(encoded.dictionary, self._known)
        numbers = np.append(places.to_numpy(zero_copy_only=False).astype(np.int64) + 1, 0)
        indices = pc.fill_null(encoded.indices, len(numbers) - 1).to_numpy(zero_copy_only=False)
        row_numbers: Numbers = numbers[indices]
        return row_numbers

    def take(self, numbers: npt.NDArray[np.int32]) -> pa.Array:
        """The values of ``numbers``."""
        return self._known.take(pa.array(numbers - 1, mask=numbers == 0))

"""Columns that repeat, kept once for each of their combinations, which rows name by number."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from commprof.align.distinct import numbered

Numbers = npt.NDArray[np.int64]
KIND: Final = "kind"


class Combinations:
    """The distinct combinations of some columns, numbered in the order in which they come.

    Args:
        schema: the columns.
    """

    def __init__(self, schema: pa.Schema) -> None:
        self._schema = schema
        self._numbers: dict[tuple[Any, ...], int] = {}

    def number(self, rows: pa.Table) -> Numbers:
        """The number of each row's combination."""
        rows = rows.select(self._schema.names)
        codes, first = numbered(rows)
        found = rows.take(pa.array(first))
        combinations = zip(*(column.to_pylist() for column in found.columns), strict=True)
        numbers = [self._numbers.setdefault(one, len(self._numbers)) for one in combinations]
        return np.array(numbers, np.int64)[codes]

    def table(self) -> pa.Table:
        """One row per combination: ``kind`` (int32) and the columns."""
        columns = list(zip(*self._numbers, strict=True)) or [()] * len(self._schema)
        arrays = [pa.array(values, field.type) for values, field in zip(columns, self._schema, strict=True)]
        kinds = pa.array(range(len(self._numbers)), pa.int32())
        return pa.table([kinds, *arrays], schema=self._schema.insert(0, pa.field(KIND, pa.int32())))

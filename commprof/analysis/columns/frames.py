"""The frames that hold answers, with the types that their columns declare.

Integers stay integers: a column that may be null is ``Int64``, with ``<NA>``; any other is ``int64``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import numpy as np
import pandas as pd
import pyarrow as pa

from commprof.schema import Column

# pandas 3 has a type for text; in pandas 2 "str" would turn a null into the text "None".
TEXT: Final = "str" if int(pd.__version__.partition(".")[0]) >= 3 else "object"

pa.array([], pa.int64()).to_pandas()  # Arrow knows pandas from here on, whatever cli.runs told it before


def _dtype(column: Column) -> Any:  # a pandas extension dtype or the name of one
    if column.type.startswith("int"):
        return "Int64" if column.nullable else "int64"
    if column.type == "bool":
        return "boolean" if column.nullable else "bool"
    return "float64" if column.type == "float64" else TEXT


def from_arrow(table: pa.Table, columns: Iterable[Column]) -> pd.DataFrame:
    """The columns of ``table`` that are declared, in that order, each with the type that its declaration asks for."""
    return pd.DataFrame({column.name: _values(table.column(column.name), column) for column in columns})


def _values(values: pa.ChunkedArray, column: Column) -> Any:
    series: pd.Series[Any]
    if column.type.startswith("int") and (column.nullable or not values.null_count):
        numbers = values.cast(pa.int64())
        if not column.nullable:
            return numbers.to_numpy()
        # In half the time of Arrow's own mapping.
        unknown = np.array(numbers.is_null().to_numpy())
        return pd.arrays.IntegerArray(np.array(numbers.fill_null(0).to_numpy()), unknown)
    if column.type == "string":
        series = values.cast(pa.string()).to_pandas()
    elif column.type == "float64":
        series = values.cast(pa.float64()).to_pandas()
    else:
        # Through Arrow's own mapping: a detour over float64 would round integers past 2**53.
        wanted, extension = (
            (pa.bool_(), pd.BooleanDtype()) if column.type == "bool" else (pa.int64(), pd.Int64Dtype())
        )
        series = values.cast(wanted).to_pandas(types_mapper={wanted: extension}.get)
    return series.astype(_dtype(column)).array  # a frame of series takes three times as long


def as_declared(frame: pd.DataFrame, columns: Iterable[Column]) -> pd.DataFrame:
    """The columns of ``frame`` that are declared, in that order, each with the type that its declaration asks for."""
    return pd.DataFrame({column.name: frame[column.name].astype(_dtype(column)) for column in columns})


def from_rows(rows: Iterable[Mapping[str, Any]], columns: Iterable[Column]) -> pd.DataFrame:
    """``rows`` as a frame with exactly the declared columns; a missing value is null."""
    rows = list(rows)
    return pd.DataFrame(
        {
            column.name: pd.array([row.get(column.name) for row in rows], dtype=_dtype(column))
            for column in columns
        },
        copy=False,
    )

"""Checks rows from programs and files, which may be damaged, and converts valid rows to tables of the schema."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

import pyarrow as pa

from commprof.errors import TraceError
from commprof.schema import COLLECTIVES, OPS, TABLES, Column, Source
from commprof.trace.manifest import MOST_RANKS
from commprof.trace.tables import table_from_rows

_BITS: Final = {"int8": 8, "int16": 16, "int32": 32, "int64": 64}
# A larger message is a damaged number, and sums of such numbers would not fit 64 bits.
_MOST_BYTES: Final = 1 << 50


class Fitted(NamedTuple):
    """The rows that fit a table, and the number of rows that do not."""

    table: pa.Table
    left_out: int


def fitted(name: str, rows: Iterable[Mapping[str, Any]]) -> Fitted:
    """Convert ``rows`` to table ``name`` of the schema, without the rows that do not fit the table."""
    given_rows = list(rows)
    try:
        return Fitted(table_from_rows(name, given_rows), 0)
    except TraceError:
        fitting_rows = [row for row in given_rows if fits_table(name, row)]
        return Fitted(table_from_rows(name, fitting_rows), len(given_rows) - len(fitting_rows))


def fits_table(name: str, row: Mapping[str, Any]) -> bool:
    """Return whether ``row`` has a valid value for every column of table ``name``."""
    return all(fits(column, row.get(column.name)) for column in TABLES[name].columns)


def fits(column: Column, value: Any) -> bool:
    """Return whether ``value`` is valid in ``column``."""
    if value is None:
        return column.nullable
    if column.type == "bool":
        return isinstance(value, bool)
    if column.type == "string":
        return isinstance(value, str) and _is_text(value)
    if isinstance(value, bool) or not isinstance(value, int):
        return column.type == "float64" and isinstance(value, float)
    limit = 1 << (_BITS.get(column.type, 54) - 1)
    return -limit <= value < limit


def _is_text(value: str) -> bool:
    if value.isascii():
        return True
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_signature(row: Mapping[str, Any]) -> bool:
    """Return whether ``row`` has all columns of a signature, with values that a collective can have."""
    if row.get("op") not in OPS:
        return False
    for column in COLLECTIVES.columns:
        if column.source is not Source.SIGNATURE or column.name == "api":
            continue
        value = row.get(column.name)
        if (column.name not in row and column.since == 1) or not fits(column, value):
            return False
        if column.unit and whole_number(value, 0, _MOST_BYTES) is None:
            return False
    return True


def whole_number(value: Any, low: int = 0, high: int = (1 << 63) - 1) -> int | None:
    """Return ``value`` if it is an integer between ``low`` and ``high``, and None otherwise."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        return None
    return value


def world_size(value: Any) -> int | None:
    """Return ``value`` if it is a possible world size of a job, and None otherwise."""
    return whole_number(value, 1, MOST_RANKS)

"""Pages of records with filters and a sort order, and all matching records as CSV."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from commprof.analysis.columns.answers import RECORDS
from commprof.analysis.columns.csv_text import write_csv
from commprof.analysis.columns.frames import from_arrow
from commprof.analysis.storage.answer_cache import answer_cache
from commprof.analysis.storage.index import Index
from commprof.analysis.storage.record_spans import KIND_COLUMNS
from commprof.errors import UsageError
from commprof.schema import Column

MOST_ROWS: Final = 10_000  # maximum number of rows of one page
_BATCH: Final = 50_000
_FEW: Final = 5_000  # up to this position in the order, a sort with a limit is fastest
_TEXT_TESTS: Final = {
    "contains": ("contains(lower({0}), lower(?))", "{}"),
    "not contains": ("not contains(lower({0}), lower(?))", "{}"),
    "starts with": ("starts_with(lower({0}), lower(?))", "{}"),
    "ends with": ("ends_with(lower({0}), lower(?))", "{}"),
}
_ORDER_TESTS: Final = ("=", "!=", "<", "<=", ">", ">=")
TESTS: Final = (*_ORDER_TESTS, "between", *_TEXT_TESTS, "is null", "is not null")
SELECTED: Final = ", ".join(
    f"{'k' if column.name in KIND_COLUMNS else 'r'}.{column.name}" for column in RECORDS.columns
)


class Filter(NamedTuple):
    """A condition on one column.

    Examples: ``Filter("op", "=", "all_reduce")``, ``Filter("payload_bytes", "between", (1, 1024))``.

    ``test`` is one of :data:`TESTS`. The tests ``contains``, ``not contains``, ``starts with`` and ``ends with`` ignore
    case. All other tests are case-sensitive.
    """

    column: str
    test: str
    value: Any = None


class Page(NamedTuple):
    """A page of rows, and the number of all matching rows."""

    rows: pd.DataFrame
    total: int


class _Where(NamedTuple):
    """The filters as an SQL condition on the columns of ``records r`` alone, with the values of its question marks.

    A filter on a column of the table ``kinds`` becomes a list of the numbers of the matching kinds.
    """

    clause: str
    values: tuple[Any, ...]


def page(index: Index, filters: Sequence[Filter], sort: str | None, offset: int, limit: int) -> Page:
    """Return a page of records (see :func:`commprof.analysis.api.records_page`)."""
    if offset < 0 or not 0 <= limit <= MOST_ROWS:
        raise UsageError(
            f"rows {offset} to {offset + limit} cannot be given; up to {MOST_ROWS:,} from 0 on can"
        )
    where = _where(index, filters)
    total = _total(index, where)
    column, descending = _order(sort)
    if offset >= total or not limit:
        return Page(_frame(index, []), total)
    if column is None:
        rows = _places(index, where, "", (), offset, limit)
    else:
        rows = _sorted_places(index, where, column, descending, offset, limit, total)
    return Page(_frame(index, rows), total)


def every(index: Index, filters: Sequence[Filter], sort: str | None) -> Iterator[pa.Table]:
    """Yield all matching rows in batches, in the order of :func:`page`."""
    where = _where(index, filters)
    column, descending = _order(sort)
    if column is None:
        first = 0
        while first < index.facts["records"]:
            yield _rows(
                index,
                f"{where.clause} and r.rowid >= ? and r.rowid < ?",
                (*where.values, first, first + _BATCH),
            )
            first += _BATCH
        return
    way = "desc" if descending else "asc"
    name = f"{'k' if column in KIND_COLUMNS else 'r'}.{column}"
    sql = (
        f"select r.rowid as place from records r join kinds k using (kind) where {where.clause} "
        f"order by {name} {way} nulls last, r.rowid"
    )
    places = index.ask(sql, where.values)["place"].to_numpy()
    for offset in range(0, len(places), _BATCH):
        yield _in_order(index, places[offset : offset + _BATCH].tolist())


def csv_parts(
    index: Index, filters: Sequence[Filter], sort: str | None, columns: Sequence[str] | None
) -> Iterator[bytes]:
    """Yield all matching rows as CSV in batches. The first batch begins with the header."""
    names = list(RECORDS.names if columns is None else columns)
    for name in names:
        _column(name)
    header = False
    for rows in every(index, filters, sort):
        out = io.BytesIO()
        write_csv(rows.select(names), out)
        text = out.getvalue()
        yield text.partition(b"\n")[2] if header else text
        header = True
    if not header:
        yield (",".join(names) + "\r\n").encode()


def _order(sort: str | None) -> tuple[str | None, bool]:
    if not sort:
        return None, False
    name = sort.removeprefix("-")
    _column(name)
    return (None, False) if sort == "begin_ns" else (name, sort.startswith("-"))


def _column(name: str) -> Column:
    for column in RECORDS.columns:
        if column.name == name:
            return column
    raise UsageError(f"records have no column {name!r}; they have: {', '.join(RECORDS.names)}")


def _where(index: Index, filters: Sequence[Filter]) -> _Where:
    own, kind = ["true"], ["true"]
    own_values: list[Any] = []
    kind_values: list[Any] = []
    for one in filters:
        column = _column(one.column)
        clause, values = _condition(column, one)
        if column.name in KIND_COLUMNS:
            kind.append(clause.format(f"k.{column.name}"))
            kind_values += values
        else:
            own.append(clause.format(f"r.{column.name}"))
            own_values += values
    if len(kind) > 1:
        fit = index.ask(f"select kind from kinds k where {' and '.join(kind)}", kind_values)[
            "kind"
        ].to_pylist()
        own.append(f"r.kind in (select unnest([{', '.join(map(str, fit))}]))" if fit else "false")
    return _Where(" and ".join(own), tuple(own_values))


def _condition(column: Column, one: Filter) -> tuple[str, list[Any]]:
    """Return the condition as SQL, with ``{0}`` as a placeholder for the column, and the values of the condition."""
    if one.test in ("is null", "is not null"):
        return f"{{0}} {one.test}", []
    if one.test in _TEXT_TESTS:
        clause = _TEXT_TESTS[one.test][0].replace("{0}", "cast({0} as varchar)")
        return (f"coalesce({clause}, true)" if one.test.startswith("not") else clause), [str(one.value)]
    if one.test == "between":
        if not isinstance(one.value, tuple | list) or len(one.value) != 2:
            raise UsageError(f"between needs two values, not {one.value!r}")
        return "{0} between ? and ?", [_value(column, value) for value in one.value]
    if one.test not in _ORDER_TESTS:
        raise UsageError(f"there is no test {one.test!r}; choose from {', '.join(TESTS)}")
    test = "is distinct from" if one.test == "!=" else one.test
    return f"{{0}} {test} ?", [_value(column, one.value)]


def _value(column: Column, value: Any) -> Any:
    """Return ``value`` converted to the type of the column.

    Raises:
        UsageError: ``value`` does not have this type.
    """
    try:
        if column.type == "string":
            return str(value)
        if column.type == "bool":
            return {"true": True, "false": False, "1": True, "0": False}[str(value).lower()]
        number = float(value) if isinstance(value, float) else int(value)
        if not abs(number) < 1 << 63:
            raise ValueError
        return number
    except (ValueError, KeyError, TypeError, OverflowError):
        raise UsageError(f"column {column.name} is {column.type}; {value!r} is not") from None


def _total(index: Index, where: _Where) -> int:
    if where == _Where("true", ()):
        return int(index.facts["records"])
    return int(_counted(index, where, "true", ()))


def _counted(index: Index, where: _Where, clause: str, values: tuple[Any, ...]) -> int:
    """Return the number of matching rows for which ``clause`` is true."""
    sql = f"select count(*) as n from records r where {where.clause} and {clause}"
    return int(_cached(index, sql, (*where.values, *values), lambda rows: rows["n"][0].as_py()))


def _cached(index: Index, sql: str, values: tuple[Any, ...], answer: Callable[[pa.Table], Any]) -> Any:
    """Return the result of ``answer`` for the rows of ``sql``, cached because the same page is requested many times."""
    return answer_cache.get(index, (sql, values), lambda: answer(index.ask(sql, values)))


def _places(
    index: Index, where: _Where, clause: str, values: tuple[Any, ...], offset: int, limit: int
) -> list[int]:
    """Return the row numbers of at most ``limit`` matching rows from ``offset`` on, in order of time."""
    if where.clause == "true" and not clause:
        return list(range(offset, min(offset + limit, index.facts["records"])))
    # Far from the start, the rows are scanned in their order, so no sort is needed.
    order = "" if offset + limit > _FEW else "order by r.rowid"
    sql = f"select r.rowid as place from records r where {where.clause} {clause} {order} limit {limit} offset {offset}"
    places: list[int] = index.ask(sql, (*where.values, *values))["place"].to_pylist()
    return places


def _sorted_places(
    index: Index, where: _Where, column: str, descending: bool, offset: int, limit: int, total: int
) -> list[int]:
    """Return row numbers in order of ``column``. Equal values are in order of time, and null is last.

    The function first finds the values at the begin and the end of the page. Rows that are equal to one of these two
    values need no sort, and few rows are between the values.
    """
    by_kind = column in KIND_COLUMNS
    cuts = _kind_cuts if by_kind else _value_cuts
    places: list[int] = []
    for clause, values, count, is_one in cuts(index, where, column, descending, offset, limit, total):
        if offset >= count:
            offset -= count
            continue
        wanted = min(limit - len(places), count - offset)
        if is_one:
            places += _places(index, where, f"and {clause}", values, offset, wanted)
        else:
            way = "desc" if descending else "asc"
            sql = (
                f"select r.rowid as place from records r where {where.clause} and {clause} "
                f"order by r.{column} {way}, r.rowid limit {wanted} offset {offset}"
            )
            places += index.ask(sql, (*where.values, *values))["place"].to_pylist()
        offset = 0
        if len(places) >= limit:
            break
    return places


# A condition, its values, the number of matching rows, and whether these rows have equal values in the sort column.
_Cut = tuple[str, tuple[Any, ...], int, bool]


def _kind_cuts(
    index: Index, where: _Where, column: str, descending: bool, offset: int, limit: int, total: int
) -> Iterator[_Cut]:
    """Yield one cut for each value of a column of the table ``kinds``.

    There are few such values, so it is fast to count their rows.
    """
    sql = (
        f"select k.{column} as value, list(c.kind) as kinds, cast(sum(c.n) as bigint) as n from "
        f"(select r.kind, count(*) as n from records r where {where.clause} group by r.kind) c "
        f"join kinds k using (kind) group by k.{column}"
    )
    counted_values = _cached(index, sql, where.values, lambda rows: rows.to_pylist())
    rows = [row for row in counted_values if row["value"] is not None]
    rows.sort(key=lambda row: row["value"], reverse=descending)
    rows += [row for row in counted_values if row["value"] is None]
    for row in rows:
        kinds = ", ".join(map(str, row["kinds"]))
        yield f"r.kind in (select unnest([{kinds}]))", (), row["n"], True


def _value_cuts(
    index: Index, where: _Where, column: str, descending: bool, offset: int, limit: int, total: int
) -> Iterator[_Cut]:
    """Yield cuts for a column of the records.

    The cuts contain the rows before the first value of the page, the rows equal to this value, the rows between the
    first and the last value of the page, the rows equal to the last value, and the rows with null.
    """
    name = f"r.{column}"
    nulls = _counted(index, where, f"{name} is null", ())
    known = total - nulls
    if offset < known:
        last = min(offset + limit, known) - 1
        if last < _FEW:
            yield f"{name} is not null", (), known, False
        else:
            low, high = _values_at(index, where, name, descending, known, offset, last)
            after = "<" if descending else ">"
            before = ">" if descending else "<"
            yield f"{name} {before} ?", (low,), _counted(index, where, f"{name} {before} ?", (low,)), False
            yield f"{name} = ?", (low,), _counted(index, where, f"{name} = ?", (low,)), True
            if high != low:
                between = f"{name} {after} ? and {name} {before} ?"
                yield between, (low, high), _counted(index, where, between, (low, high)), False
                yield f"{name} = ?", (high,), _counted(index, where, f"{name} = ?", (high,)), True
    else:
        yield f"{name} is not null", (), known, False
    yield f"{name} is null", (), nulls, True


def _values_at(
    index: Index, where: _Where, name: str, descending: bool, known: int, first: int, last: int
) -> tuple[int, int]:
    """Return the values at positions ``first`` and ``last`` of the order, by selection instead of sorting."""
    places = [known - 1 - place if descending else place for place in (first, last)]
    shares = [min(1.0, (place + 0.5) / known) for place in places]
    sql = f"select quantile_disc({name}, [{shares[0]!r}, {shares[1]!r}]) as q from records r where {where.clause}"
    low, high = _cached(index, sql, where.values, lambda rows: rows["q"][0].as_py())
    return low, high


def _rows(index: Index, clause: str, values: tuple[Any, ...]) -> pa.Table:
    sql = f"select {SELECTED} from records r join kinds k using (kind) where {clause} order by r.rowid"
    return index.ask(sql, values)


def _in_order(index: Index, places: Sequence[int]) -> pa.Table:
    """Return the rows with the row numbers ``places``, in the order of ``places``."""
    if len(places) and places[-1] - places[0] == len(places) - 1 and list(places) == sorted(places):
        return _rows(index, "r.rowid between ? and ?", (places[0], places[-1]))
    numbers = ", ".join(map(str, places))
    sql = (
        f"select r.rowid as place, {SELECTED} from records r join kinds k using (kind) where r.rowid in "
        f"(select unnest([{numbers}]::bigint[]))"
    )
    records = index.ask(sql)
    wanted = pc.index_in(pa.array(places, pa.int64()), records["place"].combine_chunks())
    return records.drop_columns(["place"]).take(wanted)


def _frame(index: Index, places: Sequence[int]) -> pd.DataFrame:
    return from_arrow(_in_order(index, places), RECORDS.columns)

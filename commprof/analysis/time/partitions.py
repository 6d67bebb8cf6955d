"""Divide the records of a run into partitions that contain all records of their collectives and messages.

A question about individual collectives is answered one partition after another, in the memory of one
partition. The records of a collective have the same number in the group, so a partition contains all records
of a range of numbers. A message is a send and a recv, so a partition contains all messages to a range of
ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Final

import duckdb
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from commprof.align.ranks import cpp_waits
from commprof.align.ranks.cpp_waits import CppWaits
from commprof.align.ranks.own_times import (
    OWN_COLUMNS,
    SOURCES,
    OwnTimes,
    no_own_times,
    own_times,
    with_own_times,
)
from commprof.align.sequences.group_ids import numbered, split_by
from commprof.analysis.relations.sql_engine import scanned
from commprof.analysis.storage.record_spans import KIND_COLUMNS
from commprof.errors import TraceError
from commprof.trace.reader import Scan
from commprof.trace.tables import read_columns

MOST_ROWS: Final = 100_000  # the most rows of a partition, unless one number has more
# The most rows of a partition of files; more, because each partition scans all files.
_MOST_SCANNED: Final = 600_000
_FINEST: Final = 16  # the number of ranges of numbers that are counted for each partition
_IS_MESSAGE: Final = "op in ('send', 'recv')"
_PROCESS: Final = ("rank", "attempt", "pid")
_RECEIVER: Final = "case when op = 'send' then peer else rank end"

Numbers = npt.NDArray[np.int64]
Ask = Callable[[str], pa.Table]


def conditions(ask: Ask, relation: str, most_rows: int = MOST_ROWS) -> list[str]:
    """Return the partitions of ``relation`` as SQL conditions. Every row fits exactly one condition.

    Args:
        ask: A function that evaluates SQL.
        relation: A table expression with the columns pg_seq, op, peer and rank.
        most_rows: The highest number of rows of a partition, unless one number has more.
    """
    extent = ask(
        f"select count(*) as rows, min(pg_seq) as low, max(pg_seq) as high from {relation} where not {_IS_MESSAGE}"
    ).to_pylist()[0]
    clauses: list[str] = []
    if extent["rows"]:
        low, high = extent["low"] or 0, extent["high"] or 0
        of_one = extent["rows"] / (high - low + 1)
        width = max(1, int(most_rows / _FINEST / of_one))
        counted = ask(
            f"select (coalesce(pg_seq, 0) - ({low})) // {width} as place, count(*) as rows from {relation} "
            f"where not {_IS_MESSAGE} group by place order by place"
        )
        for first, last in _ranges(counted, most_rows):
            ends = f"{low + first * width} and {low + (last + 1) * width - 1}"
            clauses.append(f"not {_IS_MESSAGE} and coalesce(pg_seq, 0) between {ends}")
    counted = ask(
        f"select {_RECEIVER} as place, count(*) as rows from {relation} where {_IS_MESSAGE} group by place order by place"
    )
    clauses += [
        f"{_IS_MESSAGE} and {_RECEIVER} between {first} and {last}"
        for first, last in _ranges(counted, most_rows)
    ]
    return clauses


def _ranges(counted: pa.Table, most_rows: int) -> Iterator[tuple[int, int]]:
    """Yield the first and last number of ranges that have at most ``most_rows`` rows or only one number."""
    first = last = None
    row_count = 0
    for place, rows in zip(counted["place"].to_pylist(), counted["rows"].to_pylist(), strict=True):
        if first is not None and row_count + rows > most_rows:
            yield first, last if last is not None else first
            first, row_count = None, 0
        first = place if first is None else first
        last, row_count = place, row_count + rows
    if first is not None:
        yield first, last if last is not None else first


def of_scan(
    collectives: pa.Table | Scan,
    columns: Sequence[str],
    engine: duckdb.DuckDBPyConnection,
    waits: CppWaits | None = None,
) -> Iterator[pa.Table]:
    """Yield the partitions of a table or of files. A table in memory is one partition.

    Args:
        columns: Columns of the table ``collectives``, and :data:`OWN_COLUMNS`.
        waits: The waits in C++. If passed, the partitions also have its columns.

    Raises:
        TraceError: A file cannot be read.
    """
    has_own_times = OWN_COLUMNS[0] in columns
    columns = [*columns, *(cpp_waits.COLUMNS if waits else ())]
    if not isinstance(collectives, Scan):
        rows = _beside(collectives, waits)
        yield (with_own_times(rows) if has_own_times else rows).select(columns)
        return
    try:
        engine.register("rest_of_parts", collectives.rest)
        engine.register("rows_of_parts", scanned(engine, collectives, "rest_of_parts"))
        ask: Ask = lambda sql: engine.sql(sql).to_arrow_table()  # noqa: E731 - one line is clearer here
        own = _OwnTimesOfFiles(collectives, waits) if has_own_times else None
        added = (*OWN_COLUMNS, *cpp_waits.COLUMNS)
        names = columns_of(
            (name for name in columns if name not in added), cpp_waits.SOURCES if waits else ()
        )
        for condition in conditions(ask, "rows_of_parts", _MOST_SCANNED):
            rows = _beside(ask(f"select {', '.join(names)} from rows_of_parts where {condition}"), waits)
            yield (rows if own is None else own.beside(rows)).select(columns)
    except duckdb.Error as error:
        message = str(error).strip().partition("\n")[0]
        raise TraceError(
            f"the records of the run cannot be read: {message}. Some file of it is damaged; copy it again from where it was "
            "recorded"
        ) from None


def _beside(rows: pa.Table, waits: CppWaits | None) -> pa.Table:
    return rows if waits is None else waits.beside(rows)


class _OwnTimesOfFiles:
    """The own times of all records, which partitions look up.

    They are computed in advance, because they need all records of a process.
    """

    def __init__(self, collectives: Scan, waits: CppWaits | None) -> None:
        # The sequence numbers of the records of each process, in order.
        self._numbers: dict[tuple[int, ...], Numbers] = {}
        self._times: dict[tuple[int, ...], OwnTimes] = {}
        needed = columns_of(_PROCESS, ("seq",), SOURCES, cpp_waits.SOURCES if waits else ())
        files = (read_columns(file, needed) for file in collectives.files)
        for rows in chain(files, [collectives.rest.select(needed)]):
            rows = _beside(rows, waits)
            times, seq = own_times(rows), rows["seq"].to_numpy()
            for process, mine in _by_process(rows):
                mine = mine[np.argsort(seq[mine], kind="stable")]
                self._numbers[process], self._times[process] = seq[mine], times.of(mine)

    def beside(self, rows: pa.Table) -> pa.Table:
        """Return ``rows`` with the columns :data:`OWN_COLUMNS`."""
        own_times = no_own_times(len(rows))
        seq = rows["seq"].to_numpy()
        for process, mine in _by_process(rows):
            place = np.searchsorted(self._numbers[process], seq[mine])
            for into, values in zip(own_times, self._times[process].of(place), strict=True):
                into[mine] = values
        for name, column in zip(OWN_COLUMNS, own_times.columns(), strict=True):
            rows = rows.append_column(name, column)
        return rows


def _by_process(rows: pa.Table) -> Iterator[tuple[tuple[int, ...], Numbers]]:
    """Yield each process in ``rows`` and the indices of its rows."""
    codes, first = numbered(rows.select(_PROCESS))
    names = rows.select(_PROCESS).take(pa.array(first)).to_pylist()
    for mine in split_by(codes, np.arange(len(rows))):
        yield tuple(names[codes[mine[0]]].values()), mine


class IndexedParts:
    """The partitions of an index: ``records`` joined with ``kinds``, whose columns are dictionary-encoded.

    Args:
        ask: A function that evaluates SQL on the index.
        columns: The columns of the table ``collectives`` to read.
    """

    def __init__(self, ask: Ask, columns: Sequence[str]) -> None:
        self._columns = list(columns)
        self._own = [name for name in columns if name not in KIND_COLUMNS]
        self._kinds = {
            name: _encoded(column)
            for name, column in _by_name(ask("select * from kinds order by kind")).items()
            if name in columns
        }
        self.conditions = conditions(ask, "records r join kinds k using (kind)")

    def read(self, condition: str, ask: Ask) -> pa.Table:
        """Return the rows that meet one of the ``conditions``."""
        names = ", ".join(f"r.{name}" for name in (*self._own, "kind"))
        records = ask(f"select {names} from records r join kinds k using (kind) where {condition}")
        kind = records["kind"].combine_chunks()
        columns = {
            name: records[name] if name in self._own else _taken(self._kinds[name], kind)
            for name in self._columns
        }
        return pa.table(columns)


def _by_name(table: pa.Table) -> Mapping[str, pa.ChunkedArray]:
    return dict(zip(table.column_names, table.columns, strict=True))


def _encoded(column: pa.ChunkedArray) -> pa.Array:
    array = column.combine_chunks()
    array = array.chunk(0) if isinstance(array, pa.ChunkedArray) else array
    return array.dictionary_encode() if pa.types.is_string(array.type) else array


def _taken(values: pa.Array, kind: Any) -> pa.Array:
    if isinstance(values, pa.DictionaryArray):
        return pa.DictionaryArray.from_arrays(values.indices.take(kind), values.dictionary)
    return values.take(kind)


def columns_of(*needs: Iterable[str]) -> tuple[str, ...]:
    """Return the union of the columns in ``needs``, in order."""
    return tuple(dict.fromkeys(name for need in needs for name in need))

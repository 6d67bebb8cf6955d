"""Builds the ``collectives`` table of one rank in parts: joins records with the interned values that they refer to.

Text columns are dictionary-encoded (Arrow), because a rank has millions of records and few distinct values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa

from commprof.errors import TraceError
from commprof.schema import COLLECTIVES, STATUSES, Column, Source, Status
from commprof.trace.rank_files.issue_order import raised_numbers
from commprof.trace.rank_files.layout import RankFile
from commprof.trace.rank_files.records import Fields, Numbers, Part, completed_status
from commprof.trace.rank_files.steps import StepTable
from commprof.trace.tables import arrow_schema

_NOT_P2P_ASYNC: Final = frozenset({"send", "recv", "send_object_list", "recv_object_list"})
_IDENTITY: Final = ("rank", "attempt", "pid")
_RAISED: Final = STATUSES.index(Status.RAISED)
# With more distinct values than this, each part gets a dictionary of only the values that occur in the part.
_MOST_VALUES: Final = 4096


def encoded_schema() -> pa.Schema:
    """Return the schema of ``collectives`` with dictionary-encoded text columns."""
    schema = arrow_schema("collectives")
    for index, item in enumerate(schema):
        if pa.types.is_string(item.type):
            schema = schema.set(index, item.with_type(pa.dictionary(pa.int32(), pa.string())))
    return schema


class _Values(NamedTuple):
    """One column of interned rows.

    Attributes:
        values: The values, or for text the indices into ``dictionary``.
        valid: For each row, whether the value is not null.
        dictionary: The distinct texts. None if the column is not text.
        kind: The Arrow type of the column.
    """

    values: np.ndarray[Any, Any]
    valid: np.ndarray[Any, Any]
    dictionary: pa.Array | None
    kind: pa.DataType


class _Places(NamedTuple):
    """The index of the row of each record among the interned rows."""

    places: np.ndarray[Any, Any]
    is_complete: bool  # whether every record has a row


class _Interned:
    """Interned rows by number, as columns that can be expanded to records. A number without a row gives null."""

    def __init__(self, rows: Mapping[int, Mapping[str, Any]]) -> None:
        self._numbers = Numbers(np.fromiter(rows, np.int64, len(rows)))
        self._rows: list[Mapping[str, Any]] = [*(rows[int(n)] for n in self._numbers.ordered), {}]
        self._columns: dict[str, _Values] = {}

    def places(self, numbers: np.ndarray[Any, Any]) -> _Places:
        """Return the index of the row of each number. If there is no row, the index is the number of rows."""
        places = self._numbers.places(numbers)
        return _Places(places, not len(places) or int(places.max()) < len(self._numbers))

    def spread(self, name: str, kind: pa.DataType, at: _Places) -> pa.Array:
        """Return column ``name`` of the rows at indices ``at``. A value that does not fit type ``kind`` is null."""
        if name not in self._columns:
            self._columns[name] = self._column(name, kind)
        values, valid, dictionary, _ = self._columns[name]
        spread = values[at.places]
        mask = None
        if not (valid[:-1].all() if at.is_complete else valid.all()):
            mask = ~valid[at.places]
        if dictionary is None:
            return pa.array(spread, kind, mask=mask)
        if len(dictionary) > _MOST_VALUES:
            used, spread = np.unique(spread, return_inverse=True)
            dictionary, spread = dictionary.take(pa.array(used)), spread.astype(np.int32)
        return pa.DictionaryArray.from_arrays(pa.array(spread, pa.int32(), mask=mask), dictionary)

    def _column(self, name: str, kind: pa.DataType) -> _Values:
        values = [row.get(name) for row in self._rows]
        try:
            column = pa.array(values, kind)
        except (pa.ArrowException, TypeError, ValueError, OverflowError):
            column = pa.array([_fit(value, kind) for value in values], kind)
        valid = np.asarray(column.is_valid())
        if not pa.types.is_string(kind):
            return _Values(
                np.asarray(column.fill_null(False if pa.types.is_boolean(kind) else 0)), valid, None, kind
            )
        encoded = column.dictionary_encode()
        dictionary = encoded.dictionary if len(encoded.dictionary) else pa.array([""], kind)
        return _Values(np.asarray(encoded.indices.fill_null(0)), valid, dictionary, kind)

    def flags(self, test: Callable[[Mapping[str, Any]], bool]) -> np.ndarray[Any, Any]:
        """Return the result of ``test`` for each row, in the order of the indices of :meth:`places`."""
        return np.array([test(row) for row in self._rows], bool)


def _fit(value: Any, kind: pa.DataType) -> Any:
    try:
        return pa.scalar(value, kind).as_py()
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        return None


class CollectiveColumns:
    """Builds the columns of ``collectives`` of one rank.

    Args:
        identity: The rank, attempt and pid of the rank file.
        signatures, tags, sites, threads: The interned rows by number.
        groups: The process groups by name.
        steps: The training steps of the rank.
        raised: The signature and the number of each call that raised.
    """

    def __init__(
        self,
        identity: RankFile,
        signatures: Mapping[int, Mapping[str, Any]],
        tags: Mapping[int, Mapping[str, Any]],
        sites: Mapping[int, Mapping[str, Any]],
        threads: Mapping[int, Mapping[str, Any]],
        groups: Mapping[str, Mapping[str, Any]],
        steps: StepTable,
        raised: Iterable[tuple[int, int]],
    ) -> None:
        self._identity = identity
        self._schema = encoded_schema()
        self._plain = arrow_schema("collectives")
        self._steps = steps
        self._signatures, self._tags = _Interned(signatures), _Interned(tags)
        self._sites, self._threads = _Interned(sites), _Interned(threads)
        self._groups = _Interned({number: groups[str(row["pg"])] for number, row in signatures.items()})
        self._on_cpu = self._signatures.flags(lambda row: row.get("device") in (None, "cpu"))
        self._asked_async = self._signatures.flags(lambda row: bool(row.get("is_async")))
        self._is_p2p = self._signatures.flags(lambda row: bool(row.get("is_p2p")))
        raised = list(raised)
        # Built only if a call raised, because a job may have millions of signatures.
        streams = {
            n: (str(row["pg"]), bool(row.get("is_p2p"))) for n, row in (signatures.items() if raised else ())
        }
        # For each stream with calls that raised: the signatures of the stream, and the numbers of these calls.
        self._raised = [
            (np.array([n for n, of in streams.items() if of == stream]), np.array(numbers))
            for stream, numbers in raised_numbers(raised, streams).items()
        ]
        self._waits_itself = self._sites.flags(lambda row: str(row.get("api")) in _NOT_P2P_ASYNC)

    def tables(self, parts: Iterator[Part]) -> Iterator[pa.Table]:
        """Yield each part as a table of :func:`encoded_schema`."""
        for part in parts:
            yield self.table(part.seq, part.records)

    def table(self, seq: np.ndarray[Any, Any], records: Fields) -> pa.Table:
        """Return ``records`` as a table of :func:`encoded_schema`.

        Args:
            seq: The numbers of the records in issue order.
            records: The fields of the records.

        Raises:
            TraceError: A column that must not be null has nulls.
        """
        columns = self._interned_columns(records)
        for name in _IDENTITY:
            columns[name] = pa.array(np.full(len(seq), getattr(self._identity, name), np.int32))
        columns["seq"] = pa.array(seq.astype(np.int64))
        placed = self._steps.place(records["step"], records["issue_ns"], records["phase"])
        columns["after_step"] = pa.array(placed.after, mask=~placed.is_outside)
        # The reader corrects these fields of the records. All other fields are used unchanged.
        corrected = {
            "step": placed.step,
            "phase": placed.phase,
            "pg_seq": self._issued_numbers(records),
            "status": completed_status(records),
            "wait_begin_ns": wait_begin_ns(records),
        }
        for column in COLLECTIVES.columns:
            if column.source is Source.RECORD and column.name not in columns:
                columns[column.name] = _decoded(column, corrected.get(column.name, records[column.name]))
        for item in self._schema:
            if not item.nullable and columns[item.name].null_count:
                raise TraceError(f"table collectives, column {item.name} has nulls; it must have none")
        return pa.Table.from_arrays([columns[name] for name in self._schema.names], schema=self._schema)

    def _issued_numbers(self, records: Fields) -> np.ndarray[Any, Any]:
        """Return :func:`commprof.trace.rank_files.issue_order.issued_number` for each record."""
        numbers = records["pg_seq"].copy()
        for signatures, raised in self._raised:
            mine = np.isin(records["signature"], signatures)
            numbers[mine] -= np.searchsorted(raised, numbers[mine])
        is_raised = records["status"] == _RAISED
        numbers[is_raised] = -1 - numbers[is_raised]
        return numbers

    def _interned_columns(self, records: Fields) -> dict[str, pa.Array]:
        signature, tag = self._signatures.places(records["signature"]), self._tags.places(records["tag"])
        site, thread = self._sites.places(records["call_site"]), self._threads.places(records["thread"])
        group = self._groups.places(records["signature"])
        columns: dict[str, pa.Array] = {}
        for column in COLLECTIVES.columns:
            kind = self._plain.field(column.name).type
            if column.source is Source.SIGNATURE:
                columns[column.name] = self._signatures.spread(column.name, kind, signature)
            elif column.source is Source.TAG:
                columns[column.name] = self._tags.spread(column.name, kind, tag)
            elif column.source is Source.GROUP:
                columns[column.name] = self._groups.spread(column.name, kind, group)
        text = pa.string()
        columns["api"] = self._sites.spread("api", text, site)
        columns["call_site"] = self._sites.spread("call_site", text, site)
        columns["thread"] = self._threads.spread("name", text, thread)
        # send and recv wait for completion, isend and irecv do not. Both use the same ProcessGroup method.
        waits_itself = self._is_p2p[signature.places] & self._waits_itself[site.places]
        is_async = self._asked_async[signature.places] & ~waits_itself
        columns["is_async"] = pa.array(is_async)
        columns["exposed_ns"] = _exposed(records, self._on_cpu[signature.places], is_async)
        return columns


def _decoded(column: Column, values: np.ndarray[Any, Any]) -> pa.Array:
    """Return a field of the records as ``column``. :data:`commprof.schema.RECORD_FIELDS` defines its stored form."""
    if column.values:
        return pa.DictionaryArray.from_arrays(
            pa.array(values.astype(np.int32)), pa.array(list(column.values), pa.string())
        )
    if column.type == "bool":
        return pa.array(values != 0)
    return pa.array(values, mask=values == 0 if column.nullable else None)


def wait_begin_ns(records: Fields) -> np.ndarray[Any, Any]:
    """Return the begin of the wait of each record in ns, or 0 if there is no wait.

    For a synchronous call the recorder writes only the end of the wait. The wait begins when the call returns.
    """
    at_once = (records["wait_end_ns"] != 0) & (records["wait_begin_ns"] == 0)
    return np.where(at_once, records["return_ns"], records["wait_begin_ns"])


def _exposed(records: Fields, on_cpu: np.ndarray[Any, Any], is_async: np.ndarray[Any, Any]) -> pa.Array:
    """Return the exposed time of each record in ns, or null if it is not known.

    A recorded exposed time is used as it is. Otherwise, for CPU tensors, the exposed time ends with the wait. It begins
    with the wait if the call is asynchronous, and with the call if the call is synchronous. For device tensors it is
    null, because the wait of the host does not measure the device.
    """
    recorded = records["exposed_ns"]
    waited = (records["wait_end_ns"] != 0) & on_cpu & (recorded == 0)
    begin = np.where(is_async, wait_begin_ns(records), records["issue_ns"])
    values = np.where(waited, records["wait_end_ns"] - begin, recorded)
    return pa.array(values, mask=~waited & (recorded == 0))

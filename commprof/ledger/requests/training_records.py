"""Counts the records of one purpose in training steps by some columns, without records of evaluations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, Protocol

import pyarrow as pa

from commprof.ledger.records.precount import COLUMNS as OF_PRECOUNT
from commprof.ledger.records.precount import survey_of
from commprof.ledger.records.row_index import where

COUNT: Final = "count"


class Records(Protocol):
    """The members of a run that this module uses. ``commprof.trace.reader.Run`` implements them."""

    def parts(self, name: str, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        """Yield the rows of table ``name`` in parts, with only ``columns`` if given."""


def counted(run: Records, purpose: str, op: str | None, columns: Sequence[str]) -> list[dict[str, Any]]:
    """Return each combination of ``columns`` with its number of records, under the key :data:`COUNT`.

    Args:
        run: The run whose records are counted.
        purpose: The purpose of the records.
        op: The operation of the records. None for any operation.
        columns: Columns of the table ``collectives``.
    """
    survey = survey_of(run.parts("collectives", OF_PRECOUNT))
    needed = list(dict.fromkeys((*OF_PRECOUNT, "purpose", *columns)))
    grouped = []
    for part in run.parts("collectives", needed):
        mine = where(part, ["purpose", "op"], lambda its, own: its == purpose and op in (None, own))
        rows = part.filter(pa.array(mine & where(part, ["step"], lambda step: step >= 0)))
        rows = rows.filter(pa.array(~survey.in_evaluation(rows)))
        grouped.append(
            _plain(rows.select(list(columns))).group_by(list(columns)).aggregate([([], "count_all")])
        )
    if not grouped:
        return []
    sums = pa.concat_tables(grouped).group_by(list(columns)).aggregate([("count_all", "sum")])
    counts: list[dict[str, Any]] = sums.rename_columns([*columns, COUNT]).to_pylist()
    return counts


def _plain(table: pa.Table) -> pa.Table:
    """Return ``table`` with dictionary-encoded texts decoded."""
    for number, name in enumerate(table.column_names):
        column = table.column(number)
        if pa.types.is_dictionary(column.type):
            table = table.set_column(number, name, column.cast(column.type.value_type))
    return table

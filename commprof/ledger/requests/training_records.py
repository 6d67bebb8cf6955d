"""Counts the records of one purpose within training steps by some columns, without those of evaluations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, Protocol

import pyarrow as pa

from commprof.ledger.records.precount import COLUMNS as OF_PRECOUNT
from commprof.ledger.records.precount import survey_of
from commprof.ledger.records.row_index import where

COUNT: Final = "count"


class Records(Protocol):
    """What is needed of a run; ``commprof.trace.reader.Run`` has it."""

    def parts(self, name: str, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        """Columns of a table of the schema, some rows at a time."""


def counted(run: Records, purpose: str, op: str | None, columns: Sequence[str]) -> list[dict[str, Any]]:
    """How many records have each combination of ``columns``, under :data:`COUNT`.

    Args:
        run: whose records.
        purpose: of the records.
        op: their operation; None for any.
        columns: of the table ``collectives``.
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
    """``table`` with dictionary-encoded text decoded."""
    for number, name in enumerate(table.column_names):
        column = table.column(number)
        if pa.types.is_dictionary(column.type):
            table = table.set_column(number, name, column.cast(column.type.value_type))
    return table

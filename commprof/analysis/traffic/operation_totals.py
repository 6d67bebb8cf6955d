"""Sum deduplicated collectives: payload bytes, wire bytes and times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Final

import pandas as pd
import pyarrow as pa

from commprof.analysis.columns.answers import GROUPINGS, TRAFFIC
from commprof.analysis.columns.frames import from_arrow
from commprof.analysis.relations.sql_engine import ask, evaluate
from commprof.errors import UsageError
from commprof.trace.reader import Scan

EVERY_COLUMN: Final = (*GROUPINGS, "root", "sender", "receiver", "call_bytes")


def operations(tables: Mapping[str, pa.Table | Scan], columns: Sequence[str] = EVERY_COLUMN) -> pa.Table:
    """Return deduplicated collectives and messages from the records of all ranks, summed by ``columns``.

    Fewer columns take less time and memory (``relations/operations.sql``).

    Args:
        tables: The tables collectives, aggregates and groups.
    """
    return evaluate("operations", tables, columns)


def checked(by: Sequence[str]) -> tuple[str, ...]:
    """Return ``by`` without duplicates.

    Raises:
        UsageError: A column of ``by`` cannot be grouped by.
    """
    for name in by:
        if name not in GROUPINGS:
            near = get_close_matches(name, GROUPINGS, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise UsageError(
                f"traffic cannot be grouped by {name!r}: {hint}choose from {', '.join(GROUPINGS)}"
            )
    return tuple(dict.fromkeys(by))


def traffic(operations: pa.Table, by: Sequence[str]) -> pd.DataFrame:
    """Return counts, bytes and times of ``operations`` for each combination of the columns ``by``.

    Without any columns, there is one row.

    Raises:
        UsageError: A column of ``by`` cannot be grouped by.
    """
    by = checked(by)
    names = ", ".join(by)
    answer = ask(
        "traffic",
        {"operations": operations},
        by=f"{names}, " if by else "",
        group_by=f"group by {names}" if by else "",
        order_by=f"order by {names}" if by else "",
    )
    return from_arrow(answer, (*(GROUPINGS[name] for name in by), *TRAFFIC.columns))

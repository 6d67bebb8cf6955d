"""What was sent, counted once for each collective, in the two measures that need no counters: payload and wire."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from typing import Final

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from commprof.align.collectives import in_order
from commprof.align.distinct import numbered
from commprof.analysis.answers import GROUPINGS, TRAFFIC
from commprof.analysis.engine import ask, query_text
from commprof.analysis.frames import from_arrow
from commprof.analysis.text_numbers import Texts, numbered_texts, with_texts
from commprof.errors import UsageError
from commprof.schema import Op
from commprof.trace.reader import Scan

EVERY_COLUMN: Final = (*GROUPINGS, "root", "sender", "receiver")

NEEDED: Final = (  # columns of the records that operations are made of
    *(name for name in GROUPINGS),
    *(
        "rank",
        "pid",
        "seq",
        "pg_seq",
        "peer",
        "num_tensors",
        "payload_bytes",
        "issue_ns",
        "return_ns",
        "exposed_ns",
    ),
    "is_p2p",
)

_TEXTS: Final = tuple(  # but for that which the query compares with names
    name for name, column in GROUPINGS.items() if column.type == "string" and name != "op"
)


def operations(
    collectives: pa.Table | Scan, aggregates: pa.Table, columns: Sequence[str] = EVERY_COLUMN
) -> pa.Table:
    """Every collective once, and every message once, from the records of all ranks, added up by ``columns``.

    ``queries/operations.sql`` and ``queries/operation_sums.sql``. The fewer the columns the quicker, and the less memory.
    Those of which only sums were kept are in it as sums.
    """
    tables: dict[str, pa.Table | Scan] = {"collectives": collectives, "aggregates": aggregates}
    texts: Texts = {}
    if not isinstance(collectives, Scan):
        coded, texts = numbered_texts({"collectives": collectives, "aggregates": aggregates}, _TEXTS)
        tables = dict(coded)
    found = ask(
        "operation_sums",
        tables,
        operations=query_text("operations").format(repeated=query_text(_repetitions(collectives))),
        by="".join(f"{name}, " for name in columns),
    )
    return with_texts(found, texts)


def _repetitions(collectives: pa.Table | Scan) -> str:
    """The question that tells the repetitions among ``collectives``: the quick one where there are surely none."""
    if isinstance(collectives, Scan):
        return "repetitions"
    is_message = pc.is_in(collectives["op"].cast(pa.string()), pa.array([Op.SEND, Op.RECV]))
    rows = collectives.select(["attempt", "pg", "group_ranks", "rank", "pg_seq"])
    if pc.any(is_message).as_py():
        rows = rows.filter(pc.invert(is_message))
    members, _ = numbered(rows.drop_columns("pg_seq"))
    order, starts = in_order((members, pc.fill_null(rows["pg_seq"], 0).to_numpy()))
    return "no_repetition" if len(order) == len(starts) else "repetitions"


def checked(by: Sequence[str]) -> tuple[str, ...]:
    """``by``, each column once.

    Raises:
        UsageError: a column of ``by`` cannot be grouped by.
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
    """Counts, bytes and times of ``operations`` for each combination of the columns ``by``; without any, one row.

    Raises:
        UsageError: a column of ``by`` cannot be grouped by.
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

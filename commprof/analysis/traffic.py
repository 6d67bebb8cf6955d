"""What was sent, counted once for each collective, in the two measures that need no counters: payload and wire."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from typing import Final, NamedTuple

import pandas as pd
import pyarrow as pa

from commprof.analysis.answers import GROUPINGS, TRAFFIC
from commprof.analysis.engine import ask, query_text
from commprof.analysis.frames import from_arrow
from commprof.analysis.members import agreed
from commprof.analysis.pairwise import COLUMNS as SPLITS
from commprof.analysis.text_numbers import among, numbered_texts, with_texts
from commprof.errors import UsageError
from commprof.ledger.summed import backends_of
from commprof.schema import Op

EVERY_COLUMN: Final = (*GROUPINGS, "root", "sender", "receiver", "call_bytes")

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
    *SPLITS,
)

_TEXTS: Final = tuple(  # but for that which the query compares with names
    name for name, column in GROUPINGS.items() if column.type == "string" and name not in ("op", "backend")
)


class Once(NamedTuple):
    """Collectives, each once (:func:`commprof.analysis.members.agreed`), and the records of messages."""

    collectives: pa.Table
    messages: pa.Table


def once(collectives: pa.Table, columns: Sequence[str] = EVERY_COLUMN) -> Once:
    """Every collective once, out of the records of all its ranks; ``columns``: that are wanted of them."""
    is_message = among(collectives["op"], (Op.SEND, Op.RECV))
    messages = collectives.filter(pa.array(is_message))
    return Once(
        agreed(collectives.filter(pa.array(~is_message)) if len(messages) else collectives, columns), messages
    )


def joined(parts: Sequence[Once]) -> Once:
    """Several parts as one."""
    return Once(*(pa.concat_tables(tables) for tables in zip(*parts, strict=True)))


def operations(
    collectives: pa.Table, aggregates: pa.Table, columns: Sequence[str] = EVERY_COLUMN
) -> pa.Table:
    """Every collective once, and every message once, from the records of all ranks, added up by ``columns``."""
    return added_up(once(collectives, columns), aggregates, columns)


def added_up(found: Once, aggregates: pa.Table, columns: Sequence[str]) -> pa.Table:
    """Operations added up by ``columns``, of which :func:`once` knows (``queries/operations.sql``, ``operation_sums.sql``).

    The fewer the columns the quicker, and the less memory. Those of which only sums were kept are in it as sums.
    """
    if "backend" not in aggregates.column_names:
        aggregates = aggregates.append_column("backend", pa.nulls(len(aggregates), pa.string()))
    tables, texts = numbered_texts(
        {"agreed": found.collectives, "point_to_point": found.messages, "aggregates": aggregates}, _TEXTS
    )
    answer = ask(
        "operation_sums",
        tables,
        operations=query_text("operations"),
        by="".join(f"{name}, " for name in columns),
    )
    return with_texts(answer, texts)


def with_backends(aggregates: pa.Table, groups: pa.Table) -> pa.Table:
    """``aggregates`` with the backend of each group, where it has one only."""
    of_group = backends_of(aggregates, groups)
    names = [of_group.get(pg) for pg in aggregates["pg"].to_pylist()]
    return aggregates.append_column("backend", pa.array(names, pa.string()))


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

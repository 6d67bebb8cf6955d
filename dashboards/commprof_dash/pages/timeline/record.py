"""Builds the details of one record below the timeline, and of the same collective on the other ranks."""

from __future__ import annotations

from typing import Any, Final

import pandas as pd
from dash import html
from dash.development.base_component import Component

from commprof.analysis import api
from commprof_dash import address
from commprof_dash.components import messages, tables
from commprof_dash.components.tables import Field
from commprof_dash.pages.timeline.data import Record, record_text

_ROWS_SHOWN: Final = 200


def record_section(path: Any, name: str, record: Record, run_begin_ns: int) -> Component:
    """Return the record that the address names, with its bucket, its NCCL lines and the records of other ranks.

    Args:
        path: The path of the run called ``name``.
        run_begin_ns: The start of the run in ns, on the clock of the record's times.
    """
    rank, attempt, pid, seq = record
    details = api.record(path, rank, seq, attempt, pid)
    if details is None:
        return messages.message(
            "No such record", f"This run has no record {record_text(record)}.", severity="warning"
        )
    row = details.row
    values: dict[str, Any] = {
        "Operation": row["op"] + (f", intended: {row['intended_op']}" if row["intended_op"] else ""),
        "Payload": f"{api.format_bytes(row['payload_bytes'])} {row['dtype'] or ''}",
        "When": (
            f"{api.format_ns(row['begin_ns'] - run_begin_ns)} after the first record, for "
            f"{api.format_ns(row['end_ns'] - row['begin_ns'])}"
        ),
        "Step": f"{row['step']}, micro-batch {row['micro_step']}, {row['phase']}",
        "Group": f"{shortened(row['pg'])}: ranks {shortened(row['group_ranks'])}, number {row['pg_seq']} in it",
        "Purpose": row["purpose"] or "not known",
        "Parameters": _long_text(row["parameters"]),
        "Call site": _long_text(row["call_site"]),
    }
    # Links to the pages that show the bucket, the log lines and the neighbors of this record.
    if row["bucket"] is not None:
        values["Bucket"] = html.A(
            f"bucket {row['bucket']} of step {row['step']}",
            href=address.link(
                "/buckets",
                run=name,
                group=row["group_ranks"],
                step=str(row["step"]),
                bucket=f"{row['micro_step']}.{row['bucket']}",
            ),
        )
    if len(details.lines):
        values["NCCL lines"] = html.A(
            ", ".join(_lines(details.lines.head(8))),
            href=address.link("/alignment", run=name, record=record_text(record)),
        )
    values["In the grid"] = html.A(
        "this record in the grid",
        href=address.link("/records", run=name, filter=[f"rank:=:{rank}", f"seq:=:{seq}"]),
    )
    fields = [
        Field("rank", "Rank", str, numeric=True),
        Field("op", "Operation"),
        Field("lateness_ns", "Arrived after the first", api.format_ns, numeric=True),
        Field("own_delay_ns", "Own delay", api.format_ns, numeric=True),
        Field("inherited_ns", "Inherited delay", api.format_ns, numeric=True),
        Field("exposed_ns", "Exposed", api.format_ns, numeric=True),
    ]
    return html.Section(
        [
            html.H3(f"Record {seq} of rank {rank}", id="record-title"),
            tables.facts(values),
            html.H3(f"The same collective on {len(details.partners):,} ranks"),
            tables.table(details.partners.head(_ROWS_SHOWN), fields, "The same collective on its ranks"),
        ],
        className="record",
        **{"aria-labelledby": "record-title"},
    )


def _long_text(text: str | None) -> str:
    return "not known" if text is None else text if len(text) <= 400 else text[:397] + "..."


def _lines(lines: pd.DataFrame) -> list[str]:
    names = ("file", "line", "state", "reason")
    return [
        f"{state}: {_long_text(reason)}" if pd.isna(file) else f"{shortened(file)}:{line} ({state})"
        for file, line, state, reason in zip(*(lines[name] for name in names), strict=True)
    ]


def shortened(text: Any) -> str:
    """Return ``text``, truncated to the length of a cell."""
    return str(text) if len(str(text)) <= 60 else str(text)[:57] + "..."

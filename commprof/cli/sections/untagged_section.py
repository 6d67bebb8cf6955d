"""The part of ``commprof report`` about collectives without a purpose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from commprof.cli import rendering
from commprof.cli.rendering import Heading, Rows

_MOST: Final = 8
_HEADINGS: Final = (
    Heading("place"),
    Heading("phase"),
    Heading("operation"),
    Heading("calls", number=True),
    Heading("payload", number=True),
)
_HINT: Final = (
    'No known framework names the purpose of these. The program can name it: with commprof.tag("metric"): around them '
    "(docs/frameworks.md lists the purposes)."
)
_UNKNOWN: Final = "not known"


def untagged_parts(rows: Sequence[Mapping[str, Any]]) -> list[Rows | str]:
    """Return the table of the call sites that sent the most bytes without a purpose; empty if there are none."""
    if not rows:
        return []
    # A message counts at its send. So call sites that only receive are left out, unless there are no other call sites.
    rows = [row for row in rows if row["collectives"]] or rows
    cells = [
        (
            _place(row["call_site"]),
            rendering.text(row["phase"]),
            rendering.text(row["op"]),
            rendering.count(row["collectives"]),
            rendering.number_of_bytes(row["payload_bytes"]),
        )
        for row in rows[:_MOST]
    ]
    if rows[_MOST:]:
        cells.append((f"and {len(rows) - _MOST} more", "", "", *_sums(rows[_MOST:])))
    calls, payload = _sums(rows)
    noun = "call" if calls == "1" else "calls"
    title = f"Without a purpose, in the whole run: {calls} {noun}, {payload} payload, by place"
    return [Rows(_HEADINGS, cells, title=title), rendering.paragraph(_HINT) + "\n"]


def _sums(rows: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    return (
        rendering.count(sum(row["collectives"] for row in rows)),
        rendering.number_of_bytes(sum(row["payload_bytes"] for row in rows)),
    )


def _place(call_site: Any) -> str:
    """Return ``call_site`` without the path of site-packages or of the working directory."""
    if rendering.is_missing(call_site):
        return _UNKNOWN
    place = str(call_site)
    for shared in ("/site-packages/", f"{Path.cwd()}/"):
        _, separator, rest = place.partition(shared)
        place = rest if separator else place
    return place

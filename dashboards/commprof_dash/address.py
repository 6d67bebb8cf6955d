"""The state of a page as text: the query of its address, so that it can be shared and stepped back to."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final
from urllib.parse import parse_qs, quote

Query = Mapping[str, tuple[str, ...]]

RUN: Final = "run"
MEASURE: Final = "measure"


def parse(search: str | None) -> Query:
    """The query of an address (``?run=a&run=b``) as values by key. A key without value stands for "none chosen"."""
    pairs = parse_qs((search or "").removeprefix("?"), keep_blank_values=True)
    return {key: tuple(value for value in values if value) for key, values in pairs.items()}


def one(query: Query, key: str, allowed: Collection[str], default: str) -> str:
    """The value of ``key``, or ``default`` where the address says nothing or something that is not ``allowed``."""
    values = query.get(key, ())
    return values[0] if values and values[0] in allowed else default


def link(path: str, **values: str | Sequence[str]) -> str:
    """An address within the dashboard: ``link("/compare", run=["a", "b"])`` is ``/compare?run=a&run=b``."""
    pairs = [
        (key, item)
        for key, value in values.items()
        for item in ([value] if isinstance(value, str) else value or [""])
    ]
    query = "&".join(f"{key}={quote(item, safe='/')}" for key, item in pairs)
    return f"{path}?{query}" if query else path

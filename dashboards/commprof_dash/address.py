"""Reads and writes the query of a page's address, which holds the page's state."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final
from urllib.parse import parse_qs, quote

Query = Mapping[str, tuple[str, ...]]

RUN: Final = "run"
MEASURE: Final = "measure"
TICK: Final = "tick"  # the runs that are ticked on Runs; the other pages show them where no run is named


def parse(search: str | None) -> Query:
    """Parse the query of an address (``?run=a&run=b``) into values by key. A key without value means "none chosen"."""
    pairs = parse_qs((search or "").removeprefix("?"), keep_blank_values=True)
    return {key: tuple(value for value in values if value) for key, values in pairs.items()}


def runs_in(query: Query) -> tuple[str, ...]:
    """The runs that an address names; else those that are ticked in it."""
    return query.get(RUN, query.get(TICK, ()))


def one(query: Query, key: str, allowed: Collection[str], default: str) -> str:
    """Return the value of ``key``, or ``default`` if the address has none or one that is not ``allowed``."""
    values = query.get(key, ())
    return values[0] if values and values[0] in allowed else default


def link(path: str, **values: str | Sequence[str]) -> str:
    """Return an address within the dashboard: ``link("/compare", run=["a", "b"])`` is ``/compare?run=a&run=b``."""
    pairs = [
        (key, item)
        for key, value in values.items()
        for item in ([value] if isinstance(value, str) else value or [""])
    ]
    query = "&".join(f"{key}={quote(item, safe='/')}" for key, item in pairs)
    return f"{path}?{query}" if query else path

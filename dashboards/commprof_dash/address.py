"""Reads and writes the query of a page's address, which contains the state of the page."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final
from urllib.parse import parse_qs, quote

Query = Mapping[str, tuple[str, ...]]

RUN: Final = "run"
MEASURE: Final = "measure"
# The runs that are ticked on the page Runs. The other pages show these runs if the address names no run.
TICK: Final = "tick"


def parse(search: str | None) -> Query:
    """Parse the query of an address (``?run=a&run=b``) into values by key. A key without value means "none chosen"."""
    pairs = parse_qs((search or "").removeprefix("?"), keep_blank_values=True)
    return {key: tuple(value for value in values if value) for key, values in pairs.items()}


def runs_in(query: Query) -> tuple[str, ...]:
    """Return the runs that an address names, or else the runs that are ticked in the address."""
    return query.get(RUN, query.get(TICK, ()))


def one(query: Query, key: str, allowed: Collection[str], default: str) -> str:
    """Return the value of ``key``, or ``default`` if the address has no value or a value that is not in ``allowed``."""
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

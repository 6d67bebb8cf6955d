"""Builds the horizontal axis of figures with values for each rank."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

_MOST_TICKS: Final = 12


def rank_axis(ranks: Iterable[int]) -> dict[str, Any]:
    """Return a plotly axis with ticks at whole ranks only, and only a few ticks if there are many ranks."""
    distinct = sorted(set(ranks))
    every = max(1, -(-len(distinct) // _MOST_TICKS))
    shown = distinct[::every]
    return {
        "title": {"text": "Rank"},
        "tickvals": shown,
        "ticktext": [str(rank) for rank in shown],
        "showgrid": False,
        "zeroline": False,
    }

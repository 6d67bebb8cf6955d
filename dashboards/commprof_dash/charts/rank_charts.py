"""The horizontal axis of figures with something for each rank."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

_MOST_TICKS: Final = 12


def rank_axis(ranks: Iterable[int]) -> dict[str, Any]:
    """A plotly axis with ticks at whole ranks only, a few of them where there are many."""
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

"""Defines the series of the traffic charts: one per operation, and one per pair of intended and issued operation."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import pandas as pd

from commprof.schema import OPS, Op
from commprof_dash.theme import OP_COLOURS, OTHER_COLOUR

REDUCING: Final = (Op.ALL_REDUCE, Op.REDUCE, Op.REDUCE_SCATTER)
_ISSUED_AS: Final = " as "


class Series(NamedTuple):
    """A series with its color and hatch."""

    name: str
    colour: str
    hatch: str  # plotly's pattern shape; "" for none


def series_name(op: str, intended_op: str | None) -> str:
    """Return ``reduce_scatter as all_to_all`` for an all_to_all that replaces a reduce_scatter, else the operation."""
    if intended_op is None or pd.isna(intended_op) or intended_op == op:
        return op
    return f"{intended_op}{_ISSUED_AS}{op}"


def meant_op(name: str) -> str:
    """Return the intended operation of a series: ``reduce_scatter`` for ``reduce_scatter as all_to_all``."""
    return name.partition(_ISSUED_AS)[0]


def with_series(frame: pd.DataFrame) -> pd.DataFrame:
    """Return ``frame`` with a column ``series``, from its columns ``op`` and ``intended_op``."""
    pairs = list(zip(frame["op"].tolist(), frame["intended_op"].tolist(), strict=True))
    # There are few operations in many rows, so names are cached. A missing intended operation is not equal to
    # itself, so the key is its text.
    known: dict[tuple[str, str], str] = {}
    names = []
    for op, intended in pairs:
        key = (op, str(intended))
        if key not in known:
            known[key] = series_name(op, intended)
        names.append(known[key])
    return frame.assign(series=pd.Series(names, index=frame.index, dtype="str"))


def is_reducing(name: str) -> bool:
    """Return whether the intended operation of a series is all_reduce, reduce or reduce_scatter."""
    return meant_op(name) in REDUCING


def series_in_order(names: pd.Series) -> list[Series]:
    """Return the distinct series of ``names``, in the order of ``schema.OPS``, with their colors and hatches."""
    known = {op: position for position, op in enumerate(OPS)}
    ordered = sorted(set(names), key=lambda name: (known.get(meant_op(name), len(known)), name))
    return [
        Series(name, OP_COLOURS.get(meant_op(name), OTHER_COLOUR), "/" if _ISSUED_AS in name else "")
        for name in ordered
    ]


def marker(series: Series) -> dict[str, Any]:
    """Return plotly's marker for the bars of ``series``."""
    look = hatched(series.colour, series.hatch, 0.32)
    look["pattern"]["solidity"] = 0.2
    return look


def hatched(colour: str, hatch: str, opacity: float) -> dict[str, Any]:
    """Return plotly's marker for bars of ``colour`` with the pattern ``hatch`` ("" for none) over the color."""
    pattern = {"shape": hatch, "fillmode": "overlay", "fgcolor": "#ffffff", "fgopacity": opacity, "size": 7}
    return {"color": colour, "line": {"width": 0}, "pattern": pattern}

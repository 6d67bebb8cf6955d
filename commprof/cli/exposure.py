"""The part of ``commprof report`` about time: what the program stood still for, and what ran beside it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from commprof.cli import rendering
from commprof.cli.rendering import Heading, Rows

if TYPE_CHECKING:
    import pandas as pd

_HEADINGS: Final = (
    Heading("purpose"),
    Heading("exposed", number=True),
    Heading("of the step", number=True),
    Heading("overlapped", number=True),
    Heading("timed", number=True),
)
_LEGEND: Final = (
    "exposed: time in which the program stood still for collectives (also where a rank came late), each moment once, mean "
    "over the ranks. overlapped: time in which some were under way and the program stood still for none. timed: records "
    "whose exposed time is known; >=: at least so much, since of some it is not."
)


def per_step_parts(per_step: pd.DataFrame) -> list[Rows | str]:
    """What a training step stands still for; nothing where no step ended, and a sentence where it is not known."""
    rows = rendering.records(per_step)
    if not rows:
        return []
    if rendering.is_missing(rows[-1]["exposed_ns"]):
        why = _unseen_waits(rows[-1])
        return [rendering.paragraph(f"Exposed per training step: not known. {why}") + "\n"] if why else []
    steps = rows[-1]["steps"]
    name = f"Exposed per training step, median of {steps} {'step' if steps == 1 else 'steps'}"
    legend = [_LEGEND]
    legend += [why] if (why := _unseen_waits(rows[-1])) else []
    return [
        Rows(_HEADINGS, [_cells(row) for row in rows], name),
        rendering.paragraph(" ".join(legend)) + "\n",
    ]


def _unseen_waits(row: Mapping[str, Any]) -> str:
    if not row["unwaited"]:
        return ""
    return (
        f"For {rendering.count(row['unwaited'])} records no wait was seen (DDP and compiled code wait in C++): "
        "what they cost is not known."
    )


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    purpose = "(no purpose given)" if rendering.is_missing(row["purpose"]) else str(row["purpose"])
    return (
        purpose,
        at_least(row, rendering.duration(row["exposed_ns"])),
        at_least(row, _share(row["exposed_share"])),
        _overlapped(row),
        f"{rendering.count(row['timed'])} of {rendering.count(row['records'])}",
    )


def at_least(row: Mapping[str, Any], text: str) -> str:
    """``text``, a time that was stood still, and whether it is a lower bound: of some records it is not known."""
    return f">= {text}" if text != rendering.MISSING and row["timed"] < row["records"] else text


def _share(value: Any) -> str:
    return rendering.MISSING if rendering.is_missing(value) else f"{100 * float(value):.1f} %"


def _overlapped(row: Mapping[str, Any]) -> str:
    """At most so much, where the backend itself did not tell the end of all of them."""
    text = rendering.duration(row["overlapped_ns"])
    bounded = not rendering.is_missing(row["overlapped_ns"]) and row["overlapped_ns"] > 0
    return f"<= {text}" if bounded and row["sampled"] < row["records"] else text


def step_texts(exposure: pd.DataFrame) -> dict[tuple[int, int], str]:
    """By attempt and step: what the heading of a step says of its time, from exposure by attempt and step."""
    return {
        (row["attempt"], row["step"]): f"exposed {at_least(row, rendering.duration(row['exposed_ns']))} "
        f"({_share(row['exposed_share'])}), overlapped {_overlapped(row)}"
        for row in rendering.records(exposure)
        if not rendering.is_missing(row["step"]) and not rendering.is_missing(row["exposed_ns"])
    }

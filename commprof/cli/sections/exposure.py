"""The part of ``commprof report`` about time: exposed and overlapped communication."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from commprof.cli import rendering
from commprof.cli.rendering import Heading, Rows

_HEADINGS: Final = (
    Heading("purpose"),
    Heading("exposed", number=True),
    Heading("of the step", number=True),
    Heading("overlapped", number=True),
    Heading("timed", number=True),
)
_LEGEND: Final = (
    "exposed: time in which a rank's program was blocked on a collective (also where another rank came late), each moment "
    "once; mean over the ranks, then median over these steps. of the step: exposed over the median time of the same steps. "
    "Purposes overlap in time, and each is a median of its own: all is their union, not their sum. overlapped: time in "
    "which some were under way and the program was blocked on none; <=: at most so long (the end of some is not known). "
    "timed: records whose exposed time is known; >=: at least so long, since of some it is not."
)


def per_step_parts(rows: Sequence[Mapping[str, Any]]) -> list[Rows | str]:
    """The exposed time of a training step; nothing where no step ended, and a sentence where it is not known."""
    if not rows:
        return []
    whole = rows[-1]
    if rendering.is_missing(whole["exposed_low_ns"]):
        why = _unseen_waits(whole)
        return [rendering.paragraph(f"Exposed per training step: not known. {why}") + "\n"] if why else []
    steps, time = whole["steps"], rendering.duration(whole["step_ns"])
    name = f"Exposed per training step of {time}, median of {steps} warm {'step' if steps == 1 else 'steps'}"
    legend = " ".join(part for part in (_LEGEND, _stalls(whole), _unseen_waits(whole)) if part)
    return [Rows(_HEADINGS, [_cells(row) for row in rows], name), rendering.paragraph(legend) + "\n"]


def _stalls(row: Mapping[str, Any]) -> str:
    if not row["bounded"]:
        return ""
    return (
        f"bounds: {rendering.count(row['bounded'])} records were waited for in C++ (DistributedDataParallel), within "
        "intervals that are known; the exposed time lies between the two numbers."
    )


def _unseen_waits(row: Mapping[str, Any]) -> str:
    unseen = row["unwaited"] - row["bounded"]
    if not unseen:
        return ""
    return (
        f"For {rendering.count(unseen)} records no wait was seen (compiled code waits in C++; a program may only ask "
        "whether they are complete): what they cost is not known."
    )


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    from commprof.analysis.columns.exposed_texts import exposed_share, exposed_time, overlapped_time

    purpose = "(no purpose given)" if rendering.is_missing(row["purpose"]) else str(row["purpose"])
    known = row["timed"] + row["bounded"]
    return (
        "all (union)" if purpose == "all" else purpose,
        exposed_time(row) or rendering.MISSING,
        exposed_share(row) or rendering.MISSING,
        overlapped_time(row) or rendering.MISSING,
        f"{rendering.count(known)} of {rendering.count(row['records'])}",
    )


def step_texts(
    steps: Sequence[Mapping[str, Any]], exposure: Sequence[Mapping[str, Any]]
) -> dict[tuple[int, int], str]:
    """By attempt and step: what the heading of a step says of its time.

    Args:
        steps: the training steps.
        exposure: exposure by attempt and step.
    """
    from commprof.analysis.columns.exposed_texts import exposed_share, exposed_time, overlapped_time

    overlapped = {(row["attempt"], row["step"]): overlapped_time(row) for row in exposure}
    found = {}
    for row in steps:
        exposed, key = exposed_time(row), (row["attempt"], row["step"])
        if exposed is not None:
            share = exposed_share(row, "duration_ns") or rendering.MISSING
            found[key] = f"exposed {exposed} ({share}), overlapped {overlapped.get(key) or rendering.MISSING}"
    return found

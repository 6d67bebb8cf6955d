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
    "exposed: time in which a rank's program was blocked on a collective, including waits for late ranks; concurrent waits "
    "count once; mean over the ranks, then median over these steps. of the step: exposed over the median time of the same "
    "steps. all: the union of the purposes, not their sum, because they overlap in time; each row is a separate "
    "median. overlapped: time in which collectives were under way and the program was blocked on none; <=: upper "
    "bound, because some end times are not known. timed: records whose exposed time is known; >=: lower bound, "
    "because for some it is not known."
)


def per_step_parts(rows: Sequence[Mapping[str, Any]]) -> list[Rows | str]:
    """Return the table of exposed time per step; empty if no step ended.

    If the exposed time is not known, the result is a sentence with the reason.
    """
    if not rows:
        return []
    union = rows[-1]
    if rendering.is_missing(union["exposed_low_ns"]):
        why = _unseen_waits(union)
        return [rendering.paragraph(f"Exposed per training step: not known. {why}") + "\n"] if why else []
    steps, time = union["steps"], rendering.duration(union["step_ns"])
    name = f"Exposed per training step of {time}, median of {steps} warm {'step' if steps == 1 else 'steps'}"
    legend = " ".join(part for part in (_LEGEND, _stalls(union), _unseen_waits(union)) if part)
    return [Rows(_HEADINGS, [_cells(row) for row in rows], name), rendering.paragraph(legend) + "\n"]


def _stalls(row: Mapping[str, Any]) -> str:
    if not row["bounded"]:
        return ""
    return (
        f"bounds: {rendering.count(row['bounded'])} records were waited for in C++ (DistributedDataParallel), within "
        "known intervals; the exposed time is between the two numbers."
    )


def _unseen_waits(row: Mapping[str, Any]) -> str:
    unseen = row["unwaited"] - row["bounded"]
    if not unseen:
        return ""
    return (
        f"For {rendering.count(unseen)} records no wait was recorded (compiled code waits in C++; a program may only poll "
        "for completion): their exposed time is not known."
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
    """Return the text about exposed time for the heading of each step, by attempt and step.

    Args:
        steps: The training steps.
        exposure: The exposed and overlapped time by attempt and step.
    """
    from commprof.analysis.columns.exposed_texts import exposed_share, exposed_time, overlapped_time

    overlapped = {(row["attempt"], row["step"]): overlapped_time(row) for row in exposure}
    texts = {}
    for row in steps:
        exposed, key = exposed_time(row), (row["attempt"], row["step"])
        if exposed is not None:
            share = exposed_share(row, "duration_ns") or rendering.MISSING
            texts[key] = f"exposed {exposed} ({share}), overlapped {overlapped.get(key) or rendering.MISSING}"
    return texts

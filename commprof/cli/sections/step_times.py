"""The times of a plan: the time of messages by purpose, and the bounds of the step time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from commprof.cli import rendering
from commprof.cli.rendering import Heading, Rows

if TYPE_CHECKING:
    from commprof.plan.durations import StepTime, Timing

_SMALL: Final = 0.05  # a row below this share of all communication gets no sentence


def show_time(timed: StepTime | str, timing: Timing) -> None:
    """Print the time of the messages of one setting and the bounds of its step time, or why they are not known."""
    if isinstance(timed, str):
        rendering.show(rendering.paragraph(f"Times of messages are not known: {timed}."))
        return
    shown = rendering.duration
    rows = [
        (
            row.purpose,
            row.op,
            rendering.count(row.group_size),
            shown(row.time_ns),
            shown(row.latency_ns),
            shown(row.overlapping_ns),
        )
        for row in timed.rows
    ]
    total = ("all", "", "", *map(shown, (timed.communication_ns, timed.latency_ns, timed.overlapping_ns)))
    headings = [
        Heading("purpose"),
        Heading("issued"),
        Heading("ranks", True),
        Heading("time", True),
        Heading("latency in it", True),
        Heading("can overlap", True),
    ]
    rendering.show("", Rows(headings, [*rows, (), total], "time of messages per step"), "")
    for sentence in [*_time_sentences(timed, timing), *_latency_sentences(timed)]:
        rendering.show(rendering.paragraph(sentence))


def _time_sentences(timed: StepTime, timing: Timing) -> list[str]:
    shown = rendering.duration
    source = f"Times are from {timing.source.text}." if timing.source else ""
    part = shown(timed.overlapping_ns) if timed.overlapping_ns else "nothing"
    sent = f"{shown(timed.communication_ns)} of communication; {part} can overlap the"
    if timed.least_ns is None:
        return [
            f"A step has {sent} computation. Its time is not predicted without --step-compute or --recorded.",
            source,
        ]
    narrowed = [] if timing.recorded is None else [f"Narrowed by {timing.recorded.text}."]
    return [
        f"A step takes {_bounds(timed)}: {shown(timing.compute_ns)} of computation and {sent} computation.",
        *narrowed,
        source,
    ]


def _latency_sentences(timed: StepTime) -> list[str]:
    """Return a sentence for each kind of message whose latency exceeds half of its time.

    Kinds with a small share of the communication are left out.
    """
    rows = [row for row in timed.rows if 2 * row.latency_ns > row.time_ns > _SMALL * timed.communication_ns]
    shown = rendering.duration
    return [
        f"{row.purpose}, {row.op}: {shown(row.latency_ns)} of {shown(row.time_ns)} is latency. Fewer, larger messages or "
        "fewer ranks in a group would shorten it."
        for row in rows
    ]


def _bounds(timed: StepTime) -> str:
    ends = rendering.duration(timed.least_ns), rendering.duration(timed.most_ns)
    return " to ".join(dict.fromkeys(ends))


def time_headings(timing: Timing) -> list[Heading]:
    """Return the headings of the columns with times in a comparison of settings."""
    if timing.source is None:
        return []
    names = ["communication"] if timing.compute_ns is None else ["communication", "step"]
    return [Heading(name, True) for name in names]


def time_cells(timed: StepTime | str, timing: Timing) -> list[str]:
    """Return the cells of a setting in the columns of :func:`time_headings`."""
    shown = rendering.duration
    cells = [rendering.MISSING, rendering.MISSING]
    if not isinstance(timed, str):
        cells = [shown(timed.communication_ns), _bounds(timed)]
    return cells[: len(time_headings(timing))]


def show_missing_times(times: Sequence[StepTime | str], shown: Sequence[str], timing: Timing) -> None:
    """Print why times are not known, except for reasons in ``shown``, and print the source of the known times."""
    if timing.source is None:
        return
    for problem in dict.fromkeys(each for each in times if isinstance(each, str)):
        if problem not in shown:
            rendering.show(rendering.paragraph(f"Times of messages are not known: {problem}."))
    rendering.show(rendering.paragraph(f"Times are from {timing.source.text}."))

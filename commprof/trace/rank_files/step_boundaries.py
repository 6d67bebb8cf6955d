"""Derives training steps, and evaluations and checkpoints between them, from the events of one rank.

A step lasts from the end of the previous step to the end of its last optimizer step. The time from there to the first
pass of the next step is the input of the next step. If a rank evaluates or saves in this time, the time until the end
of the last evaluation or checkpoint, or of the last collective after it, is outside all steps. The time after the last
step is outside all steps, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from commprof.schema import Phase
from commprof.trace.rank_files.events import Events

_STEP_LIMIT: Final = 1 << 31
_TIME_LIMIT: Final = 1 << 63
_OUTSIDE: Final = (Phase.EVALUATION, Phase.CHECKPOINT)

Row = Mapping[str, Any]
LastEnd = Callable[[int, int | None], int | None]


@dataclass(slots=True)
class Pass:
    """An evaluation or a checkpoint."""

    phase: str
    begin_ns: int
    end_ns: int | None = None  # None: the process was killed before the end
    resume_ns: int | None = None  # the time at which training resumed
    passes: int = 1
    has_trained: bool = False  # whether a training pass of the step had begun before


@dataclass(slots=True)
class Gap:
    """The time from the end of a step to the first pass of the next step.

    Attributes:
        after: The step before the gap. None if no step has ended.
        start_ns: The begin of the gap.
        stop_ns: The end of the gap. None if no step follows.
        next_step: The next step. None if no step follows.
        passes: The evaluations and checkpoints in the gap.
        phase: The phase, evaluation or checkpoint, that puts the gap outside all steps. None if the gap is the input
            of the next step.
        end_ns: The end of the time outside all steps. None if the process was killed before this end.
    """

    after: int | None
    start_ns: int
    stop_ns: int | None
    next_step: int | None
    passes: list[Pass] = field(default_factory=list)
    phase: str | None = None
    end_ns: int | None = None


@dataclass(slots=True)
class Span:
    """A training step."""

    step: int
    begin: Row
    begin_ns: int
    last: Row | None = None  # the row with the resources in use at the end of the step
    end_ns: int | None = None
    ends: list[Row] = field(default_factory=list)
    next: Row | None = None  # the boundary after the step; None if the process was killed
    outside_ns: int = 0  # the duration of evaluations and checkpoints within the step


@dataclass(slots=True)
class Course:
    """The steps of one rank in order, and the gaps between them.

    Attributes:
        spans: The steps.
        gaps: The gaps before, between and after the steps.
        void: Step numbers that turned out not to be steps, each with the step that replaces it (-1 for none).
        passes: All evaluations and checkpoints.
        ended_ns: The time at which the recording ended. None if it did not end.
    """

    spans: list[Span]
    gaps: list[Gap]
    void: dict[int, int]
    passes: list[Pass]
    ended_ns: int | None


def course_of(events: Events, elsewhere: Mapping[int, str], last_end: LastEnd) -> Course:
    """Return the steps that the events of one rank describe.

    Args:
        events: The events of the rank.
        elsewhere: The phase (evaluation or checkpoint) of other ranks, by the step that it followed.
        last_end: A function that returns the end of the last collective issued between two times, in ns.
    """
    rows = [{"step": None, **row} for row in events.rows["step"] if _is_boundary(row)]
    named = [row for row in rows if row["step"] is not None and not row.get("automatic") and not _is_end(row)]
    void: dict[int, int] = {}
    if named:  # Steps that the program names replace steps that were detected automatically.
        first_ns = named[0]["time_ns"]
        automatic = {row["step"] for row in rows if row.get("automatic") and row["step"] is not None}
        void = dict.fromkeys(automatic - {row["step"] for row in named}, -1)
        rows = [
            row
            for row in rows
            if not row.get("automatic") and not (_is_end(row) and row["time_ns"] < first_ns)
        ]
    closing = next((row for row in reversed(rows) if row["step"] is None), None)
    course = Course(_spans(rows), [], void, _passes(events), None if closing is None else closing["time_ns"])
    _drop_empty_end(course)
    for number in range(-1, len(course.spans)):
        _add_gap(course, number, elsewhere, last_end)
    for span in course.spans:
        span.outside_ns = sum(
            each.end_ns - each.begin_ns
            for each in course.passes
            if each.end_ns is not None
            and span.end_ns is not None
            and span.begin_ns <= each.begin_ns
            and each.end_ns <= span.end_ns
        )
    return course


def is_time(value: object) -> bool:
    """Return whether ``value`` is a time in ns that fits a column. A damaged line may have any value."""
    return type(value) is int and -_TIME_LIMIT <= value < _TIME_LIMIT


def _is_boundary(row: Row) -> bool:
    step = row.get("step")
    return is_time(row.get("time_ns")) and (
        step is None or (type(step) is int and -_STEP_LIMIT <= step < _STEP_LIMIT)
    )


def _is_end(row: Row) -> bool:
    return row.get("ended") is True


def _spans(rows: Iterable[Row]) -> list[Span]:
    spans: list[Span] = []
    current: Span | None = None
    for row in rows:
        if _is_end(row):
            if current is not None and current.step == row["step"]:
                current.ends.append(row)
        elif row["step"] is None or row.get("micro_step", 0) == 0:
            if current is not None and row["step"] == current.step:
                continue  # A second engine reports the same step.
            if current is not None:
                current.next = row
            current = None
            if row["step"] is not None and row["step"] >= 0:
                current = Span(row["step"], row, row["time_ns"])
                spans.append(current)
    return spans


def _passes(events: Events) -> list[Pass]:
    """Return evaluations and checkpoints in order. Each has one event at its begin and a second event after its end."""
    by_begin: dict[int, Pass] = {}
    for row in events.rows["outside_step"]:
        begin, phase = row.get("begin_ns"), row.get("phase")
        if not is_time(begin) or phase not in _OUTSIDE:
            continue
        one = by_begin.setdefault(begin, Pass(str(phase), begin, has_trained=bool(row.get("has_trained"))))
        one.end_ns, one.resume_ns = (
            value if is_time(value := row.get(name)) else None for name in ("end_ns", "resume_ns")
        )
        one.passes = passes if type(passes := row.get("passes")) is int else 1
    return [by_begin[begin] for begin in sorted(by_begin)]


def _drop_empty_end(course: Course) -> None:
    """Remove a last step in which nothing was trained. Its boundary then ends the step before it.

    This applies only if an optimizer is known to have stepped in an earlier step.
    """
    if len(course.spans) < 2 or not any(span.ends for span in course.spans[:-1]):
        return
    last = course.spans[-1]
    if last.next is not None and last.next.get("has_trained") is False and not last.ends:
        course.spans.pop()
        course.spans[-1].next = last.next
        course.void[last.step] = -1


def _add_gap(course: Course, number: int, elsewhere: Mapping[int, str], last_end: LastEnd) -> None:
    """Add the gap after span ``number`` (-1: before the first span).

    The function also sets the end of this span and the begin of the next span.
    """
    span = course.spans[number] if number >= 0 else None
    after = course.spans[number + 1] if number + 1 < len(course.spans) else None
    if span is not None and not span.ends and after is None:
        _close_last(course, span)
        return
    passes = _within(course, span, after)
    if span is None and not (passes and after):
        return
    start, is_told = (passes[0].begin_ns, True) if span is None else _end_of(span, passes)
    gap = Gap(
        None if span is None else span.step,
        start,
        None if after is None else max(after.begin_ns, *(each.resume_ns or 0 for each in passes), 0),
        None if after is None else after.step,
        passes,
    )
    if span is not None:
        span.end_ns, span.last = start, span.ends[-1] if span.ends and is_told else span.next
        others = elsewhere.get(span.step)
        gap.phase = passes[0].phase if passes else others
    else:
        gap.phase = passes[0].phase
    if gap.phase is not None or after is None:
        _end_outside(gap, course, last_end)
    if after is not None:
        after.begin_ns = _begin_of(gap, after, is_told)
    if gap.phase is not None or after is None or is_told:
        course.gaps.append(gap)


def _close_last(course: Course, span: Span) -> None:
    """Set the end of a last step in which no optimizer stepped.

    The step ends at its next boundary if this is the end of the recording, or if no step has an optimizer step.
    Otherwise the end of the step stays unknown.
    """
    if span.next is None:
        return
    if span.next.get("closed") or not any(each.ends for each in course.spans):
        span.end_ns, span.last = span.next["time_ns"], span.next


def _within(course: Course, span: Span | None, after: Span | None) -> list[Pass]:
    """Return the evaluations and checkpoints after the end of ``span`` and before the first pass of ``after``."""
    begin = -1 if span is None else (span.ends[-1]["time_ns"] if span.ends else None)
    inside = []
    for each in course.passes:
        if after is not None and each.begin_ns >= after.begin_ns:
            if each.has_trained or (after.next is not None and each.begin_ns >= after.next["time_ns"]):
                continue
            if not after.ends or each.begin_ns < after.ends[0]["time_ns"]:
                inside.append(each)
        elif begin is not None and each.begin_ns >= begin:
            inside.append(each)
    return (
        inside if span is not None else [each for each in inside if after and each.begin_ns >= after.begin_ns]
    )


def _end_of(span: Span, passes: Sequence[Pass]) -> tuple[int, bool]:
    """Return the end of ``span`` in ns, and whether it is the end of its optimizer step and not the next boundary."""
    following = None if span.next is None or span.next["step"] is None else span.next["time_ns"]
    if not span.ends:
        assert following is not None
        return following, False
    end: int = span.ends[-1]["time_ns"]
    if following is None or span.ends[-1].get("is_told") or (passes and passes[0].begin_ns < following):
        return end, True
    return following, False


def _end_outside(gap: Gap, course: Course, last_end: LastEnd) -> None:
    """Set the end of the time outside all steps in ``gap``: the end of its last pass or of its last collective."""
    if gap.passes and gap.passes[-1].end_ns is None:
        return
    if gap.phase is None:
        gap.end_ns = course.ended_ns
        return
    last = last_end(gap.start_ns, gap.stop_ns)
    ends = [each.end_ns for each in gap.passes if each.end_ns is not None]
    gap.end_ns = max([gap.start_ns, *ends, *([] if last is None else [last])])
    if gap.stop_ns is not None:
        gap.end_ns = min(gap.end_ns, gap.stop_ns)


def _begin_of(gap: Gap, after: Span, is_told: bool) -> int:
    if gap.phase is not None:
        return gap.stop_ns or after.begin_ns if gap.end_ns is None else gap.end_ns
    return gap.start_ns if is_told else after.begin_ns

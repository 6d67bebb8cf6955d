"""Formats a dump as text: the verdict, then the ranks, the groups and the stacks. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Final

from commprof.align.ranks.agreement import ranks_text
from commprof.printable import escaped
from commprof.sampling.calls import Call
from commprof.sampling.job_dump import Dump
from commprof.sampling.processes import State
from commprof.sampling.situation import RankReport, Situation, size_of
from commprof.sampling.stacks import Stack
from commprof.sampling.waits import Standing, standings

_WIDTH: Final = 100
_LEGEND: Final = (
    "#N is the column pg_seq: the N-th collective of its group, counted from 0; messages are counted apart. Sizes are "
    "payload_bytes."
)
_MOST_GROUPS: Final = 40


def dump_text(dump: Dump) -> str:
    """Return the complete dump as text that ends with a line feed."""
    situation = dump.situation
    lines = [
        escaped(dump.verdict.sentence),
        *(escaped(f"note: {note}") for note in dump.verdict.notes),
        "",
        escaped(f"run    {dump.run}"),
        f"taken  {dump.taken:%Y-%m-%d %H:%M:%S} UTC",
        "",
        "Ranks",
        *_ranks(situation),
        "",
        "Groups",
        *_groups(situation),
        "",
        *(["Stacks", *_stacks(situation), ""] if dump.with_stacks else []),
        _folded(_LEGEND),
    ]
    return "\n".join(lines) + "\n"


def _folded(text: str) -> str:
    return textwrap.fill(text, _WIDTH, break_long_words=False, break_on_hyphens=False)


def _ranks(situation: Situation) -> list[str]:
    lines = []
    for report in situation.reports.values():
        calls = report.calls
        lines.append(
            f"  rank {calls.rank}, pid {calls.pid} on {calls.host or '?'}: {_state(situation, report)}"
        )
        lines += [f"    in      {_call(situation, report, call, call.issue_ns)}" for call in calls.inside()]
        last, unknown = calls.last_done(), calls.last_unknown()
        if last is not None:
            lines.append(f"    last    {_call(situation, report, last, last.end_ns)}")
        if unknown is not None:
            issued = _call(situation, report, unknown, unknown.issue_ns)
            lines.append(f"    issued  {issued}, and whether it has completed is not known")
    return lines or ["  no rank has left a file"]


def _state(situation: Situation, report: RankReport) -> str:
    if situation.is_past:
        return "ended" if report.state is State.ENDED else "ended without closing its recording"
    return {
        State.RUNS: "runs",
        State.STOPPED: "stopped by a signal",
        State.GONE: "its process is gone",
        State.ENDED: "has ended",
        State.ELSEWHERE: "on another host",
    }[report.state]


def _call(situation: Situation, report: RankReport, call: Call, time_ns: int) -> str:
    details = [
        f"{situation.name(call)} of {situation.label_of(call)}",
        size_of(call),
        call.purpose,
        call.site,
    ]
    details.append(f"thread {call.other_thread}" if call.other_thread else None)
    details += [f"step {call.step}" if call.step >= 0 else None, report.ago(time_ns)]
    return escaped(", ".join(part for part in details if part))


def _groups(situation: Situation) -> list[str]:
    all_standings = standings(situation.groups)
    uneven = [standing for standing in all_standings if not standing.is_even]
    even = [standing for standing in all_standings if standing.is_even]
    lines = [line for standing in uneven for line in _uneven(situation, standing)]
    for standing in even[:_MOST_GROUPS]:
        call = next(iter(standing.last.values()))
        assert call is not None
        at = f"all have issued {situation.name(call)} last"
        lines.append(f"  {situation.label(standing.group)} ({ranks_text(standing.group.ranks)}): {at}")
    if len(even) > _MOST_GROUPS:
        lines.append(
            f"  and {len(even) - _MOST_GROUPS} more groups, in each of which all ranks are at the same collective"
        )
    return lines or ["  no collective has been issued"]


def _uneven(situation: Situation, standing: Standing) -> list[str]:
    """Return the lines of a group whose ranks differ in progress; the ranks with the most progress come first."""
    by_place: dict[tuple[int, str], list[int]] = {}
    for rank, call in standing.last.items():
        place = (
            (-1, "nothing") if call is None else (call.pg_seq, f"{situation.name(call)} ({size_of(call)})")
        )
        by_place.setdefault(place, []).append(rank)
    lines = [f"  {situation.label(standing.group)} ({ranks_text(standing.group.ranks)}):"]
    for (_, what), ranks in sorted(by_place.items(), reverse=True):
        has = "has" if len(ranks) == 1 else "have"
        lines.append(f"    {ranks_text(ranks)} {has} issued {what.replace(' ()', '')} last")
    return lines


def _stacks(situation: Situation) -> list[str]:
    """Return the lines of each distinct stack, with the ranks and threads that have this stack."""
    ranks_by_stack: dict[tuple[str, tuple[str, ...]], list[int]] = {}
    lines = []
    for report in situation.reports.values():
        if report.stacks is None:
            continue
        if report.stacks.problem is not None:
            lines.append(_folded(f"rank {report.rank}: no stacks: {report.stacks.problem}"))
        for stack in report.stacks.threads:
            key = (
                f"{_thread(situation, report, stack)}, by {report.stacks.source}",
                tuple(map(str, stack.frames)),
            )
            ranks_by_stack.setdefault(key, []).append(report.rank)
    for (thread, frames), ranks in ranks_by_stack.items():
        lines += _stack(ranks, thread, frames)
    return lines or ["none: no rank runs on this host"]


def _thread(situation: Situation, report: RankReport, stack: Stack) -> str:
    """Return a thread and its collective, such as ``main thread`` or ``thread loader in all_reduce #7``."""
    if stack.is_main or report.stacks is None:
        return "main thread"
    last = {(call.thread, call.thread_ident): call for call in report.calls.calls}
    mine = next((call for who, call in last.items() if report.stacks.of(*who) is stack), None)
    if mine is None:
        return f"thread {stack.thread.removeprefix('thread ')}"
    name = f"thread {mine.thread}"
    return f"{name} in {situation.name(mine)}" if mine in report.calls.inside() else name


def _stack(ranks: Sequence[int], thread: str, frames: Sequence[str]) -> list[str]:
    return [
        escaped(f"{ranks_text(ranks)}, {thread}, innermost call first:"),
        *(escaped(f"    {frame}") for frame in frames),
    ]

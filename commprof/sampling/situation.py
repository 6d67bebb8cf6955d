"""The state of the ranks of a job at one point in time, and texts about ranks, calls and groups. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Final, NamedTuple

from commprof.align.ranks.agreement import Difference, ranks_text, unshifted
from commprof.align.ranks.group_orders import OrderDifference
from commprof.analysis.columns.units import format_bytes, format_ns
from commprof.sampling.calls import Call, GroupFacts, RankCalls
from commprof.sampling.processes import State
from commprof.sampling.stacks import Stacks
from commprof.sampling.waits import (
    GroupCalls,
    Wait,
    find_difference,
    find_order_differences,
    find_unequal_split,
    find_waits,
    group_calls,
)
from commprof.schema import Op

_LIVING: Final = frozenset({State.RUNS, State.STOPPED, State.ELSEWHERE})


class End(NamedTuple):
    """How a job ended according to its launcher. A value is None if the launcher did not record the value."""

    exit_code: int | None = None
    first_failed_rank: int | None = None


END_UNKNOWN: Final = End()


@dataclass(slots=True)
class RankReport:
    """The state of one rank at the time of the dump.

    Attributes:
        now_ns: The time of the dump in ns on the rank's own clock, or None if not known.
        moved: Whether the rank issued or completed a call while it was observed, or None if not known.
    """

    calls: RankCalls
    state: State
    now_ns: int | None = None
    moved: bool | None = None
    stacks: Stacks | None = None

    @property
    def rank(self) -> int:
        """The number of the rank."""
        return self.calls.rank

    def ago(self, time_ns: int) -> str | None:
        """Return how long ago ``time_ns`` on this rank's clock was, such as ``12.3 s ago``; None if not known."""
        return (
            None if self.now_ns is None or not time_ns else f"{format_ns(max(0, self.now_ns - time_ns))} ago"
        )


class Situation:
    """The state of the ranks of a job at one point in time, and the waits among the ranks.

    Args:
        reports: The reports of the ranks whose files can be read.
        watched_ns: The time in ns for which the ranks were observed for progress.
        damaged: The reason why the files of a rank cannot be read, by rank.
        end: How the job ended.
    """

    def __init__(
        self,
        reports: Sequence[RankReport],
        watched_ns: int = 0,
        damaged: Mapping[int, str] | None = None,
        end: End = END_UNKNOWN,
    ) -> None:
        self.end = end
        self.damaged = dict(damaged or {})
        self.reports = {report.rank: report for report in reports}
        self.watched_ns = watched_ns
        self.groups: list[GroupCalls] = group_calls([report.calls for report in reports])
        self.waits: list[Wait] = find_waits([report.calls for report in reports], self.groups)
        # If no process is left, the report describes the end of the job.
        self.is_past = not any(report.state in _LIVING for report in reports)
        self.differences = self._differences()
        self.order_differences: list[OrderDifference] = find_order_differences(
            [report.calls for report in reports], self.groups, self.differences
        )
        self._labels = _labels([group.facts for group in self.groups])

    def _differences(self) -> list[Difference]:
        """Return the differences between ranks.

        They are the first collective of each group that its ranks issued differently, and the first all_to_all with
        unequal splits.
        """
        calls = {rank: report.calls for rank, report in self.reports.items()}
        all_ended = (
            all(report.state is State.ENDED for report in self.reports.values())
            and not self.end.exit_code
            and not self.damaged
            and not self.absent()
        )
        by_group = [find_difference(group, calls, all_ended=all_ended) for group in self.groups]
        differences = [difference for difference in by_group if difference is not None]
        splits = [find_unequal_split(group) for group in self.groups]
        return differences + unshifted((each for each in splits if each is not None), differences)

    def label(self, group: GroupFacts) -> str:
        """Return the label of a group: ``group default_pg``, with the ranks if several groups have this name."""
        return f"group {self._labels.get(group.pg, group.pg)}"

    def name(self, call: Call) -> str:
        """Return the name of a call: ``all_reduce #41``, ``send #3 to rank 1`` or ``all_reduce (raised)``."""
        what = call.what
        number = "(raised)" if call.raised else f"#{call.pg_seq}"
        if what.op == Op.SEND:
            return f"send {number} to {_peer(what.peer)}"
        if what.op == Op.RECV:
            return f"recv {number} from {_peer(what.peer)}"
        return f"{what.op} {number}"

    def describe(self, call: Call, report: RankReport | None = None, since: str = "issued") -> str:
        """Return details of a call: ``(4.00 MiB float32, issued at train.py:88 step, 12.3 s ago)``."""
        ago = None if report is None else report.ago(call.issue_ns)
        place = f"{since} at {short_site(call.site)}" if call.site else None
        if call.other_thread is not None:
            place = f"{place or since} in thread {call.other_thread}"
        details = [size_of(call), place if ago is None else f"{place or since}, {ago}"]
        return f"({', '.join(part for part in details if part)})" if any(details) else ""

    def whereabouts(self, rank: int, pg: str | None = None) -> str:
        """Return a clause about what a rank does instead of issuing the call that other ranks wait for.

        Args:
            rank: The rank.
            pg: The group that waits for the rank. The clause is about the thread that issued the last call in it.
        """
        report = self.reports.get(rank)
        if report is None:
            return "it left no trace"
        subject, where = _place(report, pg)
        if report.state is State.ENDED:
            return f"it {'had' if self.is_past else 'has'} ended{self._after_last(report)}"
        if report.state is State.GONE and not self.is_past:
            return f"its process (pid {report.calls.pid}) is gone{self._after_last(report)}"
        if report.state is State.STOPPED:
            return f"its process (pid {report.calls.pid}) is stopped by a signal{f', in {where}' if where else ''}"
        inside = report.calls.inside()
        if inside:
            verb = "stood" if self.is_past else "stands"
            thread = f" in thread {inside[-1].other_thread}" if inside[-1].other_thread else ""
            return f"it {verb} in {self.name(inside[-1])} of {self.label_of(inside[-1])}{thread}"
        if where is not None:
            return f"{subject} is in {where}"
        return f"its last collective {'was' if self.is_past else 'is'} {self._last(report)}"

    def absent(self) -> list[int]:
        """Return the ranks of the job that have no file."""
        worlds = [report.calls.world_size or 0 for report in self.reports.values()]
        return [
            rank
            for rank in range(max(worlds, default=0))
            if rank not in self.reports and rank not in self.damaged
        ]

    def label_of(self, call: Call) -> str:
        """Return the label of the group of ``call``."""
        return f"group {self._labels.get(call.what.pg, call.what.pg)}"

    def _after_last(self, report: RankReport) -> str:
        return f" after {self._last(report)}" if report.calls.calls else ""

    def _last(self, report: RankReport) -> str:
        last = report.calls.last_done()
        if last is None:
            return "none"
        site = f" at {short_site(last.site)}" if last.site else ""
        ago = report.ago(last.end_ns)
        return f"{self.name(last)} of {self.label_of(last)}{site}{f', {ago}' if ago else ''}"


def _place(report: RankReport, pg: str | None) -> tuple[str, str | None]:
    """Return the subject of a clause about a rank, and the place of one of its threads; None if it is not known.

    The thread is the thread that issued the last call in ``pg``, or else the main thread.
    """
    if report.stacks is None:
        return "it", None
    calls = report.calls.calls
    issued = next((call for call in reversed(calls) if call.what.pg == pg), calls[-1] if calls else None)
    stack = None if issued is None else report.stacks.of(issued.thread, issued.thread_ident)
    stack = stack or report.stacks.main
    place = None if stack is None else stack.place
    if stack is None or place is None:
        return "it", None
    subject = "it" if stack.is_main or issued is None else f"its thread {issued.thread}"
    return subject, f"{place.function} ({PurePath(place.file).name}:{place.line})"


def size_of(call: Call) -> str:
    """Return the size of a call, such as ``4.00 MiB float32``; empty for a barrier."""
    if call.what.op == Op.BARRIER:
        return ""
    return " ".join(part for part in (format_bytes(call.what.payload_bytes), call.what.dtype) if part)


def short_site(site: str | None) -> str:
    """Return a call site without its directory: ``train.py:88 step`` for ``/home/user/train.py:88 step``."""
    if site is None:
        return "an unknown place"
    file, colon, rest = site.rpartition(":")
    return f"{PurePath(file).name}{colon}{rest}"


def _peer(peer: int) -> str:
    return "any rank" if peer < 0 else f"rank {peer}"


def _labels(groups: Sequence[GroupFacts]) -> Mapping[str, str]:
    """Return the label of each group by name.

    The label is the description of the group. If several groups have the same description, the label also contains
    the name and the ranks.
    """
    named = [group.desc or group.pg for group in groups]
    return {
        group.pg: name if named.count(name) == 1 else f"{name} {group.pg} ({ranks_text(group.ranks)})"
        for group, name in zip(groups, named, strict=True)
    }

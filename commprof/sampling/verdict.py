"""The verdict on a hung job in one sentence: which rank blocks it. Pure."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from enum import StrEnum
from typing import Final, NamedTuple

from commprof.align.ranks.agreement import Difference, ranks_text
from commprof.analysis.columns.units import format_ns
from commprof.sampling.calls import Call
from commprof.sampling.processes import State
from commprof.sampling.situation import RankReport, Situation, short_site
from commprof.sampling.waits import Parting, Wait, culprits, find_cycle, find_parting, find_sites
from commprof.schema import Op

_SIGNALS_FROM: Final = 128  # shells and commprof add this to the number of a signal to get an exit code
_MOST_NAMED: Final = 4  # ranks that the sentence describes one by one


class Kind(StrEnum):
    """The kinds of verdicts on a job."""

    MISSING = "missing"  # some ranks have not issued a call that other ranks wait for
    DIFFERENT = "different"  # ranks issued different collectives at the same position of a group
    RING = "ring"  # ranks wait for each other in a ring
    STUCK = "stuck"  # all ranks have issued a collective, and it does not end
    IDLE = "idle"  # no rank waits
    MOVING = "moving"  # collectives are issued or completed
    ENDED = "ended"  # every rank ended normally
    KILLED = "killed"  # the job has ended, a rank was killed or failed, and no rank waited for another
    EMPTY = "empty"  # nothing was recorded


class Verdict(NamedTuple):
    """The verdict in one sentence, and notes."""

    kind: Kind
    sentence: str
    notes: tuple[str, ...] = ()

    @property
    def hangs(self) -> bool:
        """Whether a rank is blocked: the kind is missing, different, ring or stuck."""
        return self.kind in (Kind.MISSING, Kind.DIFFERENT, Kind.RING, Kind.STUCK)


def judge(situation: Situation) -> Verdict:
    """Return the verdict on the job at the time of the dump, or at the end of the job."""
    verdict = _judged(situation)
    if verdict.kind is not Kind.DIFFERENT:
        differing = tuple(difference.sentence for difference in situation.differences)
        verdict = verdict._replace(notes=(*differing, *verdict.notes))
    orders = tuple(difference.sentence for difference in situation.order_differences)
    verdict = verdict._replace(notes=(*orders, *verdict.notes))
    code = situation.end.exit_code
    if verdict.kind is Kind.KILLED or not situation.is_past or not code:
        return verdict
    return verdict._replace(notes=(f"the job has ended with exit code {code}", *verdict.notes))


def _judged(situation: Situation) -> Verdict:
    """Return the verdict without the note about how the job ended.

    The verdict is the first true statement of this list:

    - Nothing was recorded, or every rank ended normally.
    - The job makes progress.
    - Ranks issued different collectives at one position of a group.
    - Some ranks wait for ranks that wait for no other rank.
    - Ranks wait for each other in a ring.
    - A collective does not end although all ranks have issued it.
    - No rank waits.
    """
    reports = situation.reports.values()
    if not any(report.calls.calls for report in reports):
        return Verdict(
            Kind.EMPTY, "no rank has recorded a collective, so nothing can be said about what it waits for"
        )
    failed = situation.is_past and (situation.end.exit_code or situation.absent())
    if all(report.state is State.ENDED for report in reports) and not failed:
        who = "every rank whose records can be read" if situation.damaged else "every rank"
        damage_notes = _notes(situation) if situation.damaged else ()
        return Verdict(Kind.ENDED, f"nothing hangs: {who} ended its recording normally", damage_notes)
    notes = _notes(situation)
    if not situation.is_past and any(report.moved for report in reports):
        return Verdict(Kind.MOVING, _say_moving(situation), notes)
    stuck = {wait.group.pg: wait.call.pg_seq for wait in situation.waits if not wait.call.what.is_p2p}
    for group in situation.groups:
        parting = find_parting(group, stuck[group.facts.pg]) if group.facts.pg in stuck else None
        if parting is not None:
            return Verdict(Kind.DIFFERENT, _say_parting(situation, parting), notes)
    for wait in situation.waits:
        unequal = _unequal_splits(situation, wait)
        if unequal is not None:
            return Verdict(Kind.DIFFERENT, f"{unequal.sentence}; {_waiting_clause(situation, wait)}", notes)
    roots = culprits(situation.waits)
    missed = [wait for wait in situation.waits if set(wait.missing) & set(roots)]
    if missed:
        wait = min(missed, key=lambda w: (-len(w.waiting), w.call.pg_seq))
        return Verdict(Kind.MISSING, _say_missing(situation, wait), (*notes, *_hints(situation, wait)))
    ring = find_cycle(situation.waits)
    if ring:
        return Verdict(Kind.RING, _say_ring(situation, ring), notes)
    if situation.waits:
        wait = min(situation.waits, key=lambda w: (bool(w.missing), -len(w.waiting), w.call.pg_seq))
        return Verdict(Kind.STUCK, _say_stuck(situation, wait), notes)
    if situation.is_past:
        return Verdict(Kind.KILLED, _say_killed(situation), notes)
    return Verdict(Kind.IDLE, _say_idle(situation), notes)


def _unequal_splits(situation: Situation, wait: Wait) -> Difference | None:
    """Return the unequal splits of the all_to_all in which ranks wait, or None if there are none."""
    if wait.call.what.op != Op.ALL_TO_ALL:
        return None
    here = wait.group.pg, wait.call.pg_seq
    return next((each for each in situation.differences if (each.pg, each.call.number) == here), None)


def _say_killed(situation: Situation) -> str:
    """Return a text about the rank that failed first and the ranks that did not close their recording.

    The text contains the last call of these ranks.
    """
    code, first = situation.end
    absent = situation.absent()
    unended = [report.rank for report in situation.reports.values() if report.state is not State.ENDED]
    clauses = ["the job has ended" + (f" with exit code {code}" if code is not None else "")]
    if first is not None:
        clauses.append(f"rank {first} failed first{_signal_clause(code)}")
    others = [rank for rank in unended if rank != first]
    if others:
        clauses.append(f"{ranks_text(others)} ended without closing its recording (killed, or os._exit)")
    if absent:
        clauses.append(f"{ranks_text(absent)} left no file: ended before the first process group")
    named = list(dict.fromkeys([*([first] if first is not None else []), *unended]))
    reports = [situation.reports[rank] for rank in named[:_MOST_NAMED] if rank in situation.reports]
    clauses += [_last_clause(situation, report) for report in reports]
    inside = [report.rank for report in situation.reports.values() if report.calls.inside()]
    return "; ".join([*clauses, *([] if inside else ["no rank was inside a collective"])])


def _signal_clause(code: int | None) -> str:
    """Return a text such as ``, killed by SIGKILL`` if the exit code is 128 plus the number of a signal."""
    if code is None or code <= _SIGNALS_FROM:
        return ""
    try:
        return f", killed by {signal.Signals(code - _SIGNALS_FROM).name}"
    except ValueError:
        return ""


def _last_clause(situation: Situation, report: RankReport) -> str:
    calls = report.calls.calls
    if not calls:
        return f"rank {report.rank} had issued nothing"
    last = calls[-1]
    site = f" at {short_site(last.site)}" if last.site else ""
    text = f"the last operation of rank {report.rank} is {situation.name(last)} of {situation.label_of(last)}{site}"
    further = [
        other.rank
        for other in situation.reports.values()
        if not last.what.is_p2p
        and any(
            call.what.pg == last.what.pg and not call.what.is_p2p and call.place > last.place
            for call in other.calls.calls
        )
    ]
    return f"{text}, and {ranks_text(further)} issued a later one" if further else text


def _say_missing(situation: Situation, wait: Wait) -> str:
    clauses = [_waiting_clause(situation, wait)]
    its = "the matching " + ("recv" if wait.call.what.op == Op.SEND else "send")
    what = its if wait.call.what.is_p2p else "it"
    has = "had" if situation.is_past else "has" if len(wait.missing) == 1 else "have"
    clauses.append(
        f"{ranks_text(wait.missing)} {has} not issued {what}: {_whereabouts(situation, wait.missing, wait.group.pg)}"
    )
    return "; ".join(clauses)


def _say_parting(situation: Situation, parting: Parting) -> str:
    issued = [
        f"{ranks_text(party.ranks)} issued {party.call.what.op} {situation.describe(party.call)}{_root(party.call)}"
        for party in parting.parties
    ]
    text = (
        f"at #{parting.pg_seq} of {situation.label(parting.group)} the ranks diverge: {', but '.join(issued)}"
    )
    waits = [wait for wait in situation.waits if wait.group.pg == parting.group.pg]
    if waits:
        text += f"; now {_waiting_clause(situation, waits[0])}"
    return text


def _root(call: Call) -> str:
    return f" with root {call.what.peer}" if call.what.peer >= 0 and not call.what.is_p2p else ""


def _say_ring(situation: Situation, ring: Sequence[Wait]) -> str:
    clauses = [f"{_waiting_clause(situation, wait)} for {ranks_text(wait.missing)}" for wait in ring]
    return f"a ring: {', and '.join(clauses)}; none of them can continue"


def _say_stuck(situation: Situation, wait: Wait) -> str:
    text = _waiting_clause(situation, wait)
    if wait.absent:
        who = ranks_text(wait.absent)
        return f"{text}; it is not known whether {who} issued it, because no file of {who} can be read here"
    members = [situation.reports[rank] for rank in wait.group.ranks if rank in situation.reports]
    halted = [
        r for r in members if r.state is State.STOPPED or (r.state is State.GONE and not situation.is_past)
    ]
    if halted:
        return f"{text}; all have issued it; {ranks_text([r.rank for r in halted])}: " + "; ".join(
            situation.whereabouts(report.rank, wait.group.pg) for report in halted[:_MOST_NAMED]
        )
    if wait.finished:
        return f"{text}; {ranks_text(wait.finished)} issued it too and continued: the transfer itself does not complete"
    return (
        f"{text}; every rank has issued the same collective: the transfer itself does not complete "
        "(network, device or backend)"
    )


def _say_idle(situation: Situation) -> str:
    done = [(report, call) for report in situation.reports.values() if (call := report.calls.last_done())]
    stopped = [report for report in situation.reports.values() if report.state is State.STOPPED]
    text = "no rank waits: none is inside a collective"
    if done:
        report, call = max(done, key=lambda pair: pair[1].end_ns)
        ago = report.ago(call.end_ns)
        text += f"; the last one, {situation.name(call)} of {situation.label_of(call)}, ended{f' {ago}' if ago else ''}"
    if stopped:
        text += f"; {ranks_text([report.rank for report in stopped])}: stopped by a signal"
    return text


def _say_moving(situation: Situation) -> str:
    moved = [report.rank for report in situation.reports.values() if report.moved]
    still = [report.rank for report in situation.reports.values() if report.moved is False]
    text = (
        f"the job makes progress: {ranks_text(moved)} issued or completed collectives within the "
        f"{format_ns(situation.watched_ns)} in which it was observed"
    )
    waits = [wait for wait in situation.waits if set(wait.waiting) & set(still)]
    return f"{text}; {_waiting_clause(situation, waits[0])}" if waits else text


def _waiting_clause(situation: Situation, wait: Wait) -> str:
    """Return a clause such as ``ranks 0, 2, 3 wait in all_reduce #41 of group default_pg (...)``."""
    ranks = tuple(wait.waiting)
    verb = "waited" if situation.is_past else "waits" if len(ranks) == 1 else "wait"
    place = f"{situation.name(wait.call)} of {situation.label(wait.group)}"
    if not wait.known:
        verb = "issued" if situation.is_past else "has issued" if len(ranks) == 1 else "have issued"
        return f"{ranks_text(ranks)} {verb} {place} {situation.describe(wait.call, situation.reports[ranks[0]], 'called')}"
    return (
        f"{ranks_text(ranks)} {verb} in {place} {situation.describe(wait.call, situation.reports[ranks[0]])}"
    )


def _whereabouts(situation: Situation, ranks: Sequence[int], pg: str) -> str:
    if len(ranks) == 1:
        return situation.whereabouts(ranks[0], pg)
    # Ranks with equal texts share one entry.
    by_text: dict[str, list[int]] = {}
    for rank in ranks:
        by_text.setdefault(situation.whereabouts(rank, pg), []).append(rank)
    texts = [f"{ranks_text(same)}: {text}" for text, same in by_text.items()]
    more = f", and {len(texts) - _MOST_NAMED} more" if len(texts) > _MOST_NAMED else ""
    return ", ".join(texts[:_MOST_NAMED]) + more


def _notes(situation: Situation) -> tuple[str, ...]:
    absent = situation.absent()
    notes = [f"rank {rank} cannot be read: {reason}" for rank, reason in situation.damaged.items()]
    if absent and not situation.is_past:
        notes.append(
            f"{ranks_text(absent)} left no file in this run: not started yet, or on a host that writes elsewhere"
        )
    hosts = {r.calls.host for r in situation.reports.values() if r.state is State.ELSEWHERE}
    if hosts:
        others = ", ".join(sorted(map(str, hosts)))
        notes.append(f"stacks are those of this host's ranks; for the others run commprof dump on {others}")
    return tuple(notes)


def _hints(situation: Situation, wait: Wait) -> tuple[str, ...]:
    """Return a hint about the position from which the call sites of the ranks differ, if they differ.

    Only positions up to the call that the ranks wait for now are compared.
    """
    group = next((g for g in situation.groups if g.facts.pg == wait.group.pg), None)
    parting = None if group is None or wait.call.what.is_p2p else find_sites(group, wait.call.pg_seq)
    if parting is None:
        return ()
    sites = ", ".join(f"{ranks_text(p.ranks)} at {short_site(p.call.site)}" for p in parting.parties)
    return (f"from #{parting.pg_seq} of {situation.label(parting.group)} on the call sites differ: {sites}",)

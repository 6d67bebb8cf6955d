"""Reconciles the four levels of a run: :func:`verify` closes its ledger or names what is unexplained."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from commprof.align.ranks.agreement import ranks_text, unshifted
from commprof.exit_codes import State, decide
from commprof.ledger.levels import Moved, Unexplained, Verdict
from commprof.ledger.reconcile import attribution, sentences
from commprof.ledger.reconcile.attribution import Findings
from commprof.ledger.reconcile.compared_orders import COLUMNS as OF_GROUP_ORDERS
from commprof.ledger.reconcile.compared_orders import GroupOrders
from commprof.ledger.reconcile.compared_splits import COLUMNS as OF_SPLITS
from commprof.ledger.reconcile.compared_splits import Splits
from commprof.ledger.reconcile.ledger_table import (
    Labelled,
    doubtful,
    gradient_rows,
    ledger_rows,
    remarks,
    requested_reductions,
    unexplained,
)
from commprof.ledger.reconcile.rank_orders import COLUMNS as OF_ORDERS
from commprof.ledger.reconcile.rank_orders import RankOrders
from commprof.ledger.reconcile.unmatched_messages import COLUMNS as OF_MESSAGES
from commprof.ledger.reconcile.unmatched_messages import Ends
from commprof.ledger.records import movement
from commprof.ledger.records.aggregated_steps import backends_of, sums_of, with_sums
from commprof.ledger.records.executed import Executed, executed
from commprof.ledger.records.issued import COLUMNS, issued
from commprof.ledger.records.precount import COLUMNS as OF_PRECOUNT
from commprof.ledger.records.precount import Survey
from commprof.ledger.records.readings import StepReadings
from commprof.ledger.records.sendings import COLUMNS as OF_SENDINGS
from commprof.ledger.records.sendings import Sendings, sendings
from commprof.ledger.requests.demand import COMPLETE, RUNNING, demands, of_recorded_groups
from commprof.ledger.requests.engine_sequence import Turn, before_steps, demands_in_turn, turns_of
from commprof.ledger.requests.request import RecordedRun, Request, WholeRun, last_attempt, request_of
from commprof.trace.config_copy import config_note
from commprof.trace.coverage import uncovered
from commprof.trace.directory import elsewhere
from commprof.trace.pending_ranks import NO_MANIFEST
from commprof.trace.wire import DAMAGED_LINES


def verify(recorded: WholeRun) -> Verdict:
    """Reconcile the requested, issued, executed and moved levels of the run ``recorded``, and return the verdict.

    If the config is not known or is not a ZeRO config, the requested level is not known. The other levels are still
    reported. In this case the state is ``cannot tell``, unless a mismatch is found. If records are dropped, truncated,
    unseen, or not on this machine, the state is always ``cannot tell``.
    """
    there = elsewhere(recorded.path)
    run: RecordedRun = recorded if there is None else recorded.without_records()
    # One pass over the records feeds all comparisons between ranks, because the records may not fit into memory.
    survey, orders, group_orders, splits, ends = Survey(), RankOrders(), GroupOrders(run), Splits(run), Ends()
    columns = tuple(dict.fromkeys((*OF_PRECOUNT, *OF_ORDERS, *OF_GROUP_ORDERS, *OF_SPLITS, *OF_MESSAGES)))
    for part in run.parts("collectives", columns):
        survey.add(part)
        orders.add(part)
        group_orders.add(part)
        splits.add(part)
        ends.add(part)
    # Issued and executed: each collective counts once. Records and sums are combined.
    aggregates = run.table("aggregates")
    of_group = backends_of(aggregates, run.table("groups"))
    ran = executed(run, survey.backends | set(of_group.values()))
    turns = turns_of(run)
    tables = run.parts("collectives", COLUMNS)
    records = before_steps(tables) if turns else tables
    steps = with_sums(issued(records, survey, ran.ops), aggregates, of_group)
    is_told = bool(survey.records or len(aggregates))
    # Requested: the messages that each step should send, then the explanation of the issued messages by class.
    if turns:
        request, (wanted, partial, notes), requests = demands_in_turn(run, turns, steps)
    else:
        request, requests = request_of(run), []
        wanted, partial, notes = demands(run, request, steps)
    wanted, unheard = of_recorded_groups(wanted, run.health.missing_ranks)
    notes = [*notes, *unheard]
    findings = attribution.attribute(
        steps,
        wanted,
        partial,
        request.unpredicted,
        request.unpublished,
        tells_evaluations=request.wrapped is not None,
        evaluated_after=request.metrics.evaluated,
    )
    if request.reason is not None:
        findings = _without_request(findings)
    # If the records are not on this machine, there is nothing to compare with the request.
    if there is not None:
        findings = {}
    rows = ledger_rows(findings)
    # Moved: the counters are compared with the bytes that were sent between their readings.
    left_out = uncovered(run)
    wire = run.table("wire")
    sent = Sendings()
    hosts = {entry["rank"]: str(entry["host"]) for entry in _latest(run) if entry.get("host")}
    readings = StepReadings(wire, run.table("clocks"), hosts)
    if len(wire):
        sums = sums_of(aggregates, of_group)
        sent = sendings(run.parts("collectives", OF_SENDINGS), survey, ran.ops, sums, readings)
    moved, together = movement.moved(readings.wire, sent, hosts, left_out, readings.attempts)
    # If the steps or the request are not known, an absent message does not count as missing.
    is_without_steps = any(key.step >= 0 for key in steps) and not len(run.table("steps"))
    is_expected = request.reason is None and is_told and not is_without_steps
    left = _left(run, findings) if is_expected else ()
    # Differences between the ranks of a group. Gaps in the records limit the comparison.
    unrecorded = gaps(run, survey.records)
    differences = orders.differences(
        run, has_all_records=not unrecorded, complete=run.health.state == COMPLETE
    )
    in_other_order = group_orders.differences(run, differences, has_all_records=not unrecorded)
    differences += unshifted(splits.differences(run), differences)
    if run.health.state == COMPLETE:  # A program that was stopped leaves messages in flight.
        differences += ends.lone(run)
    differing, unsure = [each.sentence for each in differences], doubtful(findings)
    # The Flight Recorder also lists collectives that were not recorded individually, so no comparison is possible.
    ran_otherwise = () if run.health.summed or run.health.outside else ran.problems
    # Contradictions make a mismatch, doubts make the verdict "cannot tell".
    problems = [*differing, *ran_otherwise, *_moved_otherwise([*moved, *([together] if together else [])])]
    labels = Labelled.of(findings, {**request.unpublished, **request.unpredicted})
    doubts = [*unrecorded, *ran.doubts, *unsure, *(labels.doubts if request.reason is None else ())]
    if is_without_steps:
        doubts.append(
            "the table of the training steps (steps.parquet) is missing, so it is not known which messages the "
            "steps lack"
        )
    issued_bytes = sum(attribution.payload(messages) for messages in steps.values())
    explained_bytes = sum(
        finding.explained_bytes + attribution.payload(finding.evaluated)
        for step in findings.values()
        for finding in step.values()
    )
    if run.health.state not in (COMPLETE, RUNNING) and is_told and not issued_bytes:
        doubts.append("the program ended before it issued any payload, so nothing can be judged")
    # The report begins with the levels, followed by notes, doubts and contradictions, and ends with the total.
    edited = config_note(run.path, run.manifest.config)
    no_request = [] if request.reason is None else [request.reason]
    state = decide([*left, *problems], [*doubts, *no_request], complete=not unrecorded)
    contradiction = "Mismatch" if state == State.MISMATCH else "Cannot tell"
    report_sentences = [
        *(
            _sentences_by_engine(requests, turns, findings)
            if requests
            else _request_sentences(request, findings)
        ),
        *sentences.execution_sentences(rows),
        *map(sentences.moved_sentence, moved),
        *sentences.unread_sentences(left_out, moved),
        *([sentences.moved_sentence(together)] if together else []),
        *([f"{edited}."] if edited else []),
        *([f"Note: {NO_MANIFEST}."] if NO_MANIFEST in run.health.notes else []),
        *(f"Note: {note}." for note in run.health.notes if note.endswith(DAMAGED_LINES)),
        *(notes if is_told else ()),  # Without any records, missing messages of steps are not reported.
        *remarks(findings),
        *(f"Note: {each.sentence}." for each in in_other_order),
        *(f"Cannot tell: {text}." for text in doubts),
        *(f"{contradiction}: {text}." for text in problems),
        *(
            [_total(request, issued_bytes, explained_bytes, left, labels, has_all_records=not unrecorded)]
            if there is None
            else []
        ),
    ]
    return Verdict(
        state=state,
        sentences=tuple(report_sentences),
        rows=rows,
        moved=moved,
        issued_bytes=issued_bytes,
        explained_bytes=explained_bytes,
        labelled_bytes=labels.payload_bytes,
        unexplained=left,
        sources=_sources(run, request, ran, moved),
        disagreements=tuple(differing),
        differences=tuple(differences),
        order_differences=tuple(in_other_order),
        unsure=tuple(unsure),
        request_reason=request.reason,
        moved_together=together,
        requested_reductions=requested_reductions(findings),
    )


def _left(run: RecordedRun, findings: Findings) -> tuple[Unexplained, ...]:
    """Return the unexplained and missing messages.

    A program that was stopped has not written the sums of its last steps, so messages do not count as missing then.
    """
    items = unexplained(findings)
    if run.health.summed and run.health.state != COMPLETE:
        return tuple(item for item in items if item.kind != "missing")
    return tuple(items)


def _latest(run: RecordedRun) -> list[Mapping[str, Any]]:
    entries = list(run.manifest.ranks)
    last = last_attempt(run)
    return list({entry["rank"]: entry for entry in entries if entry["attempt"] == last}.values())


def _without_request(findings: Findings) -> Findings:
    """Return ``findings`` without unexplained messages, because the request is not known."""
    for step in findings.values():
        for finding in step.values():
            finding.surplus = Counter()
    return findings


def gaps(run: RecordedRun, records: int) -> list[str]:
    """Return clauses about missing records. If there is any clause, the run cannot be judged completely."""
    health = run.health
    there = elsewhere(run.path)
    clauses = [] if records or health.summed or there is not None else ["no collective was recorded"]
    clauses += [] if there is None else [f"the records are at {there.place} and were not read"]
    for number, text in (
        (health.lost, "collectives were dropped while recording"),
        (health.unseen, "collectives were issued outside the recorded layers"),
        (health.torn, "records are truncated"),
        (
            health.summed,
            "collectives were recorded as sums only: the number and bytes of each step are compared, but no "
            "single collective",
        ),
        (health.outside, "collectives were issued outside the steps that were recorded"),
    ):
        if number:
            clauses.append(f"{number:,} {text}")
    clauses += health.damaged
    if health.missing_ranks:
        clauses.append(f"{ranks_text(health.missing_ranks)} left no records")
    return clauses


def _moved_otherwise(moved: Sequence[Moved]) -> list[str]:
    """Return clauses about hosts that moved fewer bytes than were executed, or more bytes than the records explain."""
    clauses = []
    for row in moved:
        who = row.host if row.host == movement.ALL_HOSTS else f"host {row.host}"
        if movement.is_short(row):
            needed = round(row.expected_bytes or 0)
            clauses.append(
                f"{who} moved {row.sent_bytes:,} bytes, but the executed collectives need {needed:,}"
            )
        elif movement.is_long(row):
            explained = round(row.expected_bytes or 0)
            clauses.append(
                f"{who} moved {row.sent_bytes:,} bytes, but the records explain only {explained:,}"
            )
    return clauses


def _sentences_by_engine(requests: Sequence[Request], turns: Sequence[Turn], findings: Findings) -> list[str]:
    """Return the sentences about the requests of all engines, each sentence once.

    A sentence of a later engine names the step from which it applies.
    """
    first_texts: dict[str, str] = {}
    for request, turn in zip(requests, turns, strict=True):
        own = {key: classes for key, classes in findings.items() if turn.covers(key)}
        for text in _request_sentences(request, own):
            first_texts.setdefault(text, f"From step {turn.first} on: {text}" if turn.first else text)
    return list(first_texts.values())


def _request_sentences(request: Request, findings: Findings) -> list[str]:
    texts = []
    if request.reason is not None:
        texts.append(f"The requested level is not known: {request.reason.rstrip('.')}.")
    elif request.configuration is not None:
        texts += sentences.gradient_sentences(
            request.config, request.configuration, gradient_rows(findings), request.replicas, request.runtime
        )
        texts += [f"The config and the engine differ: {text}." for text in request.differences]
    elif request.wrapped is not None:
        sentence = sentences.wrapper_sentence(request.wrapped.names, ledger_rows(findings))
        texts += [sentence] if sentence else []
    return texts


def _total(
    request: Request,
    issued_bytes: int,
    explained_bytes: int,
    left: Sequence[Unexplained],
    labels: Labelled,
    *,
    has_all_records: bool,
) -> str:
    """Return the sentence with the explained share of the issued payload.

    If records are missing, absent messages may have been issued, so the sentence does not claim the opposite.
    """
    share = 100 * explained_bytes / max(issued_bytes, 1)
    if request.reason is None and explained_bytes < issued_bytes:
        share = min(share, 99.999)
    if issued_bytes:
        text = (
            f"{share:.3f} % of the issued payload is explained: {explained_bytes:,} of {issued_bytes:,} bytes"
        )
    else:
        text = "No payload was issued" if has_all_records else "No payload is among the records"
    if labels.payload_bytes:
        part = 100 * labels.payload_bytes / max(issued_bytes, 1)
        text += (
            f"; {part:.3f} % is labelled, not predicted: {labels.payload_bytes:,} bytes "
            f"({', '.join(labels.purposes)})"
        )
    extra = sum(item.count for item in left if item.kind == "unexplained")
    missing = sum(item.payload_bytes for item in left if item.kind == "missing")
    if extra:
        text += f"; {extra:,} collective{' has' if extra == 1 else 's have'} no explanation"
    if missing:
        where = "were not issued" if has_all_records else "are not among them"
        text += f"; {missing:,} bytes that the config requests {where}"
    return text + "."


def _sources(run: RecordedRun, request: Request, ran: Executed, moved: Sequence[Moved]) -> dict[str, str]:
    health = run.health
    ranks = "1 rank" if health.ranks_recorded == 1 else f"{health.ranks_recorded} ranks"
    requested = (
        f"not known: {request.reason}"
        if request.reason is not None
        else f"{request.source} and {request.parameters_text}, by the rules of {request.rules}, "
        f"{f'ranks along {request.shared.axes}' if request.shared is not None else f'n = {request.world_size}'}"
    )
    sums = f"; {health.summed:,} as sums over each step" if health.summed else ""
    return {
        "requested": requested,
        "issued": f"{health.records:,} records of {ranks}, each collective counted once{sums}",
        "executed": ran.source,
        "moved": "interface counters of the whole host, all its processes"
        if moved
        else f"not known: {movement.NO_READINGS}",
    }

"""The ledger of a run, closed or not: :func:`verify`."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from commprof.errors import CommprofError
from commprof.ledger import attribution, backends, movement, sentences
from commprof.ledger.attribution import Class, Finding, Findings, Want
from commprof.ledger.executed import Executed, executed
from commprof.ledger.issue import Issued, Message, StepKey, disagreements, issued, once_per_collective
from commprof.ledger.levels import INIT, STEPS, LedgerRow, Moved, State, Unexplained, Verdict
from commprof.ledger.request import RecordedRun, Request, request_of
from commprof.requested.expectation import Expectation
from commprof.schema import Op, Purpose, wire_bytes

_AFTER_OVERFLOW: Final = frozenset({Purpose.GRADIENT_NORM, Purpose.PARAMETER_GATHER})


def verify(run: RecordedRun) -> Verdict:
    """Close the ledger of ``run``: requested, issued, executed and moved, and what none of them explains.

    Where the config is not known, or not one of ZeRO's, nothing is requested, and the state is unknown; the other levels
    are told all the same. So it is where records are lost, torn or unseen.
    """
    collectives = run.table("collectives")
    once = once_per_collective(collectives)
    ran = executed(run, once)
    steps = issued(once, ran.ops)
    request = request_of(run)
    wanted, partial, remarks = _wanted(run, request, steps)
    findings = attribution.attribute(steps, wanted, partial)
    if request.reason is not None:
        findings = _without_request(findings)
    rows = _rows(findings, run)
    moved = movement.moved(run.table("wire"), steps, [str(entry.get("host")) for entry in _latest(run)])
    unexplained = tuple(_unexplained(findings)) if request.reason is None else ()
    problems = [*disagreements(collectives), *ran.problems, *_moved_short(moved)]
    doubts = [*gaps(run, collectives.num_rows), *ran.doubts]
    issued_bytes = sum(attribution.payload(messages) for messages in steps.values())
    explained_bytes = sum(finding.explained_bytes for step in findings.values() for finding in step.values())
    state = State.MISMATCH if unexplained or problems else State.CLOSED
    if doubts or request.reason is not None:
        state = State.UNKNOWN
    told = [
        *_told(request, rows, steps, moved),
        *remarks,
        *_remarks(findings),
        *(f"Cannot tell: {text}." for text in doubts),
        *(f"Mismatch: {text}." for text in problems),
        _total(request, issued_bytes, explained_bytes, unexplained),
    ]
    return Verdict(
        state=state,
        sentences=tuple(told),
        rows=rows,
        moved=moved,
        issued_bytes=issued_bytes,
        explained_bytes=explained_bytes,
        unexplained=unexplained,
        sources=_sources(run, request, ran, moved),
        request_reason=request.reason,
    )


def _latest(run: RecordedRun) -> list[Mapping[str, Any]]:
    entries = list(run.manifest.ranks)
    last = max((entry["attempt"] for entry in entries), default=0)
    return list({entry["rank"]: entry for entry in entries if entry["attempt"] == last}.values())


def _wanted(
    run: RecordedRun, request: Request, steps: Issued
) -> tuple[dict[StepKey, dict[Class, Want]], frozenset[StepKey], list[str]]:
    """What each step should send, the steps that did not reach their end, and remarks about both."""
    if request.reason is not None:
        return {}, frozenset(), []
    ended: dict[StepKey, bool] = {}
    for row in run.table("steps").select(["attempt", "step", "end_ns"]).to_pylist():
        key = StepKey(row["attempt"], row["step"])
        ended[key] = ended.get(key, True) and row["end_ns"] is not None
    attempts = {key.attempt for key in (*steps, *ended)} or {0}
    wanted: dict[StepKey, dict[Class, Want]] = {}
    partial, overflowed = set(), []
    try:
        for attempt in sorted(attempts):
            wanted[StepKey(attempt, -1)] = _wanted_before(request, StepKey(attempt, -1), steps)
            keys = sorted(key for key in ended if key.attempt == attempt and key.step >= 0)
            for ordinal, key in enumerate(keys):
                expectations = request.expectations(key, ordinal)
                if _overflowed(key, request, steps):
                    overflowed.append(key)
                    expectations = [row for row in expectations if row.purpose not in _AFTER_OVERFLOW]
                elif not ended[key] or (key == keys[-1] and _unfinished(expectations, steps.get(key, {}))):
                    partial.add(key)
                wanted[key] = attribution.wants(expectations, request.world_size)
    except CommprofError as error:
        request.reason = str(error)
        return {}, frozenset(), []
    remarks = [f"{text[0].upper()}{text[1:]}." for text in dict.fromkeys(request.notes)]
    if overflowed:
        remarks.append(
            f"{_step_list(overflowed)}: ended at the overflow check, without norm and without gathering."
        )
    if partial:
        remarks.append(
            f"{_step_list(sorted(partial))}: did not reach the end; what is not there is not counted as missing."
        )
    return wanted, frozenset(partial), remarks


def _wanted_before(request: Request, key: StepKey, steps: Issued) -> dict[Class, Want]:
    """What should be sent before the first step; a model made within ``zero.Init`` is broadcast once less."""
    plain, lean = (
        attribution.wants(request.expectations(key, zero_init=made), request.world_size)
        for made in (False, True)
    )
    if plain == lean:
        return plain
    sent = attribution.attribute({key: steps.get(key, {})}, {key: lean}, frozenset())[key]
    if all(finding.closes for finding in sent.values()):
        request.notes.append("before the first step was sent what a model made within zero.Init needs")
        return lean
    return plain


def _overflowed(key: StepKey, request: Request, steps: Issued) -> bool:
    """Whether the step went as far as the overflow check and no further."""
    if request.configuration is None or not request.configuration.check_overflow:
        return False
    purposes = {message.purpose for message in steps.get(key, {})}
    return Purpose.OVERFLOW_CHECK in purposes and not purposes & _AFTER_OVERFLOW


def _unfinished(expectations: Sequence[Expectation], messages: Mapping[Message, int]) -> bool:
    """Whether nothing was sent of what ends a step: the script stopped within it. Asked of an attempt's last step only."""
    ends = {row.purpose for row in expectations if row.when == "step"}
    ends -= {Purpose.GRADIENT_REDUCE, Purpose.OVERFLOW_CHECK}
    return bool(ends) and not {message.purpose for message in messages} & ends


def _without_request(findings: Findings) -> Findings:
    """Nothing is unexplained where nothing is known of what was asked; only what explains itself is explained."""
    for step in findings.values():
        for finding in step.values():
            finding.surplus = Counter()
    return findings


def _rows(findings: Findings, run: RecordedRun) -> tuple[LedgerRow, ...]:
    merged: dict[tuple[str, str | None, str, str], list[Finding]] = defaultdict(list)
    numbers: dict[str, int] = Counter()
    for key, step in findings.items():
        when = INIT if key.step < 0 else STEPS
        numbers[when] += 1
        for kind, finding in step.items():
            merged[when, kind.purpose, kind.op, kind.group_ranks].append(finding)
    by_class: dict[tuple[str, str | None, str], list[Finding]] = defaultdict(list)
    for (when, purpose, op, _), found in merged.items():
        by_class[when, purpose, op] += found
    rows = [_row(*key, numbers[STEPS] if key[0] == STEPS else 0, found) for key, found in by_class.items()]
    return tuple(sorted(rows, key=lambda row: (row.when, row.purpose or "~", row.issued_op or "")))


def _row(when: str, purpose: str | None, op: str, steps: int, findings: Sequence[Finding]) -> LedgerRow:
    wants = [finding.want for finding in findings if finding.want is not None]
    messages: Counter[Message] = Counter()
    for finding in findings:
        messages.update(finding.messages)
    size = max((message.group_size for message in messages), default=1)
    payload = attribution.payload(messages)
    expected_payload = sum(want.payload_bytes for want in wants)
    by = {finding.explained_by for finding in findings} - {None}
    ran, ran_bytes = _ran(messages)
    return LedgerRow(
        when=when,
        steps=steps,
        purpose=purpose,
        requested_op=wants[0].requested_op if wants else None,
        expected_op=op if wants else None,
        expected_count=sum(want.count for want in wants) if wants else None,
        expected_payload_bytes=expected_payload if wants else None,
        requested_wire_bytes=wire_bytes(wants[0].requested_op, expected_payload, size) if wants else None,
        issued_op=op if messages else None,
        issued_count=sum(messages.values()),
        issued_payload_bytes=payload,
        issued_wire_bytes=_wire(messages),
        executed_op=ran,
        executed_count=sum(messages.values()) if ran else None,
        executed_wire_bytes=ran_bytes,
        explained_bytes=sum(finding.explained_bytes for finding in findings),
        explained_by=min(str(name) for name in by) if by else None,
    )


def _wire(messages: Mapping[Message, int]) -> float:
    return sum(wire_bytes(m.op, m.payload_bytes, m.group_size) * count for m, count in messages.items())


def _ran(messages: Mapping[Message, int]) -> tuple[str | None, float | None]:
    """What ran for ``messages`` and the modelled bytes of it; None where that is not known of all of them."""
    ops = {message.executed_op for message in messages}
    if not messages or None in ops:
        return None, None
    total = 0.0
    for message, count in messages.items():
        if backends.known(message.backend):
            sent = backends.execution(message.op, message.payload_bytes, message.group_size).wire_bytes
        else:
            plain = message.executed_op if "+" not in str(message.executed_op) else message.op
            same = plain if plain not in (Op.SEND, Op.RECV) else message.op
            sent = wire_bytes(str(same), message.payload_bytes, message.group_size)
        total += sent * count
    return "+".join(sorted(str(op) for op in ops)), total


def _remarks(findings: Findings) -> list[str]:
    """What is explained although it is not what was expected, a sentence for each purpose and difference."""
    found: dict[str, list[StepKey]] = defaultdict(list)
    for key, step in findings.items():
        for kind, finding in step.items():
            if finding.remark:
                found[f"{kind.purpose}: {finding.remark}."].append(key)
    return [f"{_step_list(keys)}, {text}" for text, keys in found.items()]


def _unexplained(findings: Findings) -> Iterable[Unexplained]:
    """Everything left over or missing, grouped over the steps in which it is the same."""
    groups: dict[tuple[Any, ...], list[tuple[StepKey, int, int]]] = defaultdict(list)
    for key, step in findings.items():
        for kind, finding in step.items():
            for message, count in finding.surplus.items():
                reason = attribution.RAISED if message.status == "raised" else finding.reason
                group = ("unexplained", *kind, message.payload_bytes, message.call_site, reason)
                groups[group].append((key, count, count * message.payload_bytes))
            if finding.lacking_bytes or finding.lacking_count:
                group = ("missing", *kind, finding.lacking_bytes, None, finding.reason)
                groups[group].append((key, finding.lacking_count, finding.lacking_bytes))
    for (kind_name, purpose, op, ranks, _, site, reason), found in sorted(groups.items(), key=str):
        yield Unexplained(
            kind=kind_name,
            steps=_step_text([key for key, _, _ in found]),
            purpose=purpose,
            op=op,
            group_ranks=ranks,
            count=sum(count for _, count, _ in found),
            payload_bytes=sum(size for _, _, size in found),
            call_site=site,
            reason=reason,
        )


def _step_text(keys: Iterable[StepKey]) -> str:
    """``init``, ``4`` or ``0-3,7``; of the second attempt ``0-3 (attempt 1)``."""
    parts = []
    by_attempt: dict[int, list[int]] = defaultdict(list)
    for key in sorted(set(keys)):
        by_attempt[key.attempt].append(key.step)
    for attempt, steps in by_attempt.items():
        ranges: list[list[int]] = []
        for step in steps:
            if ranges and step == ranges[-1][1] + 1 and ranges[-1][0] >= 0:
                ranges[-1][1] = step
            else:
                ranges.append([step, step])
        text = ",".join(INIT if a < 0 else f"{a}-{b}" if a != b else str(a) for a, b in ranges)
        parts.append(f"{text} (attempt {attempt})" if attempt else text)
    return "; ".join(parts)


def _step_list(keys: Iterable[StepKey]) -> str:
    listed = list(keys)
    return f"{'Step' if len(listed) == 1 else 'Steps'} {_step_text(listed)}"


def gaps(run: RecordedRun, records: int) -> list[str]:
    """What is missing from the records, so that nothing can be said of the whole."""
    health = run.health
    found = [] if records else ["no collective was recorded"]
    for number, text in (
        (health.lost, "collectives were lost while recording"),
        (health.unseen, "collectives were issued beside the layer that is recorded"),
        (health.torn, "records are torn"),
    ):
        if number:
            found.append(f"{number:,} {text}")
    if health.missing_ranks:
        found.append(f"ranks {', '.join(map(str, health.missing_ranks))} left no records")
    return found


def _moved_short(moved: Sequence[Moved]) -> list[str]:
    return [
        f"host {row.host} moved {row.sent_bytes:,} bytes where what was executed needs {round(row.expected_bytes):,}"
        for row in moved
        if row.expected_bytes is not None and row.sent_bytes < row.expected_bytes * (1 - movement.TOLERANCE)
    ]


def _told(request: Request, rows: Sequence[LedgerRow], steps: Issued, moved: Sequence[Moved]) -> list[str]:
    told = []
    if request.reason is not None:
        told.append(f"What was asked for is not known: {request.reason}.")
    elif request.configuration is not None:
        sentence = sentences.gradient_sentence(
            request.config, request.configuration, rows, request.world_size
        )
        told += [sentence] if sentence else []
        told += [f"The config and the engine differ: {text}." for text in request.differences]
    told += sentences.execution_sentences(rows)
    told += [sentences.moved_sentence(row) for row in moved]
    return told


def _total(
    request: Request, issued_bytes: int, explained_bytes: int, unexplained: Sequence[Unexplained]
) -> str:
    share = 100.0 if not issued_bytes else 100 * explained_bytes / issued_bytes
    if request.reason is None and explained_bytes < issued_bytes:
        share = min(share, 99.999)
    text = f"{share:.3f} % of the issued payload is explained: {explained_bytes:,} of {issued_bytes:,} bytes"
    extra = sum(item.count for item in unexplained if item.kind == "unexplained")
    missing = sum(item.payload_bytes for item in unexplained if item.kind == "missing")
    if extra:
        text += f"; {extra:,} collective{' has' if extra == 1 else 's have'} no explanation"
    if missing:
        text += f"; {missing:,} bytes that the config asks for were not issued"
    return text + "."


def _sources(run: RecordedRun, request: Request, ran: Executed, moved: Sequence[Moved]) -> dict[str, str]:
    health = run.health
    requested = (
        f"not known: {request.reason}"
        if request.reason is not None
        else f"{request.source} and {len(request.parameters)} parameters, by the rules of {request.runtime}, "
        f"n = {request.world_size}"
    )
    return {
        "requested": requested,
        "issued": f"{health.records:,} records of {health.ranks_recorded} ranks, each collective counted once",
        "executed": ran.source,
        "moved": "interface counters of the whole host, all its processes"
        if moved
        else f"not known: {movement.NO_READINGS}",
    }

"""Builds the rows of the ledger and the list of unexplained messages from the findings of all steps."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from commprof.ledger.levels import INIT, STEPS, LedgerRow, RequestedReduction, Unexplained
from commprof.ledger.reconcile import attribution
from commprof.ledger.reconcile.attribution import Finding, Findings
from commprof.ledger.records import backends
from commprof.ledger.records.issued import Message, StepKey, step_list, step_text
from commprof.ledger.requests.message_classes import Class
from commprof.schema import Op, Purpose, parse_ranks, wire_bytes


class _OfGroup(NamedTuple):
    """The finding of one class in one step, with the ranks of its group."""

    ranks: str
    finding: Finding


def ledger_rows(findings: Findings) -> tuple[LedgerRow, ...]:
    """Return the rows of the ledger: one per purpose, operation and requested operation, for init and for all steps.

    The requested operation may differ between groups. For example, copies of a weight in two stages of a pipeline are
    always all_reduced, and the config determines the operation for the other gradients. It may also differ between the
    steps of different engines. Messages of evaluations have separate rows.
    """
    merged: dict[tuple[str, str | None, str, str], list[_OfGroup]] = defaultdict(list)
    numbers: dict[str, int] = Counter()
    for key, step in findings.items():
        when = INIT if key.step < 0 else STEPS
        numbers[when] += 1
        for kind, finding in step.items():
            merged[when, kind.purpose, kind.op, kind.group_ranks].append(_OfGroup(kind.group_ranks, finding))
    by_class: dict[tuple[str, str | None, str], dict[str | None, list[_OfGroup]]] = defaultdict(dict)
    for (when, purpose, op, _), of_groups in merged.items():
        asked = [None if each.finding.want is None else each.finding.want.requested_op for each in of_groups]
        first = next((each for each in asked if each is not None), None)
        for each, of_finding in zip(of_groups, asked, strict=True):
            by_class[when, purpose, op].setdefault(of_finding or first, []).append(each)
    rows: list[LedgerRow] = []
    for (when, purpose, op), by_asked in by_class.items():
        steps = numbers[STEPS] if when == STEPS else 0
        for of_groups in _with_the_unexpected(by_asked):
            trained = [each for each in of_groups if each.finding.messages or each.finding.want is not None]
            evaluated = [_of_evaluation(each) for each in of_groups if each.finding.evaluated]
            rows += [_row(when, purpose, op, steps, some) for some in (trained, evaluated) if some]
    return tuple(sorted(rows, key=lambda row: (row.when, row.purpose or "~", row.issued_op or "")))


def gradient_rows(findings: Findings) -> dict[int, tuple[LedgerRow, ...]]:
    """Return the rows of reduced gradients by the size of their groups, the largest size first.

    For example, gradients of experts are reduced in smaller groups than other gradients.
    """
    by_size: dict[int, Findings] = defaultdict(lambda: defaultdict(dict))
    for key, step in findings.items():
        for kind, finding in step.items():
            if key.step >= 0 and kind.purpose == Purpose.GRADIENT_REDUCE:
                by_size[_size(kind.group_ranks)][key][kind] = finding
    return {size: ledger_rows(by_size[size]) for size in sorted(by_size, reverse=True)}


def requested_reductions(findings: Findings) -> tuple[RequestedReduction, ...]:
    """Return the reductions of gradients that the config requests. Equal requests are listed once, with their steps."""
    steps: dict[RequestedReduction, list[tuple[int, int]]] = defaultdict(list)
    known: dict[tuple[Class, int], RequestedReduction] = {}  # Steps with equal findings share one object.
    for key, step in findings.items():
        for kind, finding in step.items():
            want = finding.want
            if key.step < 0 or kind.purpose != Purpose.GRADIENT_REDUCE or want is None:
                continue
            asked = known.get((kind, id(finding)))
            if asked is None:
                wire = _requested_wire(kind.op, [_OfGroup(kind.group_ranks, finding)], finding.messages)
                size = _size(kind.group_ranks)
                asked = RequestedReduction(
                    want.requested_op, kind.op, size, want.count, want.payload_bytes, wire, ()
                )
                known[kind, id(finding)] = asked
            steps[asked].append((key.attempt, key.step))
    return tuple(asked._replace(steps=tuple(its_steps)) for asked, its_steps in steps.items())


def _of_evaluation(group: _OfGroup) -> _OfGroup:
    """Return the messages of evaluations as a separate finding."""
    sent = group.finding.evaluated
    return group._replace(finding=Finding(None, sent, "evaluation", attribution.payload(sent)))


def _with_the_unexpected(by_asked: Mapping[str | None, list[_OfGroup]]) -> list[list[_OfGroup]]:
    """Return the findings by requested operation. Findings without an expectation are added to the first operation."""
    known = [of_groups for asked, of_groups in by_asked.items() if asked is not None]
    rest = by_asked.get(None, [])
    return [known[0] + rest, *known[1:]] if known else [rest]


def _row(when: str, purpose: str | None, op: str, steps: int, groups: Sequence[_OfGroup]) -> LedgerRow:
    findings = [each.finding for each in groups]
    wants = [finding.want for finding in findings if finding.want is not None]
    messages: Counter[Message] = Counter()
    times = Counter(map(id, findings))  # Steps with equal findings share one object.
    for finding in {id(each): each for each in findings}.values():
        for message, count in finding.messages.items():
            messages[message] += count * times[id(finding)]
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
        requested_wire_bytes=_requested_wire(op, groups, messages) if wants else None,
        issued_op=op if messages else None,
        issued_count=sum(messages.values()),
        issued_payload_bytes=payload,
        issued_wire_bytes=_wire(messages),
        executed_op=ran,
        executed_count=sum(messages.values()) if ran else None,
        executed_wire_bytes=ran_bytes,
        explained_bytes=sum(finding.explained_bytes for finding in findings),
        explained_by=min(str(name) for name in by) if by else None,
        group_size=size,
        outside_count=sum(count for message, count in messages.items() if message.outside),
    )


def _requested_wire(op: str, groups: Sequence[_OfGroup], messages: Mapping[Message, int]) -> float:
    """Return the wire bytes of the requested operation, computed with the size of each group.

    If operations and payload are the same as issued, the result is the wire bytes of the issued messages.
    """
    asked = [(each.ranks, each.finding.want) for each in groups if each.finding.want is not None]
    as_issued = all(
        each.finding.want is not None
        and each.finding.want.requested_op == op
        and each.finding.want.payload_bytes == attribution.payload(each.finding.messages)
        for each in groups
    )
    if as_issued:
        return _wire(messages)
    totals: Counter[tuple[str, str]] = Counter()
    for ranks, want in asked:
        totals[want.requested_op, ranks] += want.payload_bytes
    return sum(wire_bytes(name, total, _size(ranks)) for (name, ranks), total in totals.items())


@lru_cache(maxsize=4096)
def _size(ranks: str) -> int:
    return len(parse_ranks(ranks))


def _wire(messages: Mapping[Message, int]) -> float:
    return sum(message.wire_bytes * count for message, count in messages.items())


def _ran(messages: Mapping[Message, int]) -> tuple[str | None, float | None]:
    """Return the executed operations for ``messages`` and their modeled bytes. None if not known for all messages."""
    ops = {message.executed_op for message in messages}
    if not messages or None in ops:
        return None, None
    total = 0.0
    for message, count in messages.items():
        if message.exchanged_bytes is not None:
            sent = message.wire_bytes
        elif backends.known(message.backend):
            sent = backends.execution(message.op, message.payload_bytes, message.group_size).wire_bytes
        else:
            plain = message.executed_op if "+" not in str(message.executed_op) else message.op
            same = plain if plain not in (Op.SEND, Op.RECV) else message.op
            sent = wire_bytes(str(same), message.payload_bytes, message.group_size)
        total += sent * count
    return "+".join(sorted(str(op) for op in ops)), total


class Labelled(NamedTuple):
    """Messages with a purpose whose amount no rule predicts.

    Attributes:
        payload_bytes: The payload of all these messages.
        purposes: The names of their purposes.
        doubts: Clauses about messages that training issued. They may or may not have been requested.
    """

    payload_bytes: int
    purposes: tuple[str, ...]
    doubts: tuple[str, ...]

    @classmethod
    def of(cls, findings: Findings, unpredicted: Mapping[str, str]) -> Labelled:
        """Return the labelled messages of ``findings``. ``unpredicted`` gives the reason for some purposes."""
        total = 0
        purposes: dict[str, None] = {}
        doubted: dict[str, list[tuple[StepKey, int, int]]] = defaultdict(list)
        for key, step in findings.items():
            for kind, finding in step.items():
                if finding.explained_by != attribution.LABEL:
                    continue
                total += attribution.payload(finding.messages)
                purposes[str(kind.purpose)] = None
                inside = attribution.inside_training(kind, finding)
                if key.step >= 0 and inside:
                    sent = key, sum(inside.values()), attribution.payload(inside)
                    doubted[str(kind.purpose)].append(sent)
        return cls(total, tuple(purposes), tuple(_doubted(doubted, unpredicted)))


def _doubted(
    doubted: Mapping[str, Sequence[tuple[StepKey, int, int]]], unpredicted: Mapping[str, str]
) -> Iterable[str]:
    for purpose, sent in doubted.items():
        count, size = sum(number for _, number, _ in sent), sum(total for _, _, total in sent)
        steps = step_list({key for key, _, _ in sent})
        why = unpredicted.get(purpose, "no rule says how much there should be")
        yield f"{steps}, {purpose}: {count:,} messages ({size:,} bytes) are labelled, not predicted: {why}"


def remarks(findings: Findings) -> list[str]:
    """Return a sentence for each purpose whose messages are explained but differ from the expected messages."""
    steps_by_text: dict[str, list[StepKey]] = defaultdict(list)
    for key, step in findings.items():
        for kind, finding in step.items():
            if finding.remark:
                steps_by_text[f"{kind.purpose}: {finding.remark}."].append(key)
    return [f"{step_list(keys)}, {text}" for text, keys in steps_by_text.items()]


def doubtful(findings: Findings) -> list[str]:
    """Return a clause for each purpose whose messages may or may not be explained."""
    steps_by_text: dict[str, list[StepKey]] = defaultdict(list)
    for key, step in findings.items():
        for kind, finding in step.items():
            if finding.doubt:
                steps_by_text[f"{kind.purpose or 'no purpose given'}: {finding.doubt}"].append(key)
    return [f"{step_list(keys)}, {text}" for text, keys in steps_by_text.items()]


def unexplained(findings: Findings) -> Iterable[Unexplained]:
    """Yield all unexplained and missing messages. Equal messages of several steps are grouped."""
    groups: dict[tuple[Any, ...], list[tuple[StepKey, int, int]]] = defaultdict(list)
    for key, step in findings.items():
        for kind, finding in step.items():
            for message, count in finding.surplus.items():
                reason = attribution.RAISED if message.status == "raised" else finding.reason
                place = (message.call_site, reason, message.outside and key.step >= 0)
                group = ("unexplained", *kind, message.payload_bytes, *place)
                groups[group].append((key, count, count * message.payload_bytes))
            if finding.lacking_bytes or finding.lacking_count:
                group = ("missing", *kind, finding.lacking_bytes, None, finding.reason, False)
                groups[group].append((key, finding.lacking_count, finding.lacking_bytes))
    for (kind_name, purpose, op, ranks, _, site, reason, outside), occurrences in sorted(
        groups.items(), key=str
    ):
        yield Unexplained(
            kind=kind_name,
            steps=step_text([key for key, _, _ in occurrences]),
            purpose=purpose,
            op=op,
            group_ranks=ranks,
            count=sum(count for _, count, _ in occurrences),
            payload_bytes=sum(size for _, _, size in occurrences),
            call_site=site,
            reason=reason,
            outside=outside,
        )

"""Expectations beside what was issued, step by step: which messages are explained, which are not, which are missing.

A class of messages is a purpose, an operation and a group. Where count and bytes of a class are those expected, all its
messages are explained. Where they are not, the messages that have no counterpart in a step that closed are singled out;
where no step closes, the whole class is named, since its messages cannot be told apart.

Stage 3 leaves two things that only a run can show. Bytes that depend on the order in which modules run (the checks of
that order; gathers under activation checkpointing or tight limits) are an estimate. And an evaluation gathers the
parameters once more: messages that repeat those of a step that closes, where every forward gathers, are explained as
that. Both are remarked upon.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from commprof.ledger.issue import Issued, Message, StepKey
from commprof.requested.expectation import Expectation
from commprof.schema import Op, Purpose, Status, format_ranks

# What a program sends for ends of its own, when it says so.
OWN_PURPOSES: Final = frozenset(
    {Purpose.METRIC, Purpose.CHECKPOINT, Purpose.OTHER, Purpose.ACTIVATION, Purpose.PIPELINE}
)
UNTAGGED: Final = "no purpose was given, and the config asks for nothing like it"
NOT_ASKED: Final = "the config's rules ask for none with this purpose"
OTHER_OP: Final = "the config's rules ask for another operation with this purpose"
OTHER_GROUP: Final = "the config's rules ask for it in the group of all ranks"
RAISED: Final = "the call raised"


class Class(NamedTuple):
    """Messages that an expectation speaks of together."""

    purpose: str | None
    op: str
    group_ranks: str


@dataclass
class Want:
    """What the rules expect of one class in one step."""

    requested_op: str
    count: int = 0
    payload_bytes: int = 0
    exact: bool = True
    estimated: bool = False  # the bytes too are the rules' best guess
    in_each_pass: bool = False  # parameters are gathered in every forward, an evaluation's as well


@dataclass
class Finding:
    """One class in one step: what was expected and issued, and how much of it is explained.

    ``surplus`` are messages without explanation, ``lacking`` those that should be there, as (bytes, call site) -> count;
    bytes are None where single messages cannot be told apart.
    """

    want: Want | None
    messages: Counter[Message]
    explained_by: str | None
    explained_bytes: int
    surplus: Counter[Message] = field(default_factory=Counter)
    lacking_count: int = 0
    lacking_bytes: int = 0
    reason: str = ""
    remark: str = ""  # why it is explained although it is not what was expected

    @property
    def closes(self) -> bool:
        """Whether nothing is left over and nothing is missing."""
        return not self.surplus and not self.lacking_count and not self.lacking_bytes


Findings = dict[StepKey, dict[Class, Finding]]


def wants(expectations: Iterable[Expectation], world_size: int) -> dict[Class, Want]:
    """The expectations of one step by class."""
    found: dict[Class, Want] = {}
    ranks = format_ranks(list(range(world_size)))
    for row in expectations:
        want = found.setdefault(Class(row.purpose, row.issued_op, ranks), Want(row.requested_op))
        want.count += row.count
        want.payload_bytes += row.payload_bytes
        want.exact &= row.exact
        want.in_each_pass |= row.purpose == Purpose.PARAMETER_GATHER and row.when == "micro_step"
        want.estimated |= not row.bytes_exact
    return found


def attribute(
    issued: Issued, wanted: Mapping[StepKey, Mapping[Class, Want]], partial: frozenset[StepKey]
) -> Findings:
    """Judge every class of every step.

    Args:
        issued: the messages of each step.
        wanted: what each step should send.
        partial: steps that did not reach their end: nothing is missing in them.
    """
    findings: Findings = defaultdict(dict)
    for key in sorted(set(issued) | set(wanted)):
        classes: dict[Class, Counter[Message]] = defaultdict(Counter)
        for message, count in issued.get(key, {}).items():
            classes[Class(message.purpose, message.op, message.group_ranks)][message] += count
        step_wants = wanted.get(key, {})
        for kind in sorted({*classes, *step_wants}, key=str):
            findings[key][kind] = _judge(
                kind, classes.get(kind, Counter()), step_wants, partial=key in partial
            )
    _single_out(findings)
    return dict(findings)


def _judge(kind: Class, messages: Counter[Message], wants: Mapping[Class, Want], *, partial: bool) -> Finding:
    want = wants.get(kind)
    total = payload(messages)
    raised = Counter({m: n for m, n in messages.items() if m.status == Status.RAISED})
    if want is None:
        by, reason = _explained_without_want(kind, wants)
        if by is not None:
            return Finding(None, messages, by, total)
        return Finding(None, messages, None, 0, surplus=messages.copy(), reason=reason)
    count = sum(messages.values())
    fits = total == want.payload_bytes and (count == want.count or not want.exact)
    if partial:
        fits = total <= want.payload_bytes and (count <= want.count or not want.exact)
    if fits:
        return Finding(want, messages, "config", total)
    finding = Finding(want, messages, "config", min(total, want.payload_bytes))
    finding.reason = _difference(count, total, want)
    if want.estimated and messages:
        finding.explained_bytes = total
        finding.remark = f"{finding.reason}: an estimate, since the order in which modules run is in no list"
        return finding
    if total > want.payload_bytes or (total == want.payload_bytes and count > want.count):
        finding.surplus = raised or messages.copy()
    elif not partial:
        finding.lacking_count = max(want.count - count, 0)
        finding.lacking_bytes = want.payload_bytes - total
    return finding


def _explained_without_want(kind: Class, wants: Mapping[Class, Want]) -> tuple[str | None, str]:
    if kind.op == Op.BARRIER:
        return "barrier", ""
    asked = [other for other in wants if other.purpose == kind.purpose]
    if not asked and kind.purpose in OWN_PURPOSES:
        return "tag", ""
    if kind.purpose is None:
        return None, UNTAGGED
    if not asked:
        return None, NOT_ASKED
    return None, OTHER_GROUP if any(other.op == kind.op for other in asked) else OTHER_OP


def _difference(count: int, total: int, want: Want) -> str:
    about = "" if want.exact else "about "
    return f"{count} of {total:,} bytes were issued, {about}{want.count} of {want.payload_bytes:,} bytes expected"


def payload(messages: Mapping[Message, int]) -> int:
    """Payload of all ``messages``."""
    return sum(message.payload_bytes * count for message, count in messages.items())


def _single_out(findings: Findings) -> None:
    """Reduce what a class has too much to the messages that a step which closes does not have."""
    models: dict[tuple[Class, int, int], Counter[Message]] = {}
    for step in findings.values():
        for kind, finding in step.items():
            if finding.want is not None and finding.messages and finding.closes and not finding.remark:
                want = finding.want
                models.setdefault((kind, want.count, want.payload_bytes), finding.messages)
    for step in findings.values():
        for kind, finding in step.items():
            if finding.want is not None and finding.surplus:
                want = finding.want
                _narrow(finding, want, models.get((kind, want.count, want.payload_bytes), Counter()))


def _narrow(finding: Finding, want: Want, model: Counter[Message]) -> None:
    """Narrow the surplus of ``finding`` down to what ``model``, the same class in a step that closes, does not have."""
    extra_bytes = payload(finding.messages) - want.payload_bytes
    extra = finding.messages - model
    single = [message for message in finding.messages if message.payload_bytes == extra_bytes]
    if extra and payload(extra) == extra_bytes:
        if want.in_each_pass and extra.keys() <= model.keys():
            finding.remark = f"{finding.reason}: the rest repeats what a step sends, as an evaluation does"
            finding.surplus = Counter()
            finding.explained_bytes = payload(finding.messages)
        else:
            finding.surplus = extra
    elif len(single) == 1 and sum(finding.messages.values()) == want.count + 1:
        finding.surplus = Counter(single)
    else:
        finding.reason += "; which of these are too many cannot be told"

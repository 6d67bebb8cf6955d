"""Compares expected and issued messages step by step, and finds explained, unexplained and missing messages.

A class of messages is a purpose, an operation and a group. If the count and bytes of a class equal the expected values,
all its messages are explained. Otherwise the report names the messages that have no counterpart in a closed step. If no
step is closed, the report names the whole class, because its messages cannot be distinguished.

At stage 3, three quantities can only be estimated, and the report flags them:

* Bytes that depend on the order in which modules run have an estimate with bounds. These are the checks of this order,
  and gathers under activation checkpointing or tight limits.
* Gathers of modules whose parameters are all frozen have an estimate with bounds, because such modules may never run.
* An evaluation gathers the parameters once more (:mod:`commprof.ledger.requests.evaluations`).
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from commprof.ledger.records.issued import Issued, Message, StepKey
from commprof.ledger.requests import evaluations
from commprof.ledger.requests.message_classes import Class, Want
from commprof.schema import Op, Purpose, Status

# Purposes that a program or its wrapper assigns to messages that no config requests.
OWN_PURPOSES: Final = frozenset(
    {
        Purpose.METRIC,
        Purpose.CHECKPOINT,
        Purpose.OTHER,
        Purpose.ACTIVATION,
        Purpose.PIPELINE,
        Purpose.CONTROL,
        Purpose.OBJECT,
        Purpose.INPUT,
        Purpose.EVALUATION,
        Purpose.PARAMETER_ACCESS,
    }
)
LABEL: Final = "label"  # The purpose of the messages is known, but no rule predicts their amount.
# Purposes outside of the passes of a model: no rule of training covers them.
BESIDE_TRAINING: Final = frozenset(
    {
        Purpose.METRIC,
        Purpose.EVALUATION,
        Purpose.CHECKPOINT,
        Purpose.CONTROL,
        Purpose.OBJECT,
        Purpose.INPUT,
    }
)
UNTAGGED: Final = "no purpose was given, and the config requests nothing like it"
NOT_ASKED: Final = "the rules of the config predict no collective with this purpose"
OTHER_OP: Final = "the rules of the config predict another operation with this purpose"
OTHER_GROUP: Final = "the rules of the config predict it in another group"
RAISED: Final = "the call raised"
OF_SCRIPT: Final = "script"
_MOST_SHOWN: Final = 4
# An estimate counts one forward and one backward pass. It is implausible that modules ran more often than this factor.
MOST_TIMES: Final = 4


@dataclass
class Finding:
    """One class in one step: the expected and the issued messages, and the explained part.

    Attributes:
        want: The expectation. None if there is none.
        messages: The issued messages, without the messages of evaluations.
        explained_by: The kind of the explanation, see ``LedgerRow.explained_by``.
        explained_bytes: The explained part of the payload.
        surplus: Messages without an explanation.
        lacking_count, lacking_bytes: The number and the bytes of missing messages.
        reason: The reason why messages are surplus or missing.
        remark: The reason why messages are explained although they differ from the expectation.
        doubt: The reason why messages may or may not be explained.
        evaluated: Messages of an evaluation, in addition to ``messages``.
    """

    want: Want | None
    messages: Counter[Message]
    explained_by: str | None
    explained_bytes: int
    surplus: Counter[Message] = field(default_factory=Counter)
    lacking_count: int = 0
    lacking_bytes: int = 0
    reason: str = ""
    remark: str = ""
    doubt: str = ""
    evaluated: Counter[Message] = field(default_factory=Counter)

    @property
    def closes(self) -> bool:
        """Whether there are no surplus and no missing messages."""
        return not self.surplus and not self.lacking_count and not self.lacking_bytes


Findings = dict[StepKey, dict[Class, Finding]]


def attribute(
    issued: Issued,
    wanted: Mapping[StepKey, Mapping[Class, Want]],
    partial: frozenset[StepKey],
    unpredicted: Mapping[str, str] = MappingProxyType({}),
    unpublished: Mapping[str, str] = MappingProxyType({}),
    *,
    tells_evaluations: bool = False,
    evaluated_after: Set[StepKey] = frozenset(),
) -> Findings:
    """Compare the issued with the expected messages for every class of every step.

    Steps with the same issued and the same expected messages share one value, because there may be 100,000 steps.

    Args:
        issued: The messages of each step.
        wanted: The expected messages of each step.
        partial: Steps that did not reach their end. Absent messages do not count as missing in these steps.
        unpredicted: Purposes that the rules predict only in part, with the reason.
        unpublished: Purposes that the rules predict only in part for the steps in ``partial``, with the reason.
        tells_evaluations: Whether ``wanted`` includes the messages of evaluations, so that no detection is needed.
        evaluated_after: Steps after which an evaluation gathered parameters, as reported by the engine.
    """
    classes = _classes(issued, wanted)
    evaluated = (
        dict.fromkeys(classes, evaluations.NOTHING)
        if tells_evaluations
        else evaluations.of(classes, wanted, evaluated_after)
    )
    left = evaluations.before(evaluated)
    findings: Findings = {}
    known: dict[tuple[int, int, bool], dict[Class, Finding]] = {}
    nothing: dict[Class, Want] = {}
    for key, sent in classes.items():
        wants, ended = wanted.get(key, nothing), key not in partial
        reasons = unpredicted if ended else {**unpublished, **unpredicted}
        alike = (id(sent), id(wants), ended)
        if evaluated[key] or left[key]:
            findings[key] = _judged(sent, wants, evaluated[key], left[key], reasons, ended=ended)
        else:
            findings[key] = known[alike] = known.get(alike) or _judged(
                sent, wants, {}, {}, reasons, ended=ended
            )
    _single_out(findings, unpredicted)
    _doubt_the_odd(findings, {key for key, sent in left.items() if sent})
    for key, by_class in evaluated.items():
        for kind, messages in by_class.items():
            findings[key][kind] = _with_evaluation(findings[key].get(kind), messages)
    return {key: step for key, step in findings.items() if step}


def _classes(
    issued: Issued, wanted: Mapping[StepKey, Mapping[Class, Want]]
) -> dict[StepKey, dict[Class, Counter[Message]]]:
    nothing: dict[Message, int] = {}
    known: dict[int, dict[Class, Counter[Message]]] = {}
    by_step: dict[StepKey, dict[Class, Counter[Message]]] = {}
    for key in sorted({*issued, *wanted}):
        messages = issued.get(key, nothing)
        if id(messages) not in known:
            known[id(messages)] = _by_class(messages)
        by_step[key] = known[id(messages)]
    return by_step


def _judged(
    sent: Mapping[Class, Counter[Message]],
    wants: Mapping[Class, Want],
    evaluated: Mapping[Class, Counter[Message]],
    left: Mapping[Class, Counter[Message]],
    unpredicted: Mapping[str, str],
    *,
    ended: bool,
) -> dict[Class, Finding]:
    """Compare the issued with the expected messages for every class of one step, without messages of an evaluation.

    Args:
        sent: The messages of the step.
        wants: The expected messages of the step.
        evaluated: The part of ``sent`` that an evaluation sent.
        left: The messages of an evaluation just before the step.
        unpredicted: Purposes that the rules predict only in part, with the reason.
        ended: Whether the step reached its end.
    """
    findings = {}
    for kind in sorted({*sent, *wants}, key=str):
        own = sent.get(kind, Counter()) - evaluated.get(kind, Counter())
        if own or kind in wants:
            findings[kind] = _judge(
                kind, own, wants, payload(left.get(kind, {})), unpredicted, partial=not ended
            )
    return findings


def _by_class(messages: Mapping[Message, int]) -> dict[Class, Counter[Message]]:
    classes: dict[Class, Counter[Message]] = defaultdict(Counter)
    for message, count in messages.items():
        classes[Class(message.purpose, message.op, message.group_ranks)][message] += count
    return dict(classes)


def _with_evaluation(finding: Finding | None, messages: Counter[Message]) -> Finding:
    sent, count = payload(messages), sum(messages.values())
    remark = f"{count} message{'s' * (count > 1)} ({sent:,} bytes) of an evaluation, which runs the model too"
    finding = finding or Finding(None, Counter(), None, 0)
    finding.evaluated = messages
    finding.remark = f"{finding.remark}; {remark}" if finding.remark else remark
    return finding


def _judge(
    kind: Class,
    messages: Counter[Message],
    wants: Mapping[Class, Want],
    left_bytes: int,
    unpredicted: Mapping[str, str],
    *,
    partial: bool,
) -> Finding:
    """Return the finding for one class in one step.

    An evaluation just before the step sent ``left_bytes`` of this class, so the step need not send them again.
    """
    want = wants.get(kind)
    total = payload(messages)
    raised = Counter({m: n for m, n in messages.items() if m.status == Status.RAISED})
    if want is None:
        by, reason = _explained_without_want(kind, wants, unpredicted)
        if by is not None:
            return Finding(None, messages, by, 0 if by == LABEL else total)
        own = Counter({m: n for m, n in messages.items() if m.in_group_of_script})
        if kind.purpose is None and own:
            return _of_script(kind, messages, own)
        return Finding(None, messages, None, 0, surplus=messages.copy(), reason=reason)
    count = sum(messages.values())
    fits = total == want.payload_bytes and (count == want.count or not want.exact)
    if partial:
        fits = total <= want.payload_bytes and (count <= want.count or not want.exact)
    if fits:
        return Finding(want, messages, "config", total)
    finding = Finding(want, messages, "config", min(total, want.payload_bytes))
    finding.reason = _difference(count, total, want)
    counted = (
        count == want.count or not want.exact or (want.in_each_pass and count < want.count and want.estimate)
    )
    if want.estimated and counted and want.least_bytes - left_bytes <= total <= want.most_bytes:
        return _estimated(finding, want, total)
    if not partial and want.payload_bytes - left_bytes <= total < want.payload_bytes:
        finding.explained_bytes = total
        finding.remark = f"{finding.reason}: the evaluation before this step had already sent the rest"
        return finding
    why = unpredicted.get(str(kind.purpose)) or want.others
    if total > want.payload_bytes and why:
        finding.doubt = f"{finding.reason}; the rest is labelled, not predicted: {why}"
    elif total > want.payload_bytes or (total == want.payload_bytes and count > want.count):
        finding.surplus = raised or messages.copy()
    elif not partial:
        finding.lacking_count = max(want.count - count, 0)
        finding.lacking_bytes = want.payload_bytes - total
    return finding


def _of_script(kind: Class, messages: Counter[Message], own: Counter[Message]) -> Finding:
    """Return a finding for the messages ``own``, which were issued in a group that only the script uses.

    No config covers these messages.
    """
    finding = Finding(None, messages, OF_SCRIPT, 0, surplus=messages - own, reason=UNTAGGED)
    number, size = sum(own.values()), payload(own)
    finding.doubt = (
        f"{number} {kind.op} ({size:,} bytes) {'was' if number == 1 else 'were'} issued in a group that the script made "
        f"(ranks {kind.group_ranks}), which the config does not mention: commprof.tag can give the purpose"
    )
    return finding


def _estimated(finding: Finding, want: Want, total: int) -> Finding:
    finding.explained_bytes = total
    depends = want.estimate or "the order in which modules run"
    finding.remark = f"{finding.reason}: an estimate, which depends on {depends}"
    if want.in_each_pass and want.most_bytes == math.inf and total > MOST_TIMES * want.payload_bytes > 0:
        finding.doubt = (
            f"{finding.reason}; modules may have run often enough to send all of these bytes, or other code may "
            "have sent a part of them"
        )
    return finding


def _explained_without_want(
    kind: Class, wants: Mapping[Class, Want], unpredicted: Mapping[str, str]
) -> tuple[str | None, str]:
    if kind.op == Op.BARRIER:
        return "barrier", ""
    asked = [other for other in wants if other.purpose == kind.purpose]
    if kind.purpose in unpredicted or (kind.purpose in OWN_PURPOSES and not asked):
        return LABEL, ""
    if kind.purpose is None:
        return None, UNTAGGED
    if not asked:
        return None, NOT_ASKED
    return None, OTHER_GROUP if any(other.op == kind.op for other in asked) else OTHER_OP


def _difference(count: int, total: int, want: Want) -> str:
    about = "" if want.exact else "about "
    was, messages = ("was", "message") if count == 1 else ("were", "messages")
    return f"{count} {messages} ({total:,} bytes) {was} issued, {about}{want.count} ({want.payload_bytes:,} bytes) expected"


def inside_training(kind: Class, finding: Finding) -> Counter[Message]:
    """Return the messages of a labelled finding that belong to training.

    Accesses to full parameters outside of the steps are left out, because they do not change a step.
    """
    if kind.purpose in BESIDE_TRAINING:
        return Counter()
    if kind.purpose == Purpose.PARAMETER_ACCESS:
        return Counter({message: n for message, n in finding.messages.items() if not message.in_evaluation})
    return finding.messages


def payload(messages: Mapping[Message, int]) -> int:
    """Return the payload of all ``messages`` in bytes."""
    return sum(message.payload_bytes * count for message, count in messages.items())


def _doubt_the_odd(findings: Findings, after_evaluation: Set[StepKey]) -> None:
    """Mark an estimate as doubtful if most steps with the same estimate sent a different amount.

    Modules usually run in one order. Steps that record or check this order are left out, and so are steps after an
    evaluation.
    """
    alike: dict[tuple[Class, int, int], list[Finding]] = defaultdict(list)
    for key, step in findings.items():
        if key in after_evaluation or any(kind.purpose == Purpose.TRACE_CHECK for kind in step):
            continue
        for kind, finding in step.items():
            if finding.want is not None and finding.want.estimated and not finding.want.estimate:
                alike[kind, finding.want.count, finding.want.payload_bytes].append(finding)
    for estimated in alike.values():
        sizes = [_sizes(finding.messages) for finding in estimated]
        usual, steps = Counter(sizes).most_common(1)[0]
        if 2 * steps <= len(estimated):
            continue
        for finding, own in zip(estimated, sizes, strict=True):
            if own != usual:
                count, total = sum(n for _, n in usual), sum(size * n for size, n in usual)
                finding.doubt = f"{finding.reason or 'as expected'}, but {count} ({total:,} bytes) in most comparable steps"


def _sizes(messages: Mapping[Message, int]) -> tuple[tuple[int, int], ...]:
    """Return the sizes of messages in bytes with the number of messages of each size."""
    sizes: Counter[int] = Counter()
    for message, count in messages.items():
        sizes[message.payload_bytes] += count
    return tuple(sorted(sizes.items()))


def _single_out(findings: Findings, unpredicted: Mapping[str, str]) -> None:
    """Reduce the surplus of a class to the messages that a closed step does not have."""
    models: dict[tuple[Class, int, int], Counter[Message]] = {}
    distinct = list({id(step): step for step in findings.values()}.values())
    for step in distinct:
        for kind, finding in step.items():
            if (
                finding.want is not None
                and finding.messages
                and finding.closes
                and not (finding.remark or finding.doubt)
            ):
                want = finding.want
                models.setdefault((kind, want.count, want.payload_bytes), finding.messages)
    for step in distinct:
        for kind, finding in step.items():
            if finding.want is None:
                continue
            want = finding.want
            usual = models.get((kind, want.count, want.payload_bytes))
            if kind.purpose in unpredicted and usual and payload(finding.messages) > want.payload_bytes:
                # A closed step with the same passes shows that the rules predict this class completely.
                finding.surplus, finding.doubt = finding.messages.copy(), ""
            if finding.surplus:
                _narrow(finding, want, usual or Counter())


def _narrow(finding: Finding, want: Want, model: Counter[Message]) -> None:
    """Reduce the surplus of ``finding`` to the messages that are not in ``model``, the same class in a closed step."""
    extra_bytes = payload(finding.messages) - want.payload_bytes
    extra = finding.messages - model
    single = [message for message in finding.messages if message.payload_bytes == extra_bytes]
    absent = model - finding.messages
    if extra and payload(extra) == extra_bytes:
        finding.surplus = extra
    elif model and extra and payload(extra) - payload(absent) == extra_bytes:
        finding.surplus = extra
        finding.explained_bytes = payload(finding.messages) - payload(extra)
        sizes = ", ".join(
            f"{each.payload_bytes:,}" for each in sorted(absent.elements(), key=str)[:_MOST_SHOWN]
        )
        finding.reason += f"; closed steps send {sizes} bytes instead"
    elif len(single) == 1 and sum(finding.messages.values()) == want.count + 1:
        finding.surplus = Counter(single)
    else:
        finding.reason += "; which of these are surplus is not known"

"""Compares a run with a budget and reports the limits that it breaks. Derives the tightest budget that a run meets."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from commprof.errors import UsageError
from commprof.ledger.levels import INIT, Unexplained, Verdict
from commprof.ledger.limits import UNTAGGED, Budget, Limit
from commprof.ledger.records.issued import COLUMNS, Issued, Message, StepKey, issued
from commprof.ledger.records.precount import COLUMNS as OF_PRECOUNT
from commprof.ledger.records.precount import survey_of
from commprof.ledger.requests.request import WholeRun
from commprof.ledger.verification import gaps, verify

_SITES: Final = 2


class Violation(NamedTuple):
    """One limit that a run breaks: its ``key`` in the budget file, and a ``text`` with the measured value and place."""

    key: str
    text: str


class _Scope(NamedTuple):
    """The messages of one step, of the time before the first step, or of the run.

    Messages between steps count only in the scope of the run.
    """

    name: str
    messages: Mapping[Message, int]


def violations(run: WholeRun, budget: Budget) -> list[Violation]:
    """Return every limit of ``budget`` that ``run`` breaks, or that cannot be checked with the records of ``run``."""
    scopes = _scopes(_issued_by(run))
    broken_limits = [
        Violation("records", f"{text}, so no limit can be shown to be met")
        for text in gaps(run, sum(map(len, scopes.values())))
    ]
    wanted = {limit.scope for limit in budget.limits} | set(budget.allowed_ops)
    if "step" in wanted and not scopes["step"]:
        broken_limits.append(
            Violation("step", "the run has no training step, so what a step may send cannot be checked")
        )
    for limit in budget.limits:
        broken_limits += _broken(limit, scopes[limit.scope])
    for scope, ops in budget.allowed_ops.items():
        broken_limits += _new_ops(scope, ops, scopes[scope])
    if budget.only_requested:
        broken_limits += _not_requested(verify(run))
    return broken_limits


def _issued_by(run: WholeRun) -> Issued:
    """Return the messages of each step from the records alone, without the executed operations."""
    return issued(run.parts("collectives", COLUMNS), survey_of(run.parts("collectives", OF_PRECOUNT)))


def _scopes(sent: Issued) -> dict[str, list[_Scope]]:
    init = [_Scope(_name(key), messages) for key, messages in sorted(sent.items()) if key.step < 0]
    steps = [
        _Scope(_name(key), {message: count for message, count in messages.items() if not message.outside})
        for key, messages in sorted(sent.items())
        if key.step >= 0
    ]
    of_run: dict[Message, int] = defaultdict(int)
    for messages in sent.values():
        for message, count in messages.items():
            of_run[message] += count
    return {"init": init, "step": steps, "run": [_Scope("in the run", of_run)] if of_run else []}


def _name(key: StepKey) -> str:
    name = "before the first step" if key.step < 0 else f"in step {key.step}"
    return f"{name} of attempt {key.attempt}" if key.attempt else name


def _selected(limit: Limit, messages: Mapping[Message, int]) -> dict[Message, int]:
    return {
        message: count
        for message, count in messages.items()
        if (limit.op is None or message.op == limit.op)
        and (limit.purpose is None or (message.purpose or UNTAGGED) == limit.purpose)
    }


def measured(measure: str, messages: Mapping[Message, int]) -> int:
    """Return the value of ``measure`` for ``messages``: a number of collectives, or bytes (rounded up)."""
    if measure == "max_collectives":
        return sum(messages.values())
    if measure == "max_payload_bytes":
        return sum(message.payload_bytes * count for message, count in messages.items())
    total = sum(message.wire_bytes * count for message, count in messages.items())
    return math.ceil(round(total, 6))  # removes rounding errors of thirds


def _broken(limit: Limit, scopes: Iterable[_Scope]) -> list[Violation]:
    over = []
    for scope in scopes:
        messages = _selected(limit, scope.messages)
        value = measured(limit.measure, messages)
        if value > limit.most:
            over.append((value, scope.name, messages))
    if not over:
        return []
    value, name, messages = max(over, key=lambda item: item[0])
    more = f" and {len(over) - 1} more" if len(over) > 1 else ""
    text = f"{value:,} is more than {limit.most:,} {name}{more}; {_largest(messages)}"
    return [Violation(limit.key, text)]


def _largest(messages: Mapping[Message, int]) -> str:
    """Return a text that lists the call sites that send the most bytes."""
    sizes: dict[tuple[str, str], int] = defaultdict(int)
    counts: dict[tuple[str, str], int] = defaultdict(int)
    for message, count in messages.items():
        key = (message.op, message.call_site or "an unknown place")
        sizes[key] += message.payload_bytes * count
        counts[key] += count
    ranked = sorted(sizes, key=lambda key: (-sizes[key], key))
    listed = [f"{counts[key]} {key[0]} at {key[1]}" for key in ranked[:_SITES]]
    return "mostly " + ", ".join(listed) if len(ranked) > _SITES else ", ".join(listed)


def _new_ops(scope: str, allowed: frozenset[str], scopes: Iterable[_Scope]) -> list[Violation]:
    seen: dict[str, tuple[str, dict[Message, int]]] = {}
    for part in scopes:
        for op in {message.op for message in part.messages} - allowed - seen.keys():
            seen[op] = (part.name, {m: count for m, count in part.messages.items() if m.op == op})
    return [
        Violation(
            f"{scope}.allowed_ops",
            f"{op} is not among {', '.join(sorted(allowed)) or 'none'}: first {name}, {_largest(messages)}",
        )
        for op, (name, messages) in sorted(seen.items())
    ]


def _not_requested(verdict: Verdict) -> list[Violation]:
    if verdict.request_reason is not None:
        return [Violation("only_requested", f"what was requested is not known: {verdict.request_reason}")]
    not_requested = [_unexplained_text(item) for item in verdict.unexplained if item.kind == "unexplained"]
    unsure = [f"cannot tell: {text}" for text in verdict.unsure]
    return [Violation("only_requested", text) for text in (*not_requested, *verdict.disagreements, *unsure)]


def _unexplained_text(item: Unexplained) -> str:
    steps = item.steps if item.steps == INIT else f"step{'' if item.steps.isdigit() else 's'} {item.steps}"
    return (
        f"{item.count:,} {item.op} ({item.payload_bytes:,} bytes, purpose {item.purpose or UNTAGGED}) in {steps} "
        f"at {item.call_site or 'an unknown place'}: {item.reason}"
    )


def budget_of(run: WholeRun) -> str:
    """Return the tightest budget that ``run`` itself meets, as TOML.

    Raises:
        UsageError: The records of the run are incomplete, so no budget can be shown to be met.
    """
    scopes = _scopes(_issued_by(run))
    missing = gaps(run, sum(map(len, scopes.values())))
    if missing:
        raise UsageError(
            f"{run.path} cannot be shown to meet a budget, so none is written: {'; '.join(missing)}. Record a "
            "complete run, without --aggregate, --steps or --max-size"
        )
    verdict = verify(run)
    clean = not _not_requested(verdict)
    lines = [f"# The tightest budget that {run.path.name} meets: see docs/verify.md."]
    lines += [f"only_requested = {'true' if clean else 'false'}"]
    for scope in ("init", "step"):
        lines += _written(scope, scopes[scope])
    return "\n".join(lines) + "\n"


def _written(scope: str, scopes: list[_Scope]) -> list[str]:
    if not scopes:
        return []
    ops = sorted({message.op for part in scopes for message in part.messages})
    purposes = sorted({message.purpose or UNTAGGED for part in scopes for message in part.messages})
    lines = ["", f"[{scope}]", *_most(Limit(scope, None, None, "", 0), scopes)]
    lines.append(f"allowed_ops = {json.dumps(ops)}")
    for purpose in purposes:
        lines += ["", f"[{scope}.purpose.{purpose}]", *_most(Limit(scope, None, purpose, "", 0), scopes)]
    return lines


def _most(limit: Limit, scopes: list[_Scope]) -> list[str]:
    return [
        f"{measure} = {max(measured(measure, _selected(limit, part.messages)) for part in scopes)}"
        for measure in ("max_payload_bytes", "max_wire_bytes", "max_collectives")
    ]

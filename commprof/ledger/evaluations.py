"""Evaluations at stage 3: a forward pass outside of training gathers the parameters too.

What an evaluation sends comes after the optimizer of one step and before the forward of the next
(``Message.in_evaluation``). It is told from stray messages by its amount: it gathers all that does not stay gathered. The
step after it does not gather again what is still there, nor check again an order of modules that the evaluation
checked. An evaluation before the first step records that order without a backward pass, so that what the steps after it
gather depends on the order in which modules run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from commprof.ledger.issue import INIT_STEP, Message, StepKey
from commprof.schema import Op, Purpose

if TYPE_CHECKING:
    from commprof.ledger.attribution import Class, Want

PURPOSES: Final = frozenset({Purpose.PARAMETER_GATHER, Purpose.TRACE_CHECK})
# Where ranks share a model, a forward pass outside of training sends what one within it does.
_OF_A_FORWARD: Final = frozenset({Purpose.ACTIVATION, Purpose.PIPELINE})

Evaluated = dict[StepKey, dict["Class", Counter[Message]]]
NOTHING: Final[dict[Class, Counter[Message]]] = {}  # was sent by an evaluation


def of(
    classes: Mapping[StepKey, Mapping[Class, Counter[Message]]],
    wanted: Mapping[StepKey, Mapping[Class, Want]],
) -> Evaluated:
    """What the evaluations after each step sent, by class; nothing where there was none."""
    least = {
        kind: want.least_of_a_pass
        for wants in wanted.values()
        for kind, want in wants.items()
        if want.in_each_pass
    }
    shared = _asked_of_shared_models(wanted)
    known: dict[int, dict[Class, Counter[Message]]] = {}  # steps that sent the same share one value
    for by_class in classes.values():
        if id(by_class) not in known:
            known[id(by_class)] = _gathered(by_class, least) | _of_shared_models(by_class, shared)
    return {key: known[id(by_class)] for key, by_class in classes.items()}


def _gathered(
    by_class: Mapping[Class, Counter[Message]], least: Mapping[Class, int]
) -> dict[Class, Counter[Message]]:
    """What was sent outside of training, where it gathers at least what a forward pass must."""
    outside = {
        kind: Counter({message: n for message, n in messages.items() if message.in_evaluation})
        for kind, messages in by_class.items()
        if kind.purpose in PURPOSES
    }
    gathered = any(
        kind in least and messages and _bytes(messages) >= least[kind] for kind, messages in outside.items()
    )
    return {kind: messages for kind, messages in outside.items() if messages} if gathered else {}


def _of_shared_models(
    by_class: Mapping[Class, Counter[Message]], shared: frozenset[Class]
) -> dict[Class, Counter[Message]]:
    found = {}
    for kind in shared & by_class.keys():
        outside = Counter({message: n for message, n in by_class[kind].items() if message.in_evaluation})
        if outside:
            found[kind] = outside
    return found


def _asked_of_shared_models(wanted: Mapping[StepKey, Mapping[Class, Want]]) -> frozenset[Class]:
    """What the rules ask of forward passes of a model that ranks share, the comparison of its first inputs included."""
    kinds = {kind for key, wants in wanted.items() if key.step > INIT_STEP for kind in wants}
    check = Purpose.TRACE_CHECK, Op.ALL_REDUCE
    return frozenset(
        kind for kind in kinds if kind.purpose in _OF_A_FORWARD or (kind.purpose, kind.op) == check
    )


def before(evaluated: Evaluated) -> Evaluated:
    """What an evaluation between the step before each step and that step sent."""
    found: Evaluated = {}
    earlier: StepKey | None = None
    for key in sorted(evaluated):
        sent = evaluated[earlier] if earlier is not None and earlier.attempt == key.attempt else {}
        found[key] = {kind: messages for kind, messages in sent.items() if kind.purpose not in _OF_A_FORWARD}
        earlier = key
    return found


def wanted_after(
    evaluated: Evaluated, wanted: Mapping[StepKey, Mapping[Class, Want]]
) -> Mapping[StepKey, Mapping[Class, Want]]:
    """``wanted``, as an estimate in attempts that began with an evaluation."""
    attempts = {
        key.attempt
        for key, sent in evaluated.items()
        if key.step == INIT_STEP and any(kind.purpose == Purpose.PARAMETER_GATHER for kind in sent)
    }
    known: dict[int, dict[Class, Want]] = {}
    found: dict[StepKey, Mapping[Class, Want]] = {}
    for key, wants in wanted.items():
        found[key] = wants
        if key.attempt in attempts and key.step > INIT_STEP:
            found[key] = known[id(wants)] = known.get(id(wants)) or _estimates(wants)
    return found


def _estimates(wants: Mapping[Class, Want]) -> dict[Class, Want]:
    found = dict(wants)
    for kind, want in wants.items():
        if want.in_each_pass:
            found[kind] = replace(want, estimated=True, exact=False)
            check = kind._replace(purpose=Purpose.TRACE_CHECK, op=Op.BROADCAST)
            empty = replace(
                want, requested_op=str(Op.BROADCAST), count=0, payload_bytes=0, in_each_pass=False
            )
            found[check] = replace(wants.get(check, empty), estimated=True, exact=False, least_bytes=0)
    return found


def _bytes(messages: Mapping[Message, int]) -> int:
    return sum(message.payload_bytes * count for message, count in messages.items())

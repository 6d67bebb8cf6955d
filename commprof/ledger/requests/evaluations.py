"""Evaluations at stage 3: a forward pass outside of training gathers the parameters too.

What an evaluation sends comes after the optimizer of one step and before the forward of the next
(``Message.in_evaluation``). Its amount distinguishes it from stray messages: it gathers all that does not stay gathered. The
step after it neither gathers what is still there nor checks an order of modules that the evaluation checked
(:mod:`commprof.ledger.requests.module_orders` explains what follows where the evaluation recorded that order).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Set
from typing import Final

from commprof.ledger.records.issued import INIT_STEP, Message, StepKey
from commprof.ledger.requests.message_classes import Class, Want
from commprof.schema import Op, Purpose

PURPOSES: Final = frozenset({Purpose.PARAMETER_GATHER, Purpose.TRACE_CHECK})
# Where ranks share a model, a forward pass outside of training sends what one within it does.
_OF_A_FORWARD: Final = frozenset({Purpose.ACTIVATION, Purpose.PIPELINE})

Evaluated = dict[StepKey, dict[Class, Counter[Message]]]
NOTHING: Final[dict[Class, Counter[Message]]] = {}  # was sent by an evaluation


def of(
    classes: Mapping[StepKey, Mapping[Class, Counter[Message]]],
    wanted: Mapping[StepKey, Mapping[Class, Want]],
    certain: Set[StepKey] = frozenset(),
) -> Evaluated:
    """What the evaluations after each step sent, by class; empty where there was none.

    Args:
        classes: what each step sent.
        wanted: what it should send.
        certain: steps after which an evaluation gathered parameters, as the engine says.
    """
    least: dict[Class, int] = {}
    for each in {id(wants): wants for wants in wanted.values()}.values():
        for kind, want in each.items():
            if want.in_each_pass:
                missing = max(0, want.least_of_a_pass - want.kept_bytes)
                least[kind] = max(least.get(kind, 0), missing)
    shared = _classes_of_shared_models(wanted)
    known: dict[int, dict[Class, Counter[Message]]] = {}  # steps that sent the same share one value
    for by_class in classes.values():
        if id(by_class) not in known:
            known[id(by_class)] = _gathered(by_class, least) | _of_shared_models(by_class, shared)
    return {
        key: _gathered(by_class, {}, is_certain=True) | known[id(by_class)]
        if key in certain
        else known[id(by_class)]
        for key, by_class in classes.items()
    }


def _gathered(
    by_class: Mapping[Class, Counter[Message]], least: Mapping[Class, int], *, is_certain: bool = False
) -> dict[Class, Counter[Message]]:
    """What was sent outside of training, where it gathers at least what a forward pass must.

    Where all parameters stay gathered, it gathers none, and the check of an order of modules shows the pass.
    """
    outside = {
        kind: Counter({message: n for message, n in messages.items() if message.in_evaluation})
        for kind, messages in by_class.items()
        if kind.purpose in PURPOSES
    }
    checks = any(messages for kind, messages in outside.items() if kind.purpose == Purpose.TRACE_CHECK)
    gathered = is_certain or any(
        _bytes(outside.get(kind, {})) >= size and (size > 0 or checks) for kind, size in least.items()
    )
    return {kind: messages for kind, messages in outside.items() if messages} if gathered else {}


def _of_shared_models(
    by_class: Mapping[Class, Counter[Message]], shared: frozenset[Class]
) -> dict[Class, Counter[Message]]:
    evaluated = {}
    for kind in shared & by_class.keys():
        outside = Counter({message: n for message, n in by_class[kind].items() if message.in_evaluation})
        if outside:
            evaluated[kind] = outside
    return evaluated


def _classes_of_shared_models(wanted: Mapping[StepKey, Mapping[Class, Want]]) -> frozenset[Class]:
    """What forward passes of a shared model send by the rules, the comparison of its first inputs included."""
    kinds = {kind for key, wants in wanted.items() if key.step > INIT_STEP for kind in wants}
    check = Purpose.TRACE_CHECK, Op.ALL_REDUCE
    return frozenset(
        kind for kind in kinds if kind.purpose in _OF_A_FORWARD or (kind.purpose, kind.op) == check
    )


def before(evaluated: Evaluated) -> Evaluated:
    """What an evaluation between the step before each step and that step sent."""
    preceding: Evaluated = {}
    earlier: StepKey | None = None
    for key in sorted(evaluated):
        sent = evaluated[earlier] if earlier is not None and earlier.attempt == key.attempt else {}
        preceding[key] = {
            kind: messages for kind, messages in sent.items() if kind.purpose not in _OF_A_FORWARD
        }
        earlier = key
    return preceding


def _bytes(messages: Mapping[Message, int]) -> int:
    return sum(message.payload_bytes * count for message, count in messages.items())

"""Detects evaluations at stage 3, where a forward pass outside of training also gathers the parameters.

An evaluation sends its messages after the optimizer of one step and before the forward pass of the next step
(``Message.in_evaluation``). The amount distinguishes these messages from stray messages, because an evaluation gathers
all parameters that do not stay gathered. The next step does not gather parameters that are still gathered, and does not
check an order of modules that the evaluation checked. :mod:`commprof.ledger.requests.module_orders` describes the
consequences if the evaluation recorded this order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Set
from typing import Final

from commprof.ledger.records.issued import INIT_STEP, Message, StepKey
from commprof.ledger.requests.message_classes import Class, Want
from commprof.schema import Op, Purpose

PURPOSES: Final = frozenset({Purpose.PARAMETER_GATHER, Purpose.TRACE_CHECK})
# If ranks share a model, a forward pass outside of training sends the same messages as a forward pass of training.
_OF_A_FORWARD: Final = frozenset({Purpose.ACTIVATION, Purpose.PIPELINE})

Evaluated = dict[StepKey, dict[Class, Counter[Message]]]
NOTHING: Final[dict[Class, Counter[Message]]] = {}  # no messages of an evaluation


def of(
    classes: Mapping[StepKey, Mapping[Class, Counter[Message]]],
    wanted: Mapping[StepKey, Mapping[Class, Want]],
    certain: Set[StepKey] = frozenset(),
) -> Evaluated:
    """Return the messages of the evaluations after each step by class. Empty for steps without an evaluation.

    Args:
        classes: The issued messages of each step.
        wanted: The expected messages of each step.
        certain: Steps after which an evaluation gathered parameters, as reported by the engine.
    """
    least: dict[Class, int] = {}
    for each in {id(wants): wants for wants in wanted.values()}.values():
        for kind, want in each.items():
            if want.in_each_pass:
                missing = max(0, want.least_of_a_pass - want.kept_bytes)
                least[kind] = max(least.get(kind, 0), missing)
    shared = _classes_of_shared_models(wanted)
    known: dict[int, dict[Class, Counter[Message]]] = {}  # Steps with equal messages share one value.
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
    """Return the messages outside of training if they gather at least the bytes that a forward pass must gather.

    If all parameters stay gathered, an evaluation gathers none. Then the check of an order of modules shows the pass.
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
    """Return the classes that forward passes of a shared model send, including the comparison of the first inputs."""
    kinds = {kind for key, wants in wanted.items() if key.step > INIT_STEP for kind in wants}
    check = Purpose.TRACE_CHECK, Op.ALL_REDUCE
    return frozenset(
        kind for kind in kinds if kind.purpose in _OF_A_FORWARD or (kind.purpose, kind.op) == check
    )


def before(evaluated: Evaluated) -> Evaluated:
    """Return for each step the messages of an evaluation between the previous step and this step."""
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

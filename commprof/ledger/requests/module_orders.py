"""The recorded order of modules at stage 3, where a program evaluates before that order is complete. Pure.

A forward pass of the model without a recorded order records one (2 broadcasts of ``trace_check``); the next compares it
between the ranks (6) and follows it; later ones follow it (0). An order that an evaluation has recorded has no backward
pass: the micro-batch after it departs from it where its backward pass begins, and the next one records again. So after
an evaluation before the first step, the messages of recording and comparing come one micro-batch later. The decisions
where to release parameters were made along such an order and are kept, so gathers are an estimate from then on.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Final

RECORDING: Final = 2  # broadcasts of the pass that records an order
COMPARING: Final = 6  # of the pass that compares it


class Order(enum.Enum):
    """What is known of the order of modules when a pass begins."""

    NONE = "none"
    RECORDED = "recorded"
    KNOWN = "known"  # recorded and compared
    FORWARD_RECORDED = "forward recorded"  # by an evaluation, without a backward pass
    FORWARD_KNOWN = "forward known"


class Pass(enum.Enum):
    """What one micro-batch does about the order of modules."""

    RECORDS = "records"
    COMPARES = "compares"
    FOLLOWS = "follows"
    COMPARES_AND_DEPARTS = "compares and departs"
    DEPARTS = "departs"


_PASSES: Final = {
    Order.NONE: (Pass.RECORDS, Order.RECORDED),
    Order.RECORDED: (Pass.COMPARES, Order.KNOWN),
    Order.KNOWN: (Pass.FOLLOWS, Order.KNOWN),
    Order.FORWARD_RECORDED: (Pass.COMPARES_AND_DEPARTS, Order.NONE),
    Order.FORWARD_KNOWN: (Pass.DEPARTS, Order.NONE),
}
_BROADCASTS: Final = {
    Pass.RECORDS: RECORDING,
    Pass.COMPARES: COMPARING,
    Pass.FOLLOWS: 0,
    Pass.COMPARES_AND_DEPARTS: COMPARING,
    Pass.DEPARTS: 0,
}


def passes_of(
    micro_steps: int, evaluated: Sequence[int], sent: Sequence[int]
) -> list[tuple[Pass, ...] | None]:
    """What the micro-batches of each step do; None where no evaluation has come between them and the usual.

    Evaluations may be of several engines: what the steps send shows which of them evaluated.

    Args:
        micro_steps: of each step.
        evaluated: broadcasts of ``trace_check`` that evaluations sent before each step.
        sent: those that each step sent.
    """
    order, is_usual = Order.NONE, True
    passes_by_step: list[tuple[Pass, ...] | None] = []
    for number, broadcasts in enumerate(evaluated):
        possible = _possible(order, broadcasts)
        if len(possible) > 1:
            begins = max(possible, key=lambda each: _agreement(each, number, micro_steps, evaluated, sent))
            is_usual = is_usual and begins is order
            order = begins
        passes, order = _passes(order, micro_steps)
        passes_by_step.append(None if is_usual else passes)
    return passes_by_step


def _possible(order: Order, evaluated: int) -> list[Order]:
    """What may be known after evaluations that sent so many broadcasts; the likeliest first."""
    if evaluated < RECORDING or order is Order.RECORDED:
        return [order]  # the next pass compares an order that is recorded completely
    complete = [Order.FORWARD_KNOWN] if evaluated >= RECORDING + COMPARING else []
    possible = [*complete, Order.FORWARD_RECORDED, Order.NONE]
    return [order, *possible] if order is Order.KNOWN else possible


def _agreement(
    order: Order, number: int, micro_steps: int, evaluated: Sequence[int], sent: Sequence[int]
) -> tuple[bool, bool]:
    """Whether step ``number``, and the one after it, sent what they do if that begins with ``order``."""
    passes, ends = _passes(order, micro_steps)
    following = number + 1
    return _broadcasts(passes) == sent[number], following == len(sent) or any(
        _broadcasts(_passes(each, micro_steps)[0]) == sent[following]
        for each in _possible(ends, evaluated[following])
    )


def _broadcasts(passes: Sequence[Pass]) -> int:
    return sum(_BROADCASTS[each] for each in passes)


def _passes(order: Order, micro_steps: int) -> tuple[tuple[Pass, ...], Order]:
    passes = []
    for _ in range(micro_steps):
        done, order = _PASSES[order]
        passes.append(done)
    return tuple(passes), order

"""Models the recorded order of modules at stage 3, if a program evaluates before this order is complete. Pure.

A forward pass without a recorded order records an order (2 broadcasts of ``trace_check``). The next forward pass
compares the order between the ranks (6 broadcasts) and follows the order. Later passes follow the order (0 broadcasts).

An order that an evaluation recorded has no backward pass. The next micro-batch departs from this order at the begin of
its backward pass, and the micro-batch after that records a new order. After an evaluation before the first step, the
messages of recording and comparing are therefore sent one micro-batch later. The decisions where to release parameters
were made with the order of the evaluation and are kept, so gathers are an estimate from then on.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Final

RECORDING: Final = 2  # number of broadcasts of the pass that records an order
COMPARING: Final = 6  # number of broadcasts of the pass that compares the order


class Order(enum.Enum):
    """The state of the order of modules when a pass begins."""

    NONE = "none"
    RECORDED = "recorded"
    KNOWN = "known"  # recorded and compared
    FORWARD_RECORDED = "forward recorded"  # by an evaluation, without a backward pass
    FORWARD_KNOWN = "forward known"


class Pass(enum.Enum):
    """The way in which one micro-batch treats the order of modules."""

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
    """Return how the micro-batches of each step treat the order of modules. None if no evaluation has changed this.

    Several engines may evaluate. The messages of the steps show which engine evaluated.

    Args:
        micro_steps: The number of micro-batches of each step.
        evaluated: The number of broadcasts of ``trace_check`` that evaluations sent before each step.
        sent: The number of these broadcasts that each step sent.
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
    """Return the possible states after evaluations that sent this number of broadcasts, the most likely state first."""
    if evaluated < RECORDING or order is Order.RECORDED:
        return [order]  # An order that is recorded completely is compared by the next pass.
    complete = [Order.FORWARD_KNOWN] if evaluated >= RECORDING + COMPARING else []
    possible = [*complete, Order.FORWARD_RECORDED, Order.NONE]
    return [order, *possible] if order is Order.KNOWN else possible


def _agreement(
    order: Order, number: int, micro_steps: int, evaluated: Sequence[int], sent: Sequence[int]
) -> tuple[bool, bool]:
    """Return whether step ``number`` and the next step sent the broadcasts that follow from a begin with ``order``."""
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

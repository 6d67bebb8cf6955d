"""Predicts the messages of gradient sums with a bounded delay (``communication.bounded_delay``, zero_runtime, stage 0).

Each rank sends its gradients to every other rank in the step that computes them. Some steps later, each rank sums the
gradients that it received. No other collective synchronizes the ranks. All ranks compute the norm from the same
gradients, which needs no message.
"""

from __future__ import annotations

from collections.abc import Iterable

from commprof.requested.expectation import Expectation, row
from commprof.schema import Op, Purpose


def late_sums(rows: Iterable[Expectation], delay: int, world_size: int) -> list[Expectation]:
    """Return the messages of a step with a bounded delay. A ``delay`` of 0 leaves ``rows`` unchanged.

    Args:
        rows: The messages of stage 0 without a delay.
        delay: The value of ``bounded_delay`` in steps.
        world_size: The number of ranks that average gradients.
    """
    if not delay:
        return list(rows)
    delayed = []
    for each in rows:
        if each.purpose == Purpose.GRADIENT_REDUCE:
            each = _to_every_rank(each, world_size)
        if each.purpose != Purpose.GRADIENT_NORM and each.count:
            delayed.append(each)
    return delayed


def _to_every_rank(summed: Expectation, world_size: int) -> Expectation:
    pairs = world_size * (world_size - 1)
    payloads = [sum(message) for message in summed.payloads for _ in range(pairs)]
    note = "communication.bounded_delay: each rank sends its gradients to every other rank, and nothing for the norm"
    sent = row(summed.when, Purpose.GRADIENT_REDUCE, Op.SEND, payloads, world_size, note)
    return sent._replace(
        requested_op=summed.requested_op,
        intended_op=summed.issued_op,
        wire_bytes=float((world_size - 1) * summed.payload_bytes),
        exact=summed.exact,
    )

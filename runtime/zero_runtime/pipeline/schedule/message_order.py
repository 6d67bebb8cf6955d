"""The order of messages between the computations of a pipeline, chosen so that no rank deadlocks.

The computations of all ranks are simulated. A complete backward pass takes two units of time, and any other
computation takes one unit. The time of a message is the end of the computation that produces it. All ranks
send and receive in the order of these times, which is the same on all ranks. So both ranks of the earliest
pending message reach this message next. Hence no rank deadlocks, even if messages block, and independently of
the real times of computations. On its sender and on its receiver, a message is placed before the first
computation that begins at its time or later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from zero_runtime.errors import UsageError
from zero_runtime.pipeline.schedule.instructions import Action, Instruction, Place

Steps = tuple[tuple[Instruction, ...], ...]


class _Message(NamedTuple):
    """A message that sends the output of a computation to another chunk.

    Messages are ordered by date, and then by ranks.
    """

    date: int
    sender: int
    receiver: int
    sent: Instruction
    received: Instruction


def meeting(computations: Sequence[Sequence[Instruction]], chunks: int = 1) -> tuple[Steps, ...]:
    """Return the schedules of all ranks, which consist of computations, loads and messages.

    Args:
        computations: The computations of each rank, in order.
        chunks: The number of chunks of the model on each rank.

    Raises:
        UsageError: The computations wait for each other in a cycle.
    """
    ranks = len(computations)
    begins = _begins(computations, chunks)
    messages = sorted(
        message
        for rank, order in enumerate(computations)
        for each, begin in zip(order, begins[rank], strict=True)
        for message in _messages_of(rank, each, begin + _duration(each), ranks, chunks)
    )
    return tuple(
        tuple(_steps(rank, order, begins[rank], messages, ranks, chunks))
        for rank, order in enumerate(computations)
    )


def _begins(computations: Sequence[Sequence[Instruction]], chunks: int) -> list[list[int]]:
    """Return the earliest time at which each computation can begin."""
    ranks = len(computations)
    todo = [deque(order) for order in computations]
    begins: list[list[int]] = [[] for _ in computations]
    free = [0] * ranks
    ends: dict[tuple[int, Instruction], int] = {}
    while any(todo):
        moved = False
        for rank, pending in enumerate(todo):
            while pending:
                needed = _needed(rank, pending[0], ranks, chunks)
                if needed is not None and needed not in ends:
                    break
                begin = free[rank] if needed is None else max(free[rank], ends[needed])
                begins[rank].append(begin)
                free[rank] = ends[rank, pending[0]] = begin + _duration(pending[0])
                pending.popleft()
                moved = True
        if not moved:
            raise UsageError("deadlock: the computations of a schedule wait for each other in a cycle")
    return begins


def _duration(computation: Instruction) -> int:
    return 2 if computation.action is Action.BACKWARD else 1


def _needed(rank: int, computation: Instruction, ranks: int, chunks: int) -> tuple[int, Instruction] | None:
    """Return the rank and the computation that produce the input of ``computation``.

    The result is None if ``computation`` waits for no message.
    """
    place = Place(rank, computation.chunk)
    if computation.action is Action.FORWARD:
        other = place.before(ranks)
    elif computation.action in (Action.BACKWARD, Action.BACKWARD_INPUT):
        other = place.after(ranks, chunks)
    else:
        other = None
    return None if other is None else (other.rank, computation._replace(chunk=other.chunk))


def _messages_of(
    rank: int, computation: Instruction, date: int, ranks: int, chunks: int
) -> Iterator[_Message]:
    place = Place(rank, computation.chunk)
    if computation.action is Action.FORWARD:
        other = place.after(ranks, chunks)
        kinds = Action.SEND_ACTIVATION, Action.RECEIVE_ACTIVATION
    elif computation.action in (Action.BACKWARD, Action.BACKWARD_INPUT):
        other = place.before(ranks)
        kinds = Action.SEND_GRADIENT, Action.RECEIVE_GRADIENT
    else:
        return
    if other is not None:
        sent, received = (Instruction(kind, computation.micro_batch) for kind in kinds)
        yield _Message(
            date, rank, other.rank, sent._replace(chunk=place.chunk), received._replace(chunk=other.chunk)
        )


def _steps(
    rank: int,
    order: Sequence[Instruction],
    begins: Sequence[int],
    messages: Sequence[_Message],
    ranks: int,
    chunks: int,
) -> Iterator[tuple[Instruction, ...]]:
    """Yield the steps of a rank.

    There is one step for each computation, which begins with the messages and loads before the computation.
    Messages after the last computation are in one more step.
    """
    mine = deque(each for each in messages if rank in (each.sender, each.receiver))

    def until(date: float) -> Iterator[Instruction]:
        while mine and mine[0].date <= date:
            message = mine.popleft()
            if message.sender == rank:
                yield message.sent
            if message.receiver == rank:
                yield message.received

    for each, begin in zip(order, begins, strict=True):
        place = Place(rank, each.chunk)
        at_end = place.before(ranks) is None or place.after(ranks, chunks) is None
        load = [Instruction(Action.LOAD, each.micro_batch, each.chunk)] if at_end else []
        yield (*until(begin), *(load if each.action is Action.FORWARD else ()), each)
    last = tuple(until(float("inf")))
    if last:
        yield last

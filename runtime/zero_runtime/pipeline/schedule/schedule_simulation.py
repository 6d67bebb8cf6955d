"""Simulation of pipeline schedules, with the times of instructions, the waits and the live activations."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from zero_runtime.errors import UsageError
from zero_runtime.pipeline.schedule.instructions import (
    COMPUTATIONS,
    RECEIVES,
    SENDS,
    Action,
    Instruction,
    Place,
)
from zero_runtime.pipeline.schedule.pipeline_schedules import Schedule

UNIT: Final[Mapping[Action, float]] = dict.fromkeys(COMPUTATIONS, 1.0)
_KINDS: Final = {
    Action.SEND_ACTIVATION: Action.RECEIVE_ACTIVATION,
    Action.SEND_GRADIENT: Action.RECEIVE_GRADIENT,
}
_AWAITED: Final = {
    Action.FORWARD: Action.RECEIVE_ACTIVATION,
    Action.BACKWARD: Action.RECEIVE_GRADIENT,
    Action.BACKWARD_INPUT: Action.RECEIVE_GRADIENT,
}
_LETTERS: Final = {
    Action.FORWARD: "F",
    Action.BACKWARD: "B",
    Action.BACKWARD_INPUT: "B",
    Action.BACKWARD_WEIGHT: "W",
}


class Event(NamedTuple):
    """An instruction of a rank, with its begin time and end time."""

    rank: int
    instruction: Instruction
    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """The result of a simulated schedule.

    Attributes:
        ranks: The number of ranks.
        events: The events of all ranks, in the order of the simulation.
        peaks: For each rank, the largest number of pairs (micro-batch, chunk) whose forward pass had run, but
            whose backward pass had not.
    """

    ranks: int
    events: tuple[Event, ...]
    peaks: tuple[int, ...]

    @property
    def length(self) -> float:
        """The time at which the last rank finishes."""
        return max(event.end for event in self.events)

    def busy(self, rank: int) -> float:
        """Return the time in which ``rank`` computes."""
        return sum(event.end - event.begin for event in self.events if event.rank == rank)

    @property
    def idle_fraction(self) -> float:
        """The share of time without computation, over all ranks."""
        return 1.0 - sum(map(self.busy, range(self.ranks))) / (self.ranks * self.length)

    def __str__(self) -> str:
        """Return a line for each rank, with its computation in each unit of time and a dot for each idle unit."""
        lines = []
        for rank in range(self.ranks):
            cells = ["."] * round(self.length)
            for event in self.events:
                if event.rank == rank and event.instruction.action in COMPUTATIONS:
                    text = f"{_LETTERS[event.instruction.action]}{event.instruction.micro_batch}"
                    text += "'" * event.instruction.chunk
                    span = range(round(event.begin), round(event.end))
                    cells[span.start : span.stop] = [text] * len(span)
            lines.append(" ".join(f"{cell:<3}" for cell in cells).rstrip())
        return "\n".join(lines)


def simulate(
    schedules: Sequence[Schedule],
    times: Mapping[Action, float] = UNIT,
    chunks: int = 1,
    blocking: bool = False,
) -> Timeline:
    """Simulate the schedules of all ranks. Messages take no time.

    Args:
        schedules: The schedule of each rank.
        times: The time of each kind of computation.
        chunks: The number of chunks of the model on each rank.
        blocking: Whether a send and its receive wait for each other. Otherwise they are asynchronous, and the
            computation that needs a message waits for the message.

    Raises:
        UsageError: Ranks deadlock, the order of sends differs from the order of receives, or a message is never
            received.
    """
    return _Simulation(schedules, times, chunks, blocking).run()


@dataclass(slots=True)
class _Rank:
    todo: deque[Instruction]
    time: float = 0.0
    live: set[tuple[int, int]] = field(default_factory=set)
    peak: int = 0


class _Simulation:
    def __init__(
        self, schedules: Sequence[Schedule], times: Mapping[Action, float], chunks: int, blocking: bool
    ) -> None:
        self._ranks = [_Rank(deque(each for step in schedule for each in step)) for schedule in schedules]
        self._times = times
        self._chunks = chunks
        self._blocking = blocking
        self._events: list[Event] = []
        # _sent maps (sender, receiver) to the messages in order. Each entry has the receive instruction of a
        # message and the time at which the message was sent. _expected maps the same key to the expected receives.
        self._sent: dict[tuple[int, int], deque[tuple[Instruction, float]]] = {}
        self._expected: dict[tuple[int, int], deque[Instruction]] = {}
        # Maps (receiver, message) to the time at which the message was sent; None before.
        self._arrivals: dict[tuple[int, Instruction], float | None] = {}

    def run(self) -> Timeline:
        while any(rank.todo for rank in self._ranks):
            moved = [self._advance(number) for number in range(len(self._ranks))]
            if not any(moved):
                self._deadlock()
        for (sender, receiver), undelivered in self._sent.items():
            if undelivered:
                raise UsageError(f"rank {receiver} never receives {undelivered[0][0]} from rank {sender}")
        return Timeline(len(self._ranks), tuple(self._events), tuple(rank.peak for rank in self._ranks))

    def _advance(self, number: int) -> bool:
        """Run a rank until it must wait, and return whether it ran any instruction."""
        rank, moved = self._ranks[number], False
        while rank.todo:
            each = rank.todo[0]
            if each.action in SENDS:
                done = self._send(number, each)
            elif each.action in RECEIVES:
                done = self._receive(number, each)
            else:
                done = self._compute(number, each)
            if not done:
                break
            moved = True
        return moved

    def _compute(self, number: int, instruction: Instruction) -> bool:
        rank = self._ranks[number]
        awaited = (number, instruction._replace(action=_AWAITED.get(instruction.action, instruction.action)))
        arrival = self._arrivals.get(awaited, rank.time)
        if arrival is None:
            return False
        self._arrivals.pop(awaited, None)
        rank.todo.popleft()
        begin = max(rank.time, arrival)
        rank.time = begin + self._times.get(instruction.action, 0.0)
        if instruction.action in COMPUTATIONS:
            self._events.append(Event(number, instruction, begin, rank.time))
        key = (instruction.micro_batch, instruction.chunk)
        if instruction.action is Action.FORWARD:
            rank.live.add(key)
            rank.peak = max(rank.peak, len(rank.live))
        elif instruction.action in (Action.BACKWARD, Action.BACKWARD_INPUT):
            if key not in rank.live:
                raise UsageError(f"rank {number} runs {instruction} before its forward pass")
            rank.live.remove(key)
        return True

    def _send(self, number: int, instruction: Instruction) -> bool:
        place = Place(number, instruction.chunk)
        ranks = len(self._ranks)
        forward = instruction.action is Action.SEND_ACTIVATION
        other = place.after(ranks, self._chunks) if forward else place.before(ranks)
        if other is None:
            raise UsageError(f"rank {number} has no peer for {instruction}")
        message = Instruction(_KINDS[instruction.action], instruction.micro_batch, other.chunk)
        rank, peer = self._ranks[number], self._ranks[other.rank]
        if self._blocking:
            if not peer.todo or peer.todo[0] != message:
                return False
            rank.time = peer.time = max(rank.time, peer.time)
            peer.todo.popleft()
        else:
            self._sent.setdefault((number, other.rank), deque()).append((message, rank.time))
            self._deliver(number, other.rank)
        rank.todo.popleft()
        return True

    def _receive(self, number: int, instruction: Instruction) -> bool:
        place = Place(number, instruction.chunk)
        ranks = len(self._ranks)
        forward = instruction.action is Action.RECEIVE_ACTIVATION
        other = place.before(ranks) if forward else place.after(ranks, self._chunks)
        if other is None:
            raise UsageError(f"rank {number} has no peer for {instruction}")
        if self._blocking:
            return False
        self._expected.setdefault((other.rank, number), deque()).append(instruction)
        self._arrivals[number, instruction] = None
        self._deliver(other.rank, number)
        self._ranks[number].todo.popleft()
        return True

    def _deliver(self, sender: int, receiver: int) -> None:
        """Match messages of ``sender`` with the receives of ``receiver``, in order."""
        sent = self._sent.get((sender, receiver), deque())
        expected = self._expected.get((sender, receiver), deque())
        while sent and expected:
            (message, time), each = sent.popleft(), expected.popleft()
            if message != each:
                raise UsageError(
                    f"rank {receiver} expects {each} from rank {sender}, which sends {message} first"
                )
            self._arrivals[receiver, each] = time

    def _deadlock(self) -> None:
        stuck = [
            f"rank {number} at {rank.todo[0].action} of micro-batch {rank.todo[0].micro_batch}"
            for number, rank in enumerate(self._ranks)
            if rank.todo
        ]
        raise UsageError(f"the schedules deadlock: {', '.join(stuck)}")

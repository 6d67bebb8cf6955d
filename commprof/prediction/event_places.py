"""Place the events of messages on the axis of work of a step with a different config.

The recorded messages show when the gradients before them have arrived. Between recorded messages, the backward pass is
assumed to take time in proportion to the elements of weight matrices, because its FLOPs grow with them. Embeddings and
vectors are assumed to take no time. The same assumption applies to the forward pass, in which modules of stage 3 gather
their parameters.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Final, Literal, NamedTuple

import numpy as np

from commprof.prediction.program import Event, Floats, Groups, Message, Program
from commprof.prediction.sent import GRADIENTS, Sent
from commprof.requested.parameters import Parameter
from commprof.requested.zero.module_calls import ModuleCalls
from commprof.schema import Phase, Purpose

FORWARD: Final = 1 / 3  # fraction of the compute of both passes: the backward pass has twice the FLOPs
# The minimum and maximum of this fraction, if recorded messages give a different fraction.
_LEAST_FORWARD: Final = 0.15
MOST_FORWARD: Final = 0.5
_BOTH: Final[tuple[Literal["issue", "wait"], ...]] = ("issue", "wait")
# The turns order events at the same work: first recorded events and forward passes, then backward passes, and then
# everything after the last backward pass. Within the passes of stage 3, the number of the module call follows. Then 0
# follows for the gathers of the module, and 1 for its gradients, which come after the gathers.
WITHIN, _BACKWARD, AFTER = (0,), (1,), (2,)


class Assumed(NamedTuple):
    """The assumed costs of gathering parameters in the passes and of adding up gradients, which a run does not show.

    Attributes:
        copy_ns: The time in ns to allocate and fill parameters, for each gathered byte, in addition to the message.
            Also the time for each byte of gradients that is added up without being sent.
        hook_ns: The time in ns of the Python hooks of DeepSpeed's stage 3, for each call of a module.
        evenly: Whether all modules with matrices compute equally long. Otherwise their time is in proportion to the
            elements of their matrices.
    """

    copy_ns: float = 0.0
    hook_ns: float = 0.0
    evenly: bool = False


class Inserted(NamedTuple):
    """A blocking message that is added to a pass, because the run does not have it.

    Attributes:
        message: The message.
        forward: Whether the message is sent in the forward pass, and not in the backward pass.
        share: The fraction of the pass that is done when the message is sent.
        longer: The additional compute after the message, as a fraction of the pass: (steps, ranks).
    """

    message: Message
    forward: bool
    share: float
    longer: Floats | float = 0.0


class Place(NamedTuple):
    """An event on the axis of work, which is in ns with shape (steps, ranks).

    Events at the same work are ordered by micro-batch, and then by ``turn``. ``cost`` is the compute after the event
    in ns, which is not on the axis.
    """

    work: Floats
    event: Event
    micro: int
    turn: tuple[int, ...]
    cost: Floats | float = 0.0


class Passes(NamedTuple):
    """The passes of a micro-batch on the axis of work, which is in ns with shape (steps, ranks).

    Attributes:
        start: The work at the start of the forward pass.
        points: Points of the backward pass in ascending order: the fraction that is done, and the work until then.
    """

    start: Floats
    points: list[tuple[float, Floats]]

    @property
    def end(self) -> Floats:
        """The work at the end of the backward pass."""
        return self.points[-1][1]

    def forward(self, share: float) -> Floats:
        """Return the work until the fraction ``share`` of the forward pass is done."""
        return self.start + share * (self.points[0][1] - self.start)

    def backward(self, share: float) -> Floats:
        """Return the work until the fraction ``share`` of the backward pass is done."""
        for (low, first), (high, second) in pairwise(self.points):
            if share <= high:
                return first + (second - first) * ((share - low) / (high - low) if high > low else 1.0)
        return self.end


def _share(parameters: Sequence[Parameter], count: int, evenly: bool = False) -> float:
    """Return the fraction of the backward pass that is done when the first ``count`` gradients have arrived."""
    weights = [min(1, weight(each)) if evenly else weight(each) for each in parameters]
    total = sum(weights)
    return sum(weights[:count]) / total if total else count / max(1, len(parameters))


def weight(parameter: Parameter) -> int:
    """Return the number of elements of a weight matrix, to which the time of a module is assumed to be proportional.

    It is 0 for embeddings and for parameters with fewer than two dimensions.
    """
    if "Embedding" in (parameter.owner_types or "") or len(parameter.extents) < 2:
        return 0
    return parameter.numel


def passes_of(
    program: Program,
    work: Floats,
    before: Sent,
    after: Sent,
    micro: int,
    ends: Sequence[int],
    evenly: bool = False,
) -> Passes:
    """Return the passes of micro-batch ``micro`` of the config ``after`` on the axis of work.

    Args:
        program: The recorded program.
        work: The work until each recorded event in ns: (steps, events + 1, ranks).
        before: The messages of the recorded config.
        after: The messages of the other config.
        micro: The number of the micro-batch.
        ends: The positions of the recorded events that end the micro-batches.
        evenly: As in :class:`Assumed`.
    """
    count = len(after.gradients)
    recorded = _recorded_flushes(program, before)
    end = work[:, ends[min(micro, len(ends) - 1)]]
    if len(ends) == count:
        start = work[:, ends[micro - 1]] if micro else np.zeros_like(end)
    else:  # gradients are reduced only in the last micro-batch: assume equal times of micro-batches
        start, end = work[:, ends[-1]] * (micro / count), work[:, ends[-1]] * ((micro + 1) / count)
    known = [
        (_share(before.arriving, arrived, evenly), work[:, number])
        for number, arrived in recorded.get(micro if len(ends) == count else -1, [])
        if arrived < len(before.arriving)
    ]
    begin = _begin_of_backward(start, end, known)
    return Passes(start, [(0.0, begin), *known, (1.0, end)])


def arrived_at(arriving: Sequence[Parameter], passes: Passes, evenly: bool, gradients: int) -> Floats:
    """Return the work at which the first ``gradients`` gradients have arrived."""
    if gradients >= len(arriving):
        return passes.end
    return passes.backward(_share(arriving, gradients, evenly))


def gather_messages(calls: ModuleCalls, micro: int, groups: Groups) -> list[Message]:
    """Return the messages that gather the parameters of micro-batch ``micro``, in the order of the module calls."""
    phases = {
        number: str(Phase.FORWARD if call.forward else Phase.BACKWARD)
        for call in calls.calls
        for number in (*call.own, *call.ahead)
    }
    return [
        Message(
            each.op,
            each.payload_bytes,
            str(Purpose.PARAMETER_GATHER),
            groups,
            False,
            None,
            micro,
            phases[number],
        )
        for number, each in enumerate(calls.messages)
    ]


def gather_events(after: Sent, passes: Passes, assumed: Assumed, micro: int, first: int) -> list[Place]:
    """Return the events of the gathers of micro-batch ``micro``. ``first`` is the number of their first message.

    A module issues the gathers of its own missing parameters, waits for the parameters that it needs, and issues
    gathers for later modules. In the backward pass, a module begins when the modules after it in the model have ended.
    """
    assert after.calls is not None
    sizes = [each.payload_bytes for each in after.calls.messages]
    calls = after.calls.calls
    totals = [
        sum(_weight_of(call.parameters, assumed.evenly) for call in calls if call.forward == forward) or 1
        for forward in (True, False)
    ]
    done = [0, 0]
    places: list[Place] = []
    for number_of_call, call in enumerate(calls):
        turn = (*(WITHIN if call.forward else _BACKWARD), number_of_call, 0)
        which = 0 if call.forward else 1
        share = done[which] / totals[which]
        at = passes.forward(share) if call.forward else passes.backward(share)
        places += [Place(at, Event("issue", first + number), micro, turn) for number in call.own]
        places += [
            Place(at, Event("wait", first + number), micro, turn, assumed.copy_ns * sizes[number])
            for number in call.waits
        ]
        places += [Place(at, Event("issue", first + number), micro, turn) for number in call.ahead]
        done[which] += _weight_of(call.parameters, assumed.evenly)
    waited = {place.event.message for place in places if place.event.kind == "wait"}
    rest = [number for number in range(first, first + len(sizes)) if number not in waited]
    return [*places, *(Place(passes.end, Event("wait", number), micro, _end_turn(after)) for number in rest)]


def inserted_events(inserted: Sequence[Inserted], passes: Passes, first: int) -> list[Place]:
    """Return the events of the messages ``inserted``. ``first`` is the number of the first of these messages."""
    places = []
    for number, each in enumerate(inserted, first):
        begin = passes.points[0][1]  # begin of the backward pass
        at = passes.forward(each.share) if each.forward else passes.backward(each.share)
        cost = each.longer * (begin - passes.start if each.forward else passes.end - begin)
        turn, micro = WITHIN if each.forward else _BACKWARD, each.message.micro_step
        places += [
            Place(at, Event("issue", number), micro, turn),
            Place(at, Event("wait", number), micro, turn, cost),
        ]
    return places


def _gradient_turn(after: Sent, gradients: int) -> tuple[int, ...]:
    """Return the turn of the events that the arrival of gradient number ``gradients``, counted from 1, causes."""
    if after.calls is None or gradients >= len(after.arriving):
        return _end_turn(after)
    last = after.arriving[gradients - 1].name
    calls = enumerate(after.calls.calls)
    owners = [
        number
        for number, call in calls
        if not call.forward and any(each.name == last for each in call.parameters)
    ]
    return (*_BACKWARD, owners[0], 1) if owners else _end_turn(after)


def _end_turn(after: Sent) -> tuple[int, ...]:
    """Return the turn of the events that the end of a backward pass causes."""
    return _BACKWARD if after.calls is None else (*_BACKWARD, len(after.calls.calls), 1)


def _weight_of(parameters: Sequence[Parameter], evenly: bool) -> int:
    return sum(min(1, weight(each)) if evenly else weight(each) for each in parameters)


def end_events(messages: Sequence[Message], place: Floats, first: int) -> list[Place]:
    """Return the events of messages at the end of a step.

    Blocking messages run one after the other. Otherwise all messages are issued before the first wait.
    """
    numbers = range(first, first + len(messages))
    if all(each.blocks for each in messages):
        return [
            Place(place, Event(kind, number), messages[0].micro_step, AFTER)
            for number in numbers
            for kind in _BOTH
        ]
    return [
        Place(place, Event(kind, number), messages[0].micro_step, AFTER)
        for kind in _BOTH
        for number in numbers
    ]


def _recorded_flushes(program: Program, before: Sent) -> dict[int, list[tuple[int, int]]]:
    """Return, by micro-batch, the position of each recorded gradient message and the number of gradients at this point.

    The positions are those of the events that issue the messages. A micro-batch is left out if the recorded messages
    do not match the rules.
    """
    issues: dict[int, list[int]] = defaultdict(list)
    for number, event in enumerate(program.events):
        message = program.messages[event.message]
        if event.kind == "issue" and message.purpose == GRADIENTS:
            issues[message.micro_step].append(number)
    return {
        micro: [(number, count) for number, (_, count) in zip(numbers, before.gradients[micro], strict=True)]
        for micro, numbers in issues.items()
        if micro < len(before.gradients) and len(numbers) == len(before.gradients[micro])
    }


def _begin_of_backward(start: Floats, end: Floats, known: Sequence[tuple[float, Floats]]) -> Floats:
    """Return the work at which the backward pass began.

    It follows from the pace of the recorded gradient messages. Without such messages, the backward pass is assumed to
    take two thirds of the compute.
    """
    total = end - start
    begin = start + FORWARD * total
    if known and known[0][0] < 1.0:
        share, work = known[0]
        pace = np.median(end - work) / (1.0 - share)
        begin = np.median(work - start) - share * pace + start
    begin = np.clip(begin, start + _LEAST_FORWARD * total, start + MOST_FORWARD * total)
    return np.minimum(begin, known[0][1]) if known else begin


def gradient_events(
    messages: Sequence[tuple[Message, int]],
    arrival: Callable[[int], Floats],
    after: Sent,
    first: int,
    cost: Floats,
) -> list[Place]:
    """Return the events of the gradient messages of a micro-batch.

    Args:
        messages: The messages, each with the number of gradients that have arrived when it is sent.
        arrival: A function that returns the work at which a given number of gradients have arrived.
        after: The messages of the config.
        first: The number of the first message.
        cost: The compute after each message, in ns.
    """
    places: list[Place] = []
    micro = messages[0][0].micro_step if messages else 0
    flushes: dict[int | None, list[int]] = defaultdict(list)
    counts: dict[int | None, int] = {}
    for number, (message, count) in enumerate(messages, first):
        flushes[message.bucket].append(number)
        counts[message.bucket] = count
    flying: list[list[int]] = []
    end = arrival(len(after.arriving))
    for bucket, numbers in flushes.items():
        at, turn = arrival(counts[bucket]), _gradient_turn(after, counts[bucket])
        if not after.overlaps:
            for number in numbers:
                places.append(Place(at, Event("issue", number), micro, turn))
                places.append(Place(at, Event("wait", number), micro, turn, cost))
            continue
        while after.depth and after.waits_before and len(flying) >= after.depth:
            places += [Place(at, Event("wait", number), micro, turn, cost) for number in flying.pop(0)]
        places += [Place(at, Event("issue", number), micro, turn) for number in numbers]
        flying.append(numbers)
        while after.depth and not after.waits_before and len(flying) >= after.depth:
            places += [Place(at, Event("wait", number), micro, turn, cost) for number in flying.pop(0)]
    places += [
        Place(end, Event("wait", number), micro, _end_turn(after), cost)
        for numbers in flying
        for number in numbers
    ]
    return places


def place_at_end(program: Program, work: Floats, purpose: str, end: int) -> Floats:
    """Return the work at which messages of ``purpose`` are placed.

    It is the place of the first recorded message of the same purpose after position ``end``. Without such a message,
    it is the end of the step for parameter gathers, and position ``end`` for other purposes.
    """
    for number, event in enumerate(program.events):
        message = program.messages[event.message]
        if number > end and event.kind == "issue" and message.purpose == purpose:
            return work[:, number]
    return work[:, -1] if purpose == Purpose.PARAMETER_GATHER else work[:, end]

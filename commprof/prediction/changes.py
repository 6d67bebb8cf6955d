"""The program of a step with another config: other gradient messages, cut where their gradients have arrived.

What a rank computes does not depend on its messages, so it keeps its place on an axis of *work*: ns computed since the
step began. The messages of the recorded config are taken off this axis, and those of the other config put on it, where
enough gradients have arrived. When gradients arrive is known at the recorded messages; in between, the backward pass takes
as long for each element of a weight matrix (its FLOPs grow with them), and nothing for embeddings and vectors. The same
holds for the forward pass, in which modules of stage 3 gather their parameters.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from types import MappingProxyType
from typing import Final, Literal, NamedTuple

import numpy as np

from commprof.errors import UsageError
from commprof.prediction.program import Event, Floats, Groups, Message, Program, Step
from commprof.prediction.sent import AT_END, GRADIENTS, Sent, groups_of
from commprof.requested.parameters import Parameter
from commprof.requested.zero.module_calls import ModuleCalls
from commprof.schema import Phase, Purpose

# What a gradient message costs beside its own time and its call: filling and emptying a bucket, waking up after the wait. In
# calls of it, since both are mostly Python; measured on the development runs: docs/predict.md.
_BESIDE_CALL: Final = 2.0
FORWARD: Final = 1 / 3  # of the compute of both passes: the backward pass has twice the FLOPs
_LEAST_FORWARD: Final = 0.15  # where recorded messages say otherwise
MOST_FORWARD: Final = 0.5
_BOTH: Final[tuple[Literal["issue", "wait"], ...]] = ("issue", "wait")
# Turns of events at the same work: recorded ones and forward passes, backward passes, and what follows the last of these. At
# stage 3 the number of the module call follows in the passes, and then a 1 for gradients, which come after its gathers.
_WITHIN, _BACKWARD, _AFTER = (0,), (1,), (2,)


class Assumed(NamedTuple):
    """What a run does not show of gathering parameters within the passes, and of adding up gradients.

    Attributes:
        copy_ns: for each byte that is gathered, beside its message: allocating and filling the parameters. Also for each
            byte of gradients that is added up without being sent.
        evenly: modules with matrices all compute equally long, rather than in proportion to the elements of these.
    """

    copy_ns: float = 0.0
    evenly: bool = False


class Changed(NamedTuple):
    """The program of another config and the compute of its steps.

    Attributes:
        assumed: sentences about what the recorded run does not show.
    """

    program: Program
    steps: list[Step]
    assumed: tuple[str, ...] = ()


class Inserted(NamedTuple):
    """A message of a pass that the run does not have, and that a rank waits for.

    Attributes:
        message: what is sent.
        forward: in the forward pass; else in the backward pass.
        share: of the pass that is done when it is sent.
        longer: what is computed more after it, as a part of the pass: (steps, ranks).
    """

    message: Message
    forward: bool
    share: float
    longer: Floats | float = 0.0


class _Place(NamedTuple):
    """An event on the axis of work: (steps, ranks) ns.

    Of events at the same work those of an earlier micro-batch come first, then those of a lower ``turn``. ``cost`` is
    computed after it, and is not on the axis.
    """

    work: Floats
    event: Event
    micro: int
    turn: tuple[int, ...]
    cost: Floats | float = 0.0


class _Passes(NamedTuple):
    """Where a micro-batch is on the axis of work: (steps, ranks) ns.

    Attributes:
        start: of the forward pass.
        points: of the backward pass: the part of it that is done, and the work until then, in rising order.
    """

    start: Floats
    points: list[tuple[float, Floats]]

    @property
    def end(self) -> Floats:
        """Of the backward pass."""
        return self.points[-1][1]

    def forward(self, share: float) -> Floats:
        """The work until ``share`` of the forward pass is done."""
        return self.start + share * (self.points[0][1] - self.start)

    def backward(self, share: float) -> Floats:
        """The work until ``share`` of the backward pass is done."""
        for (low, first), (high, second) in pairwise(self.points):
            if share <= high:
                return first + (second - first) * ((share - low) / (high - low) if high > low else 1.0)
        return self.end


def change(
    program: Program,
    steps: Sequence[Step],
    before: Sent,
    after: Sent,
    *,
    shrinks_optimizer: float = 1.0,
    assumed: Assumed = Assumed(),  # noqa: B008 - immutable
    inserted: Mapping[int, Sequence[Inserted]] = MappingProxyType({}),
) -> Changed:
    """Return the program of ``after`` for steps that were recorded with ``before``.

    Args:
        program: recorded events.
        steps: recorded compute, as if nothing had been in flight.
        before: what the recorded config sends.
        after: what the other one sends.
        shrinks_optimizer: elements that a rank updates, by those of the recorded config.
        assumed: about parameters that are gathered within the passes.
        inserted: messages of each micro-batch that go at a given part of its passes.

    Raises:
        UsageError: the run's messages are not those of its config, or where those of the other one go is not known.
    """
    _check_recorded(program, before)
    ranks = steps[0].spans.shape[1]
    recorded_ranks = sum(map(len, program.messages[0].groups))
    regathers = before.calls != after.calls or (after.calls is not None and ranks != recorded_ranks)
    if regathers:
        _check_gathers(program, before, after)
    ends = _ends_of_backward(program)
    if shrinks_optimizer != 1.0:
        steps = [_with_optimizer(program, each, ends[-1], shrinks_optimizer) for each in steps]
    added_ns = (after.added_bytes - before.added_bytes) * assumed.copy_ns
    steps = [_longer(each, ends[-1], added_ns) for each in steps]
    calls = _typical_calls(program, steps)
    steps = [
        _without_costs(program, each, _BESIDE_CALL * of_step, assumed.copy_ns if regathers else 0.0)
        for each, of_step in zip(steps, calls, strict=True)
    ]
    work = np.array([_work(program, each) for each in steps])  # (steps, events + 1, ranks)
    kept, moved = _kept(program, before, after)
    if regathers:
        kept -= gathered_in_passes(program)
    places = [
        _Place(
            work[:, number],
            event,
            program.messages[event.message].micro_step,
            _WITHIN if number < ends[-1] else _AFTER,
        )
        for number, event in enumerate(program.events)
        if event.message in kept
    ]
    messages = list(program.messages)
    added: list[Message] = []
    for micro, of_micro in enumerate(after.gradients):
        passes = _passes(program, work, before, after, micro, ends, assumed.evenly)
        if regathers and after.calls is not None:
            places += _gather_events(after, passes, assumed, micro, len(messages) + len(added))
            added += _gather_messages(after.calls, micro, groups_of(work.shape[2]))
        arrival = partial(_arrived_at, after.arriving, passes, assumed.evenly)
        cost = _BESIDE_CALL * calls
        places += _gradient_events(of_micro, arrival, after, len(messages) + len(added), cost)
        added += [message for message, _ in of_micro]
        places += _inserted_events(inserted.get(micro, ()), passes, len(messages) + len(added))
        added += [each.message for each in inserted.get(micro, ())]
    for purpose in moved:
        place = _place_at_end(program, work, purpose, ends[-1])
        places += _end_events(after.at_end.get(purpose, []), place, len(messages) + len(added))
        added += after.at_end.get(purpose, [])
    for message in [messages[number] for number in kept]:
        if sum(map(len, message.groups)) != ranks:
            raise UsageError(
                f"{message.purpose} of this run is kept as it was recorded, and so is predicted only for the run's own "
                "number of ranks"
            )
    return _assembled(program, steps, work, places, [*messages, *added], calls)._replace(
        assumed=(
            *(_assumptions(after, assumed) if regathers else ()),
            *(_about_adding(before, after, assumed) if added_ns else ()),
        )
    )


def gathered_in_passes(program: Program) -> set[int]:
    """The numbers of the messages that gather parameters in a forward or backward pass."""
    return {
        number
        for number, message in enumerate(program.messages)
        if message.purpose == Purpose.PARAMETER_GATHER and message.phase in (Phase.FORWARD, Phase.BACKWARD)
    }


def _check_gathers(program: Program, before: Sent, after: Sent) -> None:
    """Refuse to move gathers that the rules do not explain."""
    others = sorted(before.others | after.others)
    if others:
        raise UsageError(
            f"where messages of {' and '.join(others)} are sent is not known, so a change of what stage 3 gathers is not "
            "predicted; record a run without them"
        )
    if after.calls is not None and after.calls.unknown:
        raise UsageError(
            f"when parameters are gathered with {after.calls.unknown} is not known, so it is not predicted; record a run of "
            "that setting"
        )
    issued = sorted(program.messages[number].payload_bytes for number in gathered_in_passes(program))
    calls = before.calls
    expected = (
        sorted(each.payload_bytes for each in calls.messages for _ in before.gradients) if calls else []
    )
    if after.calls is not None and issued != expected:
        raise UsageError(
            f"the run gathers {sum(issued):,} bytes of parameters in its passes, in {len(issued)} messages, and by its "
            f"config and the order of its parameters {sum(expected):,} in {len(expected)} were expected: its modules run in "
            "another order, so other gathers cannot be predicted from it; record a run of the other setting"
        )


def _assumptions(after: Sent, assumed: Assumed) -> tuple[str, ...]:
    sentences = []
    if after.calls is not None:
        sentences.append(
            "assumed: modules run once each in the order of their parameters, and compute in proportion to the elements of "
            "their weight matrices; the interval contains equal times of all of them"
        )
    if assumed.copy_ns:
        sentences.append(
            f"assumed: filling gathered parameters costs {assumed.copy_ns:g} ns per byte beside their messages; the "
            f"interval contains 0 to {2 * assumed.copy_ns:g}"
        )
    return tuple(sentences)


def _check_recorded(program: Program, before: Sent) -> None:
    """Refuse to change gradient messages that the rules do not explain."""
    expected = sorted(m.payload_bytes for each in before.gradients for m, _ in each)
    issued = sorted(m.payload_bytes for m in program.messages if m.purpose == GRADIENTS)
    if expected != issued:
        raise UsageError(
            f"the run's gradient messages are not those of its config: {len(issued)} of {sum(issued):,} bytes in a step, "
            f"and {len(expected)} of {sum(expected):,} bytes were expected; see commprof verify"
        )
    blocking = {message.blocks for message in program.messages if message.purpose == GRADIENTS}
    if blocking == {before.overlaps}:
        did, should = ("block", "do not") if before.overlaps else ("do not block", "do")
        raise UsageError(
            f"the run's gradient messages {did}, and by its config they {should}; without the rule by which they are issued "
            "no other setting can be predicted"
        )


def _ends_of_backward(program: Program) -> list[int]:
    """The position of the event that ends each micro-batch: the issue of its last gradient message."""
    last: dict[int, int] = {}
    for number, event in enumerate(program.events):
        message = program.messages[event.message]
        if event.kind == "issue" and message.purpose == GRADIENTS:
            last[message.micro_step] = number
    if not last:
        raise UsageError(
            "the run reduces no gradients in its steps, so other settings cannot be predicted from it"
        )
    return [last[micro] for micro in sorted(last)]


def _longer(step: Step, end: int, added_ns: float) -> Step:
    """``step`` whose compute until the last gradient message takes ``added_ns`` more, in proportion."""
    spans = step.spans.copy()
    total = spans[: end + 1].sum(axis=0)
    spans[: end + 1] *= np.maximum(0.0, 1.0 + added_ns / np.maximum(total, 1.0))
    return step._replace(spans=spans)


def _about_adding(before: Sent, after: Sent, assumed: Assumed) -> tuple[str, ...]:
    more = after.added_bytes - before.added_bytes
    return (
        f"assumed: adding up gradients of micro-batches that are not reduced costs {assumed.copy_ns:g} ns per byte, "
        f"{abs(more) * assumed.copy_ns / 1e6:.1f} ms {'more' if more > 0 else 'less'} per step; the interval contains 0 to "
        f"{2 * assumed.copy_ns:g} ns",
    )


def _with_optimizer(program: Program, step: Step, end: int, factor: float) -> Step:
    spans = step.spans.copy()
    gathers = [
        number
        for number, event in enumerate(program.events)
        if number > end and program.messages[event.message].purpose == Purpose.PARAMETER_GATHER
    ]
    # The optimizer runs between the last wait for gradients and the gather of what it has updated, or the end.
    stop = gathers[0] + 1 if gathers else len(spans)
    spans[end + 1 : stop] *= factor
    return step._replace(spans=spans)


def _without_costs(program: Program, step: Step, costs: Floats, copy_ns: float) -> Step:
    """Take what each message costs beside its call off the compute that follows its wait.

    Args:
        program: recorded events.
        step: recorded compute.
        costs: of each gradient message.
        copy_ns: of each byte that is gathered in a pass.
    """
    spans = step.spans.copy()
    gathers = gathered_in_passes(program)
    for number, event in enumerate(program.events):
        message = program.messages[event.message]
        if event.kind == "wait" and message.purpose == GRADIENTS:
            spans[number + 1] = np.maximum(spans[number + 1] - costs, 0.0)
        elif event.kind == "wait" and event.message in gathers:
            spans[number + 1] = np.maximum(spans[number + 1] - copy_ns * message.payload_bytes, 0.0)
    return step._replace(spans=spans)


def _work(program: Program, step: Step) -> Floats:
    """Work until each event, and until the end."""
    return np.cumsum(step.spans, axis=0)


def _kept(program: Program, before: Sent, after: Sent) -> tuple[set[int], list[str]]:
    """The messages that stay as they are, and the purposes at the end of a step whose messages change."""
    moved = [
        purpose
        for purpose in AT_END
        if _of(before.at_end.get(purpose, [])) != _of(after.at_end.get(purpose, []))
    ]
    gone = {
        number
        for number, message in enumerate(program.messages)
        if message.purpose == GRADIENTS or (message.purpose in moved and message.phase == Phase.OPTIMIZER)
    }
    return set(range(len(program.messages))) - gone, moved


def _of(messages: Sequence[Message]) -> list[tuple[str, int, Groups]]:
    return [(each.op, each.payload_bytes, each.groups) for each in messages]


def _typical_calls(program: Program, steps: Sequence[Step]) -> Floats:
    """The mean cost of a call over the steps, for each step and rank: (steps, ranks)."""
    mean = np.mean([each.calls.mean(axis=0) for each in steps], axis=0)
    return np.array([mean for _ in steps])


def _share(parameters: Sequence[Parameter], count: int, evenly: bool = False) -> float:
    """The part of the backward pass that is done when the first ``count`` gradients have arrived."""
    weights = [min(1, weight(each)) if evenly else weight(each) for each in parameters]
    total = sum(weights)
    return sum(weights[:count]) / total if total else count / max(1, len(parameters))


def weight(parameter: Parameter) -> int:
    """Elements of a weight matrix, to which the time of its module is assumed to be in proportion; 0 of others."""
    if "Embedding" in (parameter.owner_types or "") or len(parameter.extents) < 2:
        return 0
    return parameter.numel


def _passes(
    program: Program,
    work: Floats,
    before: Sent,
    after: Sent,
    micro: int,
    ends: Sequence[int],
    evenly: bool = False,
) -> _Passes:
    """Where the passes of micro-batch ``micro`` of the other config are on the axis of work."""
    count = len(after.gradients)
    recorded = _recorded_flushes(program, before)
    end = work[:, ends[min(micro, len(ends) - 1)]]
    if len(ends) == count:
        start = work[:, ends[micro - 1]] if micro else np.zeros_like(end)
    else:  # reduced only in the last micro-batch: all take as long
        start, end = work[:, ends[-1]] * (micro / count), work[:, ends[-1]] * ((micro + 1) / count)
    known = [
        (_share(before.arriving, arrived, evenly), work[:, number])
        for number, arrived in recorded.get(micro if len(ends) == count else -1, [])
        if arrived < len(before.arriving)
    ]
    begin = _begin_of_backward(start, end, known)
    return _Passes(start, [(0.0, begin), *known, (1.0, end)])


def _arrived_at(arriving: Sequence[Parameter], passes: _Passes, evenly: bool, gradients: int) -> Floats:
    """The work at which the first ``gradients`` gradients have arrived."""
    if gradients >= len(arriving):
        return passes.end
    return passes.backward(_share(arriving, gradients, evenly))


def _gather_messages(calls: ModuleCalls, micro: int, groups: Groups) -> list[Message]:
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


def _gather_events(after: Sent, passes: _Passes, assumed: Assumed, micro: int, first: int) -> list[_Place]:
    """The events of the gathers of micro-batch ``micro``; ``first`` is the number of their first message.

    A module issues what it lacks, waits for what it needs, and issues what later modules need. In the backward pass it
    begins when those after it have ended.
    """
    assert after.calls is not None
    sizes = [each.payload_bytes for each in after.calls.messages]
    calls = after.calls.calls
    totals = [
        sum(_weight_of(call.parameters, assumed.evenly) for call in calls if call.forward == forward) or 1
        for forward in (True, False)
    ]
    done = [0, 0]
    places: list[_Place] = []
    for number_of_call, call in enumerate(calls):
        turn = (*(_WITHIN if call.forward else _BACKWARD), number_of_call, 0)
        which = 0 if call.forward else 1
        share = done[which] / totals[which]
        at = passes.forward(share) if call.forward else passes.backward(share)
        places += [_Place(at, Event("issue", first + number), micro, turn) for number in call.own]
        places += [
            _Place(at, Event("wait", first + number), micro, turn, assumed.copy_ns * sizes[number])
            for number in call.waits
        ]
        places += [_Place(at, Event("issue", first + number), micro, turn) for number in call.ahead]
        done[which] += _weight_of(call.parameters, assumed.evenly)
    waited = {place.event.message for place in places if place.event.kind == "wait"}
    rest = [number for number in range(first, first + len(sizes)) if number not in waited]
    return [*places, *(_Place(passes.end, Event("wait", number), micro, _end_turn(after)) for number in rest)]


def _inserted_events(inserted: Sequence[Inserted], passes: _Passes, first: int) -> list[_Place]:
    """The events of messages ``inserted``; ``first`` is the number of the first."""
    places = []
    for number, each in enumerate(inserted, first):
        begin = passes.points[0][1]  # of the backward pass
        at = passes.forward(each.share) if each.forward else passes.backward(each.share)
        cost = each.longer * (begin - passes.start if each.forward else passes.end - begin)
        turn, micro = _WITHIN if each.forward else _BACKWARD, each.message.micro_step
        places += [
            _Place(at, Event("issue", number), micro, turn),
            _Place(at, Event("wait", number), micro, turn, cost),
        ]
    return places


def _gradient_turn(after: Sent, gradients: int) -> tuple[int, ...]:
    """The turn of what the arrival of gradient number ``gradients``, from 1, causes."""
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
    """The turn of what the end of a backward pass causes."""
    return _BACKWARD if after.calls is None else (*_BACKWARD, len(after.calls.calls), 1)


def _weight_of(parameters: Sequence[Parameter], evenly: bool) -> int:
    return sum(min(1, weight(each)) if evenly else weight(each) for each in parameters)


def _end_events(messages: Sequence[Message], place: Floats, first: int) -> list[_Place]:
    """The events of messages at the end of a step: one after the other, or those that do not block all at once."""
    numbers = range(first, first + len(messages))
    if all(each.blocks for each in messages):
        return [
            _Place(place, Event(kind, number), messages[0].micro_step, _AFTER)
            for number in numbers
            for kind in _BOTH
        ]
    return [
        _Place(place, Event(kind, number), messages[0].micro_step, _AFTER)
        for kind in _BOTH
        for number in numbers
    ]


def _recorded_flushes(program: Program, before: Sent) -> dict[int, list[tuple[int, int]]]:
    """Micro-batch -> position of the event and number of gradients of each recorded gradient message."""
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
    """Where the backward pass began: from its recorded pace, else two thirds of the compute are its own."""
    total = end - start
    begin = start + FORWARD * total
    if known and known[0][0] < 1.0:
        share, work = known[0]
        pace = np.median(end - work) / (1.0 - share)
        begin = np.median(work - start) - share * pace + start
    begin = np.clip(begin, start + _LEAST_FORWARD * total, start + MOST_FORWARD * total)
    return np.minimum(begin, known[0][1]) if known else begin


def _gradient_events(
    messages: Sequence[tuple[Message, int]],
    arrival: Callable[[int], Floats],
    after: Sent,
    first: int,
    cost: Floats,
) -> list[_Place]:
    """The events of the gradient messages of a micro-batch.

    Args:
        messages: each with how many gradients have arrived when it is sent.
        arrival: the work at which so many gradients have arrived.
        after: what the config sends.
        first: the number of the first message.
        cost: of each message, after it.
    """
    places: list[_Place] = []
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
                places.append(_Place(at, Event("issue", number), micro, turn))
                places.append(_Place(at, Event("wait", number), micro, turn, cost))
            continue
        while after.depth and after.waits_before and len(flying) >= after.depth:
            places += [_Place(at, Event("wait", number), micro, turn, cost) for number in flying.pop(0)]
        places += [_Place(at, Event("issue", number), micro, turn) for number in numbers]
        flying.append(numbers)
        while after.depth and not after.waits_before and len(flying) >= after.depth:
            places += [_Place(at, Event("wait", number), micro, turn, cost) for number in flying.pop(0)]
    places += [
        _Place(end, Event("wait", number), micro, _end_turn(after), cost)
        for numbers in flying
        for number in numbers
    ]
    return places


def _place_at_end(program: Program, work: Floats, purpose: str, end: int) -> Floats:
    """Where messages of ``purpose`` go: where the recorded ones of it were; else before or after the optimizer."""
    for number, event in enumerate(program.events):
        message = program.messages[event.message]
        if number > end and event.kind == "issue" and message.purpose == purpose:
            return work[:, number]
    return work[:, -1] if purpose == Purpose.PARAMETER_GATHER else work[:, end]


def _assembled(
    program: Program,
    steps: Sequence[Step],
    work: Floats,
    places: Sequence[_Place],
    messages: Sequence[Message],
    calls: Floats,
) -> Changed:
    """The events in the order of the work before them; those that belong together stay in their order."""
    # Whole ns: positions that are equal by rule may differ in their last bits.
    ordered = sorted(places, key=lambda place: (round(float(place.work.mean())), place.micro, place.turn))
    used = list(dict.fromkeys(place.event.message for place in ordered))
    renumbered = {message: number for number, message in enumerate(used)}
    events = tuple(Event(place.event.kind, renumbered[place.event.message]) for place in ordered)
    before = np.zeros_like(work[:, 0])
    spans = []
    for place in ordered:
        reached = np.maximum(place.work, before)
        spans.append(reached - before)
        before = reached
    spans.append(np.maximum(work[:, -1] - before, 0.0))
    for number, place in enumerate(ordered):
        spans[number + 1] = spans[number + 1] + place.cost
    stacked = np.array(spans).swapaxes(0, 1)  # (steps, events + 1, ranks)
    recorded = len(program.messages)
    changed = [
        Step(
            stacked[number],
            np.array(
                [step.calls[message] if message < recorded else calls[number] for message in used]
            ).reshape(len(used), -1),
            step.follows,
        )
        for number, step in enumerate(steps)
    ]
    return Changed(Program(tuple(messages[each] for each in used), events), changed)

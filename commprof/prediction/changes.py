"""Build the program of a step with a different config: other messages at the places where gradients have arrived.

The compute of a rank does not depend on its messages. So it keeps its place on an axis of *work*, the compute in ns
since the step began. The messages of the recorded config are removed from this axis. The messages of the other config
are placed on it where enough gradients have arrived (:mod:`.event_places`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Final, NamedTuple

import numpy as np

from commprof.errors import UsageError
from commprof.prediction.event_places import (
    AFTER,
    WITHIN,
    Assumed,
    Inserted,
    Place,
    arrived_at,
    end_events,
    gather_events,
    gather_messages,
    gradient_events,
    inserted_events,
    passes_of,
    place_at_end,
)
from commprof.prediction.program import Event, Floats, Groups, Message, Program, Step
from commprof.prediction.sent import AT_END, GRADIENTS, Sent, groups_of
from commprof.schema import Phase, Purpose

# The cost of a gradient message in addition to its own time and its call: filling and emptying a bucket, and waking up
# after the wait. It is a multiple of the time of the call, because both are mostly Python. Measured on the development
# runs (docs/predict.md).
_BESIDE_CALL: Final = 2.0


class Changed(NamedTuple):
    """The program of a different config, and the compute of its steps.

    Attributes:
        program: The messages and events of a step.
        steps: The compute of each step.
        assumed: Sentences about assumptions, because the recorded run does not show everything.
    """

    program: Program
    steps: list[Step]
    assumed: tuple[str, ...] = ()


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
        program: The recorded events.
        steps: The recorded compute, without the slowdown by messages in flight.
        before: The messages of the recorded config.
        after: The messages of the other config.
        shrinks_optimizer: The number of elements that a rank updates, relative to the recorded config.
        assumed: The assumed costs of gathering parameters in the passes and of adding up gradients.
        inserted: Messages of each micro-batch that are placed at a given fraction of its passes.

    Raises:
        UsageError: The run's messages are not those of its config, or the places of the other messages are not known.
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
    hooks_ns = (after.hooked_calls - before.hooked_calls) * assumed.hook_ns
    steps = [_longer(each, ends[-1], added_ns + hooks_ns) for each in steps]
    calls = _typical_calls(program, steps)
    steps = [
        _without_costs(program, each, _BESIDE_CALL * of_step, assumed.copy_ns if regathers else 0.0)
        for each, of_step in zip(steps, calls, strict=True)
    ]
    work = np.array([_work(program, each) for each in steps])  # (steps, events + 1, ranks)
    kept_messages, moved = _kept(program, before, after)
    if regathers:
        kept_messages -= gathered_in_passes(program)
    places = [
        Place(
            work[:, number],
            event,
            program.messages[event.message].micro_step,
            WITHIN if number < ends[-1] else AFTER,
        )
        for number, event in enumerate(program.events)
        if event.message in kept_messages
    ]
    messages = list(program.messages)
    added: list[Message] = []
    for micro, of_micro in enumerate(after.gradients):
        passes = passes_of(program, work, before, after, micro, ends, assumed.evenly)
        if regathers and after.calls is not None:
            places += gather_events(after, passes, assumed, micro, len(messages) + len(added))
            added += gather_messages(after.calls, micro, groups_of(work.shape[2]))
        arrival = partial(arrived_at, after.arriving, passes, assumed.evenly)
        cost = _BESIDE_CALL * calls
        places += gradient_events(of_micro, arrival, after, len(messages) + len(added), cost)
        added += [message for message, _ in of_micro]
        places += inserted_events(inserted.get(micro, ()), passes, len(messages) + len(added))
        added += [each.message for each in inserted.get(micro, ())]
    for purpose in moved:
        place = place_at_end(program, work, purpose, ends[-1])
        places += end_events(after.at_end.get(purpose, []), place, len(messages) + len(added))
        added += after.at_end.get(purpose, [])
    for message in [messages[number] for number in kept_messages]:
        if sum(map(len, message.groups)) != ranks:
            raise UsageError(
                f"{message.purpose} of this run is kept as it was recorded, and so is predicted only for the run's own "
                "number of ranks"
            )
    return _assembled(program, steps, work, places, [*messages, *added], calls)._replace(
        assumed=(
            *(_assumptions(after, assumed) if regathers else ()),
            *(_about_adding(before, after, assumed) if added_ns else ()),
            *(_about_hooks(before, after, assumed) if hooks_ns else ()),
        )
    )


def gathered_in_passes(program: Program) -> set[int]:
    """Return the numbers of the messages that gather parameters in a forward or backward pass."""
    return {
        number
        for number, message in enumerate(program.messages)
        if message.purpose == Purpose.PARAMETER_GATHER and message.phase in (Phase.FORWARD, Phase.BACKWARD)
    }


def _check_gathers(program: Program, before: Sent, after: Sent) -> None:
    """Raise UsageError if the rules do not explain the recorded gathers, or do not predict the other ones."""
    others = sorted(before.others | after.others)
    if others:
        raise UsageError(
            f"where messages of {' and '.join(others)} are sent is not known, so a change of what stage 3 gathers is not "
            "predicted; record a run without them"
        )
    if after.calls is not None and after.calls.unknown:
        raise UsageError(
            f"it is not known when parameters are gathered with {after.calls.unknown}, so that setting is not "
            "predicted; record a run with it"
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
            f"assumed: filling gathered parameters costs {assumed.copy_ns:g} ns per byte in addition to their "
            f"messages; the interval contains 0 to {2 * assumed.copy_ns:g} ns"
        )
    return tuple(sentences)


def _check_recorded(program: Program, before: Sent) -> None:
    """Raise UsageError if the rules do not explain the recorded gradient messages."""
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
    """Return the position of the event that ends each micro-batch: the issue of its last gradient message."""
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
    """Return ``step`` with ``added_ns`` more compute until the last gradient message, distributed in proportion."""
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


def _about_hooks(before: Sent, after: Sent, assumed: Assumed) -> tuple[str, ...]:
    more = after.hooked_calls - before.hooked_calls
    return (
        f"assumed: DeepSpeed's hooks at stage 3 take {assumed.hook_ns / 1e6:g} ms for each of {abs(more)} calls of modules, "
        f"{abs(more) * assumed.hook_ns / 1e6:.1f} ms {'more' if more > 0 else 'less'} per step; the interval contains 0 to "
        f"{2 * assumed.hook_ns / 1e6:g} ms",
    )


def _with_optimizer(program: Program, step: Step, end: int, factor: float) -> Step:
    spans = step.spans.copy()
    gathers = [
        number
        for number, event in enumerate(program.events)
        if number > end and program.messages[event.message].purpose == Purpose.PARAMETER_GATHER
    ]
    # The optimizer runs between the last gradient message and the gather of the updated parameters, or the end.
    stop = gathers[0] + 1 if gathers else len(spans)
    spans[end + 1 : stop] *= factor
    return step._replace(spans=spans)


def _without_costs(program: Program, step: Step, costs: Floats, copy_ns: float) -> Step:
    """Return ``step`` without the additional cost of each message in the compute that follows its wait.

    Args:
        program: The recorded events.
        step: The recorded compute.
        costs: The cost of each gradient message in ns, for each rank.
        copy_ns: The cost of each byte that is gathered in a pass, in ns.
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
    """Return the work until each event and until the end, in ns: (events + 1, ranks)."""
    return np.cumsum(step.spans, axis=0)


def _kept(program: Program, before: Sent, after: Sent) -> tuple[set[int], list[str]]:
    """Return the numbers of the messages that remain, and the purposes whose messages at the end of a step change."""
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
    """Return the mean time of a call over the steps in ns, repeated for each step: (steps, ranks)."""
    mean = np.mean([each.calls.mean(axis=0) for each in steps], axis=0)
    return np.array([mean for _ in steps])


def _assembled(
    program: Program,
    steps: Sequence[Step],
    work: Floats,
    places: Sequence[Place],
    messages: Sequence[Message],
    calls: Floats,
) -> Changed:
    """Return the program with its events in the order of the work before them.

    Events at equal work, micro-batch and turn keep their order.
    """
    # Rounded to whole ns, because positions that are equal by rule may differ in their last bits.
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

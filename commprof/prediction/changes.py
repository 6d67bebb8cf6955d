"""The program of a step with another config: other gradient messages, cut where their gradients have arrived.

What a rank computes does not depend on its messages, so it keeps its place on an axis of *work*: ns computed since the
step began. The messages of the recorded config are taken off this axis, and those of the other config put on it, where
enough gradients have arrived. When gradients arrive is known at the recorded messages; in between, the backward pass takes
as long for each element of a weight matrix (its FLOPs grow with them), and nothing for embeddings and vectors.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from commprof.errors import CommprofError, UsageError
from commprof.ledger.requests.request import Request
from commprof.prediction.program import Event, Floats, Groups, Message, Program, Step
from commprof.requested.configuration import Configuration, read_configuration
from commprof.requested.expectation import Expectation
from commprof.requested.parameters import Parameter, in_model_order, trained_groups
from commprof.requested.wrappers.ddp import Ddp
from commprof.requested.zero import stages
from commprof.schema import Op, Phase, Purpose

# What a gradient message costs beside its own time and its call: filling and emptying a bucket, waking up after the wait. In
# calls of it, since both are mostly Python; measured on the development runs: docs/predict.md.
_BESIDE_CALL: Final = 2.0
DEPTH: Final = (
    2  # buckets that zero_runtime has in flight at once (zero_runtime/gradient_reduction/overlap.py)
)
_FORWARD: Final = 1 / 3  # of the compute of both passes: the backward pass has twice the FLOPs
_LEAST_FORWARD: Final = 0.15  # where recorded messages say otherwise
_MOST_FORWARD: Final = 0.5
_AT_END: Final = (str(Purpose.OVERFLOW_CHECK), str(Purpose.GRADIENT_NORM), str(Purpose.PARAMETER_GATHER))
_GRADIENTS: Final = str(Purpose.GRADIENT_REDUCE)
_BOTH: Final[tuple[Literal["issue", "wait"], ...]] = ("issue", "wait")
# Turns of events at the same work: recorded ones within the passes, gradient messages, what follows the backward pass.
_WITHIN, _GRADIENT, _AFTER = range(3)


class Sent(NamedTuple):
    """What a config sends in a step, in the order of issue.

    Attributes:
        gradients: of each micro-batch: messages, each with how many gradients have arrived when it is sent.
        at_end: messages after the last gradients, by purpose.
        arriving: the parameters in the order in which their gradients arrive.
        overlaps: gradient messages do not block.
        waits_before: with overlap, a message is issued only when fewer than ``depth`` are in flight; else the oldest is
            waited for right after the issue of the next, whose buffer is its own.
        depth: buckets in flight at once; None for all of a backward pass.
    """

    gradients: list[list[tuple[Message, int]]]
    at_end: dict[str, list[Message]]
    arriving: list[Parameter]
    overlaps: bool
    waits_before: bool = False
    depth: int | None = DEPTH


class Changed(NamedTuple):
    """The program of another config and the compute of its steps."""

    program: Program
    steps: list[Step]


class _Place(NamedTuple):
    """An event on the axis of work: (steps, ranks) ns. Of events at the same work those of a lower ``turn`` come first."""

    work: Floats
    event: Event
    turn: int


def sent_by(request: Request, config: Mapping[str, Any], world: int) -> Sent:
    """Return what ``config`` sends in a steady step of ``world`` ranks with the model of ``request``.

    Raises:
        UsageError: the rules do not know what it sends.
    """
    order = _gradient_order(request)
    try:
        configuration = read_configuration(config)
        if request.runtime == "deepspeed":
            configuration = configuration.as_deepspeed_reads()
        micro_steps = stages.micro_steps(config, world)
        rows = stages.expected(
            config,
            request.parameters,
            world,
            order,
            request.backend,
            request.runtime,
            iteration=stages.steady_step(config) * micro_steps,
            host_ranks=request.host_ranks,
        )
    except CommprofError as problem:
        raise UsageError(f"what this setting sends is not known: {problem}") from None
    overlaps = _overlaps(configuration, config, request.runtime)
    arriving = _arriving(configuration, request.parameters, order)
    gradients: list[list[tuple[Message, int]]] = [[] for _ in range(micro_steps)]
    at_end: dict[str, list[Message]] = defaultdict(list)
    for row in rows:
        if row.when == "init":
            continue
        gathers = (
            row.purpose == Purpose.PARAMETER_GATHER and configuration.stage == 3
        )  # they stay as recorded
        if not gathers and (not row.bytes_exact or row.estimate):
            raise UsageError(
                f"the messages of {row.purpose} of this setting are known only about: {row.note or row.estimate}"
            )
        groups = row.groups or _groups(world, row.group_size)
        payloads = [sum(each) for each in row.payloads]
        if row.purpose == _GRADIENTS:
            for micro in range(micro_steps) if row.when == "micro_step" else [micro_steps - 1]:
                gradients[micro] += _gradient_messages(
                    row, payloads, groups, micro, len(arriving), not overlaps
                )
        elif row.when == "step" and row.purpose in _AT_END:
            at_end[row.purpose] += [
                Message(
                    row.issued_op,
                    size,
                    row.purpose,
                    groups,
                    True,
                    None,
                    micro_steps - 1,
                    str(Phase.OPTIMIZER),
                )
                for size in payloads
            ]
    # Chunks are filled, and sent, from the last one to the first.
    if configuration.reduces_chunks:
        gradients = [each[::-1] for each in gradients]
    gradients = [_numbered(sorted(each, key=lambda pair: pair[1])) for each in gradients]
    return Sent(gradients, dict(at_end), arriving, overlaps, configuration.reduces_chunks)


def sent_by_ddp(rules: Ddp, changes: Mapping[str, Any], world: int) -> Sent:
    """Return what DistributedDataParallel sends in a step with one backward pass, with ``changes`` of its arguments.

    Raises:
        UsageError: its rules do not know what it sends.
    """
    if rules.unpredicted or rules.order is None:
        reason = "; ".join(rules.unpredicted.values()) or "the order of gradients was not recorded"
        raise UsageError(f"what DistributedDataParallel sends with this setting is not known: {reason}")
    wrapper = replace(rules.wrapper, arguments={**rules.wrapper.arguments, **changes})
    by_name = {each.name: each for each in wrapper.trained}
    arriving = [
        Parameter(name, by_name[name].numel, shape="x".join(map(str, by_name[name].extents)))
        for name in rules.order
    ]
    gradients = [
        (
            Message(
                str(Op.ALL_REDUCE),
                size,
                _GRADIENTS,
                _groups(world, None),
                False,
                number,
                0,
                str(Phase.BACKWARD),
            ),
            count,
        )
        for number, (size, count) in enumerate(replace(rules, wrapper=wrapper).steady_messages())
    ]
    return Sent([gradients], {}, arriving, overlaps=True, depth=None)


def _gradient_order(request: Request) -> tuple[str, ...] | None:
    steps = sorted(request.orders)
    return request.orders[steps[-1]][0] if steps and request.orders[steps[-1]] else None


def _groups(world: int, size: int | None) -> Groups:
    width = size or world
    return tuple(tuple(range(first, first + width)) for first in range(0, world, width))


def _gradient_messages(
    row: Expectation, payloads: Sequence[int], groups: Groups, micro: int, gradients: int, blocks: bool
) -> list[tuple[Message, int]]:
    arrived = row.arrived or (gradients,) * len(payloads)
    return [
        (Message(row.issued_op, size, _GRADIENTS, groups, blocks, None, micro, str(Phase.BACKWARD)), count)
        for size, count in zip(payloads, arrived, strict=True)
    ]


def _numbered(messages: Sequence[tuple[Message, int]]) -> list[tuple[Message, int]]:
    """Messages of one flush have one bucket number: they are issued together, and waited for together."""
    counts = list(dict.fromkeys(count for _, count in messages))
    several = len(counts) < len(messages) and any(each.op == Op.REDUCE for each, _ in messages)
    return [
        (each._replace(bucket=counts.index(count) if several else number), count)
        for number, (each, count) in enumerate(messages)
    ]


def _overlaps(configuration: Configuration, config: Mapping[str, Any], runtime: str) -> bool:
    """Whether gradient messages overlap the backward pass on a CPU: only with zero_runtime; DeepSpeed needs streams."""
    if runtime == "deepspeed" or not configuration.partitions or configuration.reduces_flat_groups:
        return False
    zero = config.get("zero_optimization")
    explicit = zero.get("overlap_comm") if isinstance(zero, Mapping) else None
    if (
        explicit is None
    ):  # zero_runtime's default: DeepSpeed's, and true for the reduction that DeepSpeed does not have
        return configuration.stage == 3 or configuration.reduction == "reduce_scatter"
    return bool(explicit)


def _arriving(
    configuration: Configuration, parameters: Sequence[Parameter], order: Sequence[str] | None
) -> list[Parameter]:
    trained = [each for group in trained_groups(parameters) for each in group]
    if order is None:
        return in_model_order(trained)[::-1]
    by_name = {each.name: each for each in trained}
    return [by_name[name] for name in order if name in by_name]


def change(
    program: Program,
    steps: Sequence[Step],
    before: Sent,
    after: Sent,
    *,
    shrinks_optimizer: float = 1.0,
) -> Changed:
    """Return the program of ``after`` for steps that were recorded with ``before``.

    Args:
        program: recorded events.
        steps: recorded compute, as if nothing had been in flight.
        before: what the recorded config sends.
        after: what the other one sends.
        shrinks_optimizer: elements that a rank updates, by those of the recorded config.
    """
    _check_recorded(program, before)
    ends = _ends_of_backward(program)
    if shrinks_optimizer != 1.0:
        steps = [_with_optimizer(program, each, ends[-1], shrinks_optimizer) for each in steps]
    calls = _typical_calls(program, steps)
    steps = [
        _without_buckets(program, each, _BESIDE_CALL * of_step)
        for each, of_step in zip(steps, calls, strict=True)
    ]
    work = np.array([_work(program, each) for each in steps])  # (steps, events + 1, ranks)
    kept, moved = _kept(program, before, after)
    places = [
        _Place(work[:, number], event, _WITHIN if number < ends[-1] else _AFTER)
        for number, event in enumerate(program.events)
        if event.message in kept
    ]
    messages = list(program.messages)
    added: list[Message] = []
    for micro, of_micro in enumerate(after.gradients):
        arrival = _arrival(program, work, before, after, micro, ends)
        places += _gradient_events(of_micro, arrival, after, len(messages) + len(added))
        added += [message for message, _ in of_micro]
    for purpose in moved:
        place = _place_at_end(program, work, purpose, ends[-1])
        for message in after.at_end.get(purpose, []):
            number = len(messages) + len(added)
            places += [_Place(place, Event(kind, number), _AFTER) for kind in _BOTH]
            added.append(message)
    ranks = steps[0].spans.shape[1]
    for message in [messages[number] for number in kept]:
        if sum(map(len, message.groups)) != ranks:
            raise UsageError(
                f"{message.purpose} of this run is kept as it was recorded, and so is predicted only for the run's own "
                "number of ranks"
            )
    return _assembled(program, steps, work, places, [*messages, *added], calls)


def _check_recorded(program: Program, before: Sent) -> None:
    """Refuse to change gradient messages that the rules do not explain."""
    expected = sorted(m.payload_bytes for each in before.gradients for m, _ in each)
    issued = sorted(m.payload_bytes for m in program.messages if m.purpose == _GRADIENTS)
    if expected != issued:
        raise UsageError(
            f"the run's gradient messages are not those of its config: {len(issued)} of {sum(issued):,} bytes in a step, "
            f"and {len(expected)} of {sum(expected):,} bytes were expected; see commprof verify"
        )
    blocking = {message.blocks for message in program.messages if message.purpose == _GRADIENTS}
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
        if event.kind == "issue" and message.purpose == _GRADIENTS:
            last[message.micro_step] = number
    if not last:
        raise UsageError(
            "the run reduces no gradients in its steps, so other settings cannot be predicted from it"
        )
    return [last[micro] for micro in sorted(last)]


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


def _without_buckets(program: Program, step: Step, costs: Floats) -> Step:
    """Take what each gradient message costs beside its call off the compute that follows its wait."""
    spans = step.spans.copy()
    for number, event in enumerate(program.events):
        if event.kind == "wait" and program.messages[event.message].purpose == _GRADIENTS:
            spans[number + 1] = np.maximum(spans[number + 1] - costs, 0.0)
    return step._replace(spans=spans)


def _work(program: Program, step: Step) -> Floats:
    """Work until each event, and until the end."""
    return np.cumsum(step.spans, axis=0)


def _kept(program: Program, before: Sent, after: Sent) -> tuple[set[int], list[str]]:
    """The messages that stay as they are, and the purposes at the end of a step whose messages change."""
    moved = [
        purpose
        for purpose in _AT_END
        if _of(before.at_end.get(purpose, [])) != _of(after.at_end.get(purpose, []))
    ]
    gone = {
        number
        for number, message in enumerate(program.messages)
        if message.purpose == _GRADIENTS or (message.purpose in moved and message.phase == Phase.OPTIMIZER)
    }
    return set(range(len(program.messages))) - gone, moved


def _of(messages: Sequence[Message]) -> list[tuple[str, int, Groups]]:
    return [(each.op, each.payload_bytes, each.groups) for each in messages]


def _typical_calls(program: Program, steps: Sequence[Step]) -> Floats:
    """The mean cost of a call over the steps, for each step and rank: (steps, ranks)."""
    mean = np.mean([each.calls.mean(axis=0) for each in steps], axis=0)
    return np.array([mean for _ in steps])


def _share(parameters: Sequence[Parameter], count: int) -> float:
    """The part of the backward pass that is done when the first ``count`` gradients have arrived."""
    weights = [_weight(each) for each in parameters]
    total = sum(weights)
    return sum(weights[:count]) / total if total else count / max(1, len(parameters))


def _weight(parameter: Parameter) -> int:
    if "Embedding" in (parameter.owner_types or "") or len(parameter.extents) < 2:
        return 0
    return parameter.numel


def _arrival(
    program: Program, work: Floats, before: Sent, after: Sent, micro: int, ends: Sequence[int]
) -> Callable[[int], Floats]:
    """A function from a number of gradients to the work at which they have arrived, in micro-batch ``micro``."""
    count = len(after.gradients)
    recorded = _recorded_flushes(program, before)
    end = work[:, ends[min(micro, len(ends) - 1)]]
    if len(ends) == count:
        start = work[:, ends[micro - 1]] if micro else np.zeros_like(end)
    else:  # reduced only in the last micro-batch: all take as long
        start, end = work[:, ends[-1]] * (micro / count), work[:, ends[-1]] * ((micro + 1) / count)
    known = [
        (_share(before.arriving, arrived), work[:, number])
        for number, arrived in recorded.get(micro if len(ends) == count else -1, [])
        if arrived < len(before.arriving)
    ]
    begin = _begin_of_backward(start, end, known)
    points = [(0.0, begin), *known, (1.0, end)]

    def at(gradients: int) -> Floats:
        share = _share(after.arriving, gradients)
        if gradients >= len(after.arriving):
            return end
        for (low, first), (high, second) in pairwise(points):
            if share <= high:
                return first + (second - first) * ((share - low) / (high - low) if high > low else 1.0)
        return end

    return at


def _recorded_flushes(program: Program, before: Sent) -> dict[int, list[tuple[int, int]]]:
    """Micro-batch -> position of the event and number of gradients of each recorded gradient message."""
    issues: dict[int, list[int]] = defaultdict(list)
    for number, event in enumerate(program.events):
        message = program.messages[event.message]
        if event.kind == "issue" and message.purpose == _GRADIENTS:
            issues[message.micro_step].append(number)
    return {
        micro: [(number, count) for number, (_, count) in zip(numbers, before.gradients[micro], strict=True)]
        for micro, numbers in issues.items()
        if micro < len(before.gradients) and len(numbers) == len(before.gradients[micro])
    }


def _begin_of_backward(start: Floats, end: Floats, known: Sequence[tuple[float, Floats]]) -> Floats:
    """Where the backward pass began: from its recorded pace, else two thirds of the compute are its own."""
    total = end - start
    begin = start + _FORWARD * total
    if known and known[0][0] < 1.0:
        share, work = known[0]
        pace = np.median(end - work) / (1.0 - share)
        begin = np.median(work - start) - share * pace + start
    return np.clip(begin, start + _LEAST_FORWARD * total, start + _MOST_FORWARD * total)


def _gradient_events(
    messages: Sequence[tuple[Message, int]], arrival: Callable[[int], Floats], after: Sent, first: int
) -> list[_Place]:
    """The events of the gradient messages of a micro-batch; ``first`` is the number of their first message."""
    places: list[_Place] = []
    flushes: dict[int | None, list[int]] = defaultdict(list)
    counts: dict[int | None, int] = {}
    for number, (message, count) in enumerate(messages, first):
        flushes[message.bucket].append(number)
        counts[message.bucket] = count
    flying: list[list[int]] = []
    end = arrival(len(after.arriving))
    for bucket, numbers in flushes.items():
        at = arrival(counts[bucket])
        if not after.overlaps:
            for number in numbers:
                places += [_Place(at, Event(kind, number), _GRADIENT) for kind in _BOTH]
            continue
        while after.depth and after.waits_before and len(flying) >= after.depth:
            places += [_Place(at, Event("wait", number), _GRADIENT) for number in flying.pop(0)]
        places += [_Place(at, Event("issue", number), _GRADIENT) for number in numbers]
        flying.append(numbers)
        while after.depth and not after.waits_before and len(flying) >= after.depth:
            places += [_Place(at, Event("wait", number), _GRADIENT) for number in flying.pop(0)]
    places += [_Place(end, Event("wait", number), _GRADIENT) for numbers in flying for number in numbers]
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
    ordered = sorted(places, key=lambda place: (round(float(place.work.mean())), place.turn))
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
        if place.event.kind == "wait" and place.turn == _GRADIENT:  # what _without_buckets has taken off
            spans[number + 1] = spans[number + 1] + _BESIDE_CALL * calls
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

"""Predict the token messages of a run with other settings of experts, from the loads that the run recorded.

The messages of a layer follow from the tokens and the loads of each rank (:class:`ForwardPass`), which do not depend on
the ranks that store the experts. So the bytes with a different ``ep_size`` are known even without dropping, when the
fullest expert of a group of ranks decides. Messages that the run also has keep their recorded place. A run with
``ep_size`` 1 does not show when tokens would be exchanged. In this case the layers are assumed to compute in proportion
to their weights.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from commprof.errors import UsageError
from commprof.ledger.requests.expert_tokens import ExpertTokens, ForwardPass
from commprof.prediction.event_places import Inserted, weight
from commprof.prediction.experts.parameters import place_of
from commprof.prediction.program import Event, Floats, Groups, Message, Program, Step
from commprof.prediction.recorded import Recorded
from commprof.requested.experts.layers import (
    CAPACITY_BYTES,
    ExpertLayer,
    element_bytes_of,
    gets_gradient,
)
from commprof.requested.parameters import Parameter, in_model_order
from commprof.schema import Op, Phase, Purpose

_INSERTED = (
    "assumed: modules compute in the order of their parameters and in proportion to the elements of their weight "
    "matrices, since the run (ep_size 1) does not show where tokens would be exchanged; the interval contains "
    "equal times of all modules"
)
_SLOTS = "assumed: the experts of a layer compute between its two all_to_alls, for the same time in each slot"


class Exchanged(NamedTuple):
    """A program with changed token messages, and the compute of its steps.

    Attributes:
        program: The program of the run with messages replaced or removed.
        steps: The compute of the steps.
        inserted: The messages that the run does not have, by micro-batch.
        assumed: Sentences about assumptions, because the run does not show everything.
    """

    program: Program
    steps: list[Step]
    inserted: Mapping[int, Sequence[Inserted]] = {}
    assumed: tuple[str, ...] = ()


class _Exchange(NamedTuple):
    """A message of a layer in a micro-batch.

    Attributes:
        layer: The name of the layer.
        op: The operation: an all_to_all of tokens, or the all_reduce by which ranks agree on the slots.
        phase: The phase of the message.
        source: The number of the forward pass within the step that determines the size of the message.
        opens: Whether it is the first of the two all_to_alls of a pass, after which the experts compute.
        returns: Whether the message belongs to the results of experts or their gradients. Their elements may have a
            different type from those of tokens.
    """

    layer: str
    op: Op
    phase: Phase
    source: int
    opens: bool = False
    returns: bool = False


def with_tokens(
    recorded: Recorded,
    steps: Sequence[Step],
    before: ExpertTokens,
    after: ExpertTokens,
    evenly: bool = False,
) -> Exchanged:
    """Return the program of ``recorded`` with the token messages that its layers send with the settings ``after``.

    Args:
        recorded: The run with its loads.
        steps: The compute of the run.
        before: The layers of the run.
        after: The same layers with other settings.
        evenly: Whether all modules with matrices compute equally long. Otherwise their time is in proportion to the
            elements of their matrices.

    Raises:
        UsageError: The recorded token messages are not those of the layers, or loads were not recorded.
    """
    _check_passes(recorded)
    passes = recorded.passes
    program = recorded.program
    replaced: dict[int, Message | None] = {}
    # Maps the first all_to_all of a pass to the second one, and to the factor of the compute between them.
    scaled: dict[int, tuple[int, Floats]] = {}
    inserted: dict[int, list[Inserted]] = defaultdict(list)
    for micro in sorted({each.micro_step for each in passes[0]}):
        old, new = (list(_exchanges(passes[0], micro, tokens)) for tokens in (before, after))
        issued = _matched(recorded, micro, old, before)
        for name in before.layers:
            of_layer = [each for each in new if each.layer == name]
            numbers = issued[name]
            if not numbers:
                continue
            exchanges: Sequence[_Exchange | None] = of_layer or [None] * len(numbers)
            for number, exchange in zip(numbers, exchanges, strict=True):
                replaced[number] = exchange and _message(program.messages[number], exchange, passes, after)
            scaled |= _factors(numbers, [each for each in old if each.layer == name], passes, before, after)
        absent = [each for each in new if not issued[each.layer]]
        inserted[micro] += _placed(absent, micro, passes, before, after, evenly)
    changes_slots = any((each != 1.0).any() for _, each in scaled.values())
    if changes_slots:
        steps = [_with_compute(program, step, number, scaled) for number, step in enumerate(steps)]
    remaining, listed = _without(
        program, steps, {number for number, each in replaced.items() if each is None}
    )
    messages = [
        replaced.get(number) or message
        for number, message in enumerate(program.messages)
        if replaced.get(number, message) is not None
    ]
    return Exchanged(
        remaining._replace(messages=tuple(messages)),
        listed,
        inserted,
        tuple(_assumptions(messages, inserted, changes_slots, after)),
    )


def _check_passes(recorded: Recorded) -> None:
    shapes = []
    for number, of_step in zip(recorded.numbers, recorded.passes, strict=True):
        if not of_step or any(len(each.loads) < recorded.world_size for each in of_step):
            raise UsageError(
                f"the loads of experts in step {number} were not recorded on all ranks, so settings of experts cannot be "
                "predicted; record a run whose layers publish them (see docs/expert-load.md)"
            )
        shapes.append([each[:4] for each in of_step])
    for number, each in zip(recorded.numbers, shapes, strict=True):
        if each != shapes[0]:
            raise UsageError(
                f"the layers of experts run {len(shapes[0])} times in step {recorded.numbers[0]} and {len(each)} times in "
                f"step {number}, or in another order; only steps whose layers run alike can be predicted"
            )


def _exchanges(passes: Sequence[ForwardPass], micro: int, tokens: ExpertTokens) -> Iterator[_Exchange]:
    """Yield the messages that the layers send in a micro-batch. Messages of the same layer are in order."""
    own = [(number, each) for number, each in enumerate(passes) if each.micro_step == micro]
    own = [
        pair for pair in own if pair[1].layer in tokens.layers and tokens.layers[pair[1].layer].ep_size > 1
    ]
    forward = [pair for pair in own if pair[1].phase != Phase.BACKWARD]
    for number, each in forward:
        yield from _of_pass(tokens.layers[each.layer], Phase.FORWARD, number)
    repeated: dict[str, list[int]] = defaultdict(list)
    for number, each in own:
        repeated[each.layer] += [number] if each.phase == Phase.BACKWARD else []
    for number, each in reversed(forward):
        if repeated[each.layer]:
            yield from _of_pass(tokens.layers[each.layer], Phase.BACKWARD, repeated[each.layer].pop(0))
        yield _Exchange(each.layer, Op.ALL_TO_ALL, Phase.BACKWARD, number, opens=True, returns=True)
        if gets_gradient(each.layer, tokens.parameters):
            yield _Exchange(each.layer, Op.ALL_TO_ALL, Phase.BACKWARD, number)


def _of_pass(layer: ExpertLayer, phase: Phase, source: int) -> Iterator[_Exchange]:
    if not layer.drop_tokens:
        yield _Exchange(layer.layer, Op.ALL_REDUCE, phase, source)
    yield _Exchange(layer.layer, Op.ALL_TO_ALL, phase, source, opens=True)
    yield _Exchange(layer.layer, Op.ALL_TO_ALL, phase, source, returns=True)


def _matched(
    recorded: Recorded, micro: int, expected: Sequence[_Exchange], tokens: ExpertTokens
) -> dict[str, list[int]]:
    """Return the numbers of the recorded messages of each layer in micro-batch ``micro``.

    Raises:
        UsageError: The recorded messages are not those in ``expected``.
    """
    numbers: dict[str, list[int]] = defaultdict(list)
    for number, message in enumerate(recorded.program.messages):
        layer = message.module
        if layer in tokens.layers and message.micro_step == micro and message.purpose == Purpose.ACTIVATION:
            numbers[str(layer)].append(number)
    for name in tokens.layers:
        issued = [recorded.program.messages[number] for number in numbers[name]]
        should = [_message(None, each, recorded.passes, tokens) for each in expected if each.layer == name]
        if [_sent(each) for each in issued] != [_sent(each) for each in should]:
            raise UsageError(
                f"layer {name} exchanges {sum(each.payload_bytes for each in issued):,} bytes of tokens in {len(issued)} "
                f"messages of a micro-batch, and by its settings and loads {sum(each.payload_bytes for each in should):,} "
                f"in {len(should)} were expected, so other settings of experts cannot be predicted; see commprof verify"
            )
    return numbers


def _sent(message: Message) -> tuple[str, Groups, int, tuple[tuple[int, ...], ...]]:
    return message.op, message.groups, message.payload_bytes, message.sizes


def _message(
    like: Message | None, exchange: _Exchange, passes: Sequence[Sequence[ForwardPass]], tokens: ExpertTokens
) -> Message:
    """Return the message of ``exchange``. Fields other than the size and the groups are taken from ``like``."""
    layer = tokens.layers[exchange.layer]
    groups = tokens.ranks.of_experts(layer.ep_size)
    first = passes[0][exchange.source]
    blocking = Message(str(exchange.op), 0, str(Purpose.ACTIVATION), groups, True, None, first.micro_step)
    message = like or blocking._replace(phase=str(exchange.phase), module=exchange.layer)
    if exchange.op == Op.ALL_REDUCE:
        return message._replace(groups=groups, payload_bytes=CAPACITY_BYTES, sizes=())
    of_slot = layer.num_experts * layer.hidden * element_bytes_of(layer, exchange.returns, tokens.item_bytes)
    sizes = [[of_slot * each[exchange.source].slots(layer, group) for group in groups] for each in passes]
    return message._replace(groups=groups).with_sizes(sizes)


def _slots(source: int, name: str, passes: Sequence[Sequence[ForwardPass]], tokens: ExpertTokens) -> Floats:
    """Return the slots of each expert for the tokens of a rank in forward pass number ``source``: (steps, ranks)."""
    layer = tokens.layers[name]
    slots = np.empty((len(passes), tokens.ranks.world_size))
    for step, of_step in enumerate(passes):
        for group in tokens.ranks.of_experts(layer.ep_size):
            slots[step, list(group)] = of_step[source].slots(layer, group)
    return slots


def _factors(
    numbers: Sequence[int],
    exchanges: Sequence[_Exchange],
    passes: Sequence[Sequence[ForwardPass]],
    before: ExpertTokens,
    after: ExpertTokens,
) -> dict[int, tuple[int, Floats]]:
    """Return the change of compute after the first all_to_all of each pass that a second one follows.

    The keys are the numbers of the first all_to_alls. The values are the number of the second all_to_all, and the ratio
    of the slots to those of the run: (steps, ranks).
    """
    factors = {}
    for place, exchange in enumerate(exchanges[:-1]):
        following = exchanges[place + 1]
        if exchange.opens and following[1:4] == exchange[1:4] and not following.opens:
            slots = [_slots(exchange.source, exchange.layer, passes, tokens) for tokens in (before, after)]
            factors[numbers[place]] = numbers[place + 1], slots[1] / np.maximum(slots[0], 1)
    return factors


def _placed(
    exchanges: Sequence[_Exchange],
    micro: int,
    passes: Sequence[Sequence[ForwardPass]],
    before: ExpertTokens,
    after: ExpertTokens,
    evenly: bool,
) -> Iterator[Inserted]:
    """Yield the messages that the run does not have, with their places before and after the experts of their layer.

    The places follow from the weights of the modules before them.
    """
    for exchange in exchanges:
        begin, end = _shares(exchange.layer, before.parameters, evenly)
        forward = exchange.phase == Phase.FORWARD
        starts = exchange.opens or exchange.op == Op.ALL_REDUCE
        share = (begin if starts else end) if forward else 1.0 - (end if starts else begin)
        slots = [_slots(exchange.source, exchange.layer, passes, tokens) for tokens in (before, after)]
        longer = slots[1] / np.maximum(slots[0], 1) - 1.0
        part = _part_of_experts(exchange.layer, before)
        yield Inserted(
            _message(None, exchange, passes, after), forward, share, part * longer if exchange.opens else 0.0
        )


def _shares(layer: str, parameters: Sequence[Parameter], evenly: bool) -> tuple[float, float]:
    """Return the fractions of a forward pass that are done before and after the experts of ``layer``."""
    done = total = 0.0
    begin: float | None = None
    for each in in_model_order(parameters):
        own = min(1, weight(each)) if evenly else weight(each)
        if _is_of(layer, each):
            begin = total if begin is None else begin
            done = total + own
        total += own
    return ((begin or 0.0) / total, done / total) if total else (0.0, 1.0)


def _part_of_experts(layer: str, tokens: ExpertTokens) -> float:
    """Return the fraction of a pass in which the experts of ``layer`` compute.

    A slot is assumed to take as long for each weight as a token takes in other modules.
    """
    work: dict[str, float] = defaultdict(float)
    for each in tokens.parameters:
        place = place_of(each.name)
        own = tokens.layers.get(place.layer) if place is not None else None
        slots = own.capacity / max(own.tokens, 1) * own.ep_size if own is not None else 1.0
        work["" if own is None else own.layer] += weight(each) * slots
    return work[layer] / (sum(work.values()) or 1.0)


def _is_of(layer: str, parameter: Parameter) -> bool:
    place = place_of(parameter.name)
    return place is not None and place.layer == layer


def _with_compute(
    program: Program, step: Step, number: int, scaled: Mapping[int, tuple[int, Floats]]
) -> Step:
    """Return ``step`` with scaled compute between the two all_to_alls of each pass through a layer."""
    spans = step.spans.copy()
    current: Floats | None = None
    until = -1
    for position, event in enumerate(program.events):
        if current is not None:
            spans[position] = spans[position] * current
        if event.kind == "wait" and event.message in scaled:
            until, factors = scaled[event.message]
            current = factors[number]
        elif event.kind == "issue" and event.message == until:
            current = None
    return step._replace(spans=spans)


def _without(program: Program, steps: Sequence[Step], gone: set[int]) -> tuple[Program, list[Step]]:
    """Return ``program`` without the messages ``gone``. The compute around them remains."""
    if not gone:
        return program, list(steps)
    remaining = [number for number in range(len(program.messages)) if number not in gone]
    renumbered = {number: place for place, number in enumerate(remaining)}
    places = [position for position, event in enumerate(program.events) if event.message not in gone]
    events = tuple(
        Event(program.events[each].kind, renumbered[program.events[each].message]) for each in places
    )
    begins = [0, *(each + 1 for each in places)]
    listed = [
        Step(np.add.reduceat(step.spans, begins, axis=0), step.calls[remaining], step.follows)
        for step in steps
    ]
    return Program(tuple(program.messages[number] for number in remaining), events), listed


def _assumptions(
    messages: Sequence[Message],
    inserted: Mapping[int, Sequence[Inserted]],
    changes_slots: bool,
    after: ExpertTokens,
) -> Iterator[str]:
    added = [each for of_micro in inserted.values() for each in of_micro]
    if changes_slots:
        yield _SLOTS
    if added:
        yield _INSERTED
    growing = [name for name, layer in after.layers.items() if not layer.drop_tokens]
    if not growing:
        return
    sizes = [
        size
        for message in [*messages, *(each.message for each in added)]
        if message.module in growing and message.op == Op.ALL_TO_ALL
        for size in ([one for step in message.sizes for one in step] or [message.payload_bytes])
    ]
    if sizes:
        yield (
            "without dropping (drop_tokens: false) the fullest expert of each group of ranks decides: an all_to_all has "
            f"{min(sizes):,} to {max(sizes):,} bytes by the recorded loads; with another routing they differ"
        )

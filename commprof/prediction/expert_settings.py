"""Other settings of the layers of experts of a run: ``ep_size`` and the capacity factor.

The messages of the other setting follow from the rules of :mod:`commprof.requested.experts`; they go where the recorded ones
were. A rank computes as many slots of experts at any ``ep_size``: fewer experts of its own, and the slots of more ranks for
each of them. With another capacity the compute between the two all_to_alls of a layer changes in proportion to the slots.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

from commprof.errors import UsageError
from commprof.ledger.requests.expert_tokens import ExpertTokens
from commprof.ledger.requests.request import Request
from commprof.prediction.program import Event, Floats, Program, Step
from commprof.requested.configuration import read_configuration
from commprof.requested.experts.layers import ExpertLayer
from commprof.requested.parameters import Parameter, trained_groups
from commprof.schema import Op, Purpose

EP_SIZE: Final = "experts.ep_size"
CAPACITY_FACTOR: Final = "experts.capacity_factor"
KEYS: Final = (EP_SIZE, CAPACITY_FACTOR)
_INNER: Final = ".deepspeed_moe.experts.deepspeed_experts."


class _Expert(NamedTuple):
    """A parameter's place: its layer, the number of its expert, and the rest of its name."""

    layer: str
    number: int
    rest: str

    @classmethod
    def of(cls, name: str) -> _Expert | None:
        layer, inner, rest = name.partition(_INNER)
        number, dot, last = rest.partition(".")
        return cls(layer, int(number), last) if inner and dot and number.isdecimal() else None

    def name(self, number: int) -> str:
        return f"{self.layer}{_INNER}{number}.{self.rest}"


def with_settings(request: Request, setting: Mapping[str, Any]) -> Request:
    """``request`` of the same model with other settings of its layers of experts.

    Raises:
        UsageError: the run has no layers that exchange tokens, or a value does not fit them.
    """
    asked = [key for key in KEYS if key in setting]
    if not asked:
        return request
    experts = request.experts
    if experts is None or not experts.passes:
        raise UsageError(
            f"{asked[0]} cannot be predicted: the run has no layer whose experts are on several ranks (ep_size above 1), so "
            "where tokens are exchanged is not known; record a run with ep_size 2 or more"
        )
    if not all(layer.drop_tokens for layer in experts.layers.values()):
        raise UsageError(
            f"{asked[0]} cannot be predicted: without dropping (drop_tokens: false) the bytes depend on the gate"
        )
    layers = {name: _changed(layer, setting, request.world_size) for name, layer in experts.layers.items()}
    if EP_SIZE in setting:
        request = _on_other_ranks(request, layers)
    changed = ExpertTokens(layers, experts.ranks, request.parameters, experts.item_bytes, experts.passes)
    return replace(request, experts=changed, _rows={}, _estimates={}, _kinds={}, notes=[])


def _changed(layer: ExpertLayer, setting: Mapping[str, Any], world: int) -> ExpertLayer:
    ep_size, factor = setting.get(EP_SIZE, layer.ep_size), setting.get(CAPACITY_FACTOR, layer.capacity_factor)
    if type(ep_size) is not int or ep_size < 1 or world % ep_size or layer.num_experts % ep_size:
        raise UsageError(
            f"{EP_SIZE} is {ep_size!r}; expected a number that divides the {world} ranks and the {layer.num_experts} "
            f"experts of layer {layer.layer}"
        )
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 < factor < 1e6:
        raise UsageError(f"{CAPACITY_FACTOR} is {factor!r}; expected a number above 0")
    return layer._replace(ep_size=ep_size, capacity_factor=float(factor))


def _on_other_ranks(request: Request, layers: Mapping[str, ExpertLayer]) -> Request:
    """The parameters of a rank and the order of its gradients, with as many experts of each layer as it then has."""
    local = {name: layer.num_experts // layer.ep_size for name, layer in layers.items()}
    of_layer: dict[str, list[Parameter]] = defaultdict(list)
    numbers: dict[str, int] = {}
    for each in request.parameters:
        place = _Expert.of(each.name)
        if place is not None and place.layer in local:
            first = numbers.setdefault(place.layer, place.number)
            of_layer[place.layer] += [each] if place.number == first else []
    width = 1 + max(local[name] * len(own) for name, own in of_layer.items())
    parameters: list[Parameter] = []
    for each in request.parameters:
        place = _Expert.of(each.name)
        at = None if each.forward_index is None else each.forward_index * width
        if place is None or place.layer not in local:
            parameters.append(each._replace(forward_index=at))
        elif of_layer[place.layer][0] is each:
            parameters += _copies(of_layer[place.layer], local[place.layer], layers[place.layer].ep_size, at)
    orders = {key: [_reordered(order, local) for order in listed] for key, listed in request.orders.items()}
    return replace(request, parameters=parameters, orders=orders)


def _copies(expert: Sequence[Parameter], count: int, ep_size: int, at: int | None) -> list[Parameter]:
    copies = []
    for number in range(count):
        for place, each in enumerate(expert):
            own = _Expert.of(each.name)
            assert own is not None
            index = None if at is None else at + number * len(expert) + place
            copies.append(each._replace(name=own.name(number), ep_size=ep_size, forward_index=index))
    return copies


def _reordered(order: Sequence[str], local: Mapping[str, int]) -> tuple[str, ...]:
    """``order`` of gradients with the experts of another ``ep_size``, last ones first as backward passes have them."""
    names: list[str] = []
    experts: dict[str, list[_Expert]] = defaultdict(list)
    for name in order:
        place = _Expert.of(name)
        if place is not None and place.layer in local:
            experts[place.layer].append(place)
    done: set[str] = set()
    for name in order:
        place = _Expert.of(name)
        if place is None or place.layer not in local:
            names.append(name)
        elif place.layer not in done:
            done.add(place.layer)
            one = [each for each in experts[place.layer] if each.number == place.number]
            names += [each.name(number) for number in reversed(range(local[place.layer])) for each in one]
    return tuple(names)


def updated(request: Request, config: Mapping[str, Any], world: int) -> float:
    """Elements that each rank updates with ``config``: its share of dense parameters and of its own experts."""
    trained = [each for group in trained_groups(request.parameters) for each in group]
    shares = read_configuration(config).partitions
    return sum(each.numel / (world // (each.ep_size or 1) if shares else 1) for each in trained)


class Exchanged(NamedTuple):
    """A program with other messages of tokens, the compute of its steps, and what is assumed."""

    program: Program
    steps: list[Step]
    assumed: tuple[str, ...] = ()


def with_tokens(
    program: Program, steps: Sequence[Step], before: ExpertTokens, after: ExpertTokens
) -> Exchanged:
    """``program`` of the layers ``before``, with the messages of tokens of those ``after``.

    Raises:
        UsageError: the recorded messages of tokens are not those of the layers.
    """
    numbers = [
        number
        for number, each in enumerate(program.messages)
        if each.purpose == Purpose.ACTIVATION and each.op == Op.ALL_TO_ALL
    ]
    sizes = {
        _bytes(layer, before): _bytes(after.layers[name], after) for name, layer in before.layers.items()
    }
    places = {
        _bytes(layer, before): after.ranks.of_experts(after.layers[name].ep_size)
        for name, layer in before.layers.items()
    }
    unknown = [number for number in numbers if program.messages[number].payload_bytes not in sizes]
    expected = sum(row.count for row in before.usual())
    micro_batches = len({program.messages[number].micro_step for number in numbers})
    if not numbers or unknown or len(numbers) != expected * max(micro_batches, 1):
        raise UsageError(
            f"the run exchanges tokens {len(numbers)} times in a step, and by its layers of experts "
            f"{expected * max(micro_batches, 1)} times were expected; see commprof verify"
        )
    messages = list(program.messages)
    factors = {}
    for number in numbers:
        message = messages[number]
        size = sizes[message.payload_bytes]
        factors[number] = size / message.payload_bytes
        messages[number] = message._replace(payload_bytes=size, groups=places[message.payload_bytes])
    if (
        expected % 4 == 0
    ):  # each layer has two all_to_alls in each pass, with the compute of its experts between them
        steps = [_with_compute(program, each, numbers, factors) for each in steps]
    assumed = (
        [
            "assumed: what experts compute, between the two all_to_alls of their layer, takes as long for each slot"
        ]
        if any(factor != 1 for factor in factors.values())
        else []
    )
    gone = {number for number in numbers if len(messages[number].groups[0]) == 1}
    return Exchanged(*_without(Program(tuple(messages), program.events), steps, gone), tuple(assumed))


def _bytes(layer: ExpertLayer, tokens: ExpertTokens) -> int:
    return layer.num_experts * layer.capacity * layer.hidden * tokens.item_bytes


def _with_compute(program: Program, step: Step, numbers: Sequence[int], factors: Mapping[int, float]) -> Step:
    """Scale the compute between the first and the second all_to_all of each pass through a layer."""
    spans = step.spans.copy()
    inside: dict[int, float] = {}  # position of an event -> factor of the compute before it
    order = {number: place for place, number in enumerate(numbers)}
    current = 0.0
    for position, event in enumerate(program.events):
        if current:
            inside[position] = current
        if event.message not in order:
            continue
        is_first = order[event.message] % 2 == 0
        if is_first and event.kind == "wait":
            current = factors[event.message]
        elif not is_first and event.kind == "issue":
            current = 0.0
    for position, factor in inside.items():
        spans[position] = spans[position] * factor
    return step._replace(spans=spans)


def _without(program: Program, steps: Sequence[Step], gone: set[int]) -> tuple[Program, list[Step]]:
    """``program`` without messages ``gone``; what is computed around them stays."""
    if not gone:
        return program, list(steps)
    kept = [number for number in range(len(program.messages)) if number not in gone]
    renumbered = {number: place for place, number in enumerate(kept)}
    places = [position for position, event in enumerate(program.events) if event.message not in gone]
    events = tuple(
        Event(program.events[each].kind, renumbered[program.events[each].message]) for each in places
    )
    listed = []
    for step in steps:
        ends = [*places, len(program.events)]
        begins = [0, *(each + 1 for each in places)]
        rows: list[Floats] = [
            step.spans[begin : end + 1].sum(axis=0) for begin, end in zip(begins, ends, strict=True)
        ]
        spans = step.spans[: len(rows)].copy()
        spans[:] = rows
        listed.append(Step(spans, step.calls[kept], step.follows))
    return Program(tuple(program.messages[number] for number in kept), events), listed

"""Determine the parameters of a rank and the order of its gradients with a different ``ep_size``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from commprof.ledger.requests.request import Request
from commprof.requested.experts.layers import ExpertLayer
from commprof.requested.parameters import Parameter

_INNER: Final = ".deepspeed_moe.experts.deepspeed_experts."


class ExpertPlace(NamedTuple):
    """The name of an expert's parameter in parts: the layer, the number of the expert, and the rest."""

    layer: str
    number: int
    rest: str

    def name(self, number: int) -> str:
        """Return the name of the corresponding parameter of expert ``number``."""
        return f"{self.layer}{_INNER}{number}.{self.rest}"


def place_of(name: str) -> ExpertPlace | None:
    """Return the parts of the parameter name ``name``, or None if the parameter is not of an expert."""
    layer, inner, rest = name.partition(_INNER)
    number, dot, last = rest.partition(".")
    return ExpertPlace(layer, int(number), last) if inner and dot and number.isdecimal() else None


def on_other_ranks(request: Request, layers: Mapping[str, ExpertLayer]) -> Request:
    """Return ``request`` with the parameters and the gradient order of a rank for the ``ep_size`` of ``layers``."""
    local = {name: layer.num_experts // layer.ep_size for name, layer in layers.items()}
    of_layer: dict[str, list[Parameter]] = defaultdict(list)
    numbers: dict[str, int] = {}
    for each in request.parameters:
        place = place_of(each.name)
        if place is not None and place.layer in local:
            first = numbers.setdefault(place.layer, place.number)
            of_layer[place.layer] += [each] if place.number == first else []
    width = 1 + max(local[name] * len(own) for name, own in of_layer.items())
    parameters: list[Parameter] = []
    for each in request.parameters:
        place = place_of(each.name)
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
            own = place_of(each.name)
            assert own is not None
            index = None if at is None else at + number * len(expert) + place
            copies.append(each._replace(name=own.name(number), ep_size=ep_size, forward_index=index))
    return copies


def _reordered(order: Sequence[str], local: Mapping[str, int]) -> tuple[str, ...]:
    """Return the gradient order ``order`` with the experts of a different ``ep_size``.

    The last expert comes first, because a backward pass runs in reverse order.
    """
    names: list[str] = []
    experts: dict[str, list[ExpertPlace]] = defaultdict(list)
    for name in order:
        place = place_of(name)
        if place is not None and place.layer in local:
            experts[place.layer].append(place)
    done: set[str] = set()
    for name in order:
        place = place_of(name)
        if place is None or place.layer not in local:
            names.append(name)
        elif place.layer not in done:
            done.add(place.layer)
            one = [each for each in experts[place.layer] if each.number == place.number]
            names += [each.name(number) for number in reversed(range(local[place.layer])) for each in one]
    return tuple(names)

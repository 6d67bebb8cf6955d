"""Change the settings of a run's layers of experts: ``ep_size`` and the capacity factor.

A rank computes the same number of slots at any ``ep_size``. With a larger ``ep_size`` it has fewer experts, but each of
its experts gets the slots of more ranks. With a different capacity, the compute between the two all_to_alls of a layer
changes in proportion to the slots.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from commprof.errors import UsageError
from commprof.ledger.requests.expert_tokens import ExpertTokens
from commprof.ledger.requests.request import Request
from commprof.prediction.experts.parameters import on_other_ranks
from commprof.requested.configuration import read_configuration
from commprof.requested.experts.layers import ExpertLayer
from commprof.requested.parameters import trained_groups

EP_SIZE: Final = "experts.ep_size"
CAPACITY_FACTOR: Final = "experts.capacity_factor"
KEYS: Final = (EP_SIZE, CAPACITY_FACTOR)


def with_settings(request: Request, setting: Mapping[str, Any]) -> Request:
    """Return ``request`` with the settings of experts in ``setting`` applied to the layers of its model.

    Raises:
        UsageError: The run has no layers of experts, or a value does not fit them.
    """
    asked = [key for key in KEYS if key in setting]
    if not asked:
        return request
    experts = request.experts
    if experts is None:
        raise UsageError(f"{asked[0]} cannot be predicted: the run describes no layer of experts")
    on_one_rank = [name for name, layer in experts.layers.items() if layer.ep_size == 1 and layer.drop_tokens]
    if CAPACITY_FACTOR in setting and on_one_rank:
        raise UsageError(
            f"{CAPACITY_FACTOR} cannot be predicted: with ep_size 1 the run does not show how long the experts of layer "
            f"{on_one_rank[0]} compute; record a run with ep_size 2 or more"
        )
    layers = {name: _changed(layer, setting, request.world_size) for name, layer in experts.layers.items()}
    if EP_SIZE in setting:
        request = on_other_ranks(request, layers)
    changed = ExpertTokens(layers, experts.ranks, request.parameters, experts.item_bytes, experts.passes)
    return replace(request, experts=changed, _rows={}, _estimates={}, _kinds={}, notes=[])


def without_effect(setting: Mapping[str, Any], experts: ExpertTokens | None) -> list[str]:
    """Return a sentence that says why ``setting`` changes nothing for the layers ``experts``.

    The list is empty if ``setting`` may change something.
    """
    if experts is None or set(setting) != {CAPACITY_FACTOR}:
        return []
    if any(layer.drop_tokens for layer in experts.layers.values()):
        return []
    return [
        f"{CAPACITY_FACTOR} changes nothing: without dropping (drop_tokens: false) an expert has the slots that it needs"
    ]


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


def updated(request: Request, config: Mapping[str, Any], world: int) -> float:
    """Return the elements that a rank updates with ``config``: its part of dense parameters and of its own experts."""
    trained = [each for group in trained_groups(request.parameters) for each in group]
    shares = read_configuration(config).partitions
    return sum(each.numel / (world // (each.ep_size or 1) if shares else 1) for each in trained)

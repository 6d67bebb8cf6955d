"""Test the adapter of DeepSpeed's expert layers, with classes that stand in for DeepSpeed's."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from commprof import hooks
from commprof.recorder.adapters.deepspeed_experts import ExpertLayers
from commprof.recorder.adapters.patching import Patches

GATES, EXPERTS = ModuleType("deepspeed.moe.sharded_moe"), ModuleType("deepspeed.moe.experts")


class StopPassError(Exception):
    """The exception with which torch ends a repeated forward pass.

    torch raises it once all tensors that the backward pass needs exist.
    """


class Experts(torch.nn.Module):
    def forward(self, slots):
        return slots


class MOELayer(torch.nn.Module):
    def __init__(self, ends: bool) -> None:
        super().__init__()
        self.experts, self.ends = Experts(), ends

    def forward(self, tokens):
        # The counts are floating point, as with a mask of used tokens.
        self.exp_counts = torch.tensor([3.0, 1.0])
        # There is one rank with two experts and five slots per expert.
        slots = self.experts(torch.ones(1, 2, 5, tokens.shape[-1]))
        if self.ends:
            raise StopPassError
        return slots


GATES.MOELayer, EXPERTS.Experts = MOELayer, Experts


@pytest.mark.parametrize("ends", [False, True])
def test_a_pass_that_activation_checkpointing_ends_has_its_load_too(monkeypatch, ends):
    loads, faults = [], []
    monkeypatch.setattr(hooks, "expert_load", lambda *values: loads.append(values))
    layers, patches = ExpertLayers(faults.append), Patches()
    for module in (GATES, EXPERTS):
        layers.wrap(module, patches)
    try:
        layer = MOELayer(ends)
        layers._tags[layer] = hooks.tag("activation", module="moe")
        if ends:
            with pytest.raises(StopPassError):
                layer(torch.ones(4, 8))
        else:
            layer(torch.ones(4, 8))
    finally:
        patches.remove()
    (load,) = loads
    assert (load[0], load[1].tolist(), load[2:]) == ("moe", [3, 1], (5, 4)) and not faults
    assert load[1].dtype is torch.int64

"""Test that a released parameter frees its memory, unless it was gathered together with the rest of a block."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from zero_runtime.sharding.message_memory import MessageMemory
from zero_runtime.sharding.parameter_gathering import Gathering, _Message

WORLD = 2


class Parameter:
    """A parameter of ``numel`` elements with the attributes that a gather uses."""

    def __init__(self, numel):
        self.slice_numel = -(-numel // WORLD)
        self.group = SimpleNamespace(world_size=WORLD)
        self.dtype = torch.float32
        self.rounded = True

    def fill(self, values):
        self.values = values


@pytest.mark.parametrize("of_block", [True, False])
def test_only_parameters_of_a_block_share_an_allocation(of_block):
    first, second = Parameter(4), Parameter(2)
    # Each rank has two elements of the first parameter and one element of the second.
    rows = torch.arange(6.0).view(WORLD, 3)
    message = _Message(SimpleNamespace(wait=lambda: None), rows.view(-1).clone(), [first, second], WORLD)
    Gathering([message], MessageMemory() if of_block else None).wait()
    assert first.values.tolist() == [0, 1, 3, 4]
    assert second.values.tolist() == [2, 5]
    addresses = {each.values.untyped_storage().data_ptr() for each in (first, second)}
    assert len(addresses) == (1 if of_block else 2)
    assert all(each.values.data_ptr() % 64 == 0 for each in (first, second))

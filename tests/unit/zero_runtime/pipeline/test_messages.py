"""Test the metadata that stages exchange before they send tensors, and the objects that cannot be sent."""

from __future__ import annotations

from collections import OrderedDict, namedtuple

import pytest
import torch

from zero_runtime.errors import UsageError
from zero_runtime.pipeline.transfer.channel import Channel
from zero_runtime.pipeline.transfer.tensor_headers import HEADER_NUMEL, form_from, form_of, more_numel

Pair = namedtuple("Pair", "first second")
VALUES = {
    "tensor": torch.ones(2, 3, dtype=torch.bfloat16),
    "number": torch.ones(()),
    "nothing in it": torch.ones(0, 4),
    "tuple": (torch.ones(2), torch.ones(3, 1, dtype=torch.int64), torch.ones(2, dtype=torch.bool)),
    "empty tuple": (),
    "one in a tuple": (torch.ones(1),),
    "many": tuple(torch.ones(1, 1, 1) for _ in range(80)),
    "list": [torch.ones(2), torch.ones(1)],
    "nested": {"a": (torch.ones(2), [torch.ones(1), None]), "b": 3, "c": "text", "d": {"e": 0.5, "f": True}},
    "ordered": OrderedDict(z=torch.ones(2), a=torch.ones(1, dtype=torch.complex64)),
}


@pytest.mark.parametrize("name", VALUES)
def test_a_header_says_all_but_the_values(name):
    value = VALUES[name]
    form, tensors = form_of(value)
    header, more = form.header()
    assert len(header) <= HEADER_NUMEL and more_numel(header) == len(more)
    found = form_from(header + [0] * (HEADER_NUMEL - len(header)), more)
    assert found == form
    restored = found.restore(tensors)
    again, same = form_of(restored)
    assert again == form and type(restored) is type(value)
    assert all(mine is theirs for mine, theirs in zip(same, tensors, strict=True))


def test_layout_of_deepspeeds_headers():
    assert form_of(torch.ones(4, 16, 64))[0].header() == ([0, 0, 3, 4, 16, 64], [])
    pair = (torch.ones(2, dtype=torch.float16), torch.ones(3, 1, dtype=torch.int64))
    assert form_of(pair)[0].header() == ([2, 2, 4, 1, 2, 10, 2, 3, 1], [])


@pytest.mark.parametrize(
    "value",
    [object(), {"a": object()}, Pair(torch.ones(1), object()), torch.ones(3).to_sparse()],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_sent(value):
    with pytest.raises(UsageError, match="cannot be sent"):
        form_of(value)


class Wire:
    """A group of two stages that stores everything that is sent."""

    world_size, device = 2, torch.device("cpu")

    def __init__(self, rank=0):
        self.rank = rank
        self.sent = []

    def send(self, tensor, member, why):
        assert why.purpose == "pipeline"
        self.sent.append(tensor.clone())

    def receive(self, tensor, member, why):
        tensor.copy_(self.sent.pop(0))


def test_other_shapes_are_refused_unless_they_may_change():
    fixed, changing = Wire(), Wire()
    channel = Channel(fixed, dynamic=False)
    channel.send_activation(torch.ones(2, 3))
    channel.send_activation(torch.zeros(2, 3))
    assert [tensor.numel() for tensor in fixed.sent] == [HEADER_NUMEL, 6, 6]
    with pytest.raises(UsageError, match=r"float32\[3, 3\] after float32\[2, 3\]; .*dynamic_shape=True"):
        channel.send_activation(torch.ones(3, 3))
    channel.reset()
    channel.send_activation(torch.ones(3, 3))
    channel = Channel(changing, dynamic=True)
    for size in (1, 2):
        channel.send_activation(torch.ones(size))
    assert [tensor.numel() for tensor in changing.sent] == [HEADER_NUMEL, 1, HEADER_NUMEL, 2]


def test_gradients_come_for_floating_point_tensors_alone():
    wire = Wire()
    value = {"a": torch.ones(2, 2), "mask": torch.ones(2, dtype=torch.bool), "unused": torch.ones(3), "n": 1}
    Channel(wire, dynamic=False).send_activation(value)
    wire.rank = 1
    last = Channel(wire, dynamic=False)
    got = last.receive_activation(differentiable=True).value()
    assert got["a"].requires_grad and not got["mask"].requires_grad and got["n"] == 1
    (got["a"] * 3).sum().backward()
    last.send_gradients(got)
    assert [tensor.tolist() for tensor in wire.sent] == [[[3.0, 3.0], [3.0, 3.0]], [0.0, 0.0, 0.0]]
    wire.rank = 0
    gradients = Channel(wire, dynamic=False).receive_gradients(value).value()
    assert [tuple(each.shape) for each in gradients] == [(2, 2), (3,)]

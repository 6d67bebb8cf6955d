"""Compare the linear layer of stage 3 with torch's linear layer."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from zero_runtime.errors import UsageError
from zero_runtime.sharding.linear import memory_efficient_linear


def gradients(shape, bias, dtype=torch.float64, autocast=False):
    torch.manual_seed(0)
    layer = nn.Linear(5, 3, bias=bias, dtype=dtype)
    inputs = torch.randn(*shape, 5, dtype=dtype, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        output = layer(inputs)
    output.float().square().sum().backward()
    return output.detach(), inputs.grad, *(parameter.grad for parameter in layer.parameters())


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(), (4,), (2, 4), (2, 1, 4)])
def test_values_and_gradients_are_those_of_torch(shape, bias):
    wanted = gradients(shape, bias)
    with memory_efficient_linear():
        found = gradients(shape, bias)
    torch.testing.assert_close(found, wanted)


def test_autocast_acts_in_both_passes():
    wanted = gradients((2, 4), True, torch.float32, autocast=True)
    with memory_efficient_linear():
        found = gradients((2, 4), True, torch.float32, autocast=True)
    assert found[0].dtype is torch.bfloat16
    # The product is rounded once more before the bias is added.
    torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)


def test_the_weight_gets_its_gradient_before_the_bias():
    def arrivals():
        layer = nn.Linear(5, 3)
        order = []
        for name, parameter in layer.named_parameters():
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
        layer(torch.randn(2, 4, 5)).sum().backward()
        return order

    assert arrivals() == ["bias", "weight"]
    with memory_efficient_linear():
        assert arrivals() == ["weight", "bias"]


def test_nothing_is_left_behind():
    before = functional.linear
    with pytest.raises(RuntimeError), memory_efficient_linear():
        functional.linear(torch.ones(2, 3), torch.ones(4, 5))
    assert functional.linear is before


def test_backward_keeps_the_parameter_and_not_what_it_held():
    """The weight may be released between the passes and be at a different address in the second pass."""
    layer = nn.Linear(5, 3)
    inputs = torch.randn(4, 5, requires_grad=True)
    with memory_efficient_linear():
        output = layer(inputs)
    held = layer.weight.data
    layer.weight.data = torch.empty(0)
    layer.weight.data = held.clone() * 2
    output.sum().backward()
    torch.testing.assert_close(inputs.grad, (held * 2).sum(0).expand(4, 5))


def test_a_sharded_weight_that_changes_between_the_passes_is_an_error():
    layer = nn.Linear(5, 3)
    layer.weight.zero_shard = object()  # This attribute marks a parameter as sharded.
    with memory_efficient_linear():
        outputs = [layer(torch.randn(4, 5)).sum() for _ in range(2)]
    outputs[0].backward()
    with torch.no_grad():
        layer.weight.mul_(2)
    with pytest.raises(UsageError, match="changed in place between its forward and its backward"):
        outputs[1].backward()

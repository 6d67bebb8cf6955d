"""Test that a backward pass in two halves gives the gradients of a complete backward pass and repeats no work."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from zero_runtime.pipeline.split_backward import backward_of_inputs

WIDTH = 6


class Product(torch.autograd.Function):
    """A matrix product that counts its backward passes."""

    passes = 0

    @staticmethod
    def forward(ctx, values, weight):
        ctx.save_for_backward(values, weight)
        return values @ weight

    @staticmethod
    def backward(ctx, gradient):
        Product.passes += 1
        values, weight = ctx.saved_tensors
        return gradient @ weight.t(), values.t() @ gradient


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, values):
        return Product.apply(values, self.weight)


class Unused(nn.Module):
    """A module whose second output depends only on its weight."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, values):
        return self.linear(values) + self.weight.exp(), self.weight * 2


def shared():
    linear = nn.Linear(WIDTH, WIDTH)
    return nn.Sequential(linear, nn.GELU(), Layer(), linear, nn.Tanh(), linear)


def repeated():
    layer = Layer()
    return nn.Sequential(layer, nn.Tanh(), layer)


MODELS = {
    "layers": lambda: nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3)
    ),
    "one weight in three places": shared,
    "weights of weights": lambda: nn.Sequential(
        parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh()
    ),
    "functions in Python": lambda: nn.Sequential(Layer(), nn.Tanh(), Layer()),
    "one function in Python in two places": repeated,
    "outputs without inputs": Unused,
    "frozen": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH).requires_grad_(False), nn.Linear(WIDTH, WIDTH)),
    "no weights": lambda: nn.Sequential(nn.Tanh()),
}


def ends_of(model, inputs):
    outputs = model(inputs.clone())
    return list(outputs) if isinstance(outputs, tuple) else [outputs]


@pytest.mark.parametrize("name", MODELS)
def test_both_halves_are_a_whole_to_the_bit(name):
    torch.manual_seed(0)
    model = MODELS[name]()
    found = []
    for halves in (False, True):
        model.zero_grad()
        inputs = torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH).requires_grad_()
        later = []
        for number in range(2):
            ends = ends_of(model, inputs)
            gradients = [torch.full_like(end, number + 0.5) for end in ends]
            if not halves:
                torch.autograd.backward(ends, gradients)
                continue
            later.append(backward_of_inputs(ends, gradients, [inputs]))
            if number == 0:
                assert all(each.grad is None for each in model.parameters())
        for each in later:
            each.run()
        found.append([inputs.grad, *(each.grad for each in model.parameters())])
    for whole, split in zip(*found, strict=True):
        assert (whole is None and split is None) or torch.equal(whole, split)


def test_functions_in_python_run_once():
    model = MODELS["functions in Python"]()
    inputs = torch.ones(2, WIDTH, requires_grad=True)
    Product.passes = 0
    backward_of_inputs(ends_of(model, inputs), None, [inputs]).run()
    assert Product.passes == 2


def test_a_hook_that_changes_a_gradient_counts_once():
    model = nn.Linear(WIDTH, WIDTH)
    found = []
    for halves in (False, True):
        model.zero_grad()
        inputs = torch.ones(2, WIDTH, requires_grad=True)
        (end,) = ends_of(model, inputs)
        end.register_hook(lambda gradient: gradient * 3)
        if halves:
            backward_of_inputs([end], [torch.ones_like(end)], [inputs]).run()
        else:
            end.backward(torch.ones_like(end))
        found.append([inputs.grad, model.weight.grad])
    assert all(map(torch.equal, *found))


def test_without_inputs_there_are_no_halves():
    model = nn.Linear(WIDTH, 1)
    later = backward_of_inputs([model(torch.ones(1, WIDTH)).sum()], None, [])
    assert torch.equal(model.weight.grad, torch.ones(1, WIDTH))
    later.run()
    assert torch.equal(model.weight.grad, torch.ones(1, WIDTH))
    backward_of_inputs([], [], []).run()

"""Models that use their parameters in unusual ways, for tests of gathering and releasing parameters at stage 3.

Each class has a method ``forward(batch) -> loss`` for a batch of shape (4, WIDTH). ``make(name)`` always
returns the same weights.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

WIDTH = 6


class Tied(nn.Module):
    """A model in which two modules share one weight."""

    def __init__(self):
        super().__init__()
        self.first, self.middle, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.last.weight = self.first.weight

    def forward(self, batch):
        return self.last(torch.relu(self.middle(self.first(batch)))).square().mean()


class Borrowed(nn.Module):
    """A model that reads the weights of a child that has already run, and of a child that never runs."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.never = nn.Linear(WIDTH, WIDTH)

    def forward(self, batch):
        hidden = torch.relu(self.first(batch))
        return (F.linear(hidden, self.first.weight) + hidden @ self.never.weight).square().mean()


class Hidden(nn.Module):
    """A model that reads a weight from a list, so that a runtime cannot observe the access."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.kept = [self.first.weight]

    def forward(self, batch):
        return F.linear(self.first(batch), self.kept[0]).square().mean()


class Returned(nn.Module):
    """A model whose child returns its bias, which the parent then uses."""

    class Child(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
            self.bias = nn.Parameter(torch.randn(WIDTH))

        def forward(self, hidden):
            return F.linear(hidden, self.weight), self.bias

    def __init__(self):
        super().__init__()
        self.child = self.Child()

    def forward(self, batch):
        hidden, bias = self.child(batch)
        return (torch.tanh(hidden) * bias).square().mean()


class Attention(nn.Module):
    """A model with the attention of torch, which never calls its own output projection."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, batch):
        hidden = self.norm(batch).unsqueeze(0)
        return self.attention(hidden, hidden, hidden)[0].square().mean()


class AttentionFirst(nn.Module):
    """A model that applies attention directly to the data, which need no gradient."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, batch):
        hidden = batch.unsqueeze(0)
        return self.attention(hidden, hidden, hidden, need_weights=False)[0].square().mean()


class Recurrent(nn.Module):
    """A model with the LSTM of torch, which stores a list of its parameters."""

    def __init__(self):
        super().__init__()
        self.cell = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)

    def forward(self, batch):
        hidden, (state, _) = self.cell(batch.unsqueeze(0))
        return hidden.square().mean() + state.square().mean()


class Repeated(nn.Module):
    """A model that runs one module three times in succession, with a shared in-place activation."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.activation = nn.ReLU(inplace=True)

    def forward(self, batch):
        hidden = batch
        for _ in range(3):
            hidden = hidden + self.activation(self.layer(hidden))
        return hidden.square().mean()


@dataclasses.dataclass
class Record:
    hidden: torch.Tensor
    note: str


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


class Opaque:
    def __init__(self, hidden):
        self.hidden = hidden


class Containers(nn.Module):
    """A model with keyword inputs.

    The outputs of its layers are in a dict, a list, a dataclass, a named tuple and an opaque object.
    """

    class Layer(nn.Module):
        def __init__(self, wrap):
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.scale = nn.Parameter(torch.randn(WIDTH))
            self.wrap = wrap

        def forward(self, *, hidden, factor=1.0):
            return self.wrap(self.linear(hidden) * self.scale * factor)

    def __init__(self):
        super().__init__()
        wraps = (
            lambda hidden: {"hidden": hidden},
            lambda hidden: [hidden, None, 3],
            lambda hidden: Record(hidden, "kept"),
            lambda hidden: Pair(hidden, hidden * 2),
            Opaque,
        )
        self.layers = nn.ModuleList(self.Layer(wrap) for wrap in wraps)

    def forward(self, batch):
        hidden = self.layers[0](hidden=batch)["hidden"]
        hidden = self.layers[1](hidden=hidden, factor=2.0)[0]
        hidden = self.layers[2](hidden=hidden).hidden
        left, right = self.layers[3](hidden=hidden)
        return self.layers[4](hidden=left + right).hidden.square().mean()


class Sizes(nn.Module):
    """A model with scalar, empty, frozen, unused, transposed and single-element parameters."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.zeros(0, 5))
        self.single = nn.Parameter(torch.ones(1))
        self.frozen = nn.Linear(WIDTH, WIDTH)
        self.frozen.requires_grad_(False)
        self.unused = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, 1, bias=False)
        self.transposed = nn.Parameter(torch.randn(WIDTH, 3).t())

    def forward(self, batch):
        hidden = self.last(self.frozen(batch)) * self.scale + self.single + self.nothing.sum()
        return hidden.square().mean() + (batch @ self.transposed.t()).square().mean()


class Changing(nn.Module):
    """A model that changes the order of its layers.

    Every third call reverses the order, and every fourth call leaves out the last layer.
    """

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.calls = 0

    def forward(self, batch):
        self.calls += 1
        order = list(self.layers)
        if self.calls % 3 == 0:
            order.reverse()
        if self.calls % 4 == 0:
            order.pop()
        for layer in order:
            batch = torch.tanh(layer(batch))
        return batch.square().mean()


class Recomputed(nn.Module):
    """A model that recomputes its activations in the backward pass."""

    reentrant = False

    def __init__(self):
        super().__init__()
        block = (nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.blocks = nn.ModuleList(
            nn.Sequential(*(type(each)(*_size(each)) for each in block)) for _ in range(3)
        )
        self.first = nn.Linear(WIDTH, WIDTH)

    def forward(self, batch):
        hidden = self.first(batch)
        for block in self.blocks:
            hidden = hidden + checkpoint(block, hidden, use_reentrant=self.reentrant)
        return hidden.square().mean()


def _size(module):
    if isinstance(module, nn.Linear):
        return WIDTH, WIDTH
    return (WIDTH,) if isinstance(module, nn.LayerNorm) else ()


class RecomputedReentrant(Recomputed):
    reentrant = True


class Twice(nn.Module):
    """A model that is called twice before one loss is computed from both outputs; see ``passes``."""

    passes = 2

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def forward(self, batch):
        return self.body(batch).square().mean()


class Experts(nn.Module):
    """A model with a leaf module in which the data determine the child that runs."""

    class Mixture(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

        def forward(self, hidden):
            chosen = int(hidden.sum().item() * 1000) % 3
            return self.experts[chosen](hidden) + 0 * sum(e.weight.sum() + e.bias.sum() for e in self.experts)

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.mixture = self.Mixture()

    def forward(self, batch):
        return self.mixture(self.first(batch)).square().mean()


class Leaking(nn.Module):
    """A model whose layers store a function of their parameters in an attribute, from which the loss is computed."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
            self.bias = nn.Parameter(torch.randn(WIDTH))

        def forward(self, hidden):
            self.penalty = self.bias.sum()
            return F.linear(hidden, self.weight, self.bias)

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(self.Layer() for _ in range(2))

    def forward(self, batch):
        for layer in self.layers:
            batch = torch.tanh(layer(batch))
        return batch.square().mean() + sum(layer.penalty for layer in self.layers)


class Derived(nn.Module):
    """A model whose modules return two outputs.

    One output is computed from the second output, as a loss is computed from logits.
    """

    class Tuple(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Linear(WIDTH, WIDTH)

        def forward(self, hidden):
            logits = self.body(hidden)
            return torch.tanh(logits), logits

    class Dict(Tuple):
        def forward(self, hidden):
            changed, logits = super().forward(hidden)
            return OrderedDict(changed=changed, logits=logits)

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = self.Tuple(), self.Dict(), self.Tuple()

    def forward(self, batch):
        hidden = self.second(self.first(batch)[0])["changed"]
        changed, logits = self.last(hidden)
        return (changed * logits).mean()


class HalfUsed(nn.Module):
    """A model whose modules receive two tensors and use only the first, or receive the same tensor twice."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Linear(WIDTH, WIDTH)
            self.scale = nn.Parameter(torch.ones(WIDTH))

        def forward(self, hidden, other):
            return torch.tanh(self.body(hidden)) * self.scale

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third, self.last = (self.Layer() for _ in range(4))

    def forward(self, batch):
        one = self.first(batch, batch)
        two = self.second(one, one)
        three = self.third(two, one)
        return (self.last(three, two) + one).square().mean()


MODELS = {
    each.__name__: each
    for each in (
        Tied,
        Borrowed,
        Hidden,
        Returned,
        Attention,
        Recurrent,
        Repeated,
        Containers,
        Sizes,
        Changing,
        Recomputed,
        RecomputedReentrant,
        Twice,
        Experts,
        Leaking,
        AttentionFirst,
        Derived,
        HalfUsed,
    )
}


def make(name):
    torch.manual_seed(7)
    return MODELS[name]()


def batch(step, rank):
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))

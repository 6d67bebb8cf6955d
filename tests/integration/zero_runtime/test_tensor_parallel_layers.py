"""Each tensor-parallel layer computes the same as torch's layer, forward and backward, in one process."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from support.standing_ranks import run_standing
from zero_runtime.comm import DataParallelGroup
from zero_runtime.errors import ConfigError, UsageError
from zero_runtime.tensor_parallel import (
    ColumnParallelLinear,
    Cut,
    RowParallelLinear,
    VocabParallelCrossEntropy,
    VocabParallelEmbedding,
    cut_of,
    parallelize,
)
from zero_runtime.tensor_parallel.division_plan import How, automatic_plan, first_rule, plan_of
from zero_runtime.tensor_parallel.tensor_collectives import Ranks


class Layers(nn.Module):
    """A feed-forward layer between embeddings, with logits from its first half."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 6, padding_idx=7)
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)
        self.loss = nn.CrossEntropyLoss(reduction="sum")

    def forward(self, x, words, target):
        hidden = self.down(F.gelu(self.up(x + self.words(words))))
        return hidden.square().sum() + self.loss(self.up(hidden).movedim(-1, 1), target)


def _layers(rank: int, world: int):
    ranks = Ranks(DataParallelGroup(), "layer")
    torch.manual_seed(0)
    plain = Layers()
    shared = copy.deepcopy(plain)
    before = dict(shared.named_parameters())
    shared.up = ColumnParallelLinear.of(shared.up, ranks, "up")
    shared.down = RowParallelLinear.of(shared.down, ranks, "down")
    shared.words = VocabParallelEmbedding.of(shared.words, ranks, "words")
    shared.loss = VocabParallelCrossEntropy.of(shared.loss, ranks, "loss")
    assert all(before[name] is parameter for name, parameter in shared.named_parameters())
    words, target = torch.randint(0, 10, (3, 4)), torch.randint(0, 8, (3, 4))
    target[1, 2] = -100
    x = torch.randn(3, 4, 6)
    found = []
    for model in (plain, shared):
        own = x.clone().requires_grad_()
        loss = model(own, words, target)
        loss.backward()
        found.append((loss.detach(), own.grad))
    (expected, gradient), (loss, own) = found
    assert torch.allclose(loss, expected, rtol=1e-5)
    assert torch.allclose(own, gradient, rtol=1e-4, atol=1e-5)
    for (name, whole), part in zip(plain.named_parameters(), shared.parameters(), strict=True):
        how = cut_of(part)
        assert (how is None) == (name == "down.bias")
        wanted = whole.grad if how is None else how.part(whole.grad)
        assert torch.allclose(part.grad, wanted, rtol=1e-4, atol=1e-5), name


def test_layers_compute_what_torch_computes():
    run_standing(2, _layers)


def _gathered_sections(rank: int, world: int):
    ranks = Ranks(DataParallelGroup(), "layer")
    torch.manual_seed(0)
    plain = nn.Linear(6, 16)
    shared = ColumnParallelLinear.of(copy.deepcopy(plain), ranks, "qkv", sections=(8, 4, 4), gathers=True)
    x, slope = torch.randn(3, 6), torch.randn(3, 16)
    found = []
    for layer in (plain, shared):
        own = x.clone().requires_grad_()
        outputs = layer(own)
        (outputs * slope).sum().backward()
        found.append((outputs.detach(), own.grad))
    for expected, mine in zip(*found, strict=True):
        torch.testing.assert_close(mine, expected)
    torch.testing.assert_close(shared.weight.grad, cut_of(shared.weight).part(plain.weight.grad))


def test_gathered_sections_are_in_the_order_of_the_layer():
    run_standing(2, _gathered_sections)


def test_parts_make_the_whole():
    whole = torch.arange(24.0).view(12, 2)
    cuts = [Cut(0, (4, 4, 4), rank, 2) for rank in range(2)]
    parts = [each.part(whole) for each in cuts]
    assert parts[0][:, 0].tolist() == [0, 2, 8, 10, 16, 18]
    assert torch.equal(cuts[0].joined(parts), whole) and cuts[0].whole_shape((6, 2)) == (12, 2)
    with pytest.raises(ConfigError, match="3 ranks cannot share"):
        Cut(0, (4, 4, 4), 0, 3).check("weight")


def test_names_say_how_layers_are_cut():
    plan = automatic_plan()
    said = {
        "model.layers.3.self_attn.q_proj": (How.COLUMN, 1),
        "transformer.h.0.attn.c_attn": (How.COLUMN, 3),
        "model.layers.0.mlp.down_proj": (How.ROW, 1),
        "encoder.layer.1.attention.output.dense": (How.ROW, 1),
        "encoder.layer.1.intermediate.dense": (How.COLUMN, 1),
        "up_proj": (How.COLUMN, 1),
    }
    for name, (how, sections) in said.items():
        rule = first_rule(plan, name)
        assert rule is not None and (rule.how, rule.sections) == (how, sections), name
    assert first_rule(plan, "lm_head") is None and first_rule(plan, "classifier.dense") is None


def test_a_plan_is_patterns_and_words():
    plan = plan_of({"a.*.b": "column:8,4,4", "a.*": "whole"})
    assert first_rule(plan, "a.3.b").sections == (8, 4, 4) and first_rule(plan, "a.3.c").how is How.WHOLE
    for wrong in ("columns", "row:3", "column:x", "column:0", None):
        with pytest.raises(ConfigError, match="expected"):
            plan_of({"a": wrong})


class Tied(nn.Module):
    """Input and output embeddings with one matrix, and an attention that uses the number of heads."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
        self.head.weight = self.words.weight
        self.attention = nn.Module()
        self.attention.num_heads, self.attention.q_proj = 2, nn.Linear(4, 4)
        self.loss = nn.CrossEntropyLoss()

    def forward(self, x, y):
        return self.loss(self.head(self.words(x)).flatten(0, 1), y.flatten())


def _tied(rank: int, world: int):
    torch.manual_seed(0)
    plain, model = Tied(), None
    x, y = torch.randint(0, 8, (2, 3)), torch.randint(0, 8, (2, 3))
    expected = plain(x, y)
    expected.backward()
    torch.manual_seed(0)
    model = parallelize(
        Tied(), None, {"words": "vocabulary", "head": "column", "loss": "loss", "attention.*": "column"}
    )
    loss = model(x, y)
    loss.backward()
    assert model.head.weight is model.words.weight and model.attention.num_heads == 1
    assert torch.allclose(loss, expected)
    assert torch.allclose(model.words.weight.grad, plain.words.weight.grad.chunk(world)[rank], atol=1e-6)
    with pytest.raises(UsageError, match="expected \\(rows, vocabulary"):
        model.loss(torch.zeros(2, 4), torch.zeros(3, dtype=torch.long))


def test_tied_words_are_cut_once_and_heads_are_shared():
    run_standing(2, _tied)

"""The two models and the batches of the recorded DeepSpeed runs.

The initial weights depend on one seed and on the order in which modules are constructed. The order must be that of the
recorded runs. Every batch is seeded by (step, micro-batch, rank), so rank r sees the same data at every world size.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from zero_runtime import checkpointing

VOCABULARY, CONTEXT, MICRO_BATCH = 96, 16, 4
WIDTH, HEADS, LAYERS = 64, 4, 2
MLP_WIDTHS = (37, 131, 257, 67, 11)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln1 = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.ln2 = nn.LayerNorm(WIDTH)
        self.fc1 = nn.Linear(WIDTH, 4 * WIDTH)
        self.fc2 = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden):
        samples, length, _ = hidden.shape
        heads = self.qkv(self.ln1(hidden)).view(samples, length, 3, HEADS, WIDTH // HEADS)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.proj(attended.transpose(1, 2).reshape(samples, length, WIDTH))
        return hidden + self.fc2(F.gelu(self.fc1(self.ln2(hidden))))


class Transformer(nn.Module):
    """``gpt``: 113,504 parameters in 30 tensors; returns the mean cross entropy."""

    def __init__(self) -> None:
        super().__init__()
        self.tok = nn.Embedding(VOCABULARY, WIDTH)
        self.pos = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList([Layer() for _ in range(LAYERS)])
        self.lnf = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens, targets):
        hidden = self.tok(tokens) + self.pos(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            hidden = self.run(block, hidden)
        logits = self.head(self.lnf(hidden))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    def run(self, block, hidden):
        return block(hidden)


class CheckpointedTransformer(Transformer):
    """The model ``gpt`` with activation checkpointing: its blocks run again in the backward pass."""

    reentrant = False

    def run(self, block, hidden):
        return checkpoint(block, hidden, use_reentrant=self.reentrant)


class ReentrantTransformer(CheckpointedTransformer):
    reentrant = True


class RegionsTransformer(Transformer):
    """The model ``gpt`` with activation checkpointing by the function of DeepSpeed's interface."""

    def run(self, block, hidden):
        return checkpointing.checkpoint(block, hidden)


class Perceptron(nn.Module):
    """``mlp``: 56,936 parameters in 8 tensors of odd sizes.

    With 2, 3 and 4 ranks, the boundaries of shards are inside tensors.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(*pair) for pair in pairwise(MLP_WIDTHS))

    def forward(self, features, targets):
        for layer in self.layers[:-1]:
            features = F.relu(layer(features))
        return F.cross_entropy(self.layers[-1](features).float(), targets)


class PartlyUsed(Perceptron):
    """The model ``mlp`` with a frozen first layer and a trainable layer that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Linear(101, 53)
        self.frozen = nn.Linear(MLP_WIDTHS[0], MLP_WIDTHS[0])
        self.frozen.requires_grad_(False)

    def forward(self, features, targets):
        return super().forward(self.frozen(features), targets)


MODELS = {
    "gpt": Transformer,
    "mlp": Perceptron,
    "partly_used": PartlyUsed,
    "nonreentrant_gpt": CheckpointedTransformer,
    "reentrant_gpt": ReentrantTransformer,
    "ds_gpt": RegionsTransformer,
}
# The class names in recorded configs, and the names of the corresponding classes in this module.
CLASSES = {"models.Block": f"{Layer.__module__}.{Layer.__name__}"}


def make_model(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]()


def make_batch(name: str, step: int, micro: int, rank: int, dtype: torch.dtype = torch.float32):
    generator = torch.Generator().manual_seed(100_000 * step + 1_000 * micro + rank)
    if name.endswith("gpt"):
        shape = (MICRO_BATCH, CONTEXT)
        tokens = torch.randint(0, VOCABULARY, shape, generator=generator)
        return tokens, torch.randint(0, VOCABULARY, shape, generator=generator)
    features = torch.randn(MICRO_BATCH, MLP_WIDTHS[0], generator=generator).to(dtype)
    return features, torch.randint(0, MLP_WIDTHS[-1], (MICRO_BATCH,), generator=generator)

"""Tensor parallelism: layers with partitioned parameters, and plans that replace a model's layers by such layers."""

from __future__ import annotations

from zero_runtime.tensor_parallel.cuts import Cut, cut_of
from zero_runtime.tensor_parallel.division import parallelize
from zero_runtime.tensor_parallel.parallel_layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from zero_runtime.tensor_parallel.parallel_loss import VocabParallelCrossEntropy, vocab_parallel_cross_entropy

__all__ = [
    "ColumnParallelLinear",
    "Cut",
    "RowParallelLinear",
    "VocabParallelCrossEntropy",
    "VocabParallelEmbedding",
    "cut_of",
    "parallelize",
    "vocab_parallel_cross_entropy",
]

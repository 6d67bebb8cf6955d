"""Trains the example GPT on a grid of ranks, or in one process on the same samples."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import zero_runtime
from commprof import hooks
from zero_runtime.errors import ConfigError

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_gpt.py"
_LOSS = hooks.tag("metric")
WIDTH, LAYERS, HEADS, CONTEXT, WORDS = 16, 2, 4, 8, 32
PLAN = {
    "token": "vocabulary",
    "position": "split",
    "blocks.*_norm": "sequence",
    "blocks.*.qkv": "column:3",
    "blocks.*.projection": "row",
    "blocks.*.expand": "column",
    "blocks.*.contract": "row",
    "norm": "sequence",
    "head": "column",
    "loss": "loss",
}


def example() -> Any:
    """Return the module ``examples/train_gpt.py``."""
    if "train_gpt" not in sys.modules:
        spec = importlib.util.spec_from_file_location("train_gpt", EXAMPLE)
        assert spec is not None and spec.loader is not None
        sys.modules["train_gpt"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["train_gpt"])
    return sys.modules["train_gpt"]


def model(seed: int = 0, heads: int = HEADS, words: int = WORDS) -> torch.nn.Module:
    """Return a small GPT of the example."""
    torch.manual_seed(seed)
    made: torch.nn.Module = example().GPT(WIDTH, LAYERS, heads, CONTEXT, words)
    return made


def batch(step: int, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the samples of all ranks in a step: inputs and targets, each (samples, CONTEXT) int64."""
    generator = torch.Generator().manual_seed(1000 + step)
    pieces = torch.randint(0, WORDS, (samples, CONTEXT + 1), generator=generator)
    return pieces[:, :-1], pieces[:, 1:]


def config(stage: int = 1, **more: Any) -> dict[str, Any]:
    """Return a configuration with a micro-batch of two samples per replica."""
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": stage},
        **more,
    }


def train(
    rank: int,
    world: int,
    given: Mapping[str, Any],
    steps: int = 3,
    samples: int = 4,
    mpu: Any = None,
    seed_by_rank: bool = False,
    made: torch.nn.Module | None = None,
) -> tuple[list[float], float | None]:
    """Train on this replica's part of the samples.

    Returns:
        The loss of each step, averaged over the replicas, and the last gradient norm.
    """
    trained = engine_of(given, made or model(rank if seed_by_rank else 0), mpu)
    losses = [step_of(trained, step, samples) for step in range(steps)]
    norm = trained.get_global_grad_norm()
    return losses, None if norm is None else float(norm)


def engine(given: Mapping[str, Any], seed: int = 0) -> Any:
    """Return an engine for the GPT of the example."""
    return engine_of(given, model(seed))


def engine_of(given: Mapping[str, Any], made: torch.nn.Module, mpu: Any = None) -> Any:
    """Return an engine for the model ``made``."""
    found, *_ = zero_runtime.initialize(
        model=made, model_parameters=list(made.parameters()), config=dict(given), mpu=mpu
    )
    return found


def step_of(trained: Any, step: int, samples: int = 4) -> float:
    """Run one optimizer step and return the loss, averaged over the replicas."""
    replicas, replica = trained.parallelism.replicas, trained.parallelism.replica
    share = samples // replicas
    micro = trained.train_micro_batch_size_per_gpu()
    total = torch.zeros(())
    for first in range(replica * share, (replica + 1) * share, micro):
        x, y = (each[first : first + micro] for each in batch(step, samples))
        loss = trained(x, y)
        trained.backward(loss)
        trained.step()
        total += loss.detach().float() * micro / share
    trained._group.all_reduce(total, why=_LOSS)
    return float(total) / trained._group.world_size


def refusal(rank: int, world: int, given: Mapping[str, Any], **arguments: Any) -> str:
    """Return the error message of ``initialize`` for a configuration that it must refuse.

    Also assert that ``initialize`` does not change the shapes of the parameters.

    Args:
        arguments: The arguments of :func:`model`.
    """
    made = model(**arguments)
    before = {name: parameter.shape for name, parameter in made.named_parameters()}
    try:
        zero_runtime.initialize(model=made, model_parameters=made.parameters(), config=dict(given))
    except ConfigError as error:
        assert {name: parameter.shape for name, parameter in made.named_parameters()} == before
        return str(error)
    return "not refused"

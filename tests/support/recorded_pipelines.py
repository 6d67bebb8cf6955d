"""Replays the recorded pipelines of DeepSpeed with the same layers, seeds and batches, through PipelineModule."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import zero_runtime
from support.process_group_log import Call, logged
from support.recorded import Case, all_cases
from support.recorded_models import CONTEXT, VOCABULARY, WIDTH, Layer, make_batch

STEPS = 3
POINT_TO_POINT = ("send", "recv")


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok = nn.Embedding(VOCABULARY, WIDTH)
        self.pos = nn.Embedding(CONTEXT, WIDTH)

    def forward(self, tokens):
        return self.tok(tokens) + self.pos(torch.arange(tokens.shape[1]))


class Block(Layer):
    """A layer with the class name that the ``partition_method`` of recorded configs matches."""


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lnf = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, hidden):
        return self.head(self.lnf(hidden))


def cross_entropy(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def transposed(module, hidden):
    return hidden @ module.weight.t()


def layers_of(arguments: dict[str, Any]) -> list[Any]:
    """Return the layers of a recorded case."""
    if not arguments.get("tied"):
        blocks = [zero_runtime.LayerSpec(Block) for _ in range(arguments.get("blocks", 2))]
        return [zero_runtime.LayerSpec(Embedding), *blocks, zero_runtime.LayerSpec(Head)]
    tied = ("emb", nn.Embedding, VOCABULARY, WIDTH)
    return [
        zero_runtime.TiedLayerSpec(*tied, tied_weight_attr="weight"),
        zero_runtime.LayerSpec(Block),
        zero_runtime.LayerSpec(Block),
        zero_runtime.LayerSpec(nn.LayerNorm, WIDTH),
        zero_runtime.TiedLayerSpec(*tied, forward_fn=transposed, tied_weight_attr="weight"),
    ]


@dataclass
class Replay:
    """The results of one rank in the replay of one case."""

    calls: list[Call] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    norms: list[float | None] = field(default_factory=list)
    parts: list[int] = field(default_factory=list)
    evaluated: float | None = None
    error: str | None = None


def cases() -> list[Case]:
    """Return the recorded pipeline cases."""
    return [case for case in all_cases() if case.flags.get("kind") == "pipe"]


def replay_all(rank: int, world: int, found: list[Case]) -> dict[str, Replay]:
    """Replay the cases ``found`` on this rank."""
    replays = {}
    for case in found:
        replay = replays[case.name] = Replay()
        with logged() as log:
            try:
                _replay(case, log, replay)
            except zero_runtime.ZeroRuntimeError as error:
                replay.error = str(error)
        replay.calls = log.calls
    return replays


def _replay(case: Case, log, replay: Replay) -> None:
    arguments = case.flags.get("args", {})
    torch.manual_seed(0)
    model = zero_runtime.PipelineModule(
        layers_of(arguments),
        num_stages=arguments.get("stages", 2),
        loss_fn=cross_entropy,
        partition_method=arguments.get("partition", "parameters"),
        seed_layers=True,
        seed_fn=None if arguments.get("noseedfn") else torch.manual_seed,
        activation_checkpoint_interval=arguments.get("act_ckpt", 0),
        dynamic_shape=arguments.get("dynamic", False),
    )
    parameters = [each for each in model.parameters() if each.requires_grad]
    engine, *_ = zero_runtime.initialize(model=model, model_parameters=parameters, config=case.config)
    replay.parts = model.parts
    replica = engine.mpu.get_data_parallel_rank()
    for step in range(STEPS):
        log.at("train_batch", step, 0)
        replay.losses.append(float(engine.train_batch(batches(step, replica))))
        norm = engine.get_global_grad_norm()
        replay.norms.append(None if norm is None else float(norm))
    if arguments.get("eval"):
        log.at("eval_batch")
        replay.evaluated = float(engine.eval_batch(batches(99, replica)))


def batches(step: int, replica: int):
    """Yield the recorded micro-batches of a step, in an endless sequence."""
    micro = 0
    while True:
        yield make_batch("gpt", step, micro, replica)
        micro += 1


def expected_calls(case: Case, rank: int) -> list[Call]:
    """Return the recorded collectives and messages of ``rank``, with the groups that zero_runtime uses.

    DeepSpeed sends messages between stages in the group of all ranks. Here they are in the group of the pipeline.
    """
    stages = case.flags.get("args", {}).get("stages", 2)
    replicas = case.world // stages
    line = "-".join(str(rank % replicas + stage * replicas) for stage in range(stages))
    return [
        call._replace(group=line) if call.method in POINT_TO_POINT else call
        for call in case.expected_calls(rank)
    ]

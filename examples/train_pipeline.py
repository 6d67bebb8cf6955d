"""Train the GPT of train_gpt.py as a pipeline: the layers are divided into stages, each step into micro-batches.

The config sets the number of stages (pp_size) and the number of micro-batches. Additional ranks form replicas. The
embedding in the first stage and the output layer in the last stage share their weights::

    commprof run --nproc 2 examples/train_pipeline.py
    commprof run --nproc 2 examples/train_pipeline.py --stages 1 --micro-batches 2   # two replicas: the same loss
    commprof run --nproc 4 examples/train_pipeline.py --micro-batches 2              # two stages, two replicas: same
    commprof run --nproc 2 examples/train_pipeline.py --schedule zero_bubble         # another order, the same loss
    commprof run --nproc 2 examples/train_pipeline.py --schedule interleaved         # two parts per stage: same loss
    torchrun --nproc-per-node 2 examples/train_pipeline.py --engine deepspeed
"""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from train_gpt import Block, batches, read_text

import commprof

VOCABULARY = 256


class Positions(nn.Module):
    """Adds a learned vector to each position of the context."""

    def __init__(self, context: int, width: int) -> None:
        super().__init__()
        self.places = nn.Embedding(context, width)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the sum. Input and output have the shape (batch, context, width)."""
        return hidden + self.places(torch.arange(hidden.shape[1], device=hidden.device))


def scores(embedding: nn.Embedding, hidden: Tensor) -> Tensor:
    """Return the logits of the output layer, (batch, context, bytes), computed with the weights of the embedding."""
    return hidden @ embedding.weight.t() / embedding.embedding_dim**0.5


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy in nats per byte."""
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def layers(pipe: Any, args: argparse.Namespace) -> list[Any]:
    """Return the model as a list of layer specs. Each layer is built only on the ranks of its stage."""
    tied = ("embedding", nn.Embedding, VOCABULARY, args.width)
    return [
        pipe.TiedLayerSpec(*tied),
        pipe.LayerSpec(Positions, args.context, args.width),
        *(pipe.LayerSpec(Block, args.width, args.heads) for _ in range(args.layers)),
        pipe.LayerSpec(nn.LayerNorm, args.width),
        pipe.TiedLayerSpec(*tied, forward_fn=scores),
    ]


def parse_arguments() -> argparse.Namespace:
    """Return the parsed command line. DeepSpeed's launcher adds ``--local_rank``."""
    parser = argparse.ArgumentParser(description="Train a small GPT as a pipeline.")
    config = str(Path(__file__).with_name("ds_pipeline.json"))
    parser.add_argument("--config", default=config, help="DeepSpeed config file")
    parser.add_argument("--engine", choices=("zero_runtime", "deepspeed"), default="zero_runtime")
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--stages", type=int, help="instead of the config's pp_size")
    parser.add_argument("--micro-batches", type=int, help="instead of the config's micro_batches")
    parser.add_argument("--schedule", choices=("1f1b", "gpipe", "interleaved", "zero_bubble"))
    parser.add_argument("--steps", type=int, default=10, help="optimizer steps")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--context", type=int, default=64, help="bytes of context")
    return parser.parse_args()


def read_config(args: argparse.Namespace) -> dict[str, Any]:
    """Return the config with the changes of the command line.

    For DeepSpeed, the number of micro-batches is set with DeepSpeed's key gradient_accumulation_steps.
    """
    config: dict[str, Any] = json.loads(Path(args.config).read_text(encoding="utf-8"))
    block = config["pipeline_parallel"]
    block["pp_size"] = args.stages or block["pp_size"]
    block["micro_batches"] = args.micro_batches or block["micro_batches"]
    if args.schedule:
        block["schedule"] = args.schedule
    if args.engine == "deepspeed":
        config["gradient_accumulation_steps"] = block["micro_batches"]
        config["optimizer"]["params"]["torch_adam"] = True
    return config


def of_replica(pieces: Iterator[Any], replica: int, replicas: int) -> Iterator[Any]:
    """Yield every ``replicas``-th piece. All replicas together use the same pieces as a single replica would."""
    for number, piece in enumerate(pieces):
        if number % replicas == replica:
            yield piece


def main() -> None:
    """Train and print the loss."""
    args = parse_arguments()
    runtime = importlib.import_module(args.engine)
    runtime.init_distributed()
    pipe = importlib.import_module(f"{args.engine}.{'pipe' if args.engine == 'deepspeed' else 'pipeline'}")
    config = read_config(args)
    stages = config["pipeline_parallel"]["pp_size"] if args.engine == "deepspeed" else None
    model = pipe.PipelineModule(
        layers(pipe, args),
        num_stages=stages,
        loss_fn=cross_entropy,
        seed_layers=True,
        seed_fn=torch.manual_seed,
    )
    parameters = None if stages is None else list(model.parameters())
    engine, _, _, _ = runtime.initialize(model=model, model_parameters=parameters, config=config)
    text, _ = read_text(1_000_000)
    pieces = batches(text, engine.train_micro_batch_size_per_gpu(), args.context, seed=0)
    grid = engine.mpu
    mine = of_replica(pieces, grid.get_data_parallel_rank(), grid.get_data_parallel_world_size())
    for _ in range(args.steps):
        loss = engine.train_batch(mine)
        if args.engine == "deepspeed":
            commprof.metric("loss", loss.item())
    if args.engine == "zero_runtime":
        idle = engine.bubble_fraction()
        if dist.get_rank() == 0:
            print(
                f"idle {idle:.3f} of the last step; by the schedule {engine.expected_bubble_fraction():.3f}"
            )
    if dist.get_rank() == 0:
        print(f"{args.steps} steps, loss {loss.item():.6f} nats per byte")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

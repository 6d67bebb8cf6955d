"""Train the GPT of train_gpt.py with activation checkpointing: blocks are recomputed in the backward pass.

The ranks of a model-parallel group have the same activations, and each rank stores a part of the inputs of the blocks.
The block ``activation_checkpointing`` of the config selects this. In this example, all ranks of a group do the same
work. With tensor parallelism, they would also divide the work. Like train_gpt.py, the program uses DeepSpeed's API::

    commprof run --nproc 2 examples/train_gpt_checkpointed.py
    commprof run --nproc 2 examples/train_gpt_checkpointed.py --plain     # the same loss without checkpoints
    torchrun --nproc-per-node 2 examples/train_gpt_checkpointed.py --engine deepspeed
"""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from train_gpt import GPT, batches, read_text

import commprof


class CheckpointedGPT(GPT):
    """A GPT that calls its blocks through ``call``, with dropout before each block."""

    call: Any = staticmethod(lambda block, hidden: block(hidden))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the mean cross entropy (nats per byte) of predicting ``y`` from ``x``, both (batch, context) int64."""
        hidden = self.token(x) + self.position(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            hidden = self.call(lambda h, block=block: block(F.dropout(h, 0.1)), hidden)
        return F.cross_entropy(self.head(self.norm(hidden)).float().flatten(0, 1), y.flatten())


class ModelParallelRanks:
    """A model-parallel unit (mpu) as DeepSpeed defines it, with groups of ``size`` consecutive ranks."""

    def __init__(self, size: int) -> None:
        firsts = range(0, dist.get_world_size(), size)
        groups = [dist.new_group(list(range(first, first + size))) for first in firsts]
        self.size, self.group = size, groups[dist.get_rank() // size]

    def get_model_parallel_rank(self) -> int:
        """Return the rank of this process in its group."""
        return dist.get_rank() % self.size

    def get_model_parallel_world_size(self) -> int:
        """Return the number of ranks in a group."""
        return self.size

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        """Return the group of this process."""
        return self.group


def parse_arguments() -> argparse.Namespace:
    """Return the parsed command line. DeepSpeed's launcher adds ``--local_rank``."""
    parser = argparse.ArgumentParser(description="Train a small GPT with activation checkpoints.")
    config = str(Path(__file__).with_name("ds_checkpointed.json"))
    parser.add_argument("--config", default=config, help="DeepSpeed config file")
    parser.add_argument("--engine", choices=("zero_runtime", "deepspeed"), default="zero_runtime")
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--model-parallel", type=int, default=2, help="ranks that share a model")
    parser.add_argument("--plain", action="store_true", help="keep all activations")
    parser.add_argument("--steps", type=int, default=10, help="optimizer steps")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--context", type=int, default=64, help="bytes of context")
    return parser.parse_args()


def main() -> None:
    """Train and print the loss."""
    args = parse_arguments()
    runtime = importlib.import_module(args.engine)
    runtime.init_distributed()
    if dist.get_world_size() % args.model_parallel:
        raise SystemExit(
            f"--model-parallel {args.model_parallel} does not divide the {dist.get_world_size()} ranks"
        )
    torch.manual_seed(0)
    model = CheckpointedGPT(args.width, args.layers, 4, args.context)
    if not args.plain:
        runtime.checkpointing.configure(ModelParallelRanks(args.model_parallel), deepspeed_config=args.config)
        model.call = runtime.checkpointing.checkpoint
    engine, _, _, _ = runtime.initialize(model=model, model_parameters=model.parameters(), config=args.config)
    device = next(engine.module.parameters()).device
    group = dist.get_rank() // args.model_parallel
    text, _ = read_text(1_000_000)
    pieces = batches(text, engine.train_micro_batch_size_per_gpu(), args.context, seed=group)
    torch.manual_seed(group)  # the ranks of a group draw the same numbers for dropout
    for _ in range(args.steps):
        x, y = next(pieces)
        loss = engine(x.to(device), y.to(device))
        engine.backward(loss)
        engine.step()
        commprof.metric("loss", loss.item())
    if dist.get_rank() == 0:
        print(f"{args.steps} steps, loss {loss.item():.6f} nats per byte")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

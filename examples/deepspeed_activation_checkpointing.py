"""Train three layers at stage 3 with offload for ten micro-batches, and configure activation checkpointing.

As with DeepSpeed, the block ``activation_checkpointing`` alone changes nothing. Layers are recomputed in the backward
pass only if the program calls ``deepspeed.checkpointing.checkpoint``, which ``--checkpoint`` selects. Without
``--complete``, the program fails with one error, for the same reasons as deepspeed_offload.py. ``--complete`` adds the
two missing keys::

    commprof run --engine zero_runtime --nproc 2 examples/deepspeed_activation_checkpointing.py --complete --checkpoint
"""

from __future__ import annotations

import argparse
from typing import Any

import deepspeed
import torch
from torch import nn

ds_config: dict[str, Any] = {
    "train_batch_size": 16,
    "gradient_accumulation_steps": 4,
    "fp16": {"enabled": True},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu"},
        "offload_param": {"device": "nvme", "nvme_path": "/local_nvme"},
    },
    "activation_checkpointing": {"partition_activations": True, "cpu_checkpointing": True},
}


class Checkpointed(nn.Sequential):
    """Layers that store only their inputs for the backward pass, and are recomputed in it."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the output of the layers. Inputs and output have the shape (batch, 1000)."""
        return deepspeed.checkpointing.checkpoint(super().forward, inputs)


def main() -> None:
    """Train and print the loss of each micro-batch."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--complete", action="store_true", help="name an optimizer, and have inputs cast")
    parser.add_argument(
        "--checkpoint", action="store_true", help="compute the layers again in backward passes"
    )
    parser.add_argument("--nvme-path", default="/local_nvme", help="folder for the files of parameters")
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the launcher")
    args = parser.parse_args()
    ds_config["zero_optimization"]["offload_param"]["nvme_path"] = args.nvme_path
    if args.complete:
        ds_config["fp16"]["auto_cast"] = True
        ds_config["optimizer"] = {"type": "Adam", "params": {"lr": 1e-3}}
    torch.manual_seed(0)
    layers = Checkpointed if args.checkpoint else nn.Sequential
    model = layers(nn.Linear(1000, 1000), nn.ReLU(), nn.Linear(1000, 1000))
    engine, _, _, _ = deepspeed.initialize(model=model, config=ds_config)
    for step in range(10):
        inputs = torch.randn(16, 1000).to(engine.device)
        output = engine(inputs)
        loss = output.sum()
        engine.backward(loss)
        engine.step()
        if engine.local_rank == 0:
            print(f"step {step}, loss {loss.item():.2f}")


if __name__ == "__main__":
    main()

"""Ten micro-batches of three layers at stage 3, with offload, and a block that says how activation checkpoints are kept.

The block alone changes nothing, as with DeepSpeed: layers are computed again in the backward pass where the program calls
``deepspeed.checkpointing.checkpoint``, as it does with ``--checkpoint``. As the program stands it ends in one error, as
deepspeed_offload.py does and for the same reasons; ``--complete`` adds the two keys that are missing::

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
    """Layers that keep nothing but their inputs for the backward pass."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """(batch, 1000) to the same shape."""
        return deepspeed.checkpointing.checkpoint(super().forward, inputs)


def main() -> None:
    """Train, and print the loss of each micro-batch."""
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

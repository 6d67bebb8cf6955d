"""Train ten micro-batches at stage 3, with optimizer states in host memory and parameters in files.

Without ``--complete``, this program cannot train, neither with zero_runtime nor with DeepSpeed. Its inputs are float32
while its model is fp16, and its config has no optimizer. zero_runtime reports both in one error. ``--complete`` adds
the two missing keys::

    commprof run --engine zero_runtime --nproc 2 examples/deepspeed_offload.py --complete

Only parameters that do not fit into ``max_in_cpu`` are written to ``--nvme-path``. This model is so small that no files
are written.
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
}


def main() -> None:
    """Train and print the loss of each micro-batch."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--complete", action="store_true", help="name an optimizer, and have inputs cast")
    parser.add_argument("--nvme-path", default="/local_nvme", help="folder for the files of parameters")
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the launcher")
    args = parser.parse_args()
    ds_config["zero_optimization"]["offload_param"]["nvme_path"] = args.nvme_path
    if args.complete:
        ds_config["fp16"]["auto_cast"] = True
        ds_config["optimizer"] = {"type": "Adam", "params": {"lr": 1e-3}}
    model = nn.Linear(1000, 1000)
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

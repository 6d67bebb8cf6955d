"""Train one model at two ZeRO stages in sequence: the second engine takes over the model from the first engine.

Written for DeepSpeed's API::

    commprof run --engine zero_runtime --nproc 2 examples/deepspeed_stages.py
"""

from __future__ import annotations

import deepspeed
import torch
from torch import nn

STEPS = 5


def main() -> None:
    """Train a few steps at each stage."""
    torch.manual_seed(0)
    deepspeed.init_distributed()
    rank = deepspeed.comm.get_rank()
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    ds_config = {
        "train_micro_batch_size_per_gpu": 8,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 0},
    }
    for stage in [2, 3]:
        ds_config["zero_optimization"]["stage"] = stage
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=ds_config)
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(rank)).to(engine.device)
        losses = []
        for _ in range(STEPS):
            loss = (engine(x) - x[:, :1]).pow(2).mean()
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        if rank == 0:
            print(f"stage {engine.zero_optimization_stage()}: loss from {losses[0]:.4f} to {losses[-1]:.4f}")
        engine.destroy()


if __name__ == "__main__":
    main()

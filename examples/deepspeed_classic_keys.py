"""Train with common configuration keys of DeepSpeed: gathers and reductions in buckets of 500 million elements.

Written for DeepSpeed's API; runs on either::

    commprof run --engine zero_runtime --nproc 2 examples/deepspeed_classic_keys.py
    commprof sweep --nproc 2 --engine zero_runtime --set zero_optimization.stage=1,2,3 \\
        examples/deepspeed_classic_keys.py --deepspeed_config examples/deepspeed_classic_keys.json
"""

from __future__ import annotations

import argparse
from pathlib import Path

import deepspeed
import torch
from torch import nn


def main() -> None:
    """Train a few steps on one batch and print the loss of each step."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the launcher")
    parser = deepspeed.add_config_arguments(parser)
    parser.set_defaults(deepspeed_config=str(Path(__file__).with_suffix(".json")))
    args = parser.parse_args()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256))
    engine, _, _, _ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
    generator = torch.Generator().manual_seed(engine.global_rank)
    x = torch.randn(engine.train_micro_batch_size_per_gpu(), 256, generator=generator).to(engine.device)
    for step in range(5):
        loss = (engine(x) - x).pow(2).mean()
        engine.backward(loss)
        engine.step()
        if engine.local_rank == 0:
            print(f"step {step}, loss {loss.item():.4f}")


if __name__ == "__main__":
    main()

"""Save a checkpoint with a tag, continue to train, and load the checkpoint: the training repeats the same losses.

Written for DeepSpeed's API::

    commprof run --engine zero_runtime --nproc 2 examples/deepspeed_checkpoint.py --dir checkpoints
"""

from __future__ import annotations

import argparse

import deepspeed
import torch
from torch import nn

TAG = "step_100"


def steps(engine: deepspeed.DeepSpeedEngine, first: int, last: int) -> float:
    """Train from step ``first`` up to, but not including, step ``last``; return the loss of the last step."""
    loss = torch.zeros(())
    for step in range(first, last):
        generator = torch.Generator().manual_seed(1000 * step + engine.global_rank)
        x = torch.randn(4, 32, generator=generator).to(engine.device)
        loss = (engine(x).squeeze(1) - x.sum(dim=1)).pow(2).mean()
        engine.backward(loss)
        engine.step()
    return float(loss.item())


def main() -> None:
    """Train, save, continue, load the checkpoint, and train the same steps again."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", default="checkpoints", help="where checkpoints go")
    parser.add_argument("--stage", type=int, default=2, help="ZeRO stage")
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the launcher")
    args = parser.parse_args()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1))
    engine, _, _, _ = deepspeed.initialize(
        args=args,
        model=model,
        model_parameters=model.parameters(),
        config={
            "train_micro_batch_size_per_gpu": 4,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
            "zero_optimization": {"stage": args.stage},
        },
    )
    steps(engine, 0, 100)
    engine.save_checkpoint(args.dir, tag=TAG, client_state={"step": 100})
    once = steps(engine, 100, 110)
    path, client_state = engine.load_checkpoint(args.dir, tag=TAG)
    again = steps(engine, client_state["step"], 110)
    if engine.global_rank == 0:
        print(f"loaded {path}: loss {once:.6f} after step 110, {again:.6f} from the checkpoint")
    if once != again:
        raise SystemExit(f"the losses differ: {once!r} and {again!r}")


if __name__ == "__main__":
    main()

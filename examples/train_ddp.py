"""Train a small network with torch's DistributedDataParallel, without DeepSpeed and without changes for commprof.

    commprof run --nproc 2 examples/train_ddp.py
    torchrun --nproc-per-node 2 examples/train_ddp.py

``--slow-loader-ms`` makes the data loader of the last rank slow, and ``--bucket-cap-mb`` sets the size of DDP's
gradient buckets. A slow loader and unsuitable buckets are common reasons for slow steps. docs/tutorial-ddp.md shows how
to find them in the recorded run.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


def network(width: int, layers: int) -> nn.Module:
    """Return a network of ``layers`` blocks of ``width`` without residuals.

    Each block has one large weight and one small bias.
    """
    blocks: list[nn.Module] = []
    for _ in range(layers):
        blocks += [nn.Linear(width, width), nn.GELU()]
    return nn.Sequential(*blocks, nn.Linear(width, 1))


def batches(rank: int, width: int, rows: int, delay_s: float) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield random inputs (rows, width) with their mean as the target (rows, 1).

    Each batch takes ``delay_s`` seconds to load.
    """
    generator = torch.Generator().manual_seed(rank)
    while True:
        time.sleep(delay_s)
        x = torch.randn(rows, width, generator=generator)
        yield x, x.mean(dim=1, keepdim=True)


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rows", type=int, default=32, help="samples of a rank in a step")
    parser.add_argument("--bucket-cap-mb", type=float, default=25.0)
    parser.add_argument("--slow-loader-ms", type=float, default=0.0)
    args = parser.parse_args()

    on_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    torch.manual_seed(0)
    model = DistributedDataParallel(
        network(args.width, args.layers).to(device), bucket_cap_mb=args.bucket_cap_mb
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = batches(rank, args.width, args.rows, args.slow_loader_ms / 1e3 if rank == last else 0.0)
    for step in range(args.steps):
        x, y = next(loader)
        loss = nn.functional.mse_loss(model(x.to(device)), y.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and (step + 1) % 10 == 0:
            print(f"step {step + 1}/{args.steps}  loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Runs one rank of ``compression.py``, which trains all cases of a plan in turn and prints the measurements."""

from __future__ import annotations

import json
import sys
import time
from itertools import islice
from pathlib import Path
from statistics import fmean, quantiles
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

import torch
import torch.distributed as dist
from train_gpt import GPT, batches, read_text

import zero_runtime

INTERFACE = "eth0"
CONTEXT, VALIDATION_BATCHES = 64, 32


def sent_bytes() -> int:
    """Return the number of bytes that the interface of this host has sent, from the counters of the kernel."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == INTERFACE:
            return int(counters.split()[8])
    raise SystemExit(f"there is no interface {INTERFACE}")


def mean_of_ranks(value: float) -> float:
    """Return the mean of ``value`` over the ranks."""
    total = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(total)
    return float(total.item()) / dist.get_world_size()


def train(config: dict[str, Any], steps: int) -> dict[str, float]:
    """Train ``steps`` steps; return the bytes per step, the losses and the times."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = GPT(128, 4, 4, CONTEXT)
    numel = sum(each.numel() for each in model.parameters())
    engine, *_ = zero_runtime.initialize(model=model, model_parameters=model.parameters(), config=config)
    training, validation = read_text(2_000_000)
    pieces = batches(training, engine.train_micro_batch_size_per_gpu(), CONTEXT, seed=rank)
    losses, times = [], []
    dist.barrier()
    before = sent_bytes()
    for _ in range(steps):
        begun = time.perf_counter()
        loss = engine(*next(pieces))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        times.append(1e3 * (time.perf_counter() - begun))
    dist.barrier()
    sent = sent_bytes() - before
    engine.eval()
    with torch.no_grad():
        checks = batches(validation, 8, CONTEXT, seed=1000)
        validation_loss = fmean(engine(*each).item() for each in islice(checks, VALIDATION_BATCHES))
    low, *_, high = quantiles(times, n=10)
    found = {
        "sent_bytes": mean_of_ranks(sent / steps),
        "training_loss": mean_of_ranks(fmean(losses[-max(1, steps // 10) :])),
        "validation_loss": validation_loss,
        "median_ms": sorted(times)[len(times) // 2],
        "low_ms": low,
        "high_ms": high,
        "parameters": numel,
    }
    engine.destroy()
    return found


def main() -> None:
    """Train all cases of the plan."""
    plan = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    zero_runtime.init_distributed("gloo")
    for name, config in plan["cases"].items():
        found = train(config, plan["steps"])
        if dist.get_rank() == 0:
            print("figures", json.dumps(found), flush=True)
            print(name, found, file=sys.stderr, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

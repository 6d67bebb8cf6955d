"""Measure the time of an all_reduce of a million floats with deepspeed.comm, and with its log.

Written for DeepSpeed's API::

    commprof run --engine zero_runtime --nproc 2 examples/deepspeed_all_reduce.py
"""

from __future__ import annotations

import time

import deepspeed
import deepspeed.comm as dist
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.comm import all_reduce

NUMEL = 1_000_000
CALLS = 10


def main() -> None:
    """Time the calls with a clock, and then with the log of deepspeed.comm."""
    deepspeed.init_distributed()
    accelerator = get_accelerator()
    tensor = torch.ones(NUMEL, device=accelerator.current_device_name())
    all_reduce(tensor)  # not timed, because the first call connects the ranks
    tensor.fill_(1.0)
    accelerator.synchronize()
    start = time.perf_counter()
    for _ in range(CALLS):
        all_reduce(tensor)
    accelerator.synchronize()
    milliseconds = (time.perf_counter() - start) / CALLS * 1e3
    world = dist.get_world_size()
    if tensor[0].item() != float(world) ** CALLS:
        raise SystemExit(f"the sum is {tensor[0].item()}, expected {float(world) ** CALLS}")
    if dist.get_rank() == 0:
        print(f"all_reduce of {NUMEL:.0e} floats over {world} ranks: {milliseconds:.2f} ms")
    dist.configure(enabled=True)
    for _ in range(CALLS):
        all_reduce(tensor.fill_(1.0))
    dist.log_summary()


if __name__ == "__main__":
    main()

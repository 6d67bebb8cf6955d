"""Measures the cost that DeepSpeed's comms logger adds to DeepSpeed's all_reduce, for benchmarks/recorder_cost.py.

The script runs in a Python environment that has DeepSpeed. Each line on standard input is a number of calls. The
answer is a line of JSON: the thread CPU time per call without the logger, and the time that the logger adds, in us.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import time

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore


def block(tensor: torch.Tensor, calls: int) -> float:
    """Return the thread CPU time per call, in us."""
    for _ in range(10):
        deepspeed.comm.all_reduce(tensor)
    begin = time.thread_time_ns()
    for _ in range(calls):
        deepspeed.comm.all_reduce(tensor)
    return (time.thread_time_ns() - begin) / calls / 1000


def configure(enabled: bool) -> None:
    """Switch the logger on or off. It logs all operations and prints nothing."""
    deepspeed.comm.configure(enabled=enabled, prof_all=True, verbose=False, debug=False)


def main() -> None:
    """Answer requests until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # The framework prints to stdout, which carries the answers.
    torch.set_num_threads(1)
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="4", LOCAL_SIZE="4", MASTER_ADDR="127.0.0.1")
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    backend = importlib.import_module("deepspeed.comm.torch")
    backend.build_shm_op = lambda: None  # The build would wait for other ranks, which do not exist.
    with contextlib.redirect_stdout(sys.stderr):
        deepspeed.init_distributed("fake")
    tensor = torch.zeros(8)
    for line in sys.stdin:
        calls = int(line)
        configure(False)
        before = block(tensor, calls)
        configure(True)
        on = block(tensor, calls)
        configure(False)
        alone = (before + block(tensor, calls)) / 2
        print(json.dumps([alone, on - alone]), file=answers, flush=True)


if __name__ == "__main__":
    main()

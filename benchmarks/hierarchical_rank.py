"""Runs one rank of benchmarks/hierarchical.py, which executes the requested operations, plain or along the axes.

Each line on standard input is ``{"operation": name, "bytes": n, "topology": sizes or 1, "repeat": n}``. The answer is
one line of JSON on standard output. It contains the seconds and losses of all repetitions, and the mean number of bytes
that the interface of the host sent per repetition.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import zero_runtime
from commprof import hooks
from zero_runtime.comm import DataParallelGroup
from zero_runtime.configuration.blocks.communication_block import CommunicationConfig
from zero_runtime.experimental.topology_aware.installation import install

INTERFACE = "eth0"
WHY = hooks.tag("gradient_reduce")
TRAINING = "training step"
LAYERS, WIDTH = 4, 512  # 1.05 M parameters


def operations(topology: Any) -> dict[str, Callable[[torch.Tensor], Callable[[], Any]]]:
    """Return a function for each operation.

    The function takes a message and returns another function, which runs the operation once on this message.
    """
    group = DataParallelGroup()
    sizes = tuple(topology) if isinstance(topology, list) else topology
    install(group, CommunicationConfig(topology=sizes), None, DataParallelGroup)

    def reduce_scatter(message: torch.Tensor) -> Callable[[], Any]:
        rows = [message.numel() // group.world_size] * group.world_size
        room = torch.empty_like(message)
        return lambda: group.sum_rows(room, message, rows, why=WHY)[1]()

    def all_gather(message: torch.Tensor) -> Callable[[], Any]:
        piece = message.chunk(group.world_size)[group.rank].clone()
        return lambda: group.all_gather_single(message, piece, why=WHY)

    return {
        "all_reduce": lambda message: lambda: group.all_reduce(message, why=WHY),
        "reduce_scatter": reduce_scatter,
        "all_gather": all_gather,
    }


def training(topology: Any) -> Callable[[], float]:
    """Return a function that runs one step of ZeRO-2 with reduce_scatter and returns the loss."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 2, "gradient_reduction": "reduce_scatter"},
        "communication": {"topology": topology},
    }
    engine, *_ = zero_runtime.initialize(model=model, model_parameters=model.parameters(), config=config)
    generator = torch.Generator().manual_seed(dist.get_rank())

    def step() -> float:
        loss = engine(torch.randn(2, WIDTH, generator=generator)).square().mean()
        engine.backward(loss)
        engine.step()
        return loss.item()

    return step


def main() -> None:
    """Join the process group, and answer requests until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    made: dict[str, Callable[[], Any]] = {}
    print(json.dumps({"ready": os.getpid()}), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        key = json.dumps([request["operation"], request["bytes"], request["topology"]])
        if key not in made:
            if request["operation"] == TRAINING:
                made[key] = training(request["topology"])
            else:
                message = torch.ones(request["bytes"] // 4)
                made[key] = operations(request["topology"])[request["operation"]](message)
        counter = Path("/sys/class/net", INTERFACE, "statistics", "tx_bytes")
        seconds, results = [], []
        dist.barrier()
        before = int(counter.read_text())
        for _ in range(request["repeat"]):
            dist.barrier()
            begin = time.perf_counter()
            result = made[key]()
            seconds.append(time.perf_counter() - begin)
            results.append(result if isinstance(result, float) else None)
        dist.barrier()
        sent = (int(counter.read_text()) - before) / request["repeat"]
        print(json.dumps({"seconds": seconds, "sent": sent, "losses": results}), file=answers, flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()

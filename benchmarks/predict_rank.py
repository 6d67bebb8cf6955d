"""Runs one rank of benchmarks/predict.py, which trains the requested setting and answers with the time of each step.

The script runs in the Python environment of DeepSpeed and in that of this project. Each line on standard input is a
request with these keys:

* ``config``
* ``model``: the arguments of the example's GPT
* ``batch``: the number of samples and tokens
* ``warm`` and ``steps``: the numbers of steps before and during the measurement
* ``sleep``: the seconds that each block sleeps in its forward and backward pass, or null
* ``experts``: the arguments of DeepSpeed's layer of experts, which replaces the feed-forward layer of each block; empty
  for no experts
* ``record``: the folder that commprof records into, or null

The answer is one line of JSON on standard output. It contains the ``seconds`` of each step after the first ``warm``
steps, or ``failed``.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import importlib
import json
import os
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from cluster_rank import EXAMPLE, load, recorded
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch_peers import Peer

TIMEOUT = datetime.timedelta(seconds=180)  # the longest wait of a rank whose peer has failed
VOCABULARY = 256
DDP = "ddp"


class Sleep(torch.autograd.Function):
    """The identity, which sleeps in both passes. It simulates compute without using a processor."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward: float, backward: float) -> torch.Tensor:
        """Return ``x`` after ``forward`` seconds."""
        ctx.seconds = backward
        time.sleep(forward)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Return ``gradient`` after ``backward`` seconds."""
        time.sleep(ctx.seconds)
        return gradient, None, None


class ExpertBlock(nn.Module):
    """A block whose feed-forward layer is one of four experts."""

    def __init__(self, block: nn.Module, framework: str, arguments: dict[str, Any]) -> None:
        super().__init__()
        if framework != "deepspeed":
            importlib.import_module(framework).as_deepspeed()
        layer = importlib.import_module("deepspeed.moe.layer").MoE
        expert = nn.Sequential(block.expand, nn.GELU(), block.contract)
        self.experts = layer(block.expand.in_features, expert, num_experts=4, k=1, **arguments)
        del block.expand, block.contract
        self.block = block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output of the block. Input and output have the shape (batch, context, width)."""
        x = x + self.block.attend(x)
        return x + self.experts(self.block.feed_forward_norm(x))[0]


def engine_of(framework: str, config: dict[str, Any], model: nn.Module) -> Any:
    """Return the engine that trains ``model``.

    For DDP, the engine is torch's DistributedDataParallel with the arguments in the block ``ddp`` of ``config``.
    """
    if framework != DDP:
        runtime = importlib.import_module(framework)
        return runtime.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    module = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=config["ddp"]["bucket_cap_mb"])
    if hook := config["ddp"]["comm_hook"]:
        module.register_comm_hook(None, getattr(default_hooks, hook))
    return Peer(module, torch.optim.AdamW(module.parameters(), lr=config["optimizer"]["params"]["lr"]))


def step_ends(framework: str, request: dict[str, Any]) -> Iterator[float]:
    """Train without end, and yield the time on the clock in seconds at the end of each step."""
    torch.manual_seed(0)
    model = load(EXAMPLE).GPT(**request["model"], vocabulary=VOCABULARY)
    if request["experts"]:
        model.blocks = nn.ModuleList(
            ExpertBlock(block, framework, request["experts"]) for block in model.blocks
        )
    if request["sleep"]:
        for block in model.blocks:
            block.register_forward_hook(lambda _, __, output: Sleep.apply(output, *request["sleep"]))
    engine = engine_of(framework, request["config"], model)
    generator = torch.Generator().manual_seed(dist.get_rank())
    while True:
        batch = torch.randint(0, VOCABULARY, (2, *request["batch"]), generator=generator)
        engine.backward(engine(*batch))
        engine.step()
        yield time.perf_counter()


def train(framework: str, request: dict[str, Any]) -> list[float]:
    """Train and return the time of each step after the first ``warm`` steps, in seconds."""
    with recorded(request["record"]):
        dist.barrier()
        clock = step_ends(framework, request)
        ends = [next(clock) for _ in range(request["warm"] + request["steps"])]
        dist.barrier()
        clock.close()
    return [after - before for before, after in pairwise(ends[request["warm"] - 1 :])]


def answer(framework: str, request: dict[str, Any]) -> dict[str, Any]:
    """Return the answer to a request.

    A setting that the engine refuses fails on all ranks. The ranks can then train the next setting.
    """
    try:
        return {"seconds": train(framework, request)}
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {error}"}


def main() -> None:
    """Join the process group, and answer requests until standard input ends."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("framework", choices=("deepspeed", "zero_runtime", DDP))
    args = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # The frameworks print to stdout, which carries the answers.
    torch.set_num_threads(1)
    if args.framework == DDP:
        dist.init_process_group("gloo", timeout=TIMEOUT)
    else:
        importlib.import_module(args.framework).init_distributed("gloo", timeout=TIMEOUT)
    print(json.dumps({"ready": os.getpid()}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(args.framework, json.loads(line))), file=answers, flush=True)
        gc.collect()  # Engines and their hooks form reference cycles.
    # destroy_process_group is not called: if a rank left while another rank still waits, the other rank would fail.
    os._exit(0)


if __name__ == "__main__":
    main()

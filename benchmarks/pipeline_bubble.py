"""Measures the idle share of a pipeline under each schedule and compares it to the expected share.

The gloo ranks sleep in each layer, so that they need no core. Forward passes, gradients of inputs and gradients of
weights take the same time, and all stages are equal. The difference to the expected share is the cost of messages,
waiting and the lists of the schedule.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parent))

ROOT = Path(__file__).resolve().parent.parent
WIDTH: Final = 32
SCHEDULES: Final[Mapping[str, Mapping[str, Any]]] = {
    "1f1b": {"schedule": "1f1b"},
    "gpipe": {"schedule": "gpipe"},
    "interleaved, 2 virtual stages": {"schedule": "interleaved", "virtual_stages": 2},
    "zero_bubble": {"schedule": "zero_bubble"},
}
HEADER: Final = ["schedule", "idle on paper", "idle measured", "step, ms", "step on paper, ms"]


def rank_main(words: Sequence[str]) -> None:
    """Run one rank: train a few steps under each schedule. Rank 0 prints the measurements."""
    import torch

    import zero_runtime

    stages, micro_batches, milliseconds, steps = int(words[0]), int(words[1]), float(words[2]), int(words[3])

    class Late(torch.autograd.Function):
        """The identity. Its backward pass sleeps."""

        @staticmethod
        def forward(ctx: Any, values: torch.Tensor, seconds: float) -> torch.Tensor:
            ctx.seconds = seconds
            return values.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
            time.sleep(ctx.seconds)
            return gradient, None

    class Layer(torch.nn.Module):
        """A layer that sleeps in the forward pass, in the gradient of its inputs and in the gradient of its weights."""

        def __init__(self, seconds: float) -> None:
            super().__init__()
            self.seconds = seconds
            self.weight = torch.nn.Parameter(torch.eye(WIDTH))

        def forward(self, values: torch.Tensor) -> torch.Tensor:
            time.sleep(self.seconds)
            return Late.apply(values @ Late.apply(self.weight, self.seconds), self.seconds)

    figures = {}
    for name, block in SCHEDULES.items():
        parts = 2 * stages  # so that every schedule has equal stages
        layers = [zero_runtime.LayerSpec(Layer, milliseconds / 2e3) for _ in range(parts)]
        model = zero_runtime.PipelineModule(
            layers, loss_fn=torch.nn.functional.mse_loss, partition_method="uniform"
        )
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
            "pipeline_parallel": {"pp_size": stages, "micro_batches": micro_batches, **block},
        }
        engine, *_ = zero_runtime.initialize(model=model, config=config)
        data = torch.ones(micro_batches, WIDTH)
        idle, lengths = [], []
        for _ in range(steps + 1):
            began = time.perf_counter()
            engine.train_batch(data=data, targets=data)
            lengths.append(time.perf_counter() - began)
            idle.append(engine.bubble_fraction())
        figures[name] = {
            "expected": engine.expected_bubble_fraction(),
            "idle": median(idle[1:]),
            "ms": median(lengths[1:]) * 1e3,
        }
    if engine.global_rank == 0:
        print("figures", json.dumps(figures), flush=True)
    torch.distributed.destroy_process_group()


def figures_of(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Start the ranks and return their measurements by schedule."""
    words = [str(value) for value in (args.stages, args.micro_batches, args.milliseconds, args.steps)]
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(args.stages),
        __file__,
        "--rank",
        *words,
    ]
    done = subprocess.run(
        command, env=_environment(), capture_output=True, text=True, timeout=1200, check=False
    )
    if done.returncode:
        raise SystemExit(f"pipeline_bubble: the ranks failed\n{done.stderr[-3000:]}")
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("figures "))
    found: dict[str, dict[str, float]] = json.loads(line.removeprefix("figures "))
    return found


def _environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("COMMPROF_", "NCCL_"))}
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "runtime")])}


def rows_of(figures: Mapping[str, Mapping[str, float]], work: float) -> Iterator[list[str]]:
    """Yield the rows of the table.

    Args:
        figures: The measurements by schedule.
        work: The compute time of a stage in a step, in ms.
    """
    for name, mine in figures.items():
        paper = work / (1.0 - mine["expected"])
        yield [name, f"{mine['expected']:.3f}", f"{mine['idle']:.3f}", f"{mine['ms']:.0f}", f"{paper:.0f}"]


def main() -> None:
    """Measure, print the table and write it."""
    if sys.argv[1:2] == ["--rank"]:
        rank_main(sys.argv[2:])
        return
    from results import arguments, publish

    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--milliseconds", type=float, default=20.0, help="of a forward pass of a stage")
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()
    figures = figures_of(args)
    publish(
        args,
        f"Idle share of a pipeline: {args.stages} stages, {args.micro_batches} micro-batches; {args.milliseconds:g} ms for "
        "each of forward pass, gradients of inputs, gradients of weights",
        HEADER,
        list(rows_of(figures, 3 * args.micro_batches * args.milliseconds)),
        figures,
    )


if __name__ == "__main__":
    main()

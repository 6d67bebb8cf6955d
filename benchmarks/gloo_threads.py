"""Measures the effect of SCHED_BATCH for gloo's event threads on training steps of zero_runtime and of torch.

Two gloo ranks train in blocks of steps. The blocks alternate between SCHED_BATCH, which zero_runtime sets, and the
default policy. This program sets the policy from outside. Each pair of blocks gives one ratio of step times and one
ratio of CPU times.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from pathlib import Path
from statistics import fmean, median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch_peers
from results import arguments, median_interval, publish
from step_time import COMMON, MICRO_BATCH, MODELS, TORCH, VARIANTS, Pair, free_port

from zero_runtime.startup.gloo_threads import THREAD

POLICIES = {"default": os.SCHED_OTHER, "SCHED_BATCH": os.SCHED_BATCH}
STAGES = ("0", "0, in buckets", "2", "3", "3, by block")
PEERS = (torch_peers.DDP, torch_peers.FSDP2_NO_RESHARD)
CASES = {f"zero_runtime, stage {stage}": ("zero_runtime", stage) for stage in STAGES} | {
    peer: (TORCH, next(name for name, each in VARIANTS.items() if each.peer == peer)) for peer in PEERS
}


def set_policy(pair: Pair, policy: int) -> int:
    """Set the scheduling policy of gloo's event threads of the ranks; return the number of these threads."""
    ranks = [  # Each rank is a fork of a process that has already imported all modules.
        child
        for process in pair.processes
        for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    ]
    tasks = [
        task
        for rank in ranks
        for task in Path(f"/proc/{rank}/task").iterdir()
        if (task / "comm").read_bytes().rstrip() == THREAD
    ]
    for task in tasks:
        os.sched_setscheduler(int(task.name), policy, os.sched_param(0))
    return len(tasks)


def by_turns(runtime: str, stage: str, model: str, rounds: int) -> dict[str, Any]:
    """Return the step times of each block by policy: wall ms of the slower rank, and CPU ms as the mean over ranks."""
    shape, steps = MODELS[model]
    variant = VARIANTS[stage]
    job = {"model": shape, "micro_batch": MICRO_BATCH, "peer": variant.peer, "port": free_port()}
    blocks: dict[str, Any] = {name: {"wall": [], "cpu": []} for name in POLICIES}
    with tempfile.TemporaryFile("w+") as log:
        pair = Pair(sys.executable, runtime, log)
        try:
            pair.ask({**job, "config": {**COMMON, "zero_optimization": variant.zero}})
            pair.ask({"steps": steps})  # torch creates some process groups in the first step
            for number in range(-1, rounds):
                for name in list(POLICIES) if number % 2 else reversed(POLICIES):
                    if not set_policy(pair, POLICIES[name]):
                        raise SystemExit(
                            f"gloo_threads: no rank has a thread {THREAD.decode()}: use torch 2.13 or newer"
                        )
                    answers = pair.ask({"steps": steps})
                    if number >= 0:
                        wall = max(median(each["seconds"]) for each in answers)
                        blocks[name]["wall"].append(1e3 * wall)
                        blocks[name]["cpu"].append(1e3 * fmean(each["cpu"] for each in answers))
            pair.tell({"end": True})
        finally:
            pair.end()
    return blocks


def main() -> None:
    """Measure, print the table and write it."""
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    rows, figures = [], {}
    for model in MODELS:
        for name, (runtime, stage) in CASES.items():
            blocks = figures[f"{model}, {name}"] = by_turns(runtime, stage, model, args.rounds)
            row = [model, name]
            for what in ("wall", "cpu"):
                default, batch = (blocks[policy][what] for policy in POLICIES)
                ratio = median_interval([b / a for a, b in zip(default, batch, strict=True)])
                row += [f"{median(default):.1f} / {median(batch):.1f}", ratio.text()]
            rows.append(row)
            print(" | ".join(row), file=sys.stderr, flush=True)
    publish(
        args,
        f"The policy SCHED_BATCH of gloo's event threads: a training step of two ranks, {args.rounds} pairs of blocks",
        [
            "model",
            "case",
            "step, ms: default / SCHED_BATCH",
            "ratio (95 % interval)",
            "CPU, ms a rank: default / SCHED_BATCH",
            "ratio (95 % interval)",
        ],
        rows,
        figures,
    )


if __name__ == "__main__":
    main()

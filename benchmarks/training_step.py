"""CPU time of a training step with commprof on against off.

Two gloo ranks train a GPT with zero_runtime (stage 2). Blocks of steps alternate off, on, on, off ... in the same processes;
each pair of blocks gives one ratio of process CPU time (all threads) per step. Both ranks switch at the same step.
"""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from results import arguments, median_interval, publish

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "train_gpt.py"
CONFIG = EXAMPLE.with_name("ds_zero2.json")
WARM_UP = 2  # steps of each block before the clock starts


def train(
    rank: int, world: int, store: str, out: str, rounds: int, steps: int, width: int, results: Any
) -> None:
    """One rank: run the blocks, send (off, on) CPU and wall seconds per step of each round."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world)
    )
    import torch
    import torch.distributed as dist

    import zero_runtime
    from commprof import hooks

    spec = importlib.util.spec_from_file_location("train_gpt", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    torch.manual_seed(0)
    model = example.GPT(width=width, layers=4, heads=4, context=64)
    config = json.loads(CONFIG.read_text())
    engine, _, _, _ = zero_runtime.initialize(model=model, model_parameters=model.parameters(), config=config)
    text, _ = example.read_text(500_000)
    pieces = example.batches(text, 4, 64, seed=rank)

    def train_steps(count: int) -> None:
        for _ in range(count):
            loss = engine(*next(pieces))
            engine.backward(loss)
            engine.step()

    def block(recorded: bool, number: int) -> tuple[float, float]:
        dist.barrier()
        if recorded:
            hooks.attach(f"{out}/{number}")
        train_steps(
            WARM_UP
        )  # with or without recording: opening files and naming things for the first time is once a run
        cpu, wall = time.process_time(), time.perf_counter()
        train_steps(steps)
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        if recorded:
            hooks.detach()
        return cpu / steps, wall / steps

    block(False, -1)
    block(True, -2)
    pairs = []
    for number in range(rounds):
        order = (False, True) if number % 2 == 0 else (True, False)
        measured = {recorded: block(recorded, number) for recorded in order}
        pairs.append((measured[False], measured[True]))
    results.put((rank, pairs))
    dist.destroy_process_group()


def main() -> None:
    """Measure, print, write."""
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=10, help="steps per block")
    parser.add_argument("--width", type=int, default=128)
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(
                target=train,
                args=(rank, 2, f"{folder}/store", folder, args.rounds, args.steps, args.width, results),
            )
            for rank in range(2)
        ]
        for process in ranks:
            process.start()
        gathered = dict(results.get(timeout=1200) for _ in ranks)
        for process in ranks:
            process.join()
    pairs = [pair for rank in sorted(gathered) for pair in gathered[rank]]
    off = median_interval([1000 * pair[0][0] for pair in pairs])
    on = median_interval([1000 * pair[1][0] for pair in pairs])
    cpu_ratio = median_interval([pair[1][0] / pair[0][0] for pair in pairs])
    wall_ratio = median_interval([pair[1][1] / pair[0][1] for pair in pairs])
    publish(
        args,
        "CPU time per training step, on against off: median (95 % interval)",
        ["off, ms", "on, ms", "CPU on/off", "wall on/off", "pairs"],
        [[off.text(), on.text(), cpu_ratio.text(4), wall_ratio.text(4), str(len(pairs))]],
        {"off_ms": off, "on_ms": on, "cpu_ratio": cpu_ratio, "wall_ratio": wall_ratio},
    )


if __name__ == "__main__":
    main()

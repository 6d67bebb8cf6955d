"""What recording, and a traffic contract, add to a training step: CPU and wall time with it on against off, in one job.

Two gloo ranks train a GPT with zero_runtime (stage 2), each on a core of its own. Blocks of steps alternate off, on, on,
off ... in the same processes; each pair of blocks gives one ratio of the CPU time of both ranks (all threads) and one of the
wall time of rank 0. Both ranks switch at the same step. What happens once a run (opening files, naming things) is before the
clock starts.

A step takes now 10 % more and now 10 % less CPU time, since what runs beside it shares caches and memory. Before and after
each block the ranks do the same piece of work, which no recorder sees, and as far as a ratio goes with that of these times
(linear regression of the logarithms) it is the machine's.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))

from results import Spread, arguments, median_interval, pseudomedian_interval, publish

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "train_gpt.py"
CONFIG = EXAMPLE.with_name("ds_zero2.json")
RANKS = 2
WARM_UP = 2  # steps of each block before the clock starts; a contract agrees on the messages of the first two
RECORDING, CONTRACT = "recording", "traffic_contract"  # what is switched on and off


class Job(NamedTuple):
    """A model, and the steps of a block. The vocabulary of the example's text is 256 or less."""

    width: int
    layers: int
    heads: int
    context: int
    vocabulary: int
    micro_batch: int
    steps: int


JOBS = {
    "25 M": Job(512, 7, 8, 128, 2816, 1, 4),
    "small, 0.8 M": Job(128, 4, 4, 64, 256, 4, 10),
}


class Block(NamedTuple):
    """Seconds per step of one rank, and CPU seconds of the work that is always the same."""

    cpu: float
    wall: float
    reference: float


def make_reference() -> Callable[[], float]:
    """Work that is always the same: multiplications in the cache, and additions that go through memory. Its CPU seconds."""
    import torch

    matrix, vector = torch.ones(256, 256), torch.ones(4_000_000)

    def reference() -> float:
        begin = time.thread_time()
        for _ in range(30):
            torch.mm(matrix, matrix)
        vector.add_(1).mul_(0.5)
        return time.thread_time() - begin

    reference()
    return reference


def make_step(job: Job, rank: int, what: str) -> tuple[Callable[[], None], Any]:
    """One training step, on batches of random tokens, and its engine."""
    import torch

    import zero_runtime

    spec = importlib.util.spec_from_file_location("train_gpt", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    torch.manual_seed(0)
    model = example.GPT(
        width=job.width, layers=job.layers, heads=job.heads, context=job.context, vocabulary=job.vocabulary
    )
    config = json.loads(CONFIG.read_text()) | {"train_micro_batch_size_per_gpu": job.micro_batch}
    config.pop("train_batch_size", None)
    config["traffic_contract"] = "stop" if what == CONTRACT else "off"
    engine, _, _, _ = zero_runtime.initialize(model=model, model_parameters=model.parameters(), config=config)
    generator = torch.Generator().manual_seed(rank)
    shape = (2, job.micro_batch, job.context)

    def step() -> None:
        loss = engine(*torch.randint(0, job.vocabulary, shape, generator=generator))
        engine.backward(loss)
        engine.step()

    engine.end_contract()
    return step, engine


def train(rank: int, store: str, out: str, rounds: int, job: Job, what: str, results: Any) -> None:
    """One rank: run the blocks, send a pair (off, on) for each round."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_WORLD_SIZE=str(RANKS)
    )
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    import torch
    import torch.distributed as dist

    from commprof import hooks

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    step, engine = make_step(job, rank, what)
    reference = make_reference()

    def block(switched_on: bool, number: int) -> Block:
        dist.barrier()
        if switched_on and what == RECORDING:
            hooks.attach(f"{out}/{number}", quiet=True)
        elif switched_on:
            engine.keep_contract()
        for _ in range(WARM_UP):
            step()
        work = reference()
        cpu, wall = time.process_time(), time.perf_counter()
        for _ in range(job.steps):
            step()
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        work += reference()
        if switched_on and what == RECORDING:
            hooks.detach()
        elif switched_on:
            engine.end_contract()
        return Block(cpu / job.steps, wall / job.steps, work)

    block(False, -1)
    block(True, -2)
    pairs = []
    for number in range(rounds):
        order = (False, True) if number % 2 == 0 else (True, False)
        measured = {switched_on: block(switched_on, number) for switched_on in order}
        pairs.append((measured[False], measured[True]))
    results.put((rank, pairs))
    dist.destroy_process_group()


def measure(job: Job, rounds: int, what: str) -> list[list[tuple[Block, Block]]]:
    """By rank: the pairs (off, on)."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=train, args=(rank, f"{folder}/store", folder, rounds, job, what, results))
            for rank in range(RANKS)
        ]
        for process in ranks:
            process.start()
        try:
            gathered = dict(results.get(timeout=3600) for _ in ranks)
        finally:
            for process in ranks:
                process.join(timeout=30)
                process.kill()
    return [gathered[rank] for rank in range(RANKS)]


def adjusted(pairs: Sequence[tuple[Block, Block]], figure: Callable[[Block], float]) -> Spread:
    """The ratio on/off of one figure of the blocks, less what the machine has done to it."""
    ratios = [math.log(figure(on) / figure(off)) for off, on in pairs]
    machine = [math.log(on.reference / off.reference) for off, on in pairs]
    slope = statistics.linear_regression(machine, ratios).slope
    found = pseudomedian_interval([a - slope * b for a, b in zip(ratios, machine, strict=True)])
    return Spread(math.exp(found.median), math.exp(found.low), math.exp(found.high), found.rounds)


def main() -> None:
    """Measure, print, write."""
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=160, help="pairs of blocks, at least 40 (default: 160)")
    parser.add_argument("--jobs", type=int, default=1, help="of each model, one after the other (default: 1)")
    parser.add_argument("--model", action="append", choices=list(JOBS), help="repeatable; default: all")
    parser.add_argument(
        "--what", action="append", choices=(RECORDING, CONTRACT), help="repeatable; default: both"
    )
    args = parser.parse_args()
    if args.rounds < 40:
        parser.error(f"--rounds {args.rounds}: an interval needs at least 40 pairs")
    os.environ["OMP_NUM_THREADS"] = "1"
    rows, figures = [], {}
    for what, model, number in itertools.product(
        args.what or (RECORDING, CONTRACT), args.model or JOBS, range(args.jobs)
    ):
        name = model if args.jobs == 1 else f"{model}, job {number + 1}"
        name = name if what == RECORDING else f"{what}, {name}"
        first, second = measure(JOBS[model], args.rounds, what)
        pairs = [
            [Block(a.cpu + b.cpu, a.wall, a.reference + b.reference) for a, b in zip(mine, its, strict=True)]
            for mine, its in zip(first, second, strict=True)
        ]
        found = {
            "off_ms": median_interval([1000 * off.cpu / RANKS for off, _ in pairs]),
            "on_ms": median_interval([1000 * on.cpu / RANKS for _, on in pairs]),
            "plain_ratio": median_interval([on.cpu / off.cpu for off, on in pairs]),
            "cpu_ratio": adjusted(pairs, lambda block: block.cpu),
            "wall_ratio": adjusted(pairs, lambda block: block.wall),
        }
        figures[name] = found
        texts = [spread.text(4 if key.endswith("ratio") else 2) for key, spread in found.items()]
        rows.append([name, *texts, str(len(pairs))])
        print(" | ".join(rows[-1]), file=sys.stderr, flush=True)
    publish(
        args,
        "A training step with recording, or a traffic contract, on against off: median (95 % interval)",
        ["model", "CPU off, ms", "CPU on, ms", "CPU on/off, as it is", "CPU on/off", "wall on/off", "pairs"],
        rows,
        figures,
    )


if __name__ == "__main__":
    main()

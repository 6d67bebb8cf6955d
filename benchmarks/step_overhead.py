"""Measures the CPU and wall time that recording and a traffic contract add to a training step, on against off.

Two gloo ranks train a GPT with zero_runtime (stage 2), each rank on a separate core. The same processes run pairs of
blocks of steps. In each pair, the recorder or contract is off in one block and on in the other block, in random order.
Both ranks switch at the same step. Each pair gives one ratio of the CPU time of both ranks (all threads), and one ratio
of the wall time of rank 0. Work that occurs once per run, such as opening files or interning names, is done before the
timing begins.

A recording needs a few steps to start, so that its blocks have several steps. A contract can skip steps without
observing them, so that its blocks are single steps. Disturbances of the machine then affect both steps of a pair
equally. The thread of the contract runs during both kinds of steps. Its CPU time counts only in steps with the
contract. The wall time that it takes from other threads counts in both kinds of steps.

The CPU time of a step varies by 10 % in both directions, because other programs share caches and memory. Before and
after each block, the ranks therefore run the same reference work, which no recorder observes. The part of a ratio that
correlates with the ratio of the reference times (linear regression of the logarithms) is attributed to the machine.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
import multiprocessing
import os
import random
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
WARM_UP = 2  # steps with the recorder on before the timing begins
AGREED = 3  # steps after which the ranks have agreed on all messages of a contract
RECORDING, CONTRACT = "recording", "traffic_contract"  # the features that are switched on and off
PAIRS = {RECORDING: 160, CONTRACT: 800}


class Job(NamedTuple):
    """A model, and the number of steps in a block of recording.

    The text of the example uses at most 256 tokens of the vocabulary.
    """

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
    """The CPU and wall time per step of one rank, and the CPU time of the reference work, in seconds."""

    cpu: float
    wall: float
    reference: float


def make_reference() -> Callable[[], float]:
    """Return a function that runs the reference work and returns its CPU time in seconds.

    The work consists of matrix multiplications in the cache and element-wise operations in main memory.
    """
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


class Recording:
    """Switches the recorder on and off."""

    def __init__(self, engine: Any, out: str, job: Job) -> None:
        self.steps, self._out, self._numbers = job.steps, out, itertools.count()
        engine.end_contract()

    def on(self, step: Callable[[], None]) -> None:
        """Start recording, and run the warm-up steps, in which names are interned once per run."""
        from commprof import hooks

        hooks.attach(f"{self._out}/{next(self._numbers)}", quiet=True)
        self.warm_up(step)

    def off(self) -> None:
        """Stop recording."""
        from commprof import hooks

        hooks.detach()

    def warm_up(self, step: Callable[[], None]) -> None:
        """Run the steps before the timing begins."""
        for _ in range(WARM_UP):
            step()

    def cpu(self) -> float:
        """Return the CPU seconds that do not belong to the step while the recorder is off: always 0."""
        return 0.0


class Contract:
    """Switches the observation of messages by a traffic contract on and off."""

    steps = 1

    def __init__(self, engine: Any, step: Callable[[], None]) -> None:
        from zero_runtime import comm

        (self._contract,) = engine._contracts
        self._group, self._looks = engine._group, comm._lookouts
        self._watched = list(self._looks)
        self._clock = time.pthread_getcpuclockid(self._contract._thread.ident)
        for _ in range(AGREED):
            step()
        self.off()

    def on(self, step: Callable[[], None]) -> None:
        """Set the state that exists after ``keep_contract`` and the agreement on each message."""
        from zero_runtime.groups import detailed_tags

        self._group.observe(self._contract)
        self._looks[:] = self._watched
        detailed_tags.add_reader()

    def off(self) -> None:
        """Set the state that exists without a contract, except that the thread of the contract still runs."""
        from zero_runtime.groups import detailed_tags

        self._group.forget(self._contract)
        self._looks.clear()
        detailed_tags.add_reader(-1)

    def warm_up(self, step: Callable[[], None]) -> None:
        """Do nothing. A step with a contract needs no warm-up."""

    def cpu(self) -> float:
        """Return the CPU seconds that do not belong to the step while the contract is off.

        This is the total CPU time of the contract's thread up to now.
        """
        return time.clock_gettime(self._clock)


def make_step(job: Job, rank: int, what: str) -> tuple[Callable[[], None], Any]:
    """Return a function that runs one training step on batches of random tokens, and its engine."""
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

    return step, engine


def train(rank: int, store: str, out: str, rounds: int, job: Job, what: str, results: Any) -> None:
    """Run one rank: execute the blocks and send one pair (off, on) per round."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_WORLD_SIZE=str(RANKS)
    )
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    step, engine = make_step(job, rank, what)
    switch = Recording(engine, out, job) if what == RECORDING else Contract(engine, step)
    reference = make_reference()

    def block(switched_on: bool) -> Block:
        dist.barrier()
        if switched_on:
            switch.on(step)
        else:
            switch.warm_up(step)
        work = reference()
        cpu, wall, apart = time.process_time(), time.perf_counter(), switch.cpu()
        for _ in range(switch.steps):
            step()
        cpu, wall, apart = time.process_time() - cpu, time.perf_counter() - wall, switch.cpu() - apart
        work += reference()
        if switched_on:
            switch.off()
        else:
            cpu -= apart
        return Block(cpu / switch.steps, wall / switch.steps, work)

    block(False)
    block(True)
    pairs = []
    # The order is equal on both ranks and random, so that a periodic disturbance affects both kinds of blocks equally.
    orders = random.Random(0)
    for _ in range(rounds):
        order = orders.choice([(False, True), (True, False)])
        measured = {switched_on: block(switched_on) for switched_on in order}
        pairs.append((measured[False], measured[True]))
    results.put((rank, pairs))
    dist.destroy_process_group()


def measure(job: Job, rounds: int, what: str) -> list[list[tuple[Block, Block]]]:
    """Start the ranks and return the pairs (off, on) of each rank."""
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
    """Return the ratio on/off of one figure of the blocks, corrected for the influence of the machine."""
    ratios = [math.log(figure(on) / figure(off)) for off, on in pairs]
    machine = [math.log(on.reference / off.reference) for off, on in pairs]
    slope = statistics.linear_regression(machine, ratios).slope
    found = pseudomedian_interval([a - slope * b for a, b in zip(ratios, machine, strict=True)])
    return Spread(math.exp(found.median), math.exp(found.low), math.exp(found.high), found.rounds)


def main() -> None:
    """Measure, print the table and write it."""
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument(
        "--rounds",
        type=int,
        help="pairs of blocks, at least 40 (default: 160 of recording, 800 of a contract)",
    )
    parser.add_argument("--jobs", type=int, default=1, help="of each model, one after the other (default: 1)")
    parser.add_argument("--model", action="append", choices=list(JOBS), help="repeatable; default: all")
    parser.add_argument(
        "--what", action="append", choices=(RECORDING, CONTRACT), help="repeatable; default: both"
    )
    args = parser.parse_args()
    if args.rounds is not None and args.rounds < 40:
        parser.error(f"--rounds {args.rounds}: an interval needs at least 40 pairs")
    os.environ["OMP_NUM_THREADS"] = "1"
    rows, figures = [], {}
    for what, model, number in itertools.product(
        args.what or (RECORDING, CONTRACT), args.model or JOBS, range(args.jobs)
    ):
        name = model if args.jobs == 1 else f"{model}, job {number + 1}"
        name = name if what == RECORDING else f"{what}, {name}"
        first, second = measure(JOBS[model], args.rounds or PAIRS[what], what)
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

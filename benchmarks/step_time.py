"""Compares time and memory of a step with zero_runtime to DeepSpeed 0.19.8 and to torch, on two gloo ranks.

The benchmark runs zero_runtime, DeepSpeed, the methods of torch, and the same model without a runtime. Each of these
four has two processes. All processes exist at the same time and take turns, a few steps each, so that a disturbance of
the machine affects all four. Every round begins with a different one of the four. A round gives ratios of wall times
and of CPU times: of the whole step, and of the step minus the plain forward and backward pass.

The methods of torch are DDP for stage 0, DDP with ZeroRedundancyOptimizer for stages 1 and 2, and FSDP2 for stage 3.
gloo runs FSDP2's reduce_scatter as an all_reduce; NCCL does not.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import venv
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple, TextIO

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch_peers
from rank_processes import PIPES, RankProcesses
from results import Spread, arguments, publish

ROOT = Path(__file__).resolve().parent.parent
RANKS = 2
DEEPSPEED = "0.19.8"
# name -> (arguments of the model, number of steps in a block)
MODELS: Mapping[str, tuple[Mapping[str, int], int]] = {
    "small, 0.9 M": ({"width": 128, "layers": 4, "heads": 4, "context": 128, "vocabulary": 256}, 10),
    "25 M": ({"width": 512, "layers": 7, "heads": 8, "context": 128, "vocabulary": 2816}, 2),
}
MICRO_BATCH = 1


class Variant(NamedTuple):
    """A variant of the configuration, which is one row of the table for each model.

    Attributes:
        zero: The block ``zero_optimization`` of zero_runtime. DeepSpeed uses only its stage.
        peer: The method of torch for comparison.
    """

    zero: Mapping[str, Any]
    peer: str


VARIANTS = {
    "0": Variant({"stage": 0}, torch_peers.DDP),
    # The bucket size equals the 25 MiB of DDP's buckets.
    "0, in buckets": Variant(
        {
            "stage": 0,
            "gradient_reduction": "all_reduce",
            "overlap_comm": True,
            "reduce_bucket_size": 25 * 2**20 // 4,
        },
        torch_peers.DDP,
    ),
    "1": Variant({"stage": 1}, torch_peers.ZERO_REDUNDANCY),
    "2": Variant({"stage": 2}, torch_peers.ZERO_REDUNDANCY),
    "3": Variant({"stage": 3}, torch_peers.FSDP2_NO_RESHARD),
    "3, by block": Variant({"stage": 3, "stage3_gather_unit": "block"}, torch_peers.FSDP2_NO_RESHARD),
    "3, by block, gathered again": Variant(
        {"stage": 3, "stage3_gather_unit": "block", "stage3_max_reuse_distance": 0}, torch_peers.FSDP2
    ),
}
WARM_UP = 3
COMMON = {
    "train_micro_batch_size_per_gpu": MICRO_BATCH,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
    "gradient_clipping": 0.0,  # The optimizers of torch do not clip; the default of DeepSpeed is 1.
    "steps_per_print": 1_000_000,
}
PEER = "deepspeed"
TORCH = "torch"
RUNTIMES = (PEER, "zero_runtime", "plain", TORCH)
RESAMPLES = 4000


class Pair(RankProcesses):
    """The ranks of one runtime.

    Args:
        variables: Additional environment variables of the ranks.
    """

    def __init__(
        self, python: str, runtime: str, log: TextIO, variables: Mapping[str, str] | None = None
    ) -> None:
        script = str(ROOT / "benchmarks" / "step_time_rank.py")
        super().__init__(
            subprocess.Popen(
                [python, script, runtime], env=_environment(rank) | dict(variables or {}), stderr=log, **PIPES
            )
            for rank in range(RANKS)
        )


class Block(NamedTuple):
    """A block of steps of one runtime.

    Attributes:
        wall: The median step time of the slower rank, in ms.
        cpu: The CPU time per step, as the mean over the ranks, in ms.
    """

    wall: float
    cpu: float


def free_port() -> int:
    """Return a TCP port that is currently free."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def _environment(rank: int) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("COMMPROF_", "NCCL_"))}
    return kept | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(RANKS),
        "LOCAL_SIZE": str(RANKS),
        "MASTER_ADDR": "127.0.0.1",
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "runtime")]),
    }


def deepspeed_python(given: str | None) -> str:
    """Return the Python interpreter that has DeepSpeed.

    Without ``given``, this is the interpreter of a separate environment, which is created at the first use.
    """
    if given:
        return given
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    place = cache / "commprof" / f"deepspeed-{DEEPSPEED}"
    python, made = place / "bin" / "python", place / "made"
    if not made.exists():
        venv.create(place, with_pip=True, clear=True)
        torch_version = version("torch").split("+")[0]
        wanted = [f"deepspeed=={DEEPSPEED}", f"torch=={torch_version}", "numpy"]
        words = [str(python), "-m", "pip", "install", "--quiet", *wanted, "-c", str(ROOT / "constraints.txt")]
        if subprocess.run(words, env={**os.environ, "DS_BUILD_OPS": "0"}).returncode:
            raise SystemExit(
                f"step_time: pip could not install DeepSpeed {DEEPSPEED}; give --deepspeed-python the Python of an "
                "environment that has it"
            )
        made.touch()
    return str(python)


@contextlib.contextmanager
def started(python: str) -> Iterator[dict[str, Pair]]:
    """Start the ranks of all runtimes and yield them by runtime."""
    with tempfile.TemporaryFile("w+") as log:
        pairs: dict[str, Pair] = {}
        try:
            for runtime in RUNTIMES:
                pairs[runtime] = Pair(python if runtime == PEER else sys.executable, runtime, log)
            yield pairs
        except (RuntimeError, BrokenPipeError) as error:
            log.seek(0)
            raise SystemExit(f"step_time: {error}\n{log.read()[-3000:]}") from None
        finally:
            for pair in pairs.values():
                pair.end()


def rounds_of(
    pairs: Mapping[str, Pair], count: int, steps: int
) -> tuple[dict[str, list[Block]], dict[str, list[float]]]:
    """Run all rounds.

    Returns:
        runtime -> one block for each round, and runtime -> the losses of all its steps on all ranks.
    """
    blocks: dict[str, list[Block]] = {name: [] for name in pairs}
    losses: dict[str, list[float]] = {name: [] for name in pairs}
    names = list(pairs)
    for number in range(-1, count):
        for turn in range(len(names)):
            name = names[(number + turn) % len(names)]
            answers = pairs[name].ask({"steps": steps if number >= 0 else WARM_UP})
            losses[name] += [loss for answer in answers for loss in answer["losses"]]
            if number >= 0:
                wall = max(median(answer["seconds"]) for answer in answers)
                blocks[name].append(Block(1e3 * wall, 1e3 * fmean(answer["cpu"] for answer in answers)))
    return blocks, losses


def bootstrap(rounds: Sequence[Any], statistic: Callable[[Sequence[Any]], float]) -> Spread:
    """Return ``statistic`` of all rounds, with its 95 % bootstrap interval over rounds drawn with replacement."""
    draw = random.Random(0)
    drawn = sorted(statistic(draw.choices(rounds, k=len(rounds))) for _ in range(RESAMPLES))
    return Spread(
        statistic(rounds), drawn[int(0.025 * RESAMPLES)], drawn[int(0.975 * RESAMPLES)], len(rounds)
    )


def ratio_of_steps(rounds: Sequence[tuple[float, ...]]) -> float:
    """Return the median over the rounds of the time of zero_runtime divided by the time of DeepSpeed.

    Args:
        rounds: For each round, the times in the order of :data:`RUNTIMES`.
    """
    return median(mine / its for its, mine, *_ in rounds)


def ratio_to_torch(rounds: Sequence[tuple[float, ...]]) -> float:
    """Return the median over the rounds of the time of zero_runtime divided by the time of torch."""
    return median(mine / torchs for _, mine, _, torchs in rounds)


def ratio_outside(rounds: Sequence[tuple[float, ...]]) -> float:
    """Return the ratio of zero_runtime to DeepSpeed without the plain forward and backward pass.

    This is median(zero_runtime - plain) / median(DeepSpeed - plain).
    """
    its = median(its - plain for its, _, plain, _ in rounds)
    return median(mine - plain for _, mine, plain, _ in rounds) / its


def measure(pairs: Mapping[str, Pair], model: str, variant: Variant, count: int) -> dict[str, Any]:
    """Measure one model with one variant and return the figures."""
    shape, steps = MODELS[model]
    job = {"model": shape, "micro_batch": MICRO_BATCH, "peer": variant.peer}
    configs = {PEER: {"stage": variant.zero["stage"]}}
    before = {
        name: fmean(
            each["rss_before"]
            for each in pair.ask(
                {
                    **job,
                    "config": {**COMMON, "zero_optimization": configs.get(name, variant.zero)},
                    "port": free_port(),
                }
            )
        )
        for name, pair in pairs.items()
    }
    blocks, losses = rounds_of(pairs, count, steps)
    memories = {name: pair.ask({"memory": True}) for name, pair in pairs.items() if name != "plain"}
    for pair in pairs.values():
        pair.tell({"end": True})
    figures: dict[str, Any] = {"rounds": count, "steps": steps}
    for what in ("wall", "cpu"):
        rounds = [tuple(getattr(blocks[name][number], what) for name in RUNTIMES) for number in range(count)]
        figures[what] = {
            "ms": {name: median(getattr(block, what) for block in blocks[name]) for name in RUNTIMES},
            "ratio": bootstrap(rounds, ratio_of_steps),
            "outside_ratio": bootstrap(rounds, ratio_outside),
            "torch_ratio": bootstrap(rounds, ratio_to_torch),
        }
    figures["memory_mib"] = {
        name: {key: max(answer[key] for answer in answers) for key in answers[0]}
        for name, answers in memories.items()
    }
    for name, each in figures["memory_mib"].items():
        each["rss_added"] = each["peak_rss"] - before[name]
    figures["loss_difference"] = {
        name: max(abs(mine / its - 1) for mine, its in zip(losses["zero_runtime"], losses[name], strict=True))
        for name in (PEER, TORCH)
    }
    figures["final_loss"] = {name: losses[name][-1] for name in (PEER, "zero_runtime", TORCH)}
    return figures


def row(model: str, variant: str, figures: Mapping[str, Any]) -> list[str]:
    """Return a row of the table."""
    wall, cpu, memory = figures["wall"], figures["cpu"], figures["memory_mib"]

    def both(source: Mapping[str, Any], digits: int = 0, key: str | None = None) -> str:
        values = (
            source[name] if key is None else source[name][key] for name in ("zero_runtime", PEER, TORCH)
        )
        return " / ".join(f"{value:.{digits}f}" for value in values)

    return [
        model,
        f"{variant} ({VARIANTS[variant].peer})",
        f"{both(wall['ms'], 1)} / {wall['ms']['plain']:.1f}",
        wall["ratio"].text(),
        wall["torch_ratio"].text(),
        wall["outside_ratio"].text(),
        cpu["ratio"].text(),
        cpu["outside_ratio"].text(),
        both(memory, key="peak_rss"),
        both(memory, key="rss_added"),
        both(memory, 1, "peak_tensors"),
        " / ".join(f"{value:.0e}" for value in figures["loss_difference"].values()),
    ]


HEADER = [
    "model",
    "stage (torch's own)",
    "step, ms: here / DeepSpeed / torch / plain",
    "step ratio (95 % interval)",
    "ratio to torch's",
    "outside plain, ratio",
    "CPU ratio",
    "CPU outside plain, ratio",
    "peak RSS, MiB: here / DeepSpeed / torch",
    "of that since imports",
    "peak of tensors, MiB",
    "loss apart: DeepSpeed / torch",
]


def main() -> None:
    """Measure, print the table and write it."""
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument(
        "--deepspeed-python", help=f"the Python of an environment that has DeepSpeed {DEEPSPEED}"
    )
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--stage", action="append", choices=list(VARIANTS), help="repeatable; default: all")
    parser.add_argument("--model", action="append", choices=list(MODELS), help="repeatable; default: all")
    args = parser.parse_args()
    rows, figures = [], {}
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        python = deepspeed_python(args.deepspeed_python)
        for model, name in itertools.product(args.model or MODELS, args.stage or VARIANTS):
            with started(python) as pairs:  # new processes, because an engine sets the allocator
                found = figures[f"{model}, stage {name}"] = measure(pairs, model, VARIANTS[name], args.rounds)
            rows.append(row(model, name, found))
            print(" | ".join(rows[-1]), file=sys.stderr, flush=True)
    finally:
        # The finished measurements are published even if the benchmark is interrupted.
        if rows:
            publish(
                args,
                f"A step against DeepSpeed {DEEPSPEED} and torch's own: {RANKS} gloo ranks, fp32, "
                f"micro-batch {MICRO_BATCH} x 128 tokens, {args.rounds} rounds",
                HEADER,
                rows,
                figures,
            )


if __name__ == "__main__":
    main()

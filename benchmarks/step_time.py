"""Time and memory of a training step against the real DeepSpeed 0.19.8: two gloo ranks on this machine, stages 0 to 3.

Both runtimes, and the same model without any, live side by side, two processes each, and train in turn, some steps each:
what disturbs the machine disturbs all three. A round gives a ratio of step times, one of CPU times, and one of what is left
of the step without plain forward and backward. Every round begins with another of the three.
"""

from __future__ import annotations

import contextlib
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

from rank_processes import PIPES, RankProcesses
from results import Spread, arguments, publish

ROOT = Path(__file__).resolve().parent.parent
RANKS = 2
DEEPSPEED = "0.19.8"
# name -> (model, steps of a block)
MODELS: Mapping[str, tuple[Mapping[str, int], int]] = {
    "small, 0.9 M": ({"width": 128, "layers": 4, "heads": 4, "context": 128, "vocabulary": 256}, 10),
    "25 M": ({"width": 512, "layers": 7, "heads": 8, "context": 128, "vocabulary": 2816}, 2),
}
MICRO_BATCH = 1
STAGES = (0, 1, 2, 3)
WARM_UP = 3
COMMON = {
    "train_micro_batch_size_per_gpu": MICRO_BATCH,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
    "steps_per_print": 1_000_000,
}
PEER = "deepspeed"
RUNTIMES = (PEER, "zero_runtime", "plain")
RESAMPLES = 4000


class Pair(RankProcesses):
    """The ranks of one runtime. ``variables`` are further ones of their environment."""

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
    """Some steps of one runtime: milliseconds of a step, of the slower rank, and CPU milliseconds of the mean rank."""

    wall: float
    cpu: float


def _free_port() -> int:
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
    """The Python that has DeepSpeed: the one given, or that of an environment of its own, made on the first use."""
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
    """The ranks of every runtime."""
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
    """(runtime -> one block for each round, runtime -> losses of all its steps on all ranks)."""
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
    """``statistic`` of all rounds, with the 95 % interval of it over rounds drawn again with replacement."""
    draw = random.Random(0)
    drawn = sorted(statistic(draw.choices(rounds, k=len(rounds))) for _ in range(RESAMPLES))
    return Spread(
        statistic(rounds), drawn[int(0.025 * RESAMPLES)], drawn[int(0.975 * RESAMPLES)], len(rounds)
    )


def ratio_of_steps(rounds: Sequence[tuple[float, float, float]]) -> float:
    """Median over the rounds of (mine by its); a round is (its, mine, plain)."""
    return median(mine / its for its, mine, _ in rounds)


def ratio_outside(rounds: Sequence[tuple[float, float, float]]) -> float:
    """Median of (mine - plain) by median of (its - plain)."""
    its = median(its - plain for its, _, plain in rounds)
    return median(mine - plain for _, mine, plain in rounds) / its


def measure(pairs: Mapping[str, Pair], model: str, stage: int, count: int) -> dict[str, Any]:
    """The figures of one case."""
    shape, steps = MODELS[model]
    config = {**COMMON, "zero_optimization": {"stage": stage}}
    job = {"model": shape, "micro_batch": MICRO_BATCH, "config": config}
    before = {
        name: fmean(each["rss_before"] for each in pair.ask({**job, "port": _free_port()}))
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
        }
    figures["memory_mib"] = {
        name: {key: max(answer[key] for answer in answers) for key in answers[0]}
        for name, answers in memories.items()
    }
    for name, each in figures["memory_mib"].items():
        each["rss_added"] = each["peak_rss"] - before[name]
    figures["loss_difference"] = max(
        abs(mine / its - 1) for mine, its in zip(losses["zero_runtime"], losses[PEER], strict=True)
    )
    figures["final_loss"] = {name: losses[name][-1] for name in (PEER, "zero_runtime")}
    return figures


def row(model: str, stage: int, figures: Mapping[str, Any]) -> list[str]:
    """A row of the table."""
    wall, cpu, memory = figures["wall"], figures["cpu"], figures["memory_mib"]

    def both(source: Mapping[str, Any], digits: int = 0, key: str | None = None) -> str:
        values = (source[name] if key is None else source[name][key] for name in ("zero_runtime", PEER))
        return " / ".join(f"{value:.{digits}f}" for value in values)

    return [
        model,
        str(stage),
        f"{both(wall['ms'], 1)} / {wall['ms']['plain']:.1f}",
        wall["ratio"].text(),
        wall["outside_ratio"].text(),
        cpu["ratio"].text(),
        cpu["outside_ratio"].text(),
        both(memory, key="peak_rss"),
        both(memory, key="rss_added"),
        both(memory, 1, "peak_tensors"),
        f"{figures['loss_difference']:.0e}",
    ]


HEADER = [
    "model",
    "stage",
    "step, ms: here / DeepSpeed / plain",
    "step ratio (95 % interval)",
    "outside plain, ratio",
    "CPU ratio",
    "CPU outside plain, ratio",
    "peak RSS, MiB: here / DeepSpeed",
    "of that since imports",
    "peak of tensors, MiB",
    "loss apart",
]


def main() -> None:
    """Measure, print, write."""
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument(
        "--deepspeed-python", help=f"the Python of an environment that has DeepSpeed {DEEPSPEED}"
    )
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--stage", type=int, action="append", choices=STAGES, help="repeatable; default: all")
    parser.add_argument("--model", action="append", choices=list(MODELS), help="repeatable; default: all")
    args = parser.parse_args()
    rows, figures = [], {}
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        with started(deepspeed_python(args.deepspeed_python)) as pairs:
            for model in args.model or MODELS:
                for stage in args.stage or STAGES:
                    found = figures[f"{model}, stage {stage}"] = measure(pairs, model, stage, args.rounds)
                    rows.append(row(model, stage, found))
                    print(" | ".join(rows[-1]), file=sys.stderr, flush=True)
    finally:
        # What has been measured counts, also where the rest takes too long.
        if rows:
            publish(
                args,
                f"A step against DeepSpeed {DEEPSPEED}: {RANKS} gloo ranks, fp32, micro-batch {MICRO_BATCH} x 128 tokens, "
                f"{args.rounds} rounds",
                HEADER,
                rows,
                figures,
            )


if __name__ == "__main__":
    main()

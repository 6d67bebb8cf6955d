"""Time and bytes of a training step on four hosts with links of 1 Gbit/s, against the real DeepSpeed 0.19.8.

The hosts are network namespaces of this machine: a rank each, veth pairs to a bridge, tbf on both ends of every link. Needs
root. Bytes come from the counters of the hosts' interfaces. All cases start from the same weights and see the same
batches; their engines live side by side and train in turn, some steps each, so that a busy machine slows all alike.
The ratio of a round is the case's mean step time by that of DeepSpeed's ZeRO-2 with default settings in the same round.

DeepSpeed builds an operation at its first start; do that once outside the hosts, which reach no other network. One that was
killed while it built leaves ``~/.cache/torch_extensions/*/deepspeed_shm_comm/lock``, for which all others wait.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple, TextIO

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from rank_processes import PIPES, RankProcesses
from results import Spread, arguments, median_interval, publish, spread
from step_time import deepspeed_python

from support import hosts as network

ROOT = Path(__file__).resolve().parent.parent
HOSTS = 4
RATE = "1gbit"
MODEL = {"width": 384, "layers": 4, "heads": 6, "context": 32, "vocabulary": 2048}  # 8.7 M parameters, fp32
MICRO_BATCH = 2
STEPS = 3  # of a case in a round
WARM_UP = 3
FIRST_PORT = 29_600
COMMON = {
    "train_micro_batch_size_per_gpu": MICRO_BATCH,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
    "steps_per_print": 1_000_000,
}
CANNOT = 3  # exit code where there can be no such hosts


class Case(NamedTuple):
    """One row of the table. Cases of one ``process`` share their ranks' processes."""

    framework: str
    process: str
    zero: Mapping[str, Any]
    top: Mapping[str, Any] = {}

    @property
    def config(self) -> dict[str, Any]:
        """The configuration."""
        return {**COMMON, **self.top, "zero_optimization": dict(self.zero)}


BASELINE = "DeepSpeed, stage 2"
SCATTER = {"stage": 2, "gradient_reduction": "reduce_scatter"}
CASES = {
    BASELINE: Case("deepspeed", "DeepSpeed", {"stage": 2}),
    "DeepSpeed, stage 2, multi_rank false": Case(
        "deepspeed", "DeepSpeed", {"stage": 2, "use_multi_rank_bucket_allreduce": False}
    ),
    "DeepSpeed, stage 1": Case("deepspeed", "DeepSpeed", {"stage": 1}),
    # Of its own process: stage 3 changes torch for all models.
    "DeepSpeed, stage 3": Case("deepspeed", "DeepSpeed stage 3", {"stage": 3}),
    "zero_runtime, stage 2": Case("zero_runtime", "zero_runtime", {"stage": 2}),
    "zero_runtime, stage 2, reduce_scatter": Case("zero_runtime", "zero_runtime", SCATTER),
    "zero_runtime, stage 2, reduce_scatter, bf16 messages": Case(
        "zero_runtime", "zero_runtime", SCATTER, {"communication_data_type": "bf16"}
    ),
    "zero_runtime, stage 2, reduce_scatter, gather into forward": Case(
        "zero_runtime", "zero_runtime", {**SCATTER, "overlap_parameter_gather": True}
    ),
    "zero_runtime, stage 3": Case("zero_runtime", "zero_runtime stage 3", {"stage": 3}),
}


class Ranks(RankProcesses):
    """The processes of one ``process``: a rank on each host."""

    def __init__(
        self,
        machines: Sequence[network.Host],
        words: Sequence[str],
        port: int,
        log: TextIO,
    ) -> None:
        super().__init__(
            machine.start(
                words,
                network.environment(machines, rank, port=port) | {"DS_ACCELERATOR": "cpu"},
                stderr=log,
                **PIPES,
            )
            for rank, machine in enumerate(machines)
        )

    def train(self, case: str, steps: int) -> list[dict[str, Any]]:
        """Train ``case``: one answer of each rank."""
        return self.ask({"case": case, "steps": steps})


def chosen(words: Sequence[str]) -> dict[str, Case]:
    """The cases whose name holds one of ``words``, and the baseline; without words, all."""
    return {
        name: case
        for name, case in CASES.items()
        if not words or name == BASELINE or any(word in name for word in words)
    }


@contextlib.contextmanager
def started(cases: Mapping[str, Case], folder: Path, python: str) -> Iterator[dict[str, Ranks]]:
    """The ranks of every case: process -> ranks. A process that does not start is left out, and said."""
    job = folder / "job.json"
    weights = folder / "weights.pt"
    write_job(job, weights, cases)
    running: dict[str, Ranks] = {}
    with network.hosts(HOSTS, RATE) as machines, (folder / "ranks.log").open("w+") as log:
        try:
            for number, process in enumerate(dict.fromkeys(case.process for case in cases.values())):
                names = [name for name, case in cases.items() if case.process == process]
                framework = cases[names[0]].framework
                script = str(ROOT / "benchmarks" / "cluster_rank.py")
                words = [
                    python if framework == "deepspeed" else sys.executable,
                    script,
                    str(job),
                    framework,
                    *names,
                ]
                ranks = Ranks(machines, words, FIRST_PORT + number, log)
                running[process] = ranks
                try:
                    ranks.answers()
                except RuntimeError as error:
                    log.seek(0)
                    said = log.read().strip().splitlines() or [str(error)]
                    print(f"cluster: {process} does not start: {said[-1]}", file=sys.stderr, flush=True)
                    ranks.end()
                    del running[process]
            yield running
        finally:
            for ranks in running.values():
                ranks.end()


def write_job(job: Path, weights: Path, cases: Mapping[str, Case]) -> int:
    """Write what the ranks need to know, and the weights that all start from; the number of parameters."""
    spec = importlib.util.spec_from_file_location("train_gpt", ROOT / "examples" / "train_gpt.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    torch.manual_seed(0)
    model = example.GPT(**MODEL)
    torch.save(model.state_dict(), weights)
    facts = {
        "model": MODEL,
        "micro_batch": MICRO_BATCH,
        "weights": str(weights),
        "interface": network.INTERFACE,
    }
    job.write_text(json.dumps(facts | {"cases": {name: case.config for name, case in cases.items()}}))
    return sum(parameter.numel() for parameter in model.parameters())


def measure(
    cases: Mapping[str, Case], running: Mapping[str, Ranks], rounds: int
) -> dict[str, dict[str, list[Any]]]:
    """Case -> what each round gave: ``seconds`` of a step (slowest rank), ``received`` and ``sent`` bytes, ``losses``."""
    cases = {name: case for name, case in cases.items() if case.process in running}
    found: dict[str, dict[str, list[Any]]] = {
        name: {"seconds": [], "received": [], "sent": [], "losses": []} for name in cases
    }
    for number in range(-1, rounds):
        for name, case in cases.items():
            answers = running[case.process].train(name, STEPS if number >= 0 else WARM_UP)
            found[name]["losses"] += zip(*(answer["losses"] for answer in answers), strict=True)
            if number >= 0:
                found[name]["seconds"].append(max(fmean(answer["seconds"]) for answer in answers))
                found[name]["received"].append(fmean(answer["received"] for answer in answers))
                found[name]["sent"].append(fmean(answer["sent"] for answer in answers))
    return found


def summarise(
    found: Mapping[str, Mapping[str, list[Any]]], gradient_bytes: int
) -> tuple[list[list[str]], dict[str, Any]]:
    """The table and its figures."""
    base = found.get(BASELINE)
    rows, figures = [], {}
    of_stage: dict[int, str] = {}  # DeepSpeed's case of each stage, with default settings
    for name in found:
        if CASES[name].framework == "deepspeed":
            of_stage.setdefault(CASES[name].zero["stage"], name)
    for name, each in found.items():
        step = spread([1e3 * value for value in each["seconds"]])
        received = median(each["received"]) / gradient_bytes
        sent = median(each["sent"]) / gradient_bytes
        figures[name] = {"step_ms": step, "received": received, "sent": sent}
        row = [name, step.text(0), f"{received:.2f}", f"{sent:.2f}"]
        if base is None:
            rows.append([*row, "-", "-", "-"])
            continue
        ratio = _ratio(each, base)
        peer = of_stage.get(CASES[name].zero["stage"])
        alike = None if peer is None else _ratio(each, found[peer])
        apart = max(
            abs(mine / its - 1)
            for these, those in zip(each["losses"], base["losses"], strict=True)
            for mine, its in zip(these, those, strict=True)
        )
        figures[name] |= {"ratio": ratio, "loss_difference": apart, "final_loss": each["losses"][-1][0]}
        figures[name]["ratio_same_stage"] = alike
        rows.append([*row, ratio.text(), "-" if alike is None else alike.text(), f"{apart:.1e}"])
    return rows, figures


def _ratio(each: Mapping[str, list[Any]], base: Mapping[str, list[Any]]) -> Spread:
    """Step times of ``each`` by those of ``base``, round by round."""
    return median_interval([mine / its for mine, its in zip(each["seconds"], base["seconds"], strict=True)])


def main() -> None:
    """Measure, print, write."""
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument(
        "--deepspeed-python", help="the Python of an environment that has DeepSpeed; default: one is made"
    )
    parser.add_argument(
        "--only", action="append", default=[], help="only cases whose name holds this; repeatable"
    )
    args = parser.parse_args()
    if (why := network.why_impossible()) is not None:
        print(f"cluster: no hosts can be made here: {why}", file=sys.stderr)
        raise SystemExit(CANNOT)
    python = deepspeed_python(args.deepspeed_python)
    cases = chosen(args.only)
    with tempfile.TemporaryDirectory() as folder:
        parameters = write_job(Path(folder, "job.json"), Path(folder, "weights.pt"), cases)
        with started(cases, Path(folder), python) as running:
            found = measure(cases, running, args.rounds)
    rows, figures = summarise(found, 4 * parameters)
    publish(
        args,
        f"A step on {HOSTS} hosts with links of 1 Gbit/s, {parameters / 1e6:.1f} M parameters in fp32, "
        f"{MICRO_BATCH} x {MODEL['context']} tokens a rank, {args.rounds} rounds of {STEPS} steps",
        [
            "case",
            "step, ms: median (minimum to maximum)",
            "received, gradient bytes = 1",
            "sent",
            f"time, {BASELINE} = 1 (95 % interval)",
            "time, DeepSpeed, same stage = 1 (95 % interval)",
            "largest relative difference of a loss",
        ],
        rows,
        figures,
    )


if __name__ == "__main__":
    main()

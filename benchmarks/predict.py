"""Predicted step times against measured ones, for settings, a model and links that were not used to develop ``predict``.

Two hosts (network namespaces of this machine, a rank each, tbf on both ends of every link) train the example's GPT with
zero_runtime. The seed, by default the current commit, draws the model, the recorded setting and the settings to predict.
The recorded setting is run a few times; all predictions are written with their hash and the time; then each setting is
measured in rounds that take turns, and the recorded one with them: its error is what runs of one setting differ by. Needs
root. A measured value is the median over rounds of the run's median step (mean over ranks); its noise is the median absolute
deviation of the rounds, relative.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
from results import arguments, publish

from commprof.prediction.recorded import recorded_steps
from commprof.quantities import bytes_per_second
from commprof.trace.reader import open_run
from support import hosts as network

ROOT = Path(__file__).resolve().parent.parent
PYTHON = sys.executable
CANNOT = 3  # exit code where there can be no such hosts
BUCKETS = (100_000, 300_000, 1_000_000, 3_000_000, 10_000_000, 500_000_000)
WAYS: Sequence[Mapping[str, Any]] = (
    {"reduce_scatter": False},
    {"use_multi_rank_bucket_allreduce": True},
    {"use_multi_rank_bucket_allreduce": False},
    {"gradient_reduction": "reduce_scatter"},
)
RATES: Mapping[str, Any] = {
    "1gbit": "1gbit",
    "200mbit": "200mbit",
    "asymmetric": [("1gbit", "500mbit"), ("500mbit", "1gbit")],
}
# Other links, on which the recorded setting is measured. The bursts that tbf lets through are too small above 1 Gbit/s.
BANDWIDTHS: Mapping[str, Sequence[float]] = {"1gbit": (0.5,), "200mbit": (0.5, 4.0), "asymmetric": (0.5,)}
MODELS = ((192, 8), (256, 4), (320, 6), (384, 4))  # width and layers


UNCHANGED = "none: another run of the recorded setting"


class Case(NamedTuple):
    """One setting of ``zero_optimization``, and how many times as fast as the recorded ones the links are."""

    zero: Mapping[str, Any]
    bandwidth: float = 1.0

    def text(self) -> str:
        """As words."""
        words = [f"{key}={json.dumps(value)}" for key, value in self.zero.items()]
        return " ".join([*words, f"bandwidth x{self.bandwidth:g}"] if self.bandwidth != 1.0 else words)

    def config(self) -> dict[str, Any]:
        """The whole config."""
        return {
            "train_micro_batch_size_per_gpu": 4,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "gradient_clipping": 1.0,
            "zero_optimization": dict(self.zero),
        }


def drawn(chance: random.Random) -> Case:
    """A setting."""
    zero: dict[str, Any] = {
        "stage": chance.choice((1, 2, 2)),
        "reduce_bucket_size": chance.choice(BUCKETS),
        "overlap_comm": chance.random() < 0.5,
    }
    return Case({**zero, **chance.choice(WAYS)})


def kind_of_change(before: Case, after: Case) -> str:
    """The class of the largest change."""
    a, b = before.zero, after.zero
    if after.bandwidth != before.bandwidth:
        return f"bandwidth x{after.bandwidth:g}"
    if a == b:
        return UNCHANGED
    if a["stage"] != b["stage"]:
        return "stage"
    if a["overlap_comm"] != b["overlap_comm"]:
        return "overlap"
    if {k: v for k, v in a.items() if k != "reduce_bucket_size"} != {
        k: v for k, v in b.items() if k != "reduce_bucket_size"
    }:
        return "reduction"
    return "bucket size"


def train(
    case: Case, name: str, folder: Path, machines: Sequence[network.Host], model: Sequence[int], steps: int
) -> Path:
    """Record one run of ``case``."""
    config = folder / f"{name}.json"
    config.write_text(json.dumps(case.config()))
    run = folder / name
    words = [
        *(PYTHON, "-m", "commprof", "run", "--out", str(run), str(ROOT / "examples" / "train_gpt.py")),
        *(
            "--config",
            str(config),
            "--steps",
            str(steps),
            "--width",
            str(model[0]),
            "--layers",
            str(model[1]),
        ),
        *("--context", "32", "--validation-batches", "1"),
    ]
    network.run_on_each(machines, words, folder)
    return run


def step_ns(run: Path) -> float:
    """The median step, mean over ranks."""
    return float(np.median(recorded_steps(open_run(run)).step_ns))


def predicted(runs: Sequence[Path], cases: Sequence[Case], calibration: Path) -> list[dict[str, Any]]:
    """What the command says of each case; the settings are given as configs that differ in their keys."""
    from commprof.calibration.file import read_calibration
    from commprof.prediction.assumptions import Assumptions
    from commprof.prediction.durations import Link
    from commprof.prediction.prediction_json import prediction_json
    from commprof.prediction.repeats import predict_repeats

    answers: dict[int, dict[str, Any]] = {}
    for bandwidth in dict.fromkeys(each.bandwidth for each in cases):
        numbers = [number for number, each in enumerate(cases) if each.bandwidth == bandwidth]
        settings = [
            (
                {f"zero_optimization.{key}": value for key, value in cases[number].zero.items()},
                cases[number].config(),
            )
            for number in numbers
        ]
        answer = predict_repeats(
            [open_run(run) for run in runs],
            settings,
            Assumptions(Link(factor=bandwidth)),
            read_calibration(calibration),
        )
        answers |= dict(zip(numbers, prediction_json(answer)["settings"], strict=True))
    return [answers[number] for number in range(len(cases))]


def links(rate: str, factor: float) -> Any:
    """The links of both hosts, ``factor`` times as fast as those of ``rate``."""

    def faster(words: str) -> str:
        bits = 8 * (bytes_per_second(words) or 0.0)
        return f"{round(bits * factor / 1e6)}mbit"

    given = RATES[rate]
    if isinstance(given, str):
        return faster(given)
    return [tuple(faster(each) for each in both) for both in given]


def calibrate(out: Path, machines: Sequence[network.Host], folder: Path) -> None:
    """Time collectives on these hosts."""
    words = ["-m", "commprof", "calibrate", "--out", str(out), "--sizes", "1KiB:32MiB:4", "--iterations", "7"]
    network.run_on_each(machines, [PYTHON, *words], folder)


def measure(rate: str, chance: random.Random, folder: Path, options: Any) -> dict[str, Any]:
    """One recorded run, its predictions, and what was then measured."""
    model = chance.choice(MODELS)
    base = drawn(chance)
    cases: list[Case] = []
    while len(cases) < options.settings:
        case = drawn(chance)
        if case not in cases and case != base:
            cases.append(case)
    with network.hosts(2, links(rate, 1.0)) as machines:
        calibrate(folder / "calibration.json", machines, folder)
        recorded = [
            train(base, f"base-{number}", folder, machines, model, options.steps)
            for number in range(options.bases)
        ]
        cases += [base._replace(bandwidth=each) for each in BANDWIDTHS[rate]]
        cases.append(base)
        answers = predicted(recorded, cases, folder / "calibration.json")
        text = json.dumps(answers, sort_keys=True)
        stamp = {
            "hash": hashlib.sha256(text.encode()).hexdigest(),
            "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        }
        (folder / "predictions.json").write_text(json.dumps({**stamp, "settings": answers}, indent=1))
        print(
            f"{rate}: model {model}, recorded {base.text()}: predictions {stamp['hash'][:16]} at {stamp['time']}",
            flush=True,
        )
    rounds: list[list[float]] = [[] for _ in cases]
    for number in range(options.rounds):
        order = list(range(len(cases)))
        chance.shuffle(order)
        for bandwidth in dict.fromkeys(cases[index].bandwidth for index in order):
            with network.hosts(2, links(rate, bandwidth)) as machines:
                for index in order:
                    if cases[index].bandwidth == bandwidth:
                        run = train(
                            cases[index], f"case{index}-{number}", folder, machines, model, options.steps
                        )
                        rounds[index].append(step_ns(run))
    rows = []
    for case, answer, times in zip(cases, answers, rounds, strict=True):
        truth = median(times)
        row = {
            "rate": rate, "case": case.text(), "kind": kind_of_change(base, case), "measured_ns": truth,
            "noise": median(abs(each - truth) for each in times) * 1.4826 / truth, "refused": answer.get("refused"),
        }  # fmt: skip
        if "step_ns" in answer:
            row |= {
                "predicted_ns": answer["step_ns"]["median"],
                "error": answer["step_ns"]["median"] / truth - 1,
                "inside": answer["step_ns"]["low"] <= truth <= answer["step_ns"]["high"],
            }
        rows.append(row)
        print(
            f"  {case.text()}: measured {truth / 1e6:.1f} ms, {row.get('error', float('nan')):+.1%}",
            flush=True,
        )
    return {
        "rate": rate,
        "model": model,
        "base": base.text(),
        "base_ns": [step_ns(each) for each in recorded],
        **stamp,
        "rows": rows,
    }


def order_is_right(rows: Sequence[Mapping[str, Any]]) -> tuple[int, int]:
    """Pairs of settings of one recorded run that differ measurably, and of how many the predicted order is right."""
    right = pairs = 0
    for a, b in combinations([row for row in rows if "error" in row], 2):
        apart = abs(a["measured_ns"] / b["measured_ns"] - 1)
        if apart > 2 * max(a["noise"], b["noise"], 0.01):
            pairs += 1
            right += (a["measured_ns"] < b["measured_ns"]) == (a["predicted_ns"] < b["predicted_ns"])
    return right, pairs


def main() -> None:
    """Measure, print, write."""
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--seed", help="default: the current commit")
    parser.add_argument("--rates", nargs="+", choices=list(RATES), default=list(RATES))
    parser.add_argument("--settings", type=int, default=6, help="predicted from each recorded run")
    parser.add_argument("--bases", type=int, default=3, help="recorded runs to predict from")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    if (why := network.why_impossible()) is not None:
        print(f"predict: no hosts can be made here: {why}", file=sys.stderr)
        raise SystemExit(CANNOT)
    head = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    seed = options.seed or head.strip()
    answers = []
    for rate in options.rates:
        with tempfile.TemporaryDirectory() as folder:
            answers.append(measure(rate, random.Random(f"{seed} {rate}"), Path(folder), options))
    unchanged = [row for each in answers for row in each["rows"] if row["kind"] == UNCHANGED]
    changed = [row for each in answers for row in each["rows"] if row["kind"] != UNCHANGED]
    rows = [row for row in changed if "error" in row]
    refused = len(changed) - len(rows)
    errors = np.array([abs(row["error"]) for row in rows])
    counts = [order_is_right(each["rows"]) for each in answers]
    table = [
        [
            kind,
            str(len(chosen)),
            f"{100 * median(abs(row['error']) for row in chosen):.1f} %",
            f"{100 * max(abs(row['error']) for row in chosen):.1f} %",
            f"{sum(row['inside'] for row in chosen)} of {len(chosen)}",
        ]
        for kind in [*dict.fromkeys(row["kind"] for row in rows), "all", UNCHANGED]
        if (
            chosen := unchanged
            if kind == UNCHANGED
            else [row for row in rows if kind in (row["kind"], "all")]
        )
    ]
    figures = {
        "seed": seed, "median_error": float(np.median(errors)), "p90_error": float(np.percentile(errors, 90)),
        "noise": median(row["noise"] for row in rows), "refused": refused,
        "order": [sum(right for right, _ in counts), sum(pairs for _, pairs in counts)], "runs": answers,
    }  # fmt: skip
    title = (
        f"Predicted against measured step times, zero_runtime on two hosts ({', '.join(options.rates)}), seed {seed[:12]}, "
        f"{options.bases} recorded runs, {options.rounds} rounds: median error {100 * figures['median_error']:.1f} %, 90th "
        f"percentile {100 * figures['p90_error']:.1f} %, noise of a measured step {100 * figures['noise']:.1f} %, order "
        f"right in {figures['order'][0]} of {figures['order'][1]} pairs, {refused} refused"
    )
    publish(
        options,
        title,
        ["change", "settings", "median error", "largest", "in the 80 % interval"],
        table,
        figures,
    )


if __name__ == "__main__":
    main()

"""Compares predicted to measured step times, for randomly drawn settings, models, links and numbers of ranks.

The hosts are network namespaces of this machine with one rank each and tbf on both ends of every link. They train the
example's GPT with zero_runtime, DeepSpeed 0.19.8 (with ``--deepspeed-python``) and torch's DistributedDataParallel. All
random choices depend on the seed, which is the current commit by default. The benchmark needs root. There are three
kinds of scenes, and each scene has one engine and one rate of the links:

* ``settings``: two ranks. The scene predicts other settings and other bandwidths of the links.
* ``world``: 2 or 4 ranks. The scene predicts the other numbers of ranks from 2 to 4, with one host per rank. The blocks
  of the model sleep instead of computing, because all ranks share the processors of this machine. The table also shows
  the results with real compute, for comparison.
* ``experts``: four sleeping ranks whose blocks have layers of experts, with zero_runtime and DeepSpeed. The scene
  predicts other values of ``ep_size`` and of the capacity factor.

A scene records its setting a few times, each time in new processes. It then writes all its predictions with their hash
and the time. After that, it measures all settings in rounds. Each round uses new processes and a different order of the
settings. The recorded setting is measured too. The error of this setting shows by how much runs of the same setting
differ.

A measured value is the median over rounds of the median step time, where a step time is the mean over ranks. The noise
is the median absolute deviation of the rounds, scaled to a standard deviation and divided by the measured value.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import random
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any, TextIO

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
from predict_scenes import (
    CALIBRATION_S,
    DDP,
    DEEPSPEED,
    ENGINES,
    FIRST_STEPS,
    RATES,
    SCENES,
    SLEEP,
    WARM,
    Case,
    Scene,
    drawn_scenes,
    kind_of_change,
    links,
)
from predict_score import HEADER, bars, is_scored, table
from rank_processes import PIPES, RankProcesses
from results import arguments, publish

from commprof.calibration.file import read_calibration
from commprof.errors import UsageError
from commprof.prediction.assumptions import Assumptions
from commprof.prediction.durations import Link
from commprof.prediction.prediction_json import prediction_json
from commprof.prediction.predictions import replayed_run
from commprof.prediction.recorded import recorded_steps
from commprof.prediction.repeats import predict_repeats
from commprof.trace.finaliser import finalise
from commprof.trace.reader import open_run
from support import hosts as network

ROOT = Path(__file__).resolve().parent.parent
CANNOT = 3  # the exit code if this machine cannot create the hosts
FIRST_PORT = 29_700
RECORDINGS = 3  # the largest number of attempts to record a run that can be replayed


class Progress:
    """The progress of the benchmark in expected seconds, with an estimate of the remaining time.

    Args:
        total: The expected duration of the whole benchmark, in seconds.
    """

    def __init__(self, total: float) -> None:
        self.total, self.done, self.began = total, 0.0, time.monotonic()

    def did(self, seconds: float) -> None:
        """Add a finished part of the work that was expected to take ``seconds`` seconds."""
        self.done += seconds

    def say(self, text: str) -> None:
        """Print ``text`` with the elapsed time and the estimated remaining time."""
        passed = time.monotonic() - self.began
        left = passed * max(0.0, self.total - self.done) / self.done if self.done else self.total
        print(f"[{passed / 60:.1f} min, about {left / 60:.0f} min left] {text}", flush=True)


class Trainer:
    """The ranks of a scene on its hosts, as a context manager.

    The ranks for a case start when the case is first trained, and exit at the end of the ``with`` block.
    """

    def __init__(
        self, scene: Scene, machines: Sequence[network.Host], python: str, log: TextIO, progress: Progress
    ):
        self.scene, self.machines, self.python = scene, machines, python
        self.log, self.progress = log, progress
        self.ranks: dict[tuple[int, bool], RankProcesses] = {}
        self.port = FIRST_PORT
        self.factor: float | None = None  # not known yet

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_: object) -> None:
        for ranks in self.ranks.values():
            ranks.end()
        self.ranks.clear()

    def train(self, case: Case, steps: int, record: Path | None = None) -> list[float]:
        """Train ``case`` and return the time of each step in seconds, as the mean over ranks.

        Raises:
            RuntimeError: A rank cannot train ``case``.
        """
        if case.bandwidth != self.factor:
            network.limit_links(self.machines, links(self.scene.rate, len(self.machines), case.bandwidth))
            self.factor = case.bandwidth
        request = self._request(case, steps, record)
        try:
            answers = self._started(case).ask(request)
        except (RuntimeError, OSError) as error:
            self.ranks.pop(case.processes).end()
            self.log.seek(0)
            raise RuntimeError((self.log.read().strip().splitlines() or [str(error)])[-1]) from None
        for answer in answers:
            if "failed" in answer:
                raise RuntimeError(answer["failed"])
        return [fmean(of_step) for of_step in zip(*(answer["seconds"] for answer in answers), strict=True)]

    def _request(self, case: Case, steps: int, record: Path | None = None) -> dict[str, Any]:
        width, layers = self.scene.model
        return {
            "config": case.config(),
            "model": {"width": width, "layers": layers, "heads": 4, "context": case.batch[1]},
            "batch": case.batch,
            "experts": dict(case.experts),
            "sleep": [SLEEP / 3 / layers, 2 * SLEEP / 3 / layers] if case.sleeps else None,
            "warm": WARM,
            "steps": steps,
            "record": None if record is None else str(record),
        }

    def _started(self, case: Case) -> RankProcesses:
        if case.processes not in self.ranks:
            words = [self.python, str(ROOT / "benchmarks" / "predict_rank.py"), self.scene.engine]
            used = self.machines[: case.world]
            self.port += 1
            ranks = self.ranks[case.processes] = RankProcesses(
                machine.start(
                    words,
                    network.environment(used, rank, port=self.port)
                    | {"DS_ACCELERATOR": "cpu", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
                    stderr=self.log,
                    **PIPES,
                )
                for rank, machine in enumerate(used)
            )
            ranks.answers()
            # The steps of the first training of a process take up to 10 % longer. Train once before any recording
            # or measurement.
            ranks.ask(self._request(case, FIRST_STEPS))
            self.progress.did(self.scene.starting(case.world))
        return self.ranks[case.processes]


def calibrate(rate: str, world: int, folder: Path) -> None:
    """Calibrate collectives of ``world`` ranks on links of ``rate``."""
    with network.hosts(world, links(rate, world)) as machines:
        words = ["-m", "commprof", "calibrate", "--out", str(calibration_file(rate, world, folder))]
        words += ["--sizes", "1KiB:16MiB:4", "--iterations", "5"]
        words += ["--ops", "all_reduce,reduce,broadcast,all_gather,reduce_scatter,all_to_all"]
        network.run_on_each(machines, [sys.executable, *words], folder)


def calibration_file(rate: str, world: int, folder: Path) -> Path:
    """Return the path of the calibration."""
    return folder / f"calibration-{rate}-{world}.json"


def predicted(
    runs: Sequence[Path], base: Case, cases: Sequence[Case], rate: str, folder: Path
) -> list[dict[str, Any]]:
    """Return the prediction of the command ``predict`` for each case.

    If ``predict`` refuses a case, its answer contains the reason as ``refused``.
    """
    sources = [open_run(run) for run in runs]
    answers: list[dict[str, Any]] = []
    for case in cases:
        setting = case.changes(base)
        config = (
            None if case.keys == base.keys or any(key.startswith(DDP) for key in case.keys) else case.config()
        )
        assumptions = Assumptions(
            Link(factor=case.bandwidth), None if case.world == base.world else case.world
        )
        calibration = read_calibration(calibration_file(rate, case.world, folder))
        try:
            answer = predict_repeats(sources, [(setting, config)], assumptions, calibration)
            answers += prediction_json(answer)["settings"]
        except UsageError as problem:
            answers.append({"set": setting, "refused": str(problem)})
    return answers


def write_predictions(scene: Scene, answers: Sequence[Mapping[str, Any]], folder: Path) -> dict[str, str]:
    """Write the predictions before anything is measured; return their hash and the time."""
    text = json.dumps(answers, sort_keys=True)
    stamp = {
        "sha256": hashlib.sha256(text.encode()).hexdigest(),
        "written": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    path = folder / f"predictions-{scene.name}.json"
    path.write_text(json.dumps(stamp | {"settings": answers}, sort_keys=True))
    return stamp


def record_bases(
    scene: Scene,
    machines: Sequence[network.Host],
    options: Any,
    folder: Path,
    progress: Progress,
    log: TextIO,
) -> list[list[Path]]:
    """Record each base setting and return its runs.

    If ``predict`` refuses a run, the setting is recorded again, as the message of ``predict`` recommends.
    """
    recorded: list[list[Path]] = [[] for _ in scene.bases]
    for number in range(options.bases):
        for place, (base, _) in enumerate(scene.bases):
            for attempt in range(RECORDINGS):
                run = folder / f"{scene.name}-{place}-{number}-{attempt}"
                with Trainer(scene, machines, options.python[scene.engine], log, progress) as trainer:
                    trainer.train(base, options.recorded_steps, run)
                finalise(run)
                if (why := why_not_replayed(run)) is None:
                    break
                print(f"  recording {attempt + 1} of at most {RECORDINGS}: {why}", flush=True)
            recorded[place].append(run)
            progress.did(scene.seconds(base, options.recorded_steps))
    return recorded


def why_not_replayed(run: Path) -> str | None:
    """Return the reason why nothing can be predicted from ``run``, or None if predictions are possible."""
    try:
        replayed_run(open_run(run))
    except UsageError as problem:
        return str(problem)
    return None


def measured(
    scene: Scene,
    machines: Sequence[network.Host],
    answers: Sequence[Mapping[str, Any]],
    options: Any,
    chance: random.Random,
    progress: Progress,
    log: TextIO,
) -> list[list[float] | str]:
    """Return the median step time of each case in each round in ns, or the reason why a case cannot be measured.

    A case that ``predict`` refused is not measured and has an empty list.
    """
    cases = [case for _, case in scene.cases]
    rounds: list[list[float] | str] = [[] for _ in cases]
    for number in range(options.rounds):
        order = list(range(len(cases)))
        chance.shuffle(order)
        with Trainer(scene, machines, options.python[scene.engine], log, progress) as trainer:
            for index in order:
                times = rounds[index]
                if isinstance(times, list) and "refused" not in answers[index]:
                    try:
                        times.append(1e9 * median(trainer.train(cases[index], options.steps)))
                    except RuntimeError as error:
                        rounds[index] = str(error)
                progress.did(scene.seconds(cases[index], options.steps))
        progress.say(f"{scene.name}: round {number + 1} of {options.rounds}")
    return rounds


def scored_rows(
    scene: Scene, answers: Sequence[Mapping[str, Any]], rounds: Sequence[list[float] | str]
) -> list[dict[str, Any]]:
    """Return a row with the predicted and the measured values of each case."""
    rows = []
    for (base, case), answer, times in zip(scene.cases, answers, rounds, strict=True):
        row: dict[str, Any] = {
            "engine": scene.engine, "rate": scene.rate, "case": case.text, "kind": kind_of_change(base, case),
            "base": f"{scene.name} {base.text}",
        }  # fmt: skip
        if isinstance(times, str) or not times:
            row |= {"failed": times} if isinstance(times, str) else {"refused": answer["refused"]}
            print(f"  {case.text}: {row.get('failed') or row.get('refused')}", flush=True)
        else:
            truth, step = median(times), answer["step_ns"]
            row |= {
                "measured_ns": truth, "rounds_ns": times, "predicted_ns": step["median"],
                "low_ns": step["low"], "high_ns": step["high"], "error": step["median"] / truth - 1,
                "noise": median(abs(each - truth) for each in times) * 1.4826 / truth,
                "inside": step["low"] <= truth <= step["high"],
            }  # fmt: skip
            print(f"  {case.text}: measured {truth / 1e6:.1f} ms, {row['error']:+.1%}", flush=True)
        rows.append(row)
    return rows


def score(scene: Scene, options: Any, folder: Path, progress: Progress) -> dict[str, Any]:
    """Record, predict and measure a scene; write and return its results."""
    chance = random.Random(f"{options.seed} {scene.name} order")
    for world in scene.worlds:
        if not calibration_file(scene.rate, world, folder).exists():
            calibrate(scene.rate, world, folder)
            progress.did(CALIBRATION_S[scene.rate])
            progress.say(f"calibrated: {world} ranks, {scene.rate}")
    count = max(scene.worlds)
    with network.hosts(count, links(scene.rate, count)) as machines, (folder / "ranks.log").open("w+") as log:
        recorded = record_bases(scene, machines, options, folder, progress, log)
        answers = [
            answer
            for (base, cases), runs in zip(scene.bases, recorded, strict=True)
            for answer in predicted(runs, base, cases, scene.rate, folder)
        ]
        stamp = write_predictions(scene, answers, folder)
        recorded_as = "; ".join(base.text for base, _ in scene.bases)
        progress.say(f"{scene.name}: model {scene.model}, recorded {recorded_as}")
        print(f"  predictions {stamp['sha256']} at {stamp['written']}", flush=True)
        rounds = measured(scene, machines, answers, options, chance, progress, log)
    base_ns = [[float(np.median(recorded_steps(open_run(run)).step_ns)) for run in runs] for runs in recorded]
    again = sum(int(run.name.rpartition("-")[2]) for runs in recorded for run in runs)
    facts = {"scene": scene.name, "model": scene.model, "recorded": recorded_as, "recorded_ns": base_ns}
    facts |= {"recorded_again": again} | stamp | {"rows": scored_rows(scene, answers, rounds)}
    (folder / f"score-{scene.name}.json").write_text(json.dumps(facts))
    return facts


def expected_seconds(scenes: Sequence[Scene], options: Any) -> float:
    """Return the expected duration of all scenes in seconds, on an idle machine with two cores."""
    calibrations = {(scene.rate, world) for scene in scenes for world in scene.worlds}
    total = sum(CALIBRATION_S[rate] for rate, _ in calibrations)
    for scene in scenes:
        for base, _ in scene.bases:
            total += options.bases * (
                scene.starting(base.world) + scene.seconds(base, options.recorded_steps)
            )
        started = sum(scene.starting(world) for world, _ in {case.processes for _, case in scene.cases})
        measuring = sum(scene.seconds(case, options.steps) for _, case in scene.cases)
        total += options.rounds * (started + measuring)
    return total


def parsed() -> Any:
    """Return the parsed command line. Its ``python`` contains the Python interpreter of each engine."""
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--seed", help="default: the current commit")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, help="default: all that there are")
    parser.add_argument("--deepspeed-python", help="the Python of an environment that has DeepSpeed")
    parser.add_argument("--rates", nargs="+", choices=list(RATES), default=list(RATES))
    parser.add_argument("--scenes", nargs="+", choices=SCENES, default=list(SCENES))
    parser.add_argument("--settings", type=int, default=4, help="predicted in each scene of settings")
    parser.add_argument("--bases", type=int, default=3, help="recorded runs to predict from")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6, help="timed in each round")
    parser.add_argument("--recorded-steps", type=int, default=16)
    parser.add_argument(
        "--keep", type=Path, help="a new folder for recorded runs, calibrations, predictions and scores"
    )
    options = parser.parse_args()
    if options.engines is None:
        options.engines = [each for each in ENGINES if each != DEEPSPEED or options.deepspeed_python]
    if DEEPSPEED in options.engines and not options.deepspeed_python:
        parser.error(
            "the engine deepspeed needs --deepspeed-python, the Python of an environment that has it"
        )
    if options.keep is not None and options.keep.exists():
        parser.error(f"--keep is {options.keep}, which exists; name a new folder")
    options.python = dict.fromkeys(ENGINES, sys.executable) | {DEEPSPEED: options.deepspeed_python}
    if options.seed is None:
        words = ["git", "rev-parse", "HEAD"]
        options.seed = subprocess.run(
            words, cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.strip()
    return options


def main() -> None:
    """Run all scenes, print the score and write it."""
    options = parsed()
    if (why := network.why_impossible()) is not None:
        print(f"predict: no hosts can be made here: {why}", file=sys.stderr)
        raise SystemExit(CANNOT)
    scenes = list(drawn_scenes(options))
    progress = Progress(expected_seconds(scenes, options))
    progress.say(f"{len(scenes)} scenes, {sum(len(scene.cases) for scene in scenes)} settings")
    answers = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for scene in scenes:
            try:
                answers.append(score(scene, options, folder, progress))
            except Exception as error:  # A failed scene must not stop the other scenes.
                traceback.print_exc()
                answers.append(
                    {"scene": scene.name, "failed": f"{type(error).__name__}: {error}", "rows": []}
                )
                progress.say(f"{scene.name} failed: {type(error).__name__}")
    publish_score(options, answers)


def publish_score(options: Any, answers: Sequence[Mapping[str, Any]]) -> None:
    """Print and write the table and the targets."""
    listed = [row for each in answers for row in each["rows"]]
    rows = [row for row in listed if "error" in row]
    reached = {"all": bars(rows)} | {
        engine: bars([row for row in rows if row["engine"] == engine]) for engine in options.engines
    }
    refused, failed = (sum(name in row for row in listed) for name in ("refused", "failed"))
    failed_scenes = sum("failed" in each for each in answers)
    for engine, of_engine in reached.items():
        for name, bar in of_engine.items():
            print(f"{engine}, {name}: {bar['text']}")
    missing = "" if DEEPSPEED in options.engines else "; without DeepSpeed"
    title = (
        f"Predicted against measured step times ({', '.join(options.engines)}; {', '.join(options.rates)}{missing}), seed "
        f"{options.seed[:12]}, {options.bases} recorded runs, {options.rounds} rounds: "
        + "; ".join(f"{name} {bar['text']}" for name, bar in reached["all"].items())
        + f"; {sum(map(is_scored, rows))} scored, {refused} refused, {failed} failed"
        + (f", {failed_scenes} scenes failed" if failed_scenes else "")
    )
    figures = {
        "seed": options.seed,
        "bars": reached,
        "refused": refused,
        "failed": failed,
        "scenes": list(answers),
    }
    publish(options, title, HEADER, table(rows), figures)


if __name__ == "__main__":
    main()

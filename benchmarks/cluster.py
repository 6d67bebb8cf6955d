"""Measures training steps on four hosts with links of 1 Gbit/s: zero_runtime, DeepSpeed 0.19.8 and torch's own methods.

The hosts are network namespaces of this machine. Each host runs one rank and has a veth pair to a bridge, with tbf on
both ends of the link. The benchmark needs root. It reads bytes from the interface counters of the hosts. All cases
start from the same weights and use the same batches. Their engines exist at the same time and take turns, a few steps
each, so that a busy machine slows all cases equally.

Each round gives two ratios of mean step times. The first ratio divides the time of the case by the time of DeepSpeed's
ZeRO-2 with default settings in the same round. The second ratio divides it by the time of torch's equivalent with
gloo: DDP for stages 0 to 2, FSDP2 for stage 3. gloo runs FSDP2's reduce_scatter as an all_reduce; NCCL does not.

The row of gloo trains nothing. Its ranks send the messages of a step at stage 2 with reduce_scatter, in the same way
as zero_runtime, and compute nothing.

The phases are wall times of a rank, including waits. The processor time is the time of all threads of a rank. The
hosts share the processors of this machine. A step therefore takes at least the sum of the processor times of all
ranks, divided by the number of processors.

After the rounds, commprof records a few steps of each case, which are not timed. The table shows the bytes derived
from these records next to the bytes of the interfaces, and the exposed communication next to the step time. At the
end, new ranks of each case run a few steps, and the peak size of their tensors is measured.

DeepSpeed compiles an operation when it first starts. Start it once outside the hosts, because the hosts have no other
network. If DeepSpeed is killed while it compiles, the file
``~/.cache/torch_extensions/*/deepspeed_shm_comm/lock`` remains, and all other processes wait for it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple, TextIO

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
import torch_peers
from rank_processes import PIPES, RankProcesses
from results import Spread, arguments, median_interval, publish, spread
from step_time import deepspeed_python

from commprof.analysis import api
from commprof.trace.finaliser import finalise
from support import hosts as network

ROOT = Path(__file__).resolve().parent.parent
HOSTS = 4
RATE = "1gbit"
MODEL = {"width": 384, "layers": 4, "heads": 6, "context": 32, "vocabulary": 2048}  # 8.7 M parameters, fp32
MICRO_BATCH = 2
STEPS = 3  # per case and round
WARM_UP = 3
RECORDED_STEPS = 3  # per case, after the rounds
FIRST_PORT = 29_600
COMMON = {
    "train_micro_batch_size_per_gpu": MICRO_BATCH,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
    "gradient_clipping": 0.0,  # The optimizers of torch do not clip; the default of DeepSpeed is 1.
    "steps_per_print": 1_000_000,
}
CANNOT = 3  # the exit code if this machine cannot create the hosts


class Case(NamedTuple):
    """A row of the table. Cases with the same ``process`` share the processes of their ranks."""

    framework: str
    process: str
    zero: Mapping[str, Any]
    top: Mapping[str, Any] = {}
    # The method of torch that the case is compared with, or that the case itself runs.
    peer: str = torch_peers.DDP

    @property
    def config(self) -> dict[str, Any]:
        """The configuration of the engine."""
        if self.framework == TORCH or self.peer == torch_peers.MESSAGES:
            return {**COMMON, "peer": self.peer}
        return {**COMMON, **self.top, "zero_optimization": dict(self.zero)}


TORCH = "torch"
BASELINE = "DeepSpeed, stage 2"
BY_BLOCK = {"stage3_gather_unit": "block"}
# The bucket size equals the 25 MiB of DDP's buckets.
IN_BUCKETS = {
    "stage": 0,
    "gradient_reduction": "all_reduce",
    "overlap_comm": True,
    "reduce_bucket_size": 25 * 2**20 // 4,
}
SCATTER = {"stage": 2, "gradient_reduction": "reduce_scatter"}
CASES = {
    BASELINE: Case("deepspeed", "DeepSpeed", {"stage": 2}),
    "DeepSpeed, stage 2, multi_rank false": Case(
        "deepspeed", "DeepSpeed", {"stage": 2, "use_multi_rank_bucket_allreduce": False}
    ),
    "DeepSpeed, stage 1": Case("deepspeed", "DeepSpeed", {"stage": 1}),
    # This case needs separate processes, because stage 3 of DeepSpeed changes torch for all models.
    "DeepSpeed, stage 3": Case(
        "deepspeed", "DeepSpeed stage 3", {"stage": 3}, peer=torch_peers.FSDP2_NO_RESHARD
    ),
    **{name: Case(TORCH, TORCH, {}, peer=name) for name in torch_peers.PEERS if name != torch_peers.MESSAGES},
    torch_peers.MESSAGES: Case("zero_runtime", "zero_runtime", {}, peer=torch_peers.MESSAGES),
    "zero_runtime, stage 0": Case("zero_runtime", "zero_runtime", {"stage": 0}),
    "zero_runtime, stage 0, in buckets": Case("zero_runtime", "zero_runtime", IN_BUCKETS),
    "zero_runtime, stage 2": Case("zero_runtime", "zero_runtime", {"stage": 2}),
    "zero_runtime, stage 2, reduce_scatter": Case("zero_runtime", "zero_runtime", SCATTER),
    "zero_runtime, stage 2, reduce_scatter, bf16 messages": Case(
        "zero_runtime", "zero_runtime", SCATTER, {"communication_data_type": "bf16"}
    ),
    "zero_runtime, stage 2, reduce_scatter, gather into forward": Case(
        "zero_runtime", "zero_runtime", {**SCATTER, "overlap_parameter_gather": True}
    ),
    **{
        # Cases that gather by block need separate processes, because their engine sets the allocator of its process.
        name: Case(
            "zero_runtime",
            f"zero_runtime stage 3{', by block' * ('stage3_gather_unit' in options)}",
            {"stage": 3, **options},
            peer=peer,
        )
        for name, options, peer in (
            ("zero_runtime, stage 3", {}, torch_peers.FSDP2_NO_RESHARD),
            ("zero_runtime, stage 3, gathered again", {"stage3_max_reuse_distance": 0}, torch_peers.FSDP2),
            ("zero_runtime, stage 3, by block", BY_BLOCK, torch_peers.FSDP2_NO_RESHARD),
            (
                "zero_runtime, stage 3, by block, gathered again",
                {**BY_BLOCK, "stage3_max_reuse_distance": 0},
                torch_peers.FSDP2,
            ),
        )
    },
}


class Ranks(RankProcesses):
    """The rank processes of the cases with the same ``process``, one rank on each host."""

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

    def train(self, case: str, steps: int, record: Path | None = None) -> list[dict[str, Any]]:
        """Train ``case`` and return one answer of each rank. If ``record`` is given, commprof records into it."""
        recorded = {} if record is None else {"record": str(record)}
        return self.ask({"case": case, "steps": steps, **recorded})


class Recorded(NamedTuple):
    """The values that commprof derives for one step, per rank.

    Attributes:
        issued: The wire bytes of the issued collectives.
        executed: The wire bytes of the collectives as the backend executes them.
        exposed_ms: The lower and upper bound of the exposed time, in ms.
    """

    issued: float
    executed: float
    exposed_ms: tuple[float, float]


def recorded(case: str, ranks: Ranks, folder: Path) -> Recorded | None:
    """Record a few steps of ``case``; return None if its ranks cannot be recorded."""
    run = folder / re.sub(r"\W+", "_", case)
    try:
        ranks.train(case, RECORDED_STEPS - 1, run)  # plus the step that precedes them
    except RuntimeError as error:
        print(f"cluster: {case} cannot be recorded: {error}", file=sys.stderr, flush=True)
        return None
    finalise(run)
    issued, executed = api.traffic(run, by=())[["wire_bytes", "executed_wire_bytes"]].iloc[0].astype(float)
    exposed = api.exposure(run, by=())[["exposed_low_ns", "exposed_high_ns"]].iloc[0].astype(float)
    return Recorded(
        issued / RECORDED_STEPS,
        executed / RECORDED_STEPS,
        tuple(1e-6 * value / RECORDED_STEPS for value in exposed),
    )


def peaks(cases: Mapping[str, Case], folder: Path, python: str) -> dict[str, float]:
    """Return the peak size of the tensors in a step of each case, in MiB, on the rank with the largest peak.

    Each case runs in separate processes.
    """
    found = {}
    for name, case in cases.items():
        with started({name: case}, folder, python) as running:
            for ranks in running.values():
                try:
                    ranks.train(name, WARM_UP)
                    answers = ranks.ask({"case": name, "memory": True})
                except RuntimeError as error:
                    print(f"cluster: no peak of {name}: {error}", file=sys.stderr, flush=True)
                    continue
                found[name] = max(answer["peak_tensors"] for answer in answers)
    return found


def chosen(words: Sequence[str]) -> dict[str, Case]:
    """Return the cases whose name contains one of ``words``, the baseline, and the torch cases for comparison.

    Without words, all cases are returned.
    """
    wanted = {name for name in CASES if not words or any(word in name for word in words)} | {BASELINE}
    wanted |= {CASES[name].peer for name in wanted}
    return {name: case for name, case in CASES.items() if name in wanted}


@contextlib.contextmanager
def started(cases: Mapping[str, Case], folder: Path, python: str) -> Iterator[dict[str, Ranks]]:
    """Start the ranks of all cases and yield them by process. A process that cannot start is reported and left out."""
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
    """Write the job description and the initial weights for the ranks; return the number of parameters."""
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
    """Return the measurements of each case, one value per round.

    ``seconds`` is the mean step time of the slowest rank. ``losses`` contains the losses of all steps on all ranks. The
    other values are means over the ranks, per step: the seconds of the ``phases`` (forward, backward, update),
    ``processor`` seconds, ``received`` and ``sent`` bytes.
    """
    cases = {name: case for name, case in cases.items() if case.process in running}
    found: dict[str, dict[str, list[Any]]] = {
        name: {"seconds": [], "received": [], "sent": [], "losses": [], "phases": [], "processor": []}
        for name in cases
    }
    for number in range(-1, rounds):
        for name, case in cases.items():
            answers = running[case.process].train(name, STEPS if number >= 0 else WARM_UP)
            found[name]["losses"] += zip(*(answer["losses"] for answer in answers), strict=True)
            if number >= 0:
                found[name]["seconds"].append(max(fmean(answer["seconds"]) for answer in answers))
                found[name]["received"].append(fmean(answer["received"] for answer in answers))
                found[name]["sent"].append(fmean(answer["sent"] for answer in answers))
                found[name]["processor"].append(fmean(answer["processor"] for answer in answers))
                by_phase = zip(*(answer["phases"] for answer in answers), strict=True)
                found[name]["phases"].append([fmean(each) for each in by_phase])
    return found


def summarise(
    found: Mapping[str, Mapping[str, list[Any]]],
    records: Mapping[str, Recorded | None],
    memory: Mapping[str, float],
    gradient_bytes: int,
) -> tuple[list[list[str]], dict[str, Any]]:
    """Return the rows of the table, and the figures by case."""
    base = found.get(BASELINE)
    rows, figures = [], {}
    of_stage: dict[int, str] = {}  # stage -> the case of DeepSpeed with default settings
    for name in found:
        if CASES[name].framework == "deepspeed":
            of_stage.setdefault(CASES[name].zero["stage"], name)
    for name, each in found.items():
        step = spread([1e3 * value for value in each["seconds"]])
        received = median(each["received"]) / gradient_bytes
        sent = median(each["sent"]) / gradient_bytes
        phases = [1e3 * median(times) for times in zip(*each["phases"], strict=True)]
        processor = 1e3 * median(each["processor"])
        figures[name] = {"step_ms": step, "received": received, "sent": sent}
        figures[name] |= {"phases_ms": phases, "processor_ms": processor}
        record = records.get(name)
        of_record = ["-", "-", "-"]
        if record is not None:
            low, high = record.exposed_ms
            wire = [record.issued / gradient_bytes, record.executed / gradient_bytes]
            figures[name] |= {"issued": wire[0], "executed": wire[1], "exposed_ms": [low, high]}
            shown = f">= {low:.0f}" if math.isnan(high) else f"{low:.0f} to {high:.0f}"
            of_record = [*(f"{value:.2f}" for value in wire), f"{low:.0f}" if high - low < 1 else shown]
        shown_phases = " + ".join(f"{value:.0f}" for value in phases)
        row = [name, step.text(0), shown_phases, f"{processor:.0f}"]
        figures[name]["peak_tensors_mib"] = memory.get(name)
        row.append(f"{memory[name]:.1f}" if name in memory else "-")
        row += [f"{received:.2f}", f"{sent:.2f}", *of_record]
        trains = CASES[name].peer != torch_peers.MESSAGES
        peer = CASES[name].peer if trains else torch_peers.DDP
        torchs = found.get(peer)
        beside_torch = None if torchs is None else _ratio(each, torchs)
        figures[name]["ratio_torch"] = beside_torch
        row.append("-" if beside_torch is None else f"{beside_torch.text()} {peer}")
        if base is None:
            rows.append([*row, "-", "-", "-"])
            continue
        ratio = _ratio(each, base)
        same_stage = of_stage.get(CASES[name].zero.get("stage"))
        alike = None if same_stage is None else _ratio(each, found[same_stage])
        apart = max(
            abs(mine / its - 1)
            for these, those in zip(each["losses"], base["losses"], strict=True)
            for mine, its in zip(these, those, strict=True)
        )
        figures[name] |= {"ratio": ratio}
        if trains:
            figures[name] |= {"loss_difference": apart, "final_loss": each["losses"][-1][0]}
        figures[name]["ratio_same_stage"] = alike
        rows.append(
            [*row, ratio.text(), "-" if alike is None else alike.text(), f"{apart:.1e}" if trains else "-"]
        )
    return rows, figures


def _ratio(each: Mapping[str, list[Any]], base: Mapping[str, list[Any]]) -> Spread:
    """Return the step times of ``each``, divided by the step times of ``base`` in the same rounds."""
    return median_interval([mine / its for mine, its in zip(each["seconds"], base["seconds"], strict=True)])


def main() -> None:
    """Measure, print the table and write it."""
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
            records = {name: recorded(name, running[cases[name].process], Path(folder)) for name in found}
        memory = peaks({name: cases[name] for name in found}, Path(folder), python)
    rows, figures = summarise(found, records, memory, 4 * parameters)
    publish(
        args,
        f"A step on {HOSTS} hosts with links of 1 Gbit/s, {parameters / 1e6:.1f} M parameters in fp32, "
        f"{MICRO_BATCH} x {MODEL['context']} tokens a rank, {args.rounds} rounds of {STEPS} steps",
        [
            "case",
            "step, ms: median (minimum to maximum)",
            "of that forward + backward + update",
            "processor, ms a rank",
            "peak of tensors, MiB",
            "received, gradient bytes = 1",
            "sent",
            "recorded: wire as issued",
            "recorded: wire as executed",
            "exposed, ms a step",
            "time, torch's own = 1 (95 % interval)",
            f"time, {BASELINE} = 1 (95 % interval)",
            "time, DeepSpeed, same stage = 1 (95 % interval)",
            "largest relative difference of a loss",
        ],
        rows,
        figures,
    )


if __name__ == "__main__":
    main()

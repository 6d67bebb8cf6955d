"""Compares memory and time of a step with offload of the optimizer (none, cpu, nvme) to DeepSpeed 0.19.8.

Two gloo ranks train a bf16 GPT at one ZeRO stage. First, each variant runs alone in separate processes to measure its
peak memory. Then the variants run in a cgroup whose memory limit is between the two peaks. The training with files
finishes in this cgroup, and the training without files cannot finish.

The runtimes whose step times are compared exist at the same time and take turns. The step time with files is always
measured at stage 3, because DeepSpeed supports files only at this stage. DeepSpeed compiles its AdamW and its file
operations at the first use, which needs a C++ compiler, ninja and the headers of libaio.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any, TextIO

sys.path.insert(0, str(Path(__file__).resolve().parent))

from results import Spread, arguments, median_interval, publish
from step_time import DEEPSPEED, PEER, RANKS, ROOT, Pair, deepspeed_python, free_port

CGROUP = Path("/sys/fs/cgroup/memory")
MIB = 2**20
SHAPES: Mapping[str, Mapping[str, int]] = {
    "100 M": {"width": 1024, "layers": 6, "heads": 8, "context": 16, "vocabulary": 12288},
    "small, 3 M": {"width": 192, "layers": 4, "heads": 4, "context": 32, "vocabulary": 2816},
}
PARTS = ("memory", "limit", "time")  # "limit" depends on the peaks of "memory"
PATIENCE = 900  # the longest time of a run in a cgroup, in seconds
STATE_BYTES = 12  # per parameter: master, exp_avg and exp_avg_sq in fp32
OURS = "zero_runtime"


def config(stage: int, device: str, path: str, torch_adam: bool = False) -> dict[str, Any]:
    """Return the configuration of one variant. Both runtimes support all of its keys."""
    offload = {"device": device, "nvme_path": path} if device == "nvme" else {"device": device}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": torch_adam}},
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": 4_000_000,
            "allgather_bucket_size": 4_000_000,
            "offload_optimizer": offload,
        },
        "aio": {"intra_op_parallelism": 2},
        "steps_per_print": 1_000_000,
    }


class Cgroup:
    """A memory cgroup (version 1) for the processes of one variant."""

    def __init__(self, name: str, limit: int) -> None:
        self.folder = CGROUP / f"zero_runtime-{os.getpid()}-{name}"
        self.folder.mkdir()
        (self.folder / "memory.limit_in_bytes").write_text(str(limit))
        with contextlib.suppress(OSError):
            (self.folder / "memory.swappiness").write_text("0")

    def add(self, pid: int) -> None:
        """Add a process to the cgroup. The processes that it starts later also belong to the cgroup."""
        (self.folder / "cgroup.procs").write_text(str(pid))

    @property
    def kills(self) -> int:
        """The number of processes that the kernel has killed because of the memory limit."""
        words = (self.folder / "memory.oom_control").read_text().split()
        return int(words[words.index("oom_kill") + 1]) if "oom_kill" in words else 0

    def kill(self) -> None:
        """Kill the processes of the cgroup."""
        for pid in (self.folder / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)

    def close(self) -> None:
        """Kill the processes of the cgroup and remove the cgroup."""
        for _ in range(100):
            self.kill()
            try:
                self.folder.rmdir()
                return
            except OSError:
                time.sleep(0.1)


@contextlib.contextmanager
def running(python: str, runtime: str, cgroup: Cgroup | None = None) -> Iterator[Pair]:
    """Start the ranks of one runtime, in ``cgroup`` if it is given, and yield them.

    Raises:
        RuntimeError: A rank failed. The message contains the last error that the ranks printed.
    """
    with tempfile.TemporaryFile("w+") as log:
        pair = Pair(python, runtime, log)
        try:
            for process in pair.processes:
                if cgroup is not None:
                    cgroup.add(process.pid)
            yield pair
        except (RuntimeError, BrokenPipeError) as error:
            log.seek(0)
            raise RuntimeError(f"{error}: {_last_line(log)}") from None
        finally:
            pair.end()


def _last_line(log: TextIO) -> str:
    lines = [line.strip() for line in log.read().splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line]
    text = (errors or lines or ["nothing was printed"])[-1]
    return text.encode("ascii", "replace").decode()[:120]


def begin(pair: Pair, shape: Mapping[str, int], given: Mapping[str, Any]) -> None:
    """Request the ranks to create their model."""
    pair.ask({"model": shape, "micro_batch": 1, "config": given, "port": free_port()})


def peak(
    shape: Mapping[str, int], given: Mapping[str, Any], steps: int, limit: int | None = None
) -> dict[str, Any]:
    """Train ``steps`` steps; return the peak resident memory of the rank with more memory in MiB, and the losses.

    If ``limit`` is given, the ranks run in a cgroup of ``limit`` bytes.
    """
    cgroup = None if limit is None else Cgroup("limited", limit)
    watch = None if cgroup is None else threading.Timer(PATIENCE, cgroup.kill)
    try:
        if watch is not None:
            watch.start()
        with running(sys.executable, OURS, cgroup) as pair:
            begin(pair, shape, given)
            trained = pair.ask({"steps": steps})
            resident = resident_peak(pair)
            pair.tell({"end": True})
    except RuntimeError as error:
        if cgroup is not None and watch is not None:
            late = not watch.is_alive()
            if late:
                raise RuntimeError(f"not done in {PATIENCE} s; {error}") from None
            if cgroup.kills:  # The error of the other rank is only a consequence, so it is not shown.
                raise RuntimeError(f"{cgroup.kills} ended by the kernel") from None
        raise
    finally:
        if cgroup is not None and watch is not None:
            watch.cancel()
            cgroup.close()
    return {"mib": resident, "losses": [loss for answer in trained for loss in answer["losses"]]}


def resident_peak(pair: Pair) -> float:
    """Return the peak resident memory of the rank with more memory, in MiB."""
    return max(_high_water(process) for process in pair.processes)


def _high_water(process: subprocess.Popen[str]) -> float:
    """Return the peak resident memory in MiB of the child of a rank's process. The child does the training."""
    (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    lines = Path(f"/proc/{child}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM:"))


def limited(shape: Mapping[str, int], ways: Mapping[str, Any], steps: int, limit: int) -> dict[str, str]:
    """Return whether each variant finishes in a cgroup of ``limit`` bytes for both ranks, as text by variant."""
    outcome = {}
    for name, given in ways.items():
        try:
            peak(shape, given, steps, limit)
            outcome[name] = "finished"
        except RuntimeError as error:
            outcome[name] = f"did not finish ({error})"
    return outcome


def side_by_side(
    python: str, shape: Mapping[str, int], given: Mapping[str, Any], rounds: int, steps: int
) -> tuple[Spread, dict[str, float]]:
    """Return the ratio of the step time of zero_runtime to that of DeepSpeed, and both step times in ms."""
    with running(python, PEER) as theirs, running(sys.executable, OURS) as ours:
        pairs = {PEER: theirs, OURS: ours}
        for pair in pairs.values():
            begin(pair, shape, given)
        blocks: dict[str, list[float]] = {name: [] for name in pairs}
        for number in range(-1, rounds):
            names = list(pairs) if number % 2 else list(reversed(pairs))
            for name in names:
                answers = pairs[name].ask({"steps": steps})
                if number >= 0:
                    blocks[name].append(1e3 * max(median(answer["seconds"]) for answer in answers))
        for pair in pairs.values():
            pair.tell({"end": True})
    ratios = [mine / its for mine, its in zip(blocks[OURS], blocks[PEER], strict=True)]
    return median_interval(ratios), {name: median(values) for name, values in blocks.items()}


def parameters(shape: Mapping[str, int]) -> int:
    """Return the number of parameters of the example's GPT."""
    import importlib.util

    import torch

    spec = importlib.util.spec_from_file_location("train_gpt", ROOT / "examples" / "train_gpt.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    with torch.device("meta"):
        return sum(each.numel() for each in example.GPT(**shape).parameters())


def main() -> None:
    """Measure, print the table and write it."""
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument(
        "--deepspeed-python", help=f"the Python of an environment that has DeepSpeed {DEEPSPEED}"
    )
    parser.add_argument("--part", action="append", choices=PARTS, help="repeatable; default: all")
    parser.add_argument(
        "--torch-adam",
        action="store_true",
        help="torch's AdamW in DeepSpeed too, whose own has to be compiled",
    )
    parser.add_argument("--path", default=".", help="folder for the files, on a disk (default: this one)")
    parser.add_argument("--model", choices=list(SHAPES), default="100 M")
    parser.add_argument("--stage", type=int, choices=(1, 2, 3), default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=2, help="of a block")
    args = parser.parse_args()
    shape = SHAPES[args.model]
    with tempfile.TemporaryDirectory(prefix="offload-", dir=args.path) as path:
        measure(args, shape, path)


def measure(args: Any, shape: Mapping[str, int], path: str) -> None:
    """Measure all figures of one model and publish them."""
    count = parameters(shape)
    ways = {device: config(args.stage, device, path, args.torch_adam) for device in ("none", "cpu", "nvme")}
    figures: dict[str, Any] = {"parameters": count, "state_bytes": STATE_BYTES * count, "stage": args.stage}
    rows: list[list[str]] = []
    parts = args.part or PARTS
    if {"memory", "limit"} & set(parts):
        rows += memory(shape, ways, args.steps, figures)
    if "limit" in parts:
        rows += limits(shape, ways, args.steps, figures)
    if "time" in parts:
        python = deepspeed_python(args.deepspeed_python)
        # DeepSpeed 0.19.8 writes no files below stage 3. At those stages it treats nvme as cpu.
        for name, stage in {("cpu", args.stage): None, ("cpu", 3): None, ("nvme", 3): None}:
            given = config(stage, name, path, args.torch_adam)
            rows.append(compare(python, f"{name}, stage {stage}", shape, given, args, figures))
    publish(
        args,
        f"Offload: {count / 1e6:.0f} M parameters in bf16, {STATE_BYTES * count / MIB:.0f} MiB of masters and states on "
        f"{RANKS} ranks, stage {args.stage}",
        ["what", "measured", "ratio"],
        rows,
        figures,
    )


def memory(
    shape: Mapping[str, int], ways: Mapping[str, Any], steps: int, figures: dict[str, Any]
) -> Iterator[list[str]]:
    """Yield the rows about the memory peaks of the three variants."""
    peaks = {name: peak(shape, given, steps) for name, given in ways.items()}
    figures["peak_mib"] = {name: each["mib"] for name, each in peaks.items()}
    figures["same_losses"] = all(each["losses"] == peaks["none"]["losses"] for each in peaks.values())
    for name, each in peaks.items():
        share = each["mib"] / peaks["none"]["mib"]
        yield [f"peak RSS of a rank, {name}", f"{each['mib']:.0f} MiB", f"{share:.2f} of none"]
    yield ["losses in the three ways", "equal to the bit" if figures["same_losses"] else "DIFFERENT", ""]


def limits(
    shape: Mapping[str, int], ways: Mapping[str, Any], steps: int, figures: dict[str, Any]
) -> Iterator[list[str]]:
    """Yield the rows about runs in a cgroup whose limit is halfway between two peaks."""
    if os.geteuid() != 0 or not (CGROUP / "memory.limit_in_bytes").exists():
        yield ["cgroup", "not measured: it needs root and a memory controller of version 1", ""]
        return
    peaks = figures["peak_mib"]
    limit = int(RANKS * MIB * (peaks["none"] + peaks["nvme"]) / 2)
    outcome = limited(shape, {name: ways[name] for name in ("nvme", "none")}, steps, limit)
    figures["limit_bytes"], figures["under_limit"] = limit, outcome
    for name, text in outcome.items():
        yield [f"cgroup of {limit / MIB:.0f} MiB for both ranks, {name}", text, ""]


def compare(
    python: str,
    name: str,
    shape: Mapping[str, int],
    given: Mapping[str, Any],
    args: Any,
    figures: dict[str, Any],
) -> list[str]:
    """Return a row about the step times with one kind of offload."""
    try:
        ratio, times = side_by_side(python, shape, given, args.rounds, args.steps)
    except RuntimeError as error:
        figures[f"step_{name}"] = str(error)
        return [f"step time, {name}", f"not measured: {error}", ""]
    figures[f"step_{name}"] = {"ms": times, "ratio": ratio}
    both = " / ".join(f"{times[runtime]:.0f}" for runtime in (OURS, PEER))
    return [f"step time, {name}, ms: here / DeepSpeed", both, ratio.text()]


if __name__ == "__main__":
    main()

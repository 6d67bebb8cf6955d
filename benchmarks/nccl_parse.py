"""Measures how fast commprof, grep and public scripts read NCCL logs, and checks their counts.

    python benchmarks/nccl_parse.py [--size 1000000000] [--rounds 5] [--peer PATH]... [--limit 600] [--work DIR]

benchmarks/nccl_log.py generates two logs. One log contains all operations. The other log contains only AllReduce and
Broadcast, which every public script supports. Each reader runs on each log as a complete command, and the readers take
turns in each round. The benchmark compares the output of each reader with the known content of the log. Memory is
measured in a first round that is not timed, because sampling the memory takes time.

``--peer`` is a checkout of a parser with the command line of nccl-rccl-parser (``rccl_nccl_parser.py``). The benchmark
downloads nothing. A peer that does not finish runs again on a tenth of the log, and then again on a tenth of that.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import pyarrow.parquet as pq
from nccl_log import Truth, generate
from results import Spread, arguments, publish, spread

SAMPLE_SECONDS = 0.1
SMALLEST_SHARE = 1000
# NCCL's name of each operation -> commprof's name
NAMES = {
    "AllReduce": "all_reduce",
    "AllGather": "all_gather",
    "ReduceScatter": "reduce_scatter",
    "Reduce": "reduce",
    "Broadcast": "broadcast",
    "AlltoAll": "all_to_all",
    "Send": "send",
    "Recv": "recv",
}
# NCCL's name of each operation -> the program of rccl-tests that nccl-rccl-parser writes for the operation
PROGRAMS = {
    "AllReduce": "all_reduce_perf",
    "AllGather": "all_gather_perf",
    "ReduceScatter": "reduce_scatter_perf",
    "Reduce": "reduce_perf",
    "Broadcast": "broadcast_perf",
    "AlltoAll": "alltoall_perf",
    "Send": "sendrecv_perf",
    "Recv": "sendrecv_perf",
}


@dataclass(frozen=True)
class Log:
    """A generated log and its exact content."""

    name: str
    path: Path
    truth: Truth


@dataclass(frozen=True)
class Reader:
    """A command that reads a log.

    Attributes:
        fault: A function that checks the output and returns a description of its errors, or an empty string.
    """

    name: str
    command: Callable[[Path, Path], list[str]]
    fault: Callable[[str, Path, Truth], str]


@dataclass
class Outcome:
    """The results of all runs of one reader on one log."""

    num_bytes: int
    fault: str = ""
    peak_bytes: int = 0
    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)


def grep() -> Reader:
    """Return a reader for grep. It is the lower bound: it reads the bytes once, counts lines and stores nothing."""

    def fault(output: str, out: Path, truth: Truth) -> str:
        found, expected = int(output), truth.of_kind("coll")
        return "" if found == expected else f"{found} lines for {expected}"

    return Reader("LC_ALL=C grep -c opCount", lambda log, out: ["grep", "-c", "opCount", str(log)], fault)


def commprof() -> Reader:
    """Return a reader for the complete command of commprof, which writes all tables."""
    program = Path(sys.executable).with_name("commprof")
    return Reader(
        "commprof nccl parse --out",
        lambda log, out: [str(program), "nccl", "parse", str(log), "--out", str(out)],
        lambda output, out, truth: table_fault(out / "nccl_ops.parquet", truth),
    )


def table_fault(path: Path, truth: Truth) -> str:
    """Compare ``nccl_ops`` with the truth; return a description of the differences, or an empty string.

    The lines, printed bytes and message bytes are compared by operation and kind.
    """
    table = pq.read_table(path, columns=["op", "kind", "state", "bytes", "message_bytes"])
    sums = table.group_by(["op", "kind", "state"]).aggregate(
        [("bytes", "count"), ("bytes", "sum"), ("message_bytes", "sum")]
    )
    found = {
        (row["op"], row["kind"], row["state"]): (
            row["bytes_count"],
            row["bytes_sum"],
            row["message_bytes_sum"],
        )
        for row in sums.to_pylist()
    }
    expected = {}
    for name, lines in truth.operations.items():
        op, kind = name.split()
        expected[NAMES[op], kind, "whole"] = (lines, truth.printed_bytes[name], truth.message_bytes[name])
    wrong = [key for key in found.keys() | expected.keys() if found.get(key) != expected.get(key)]
    return f"wrong: {', '.join(' '.join(key) for key in sorted(wrong))}" if wrong else ""


def peer(checkout: Path) -> Reader:
    """Return a reader for a public script like nccl-rccl-parser, which writes one shell command per COLL line."""
    script = checkout / "rccl_nccl_parser.py"
    if not script.is_file():
        raise SystemExit(
            f"--peer {checkout} holds no rccl_nccl_parser.py; expected a checkout of nccl-rccl-parser"
        )

    def fault(output: str, out: Path, truth: Truth) -> str:
        expected: Counter[str] = Counter()
        for name, lines in truth.operations.items():
            op, kind = name.split()
            expected[PROGRAMS[op]] += lines * (kind == "coll")
        with (out / "commands.sh").open() as commands:
            found = Counter(command.split(" ", 1)[0].rpartition("/")[2] for command in commands)
        wrong = sorted(key for key in found.keys() | expected.keys() if found[key] != expected[key])
        return f"wrong: {', '.join(wrong)}" if wrong else ""

    return Reader(
        f"peer {checkout.resolve().name}",
        lambda log, out: [
            sys.executable, str(script.resolve()), "--nccl-debug-log", str(log),
            "--output-script-name", str(out / "commands"),
        ],
        fault,
    )  # fmt: skip


class Memory(threading.Thread):
    """Samples the memory of a process and all its descendants. Shared pages count once (PSS)."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.pid = pid
        self.peak_bytes = 0
        self.ended = threading.Event()

    def run(self) -> None:
        """Sample the memory until :attr:`ended` is set."""
        while not self.ended.wait(SAMPLE_SECONDS):
            self.peak_bytes = max(self.peak_bytes, sum(map(_pss, _tree(self.pid))))


def _tree(pid: int) -> list[int]:
    found = [pid]
    for parent in found:
        try:
            for children in Path(f"/proc/{parent}/task").glob("*/children"):
                found.extend(map(int, children.read_text().split()))
        except OSError:
            continue
    return found


def _pss(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def run(reader: Reader, log: Log, outcome: Outcome, limit: float, *, timed: bool) -> None:
    """Run ``reader`` once, and add its times or its memory, and its fault, to ``outcome``."""
    out = Path(tempfile.mkdtemp(dir=log.path.parent))
    begin = time.perf_counter()
    with (out / "stdout").open("w+") as stdout, (out / "stderr").open("w+") as stderr:
        process = subprocess.Popen(
            reader.command(log.path, out),
            stdout=stdout,
            stderr=stderr,
            env=os.environ | {"LC_ALL": "C" if reader.name.startswith("LC_ALL=C") else "C.UTF-8"},
        )
        memory = Memory(process.pid)
        killer = threading.Timer(limit, process.kill)
        killer.start()
        if not timed:
            memory.start()
        _, status, usage = os.wait4(process.pid, 0)
        wall = time.perf_counter() - begin
        killer.cancel()
        memory.ended.set()
        process.returncode = os.waitstatus_to_exitcode(status)
        stdout.seek(0)
        stderr.seek(0)
        if wall >= limit:
            outcome.fault = f"not done after {limit:.0f} s"
        elif process.returncode:
            said = stderr.read().strip().splitlines() or [f"exit code {process.returncode}"]
            outcome.fault = said[-1].strip()[:60]
        else:
            outcome.fault = reader.fault(stdout.read(), out, log.truth)
    outcome.peak_bytes = max(outcome.peak_bytes, memory.peak_bytes)
    if timed:
        outcome.wall.append(wall)
        outcome.cpu.append(usage.ru_utime + usage.ru_stime)
    shutil.rmtree(out)


def measure(readers: Sequence[Reader], log: Log, rounds: int, limit: float) -> dict[str, Outcome]:
    """Run all readers on one log.

    The first round measures memory. The timed rounds follow, and each runs all readers that have no fault so far.
    """
    outcomes = {reader.name: Outcome(log.truth.bytes) for reader in readers}
    for reader in readers:
        run(reader, log, outcomes[reader.name], limit, timed=False)
    for _ in range(rounds):
        for reader in readers:
            outcome = outcomes[reader.name]
            if not outcome.fault:
                run(reader, log, outcome, limit, timed=True)
    return outcomes


def main() -> None:
    """Generate the logs, run and compare the readers, print the table and write it."""
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=1_000_000_000, help="bytes of each log")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=16)
    parser.add_argument(
        "--peer", type=Path, action="append", default=[], help="a checkout of nccl-rccl-parser"
    )
    parser.add_argument("--limit", type=float, default=600, help="seconds that one run may take")
    parser.add_argument("--work", type=Path, help="where the logs go while it runs")
    args = parser.parse_args()
    readers = [grep(), commprof(), *map(peer, args.peer)]
    rows: list[list[str]] = []
    figures: dict[str, Any] = {"size": args.size, "ranks": args.ranks}
    for name, operations in (
        ("all operations", None),
        ("AllReduce and Broadcast", frozenset({"AllReduce", "Broadcast"})),
    ):
        size, waiting, first = args.size, readers, True
        while waiting and size * SMALLEST_SHARE >= args.size:
            with tempfile.TemporaryDirectory(dir=args.work) as folder:
                path = Path(folder) / "nccl.log"
                log = Log(name, path, generate(path, size, args.ranks, names=operations))
                # A smaller log is for the readers that did not finish. The first two readers run too, for comparison.
                chosen = readers if first else [*readers[:2], *waiting]
                outcomes = measure(chosen, log, args.rounds, args.limit)
            rows.extend(_row(name, reader.name, outcomes) for reader in chosen)
            figures[f"{name}, {size}"] = {
                "operation_lines": log.truth.operation_lines,
                "lines": log.truth.lines,
                "readers": {reader.name: _figures(reader.name, outcomes) for reader in chosen},
            }
            waiting = [reader for reader in waiting if "not done" in outcomes[reader.name].fault]
            size, first = size // 10, False
    publish(
        args,
        "NCCL log to tables, whole command: median (minimum to maximum)",
        ["log", "MB", "reader", "wall, s", "CPU, s", "MB/s", "wall, grep = 1", "peak PSS, MiB", "counts"],
        rows,
        figures,
    )


def _ratio(name: str, outcomes: dict[str, Outcome]) -> Spread | None:
    """Return the wall time of a reader, divided by grep's wall time in the same round."""
    floor = next(iter(outcomes.values()))
    pairs = [wall / base for wall, base in zip(outcomes[name].wall, floor.wall, strict=False)]
    return spread(pairs) if pairs else None


def _row(log: str, name: str, outcomes: dict[str, Outcome]) -> list[str]:
    outcome = outcomes[name]
    size = f"{outcome.num_bytes / 1e6:,.0f}"
    peak = f"{outcome.peak_bytes / 2**20:.0f}"
    ratio = _ratio(name, outcomes)
    if outcome.fault or ratio is None:
        return [log, size, name, "-", "-", "-", "-", peak, outcome.fault]
    wall = spread(outcome.wall)
    rate = f"{outcome.num_bytes / 1e6 / wall.median:.0f}"
    return [log, size, name, wall.text(), spread(outcome.cpu).text(), rate, ratio.text(1), peak, "right"]


def _figures(name: str, outcomes: dict[str, Outcome]) -> dict[str, Any]:
    outcome = outcomes[name]
    if outcome.fault or not outcome.wall:
        return {"fault": outcome.fault, "peak_bytes": outcome.peak_bytes}
    return {
        "wall_seconds": spread(outcome.wall),
        "cpu_seconds": spread(outcome.cpu),
        "wall_over_grep": _ratio(name, outcomes),
        "bytes": outcome.num_bytes,
        "peak_bytes": outcome.peak_bytes,
    }


if __name__ == "__main__":
    main()

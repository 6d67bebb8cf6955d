"""Measures the time that NCCL's log adds to one all_reduce, by setting of the log.

The benchmark needs NCCL and a GPU. Without them, it prints a message and measures nothing. The log cannot be switched
on or off in a running process. Each setting therefore runs in a separate process with a communicator of one rank. The
settings take turns, and the figure is the median over the rounds. The benchmark measures the host time per call of
calls that are queued without waiting for them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from results import arguments, median_interval, publish

SETTINGS = {
    "no log": {},
    "INFO INIT,COLL": {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,COLL"},
    "TRACE INIT,COLL,CALL,TUNING": {"NCCL_DEBUG": "TRACE", "NCCL_DEBUG_SUBSYS": "INIT,COLL,CALL,TUNING"},
}
CALLS = """
import sys, time, torch, torch.distributed as dist

dist.init_process_group("nccl", init_method=sys.argv[1], rank=0, world_size=1)
tensor = torch.ones(1024, device="cuda")
for _ in range(100):
    dist.all_reduce(tensor)
torch.cuda.synchronize()
begin = time.perf_counter_ns()
for _ in range(int(sys.argv[2])):
    dist.all_reduce(tensor)
print((time.perf_counter_ns() - begin) / int(sys.argv[2]))
dist.destroy_process_group()
"""


def call_ns(settings: dict[str, str], calls: int) -> tuple[float, float]:
    """Return the host time of one call in ns, and the bytes of the log per call."""
    with tempfile.TemporaryDirectory() as directory:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("NCCL_")}
        log = {"NCCL_DEBUG_FILE": f"{directory}/%h.%p.log"} if settings else {}
        done = subprocess.run(
            [sys.executable, "-c", CALLS, f"file://{directory}/store", str(calls)],
            env=kept | settings | log, capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        if done.returncode:
            raise SystemExit(f"the program failed: {done.stderr.strip()[-500:]}")
        size = sum(file.stat().st_size for file in Path(directory).glob("*.log"))
        return float(done.stdout.split()[-1]), size / (calls + 100)


def main() -> None:
    """Measure, print the table and write it."""
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--calls", type=int, default=20_000)
    options = parser.parse_args()

    import torch

    if not torch.cuda.is_available() or not torch.distributed.is_nccl_available():
        print("not measured: this needs NCCL and a GPU, and here is none. Nothing was written")
        return
    measured: dict[str, list[tuple[float, float]]] = {name: [] for name in SETTINGS}
    for _ in range(options.rounds):
        for name, settings in SETTINGS.items():
            measured[name].append(call_ns(settings, options.calls))
    figures = {name: median_interval([ns for ns, _ in pairs]) for name, pairs in measured.items()}
    publish(
        options,
        "Host time of one all_reduce (NCCL, one rank) by its log, nanoseconds: median (95 % interval)",
        ["log", "ns per call", "log bytes per call"],
        [[name, figure.text(0), f"{measured[name][-1][1]:.0f}"] for name, figure in figures.items()],
        figures,
    )


if __name__ == "__main__":
    main()

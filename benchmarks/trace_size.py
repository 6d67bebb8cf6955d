"""Measures bytes on disk per record after finalizing, and growth of resident memory, for a realistic trace.

The benchmark uses one rank with a fake process group. Each step sends as many tagged bucket reductions, norms and
gathers as a ZeRO-2 step of a 48-layer model, from several call sites and with real times. Memory is read 100 times. The
growth is the peak in the second half minus the peak in the first half. It is measured once without recording, and then
with recording. A second trace consists of all_to_all_single calls among eight ranks with different splits in each call,
as in a mixture of experts.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch
import torch.distributed as dist
from results import arguments, publish
from torch.testing._internal.distributed.fake_pg import FakeStore

from commprof import hooks

READINGS = 100
RANKS = 8
MOST_ROWS = 200  # the upper limit of the rows that a call sends to one rank
COLUMNS = 64


def resident_bytes() -> int:
    """Return the resident memory of this process in bytes, including mapped files."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def growth(resident: list[int]) -> int:
    """Return the difference between the peak in the second half and the peak in the first half, in bytes."""
    half = len(resident) // 2
    return max(resident[half:]) - max(resident[:half])


def train(steps: int, buckets: int) -> tuple[int, list[int]]:
    """Issue the collectives of ``steps`` steps; return their number, and the readings of resident bytes."""
    sizes = [8192 - 64 * (number % 7) for number in range(buckets)]
    tensors = [torch.zeros(size) for size in sizes]
    norm, flag = torch.zeros(1), torch.zeros(1, dtype=torch.uint8)
    issued = 0
    resident = []
    for step in range(steps):
        hooks.step(step)
        hooks.phase("backward")
        for number, tensor in enumerate(tensors):
            names = tuple(
                f"blocks.{number}.{part}.weight" for part in ("qkv", "projection", "expand", "contract")
            )
            with hooks.tag("gradient_reduce", number, number % 8, names, None, tensor.nbytes):
                dist.reduce(tensor, number % 8)
            issued += 1
        hooks.phase("optimizer")
        with hooks.tag("overflow_check"):
            dist.all_reduce(flag, dist.ReduceOp.MAX)
        with hooks.tag("gradient_norm"):
            dist.all_reduce(norm)
        with hooks.tag("parameter_gather"):
            dist.all_reduce(tensors[0])
        issued += 3
        hooks.metric("loss", 1.0 / (step + 1))
        if (step + 1) * READINGS // steps > len(resident):
            resident.append(resident_bytes())
    return issued, resident


def exchange(calls: int) -> tuple[int, list[int]]:
    """Issue ``calls`` exchanges of random rows; return their number, and the readings of resident bytes."""
    chance = random.Random(1)
    given = torch.zeros(RANKS * MOST_ROWS, COLUMNS)
    taken = torch.zeros_like(given)
    resident = []
    for number in range(calls):
        sent, received = ([chance.randrange(MOST_ROWS) for _ in range(RANKS)] for _ in range(2))
        dist.all_to_all_single(taken[: sum(received)], given[: sum(sent)], received, sent)
        if (number + 1) * READINGS // calls > len(resident):
            resident.append(resident_bytes())
    return calls, resident


def measure(issue: Callable[[], tuple[int, list[int]]]) -> dict[str, float]:
    """Call ``issue`` once without and once with recording, and return the figures of the trace."""
    from commprof.trace.reader import open_run

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        _, unrecorded = issue()
        hooks.attach(str(out))
        issued, resident = issue()
        hooks.detach()
        raw = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
        begin = time.perf_counter()
        run = open_run(out)
        seconds = time.perf_counter() - begin
        recorded = run.table("collectives").num_rows
        final = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    if recorded != issued:
        raise SystemExit(f"{issued} collectives were issued and {recorded} recorded")
    return {
        "records": recorded,
        "raw_bytes_per_record": raw / recorded,
        "final_bytes_per_record": final / recorded,
        "finalise_seconds": seconds,
        "resident_growth_bytes": growth(resident),
        "resident_growth_bytes_unrecorded": growth(unrecorded),
    }


def main() -> None:
    """Measure, print the table and write it."""
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--buckets", type=int, default=97)
    parser.add_argument("--exchanges", type=int, default=100_000, help="with other splits in each call")
    args = parser.parse_args()
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    figures = {
        "training": measure(lambda: train(args.records // (args.buckets + 3), args.buckets)),
        "splits that never repeat, 8 ranks": measure(lambda: exchange(args.exchanges)),
    }
    dist.destroy_process_group()
    publish(
        args,
        "Trace size, whole run directory, and memory of the rank",
        [
            "trace",
            "records",
            "bytes per record while running",
            "bytes per record after finalising",
            "seconds to finalise",
            "resident memory, growth in KiB: recorded (not recorded)",
        ],
        [
            [
                name,
                f"{found['records']:,}",
                f"{found['raw_bytes_per_record']:.1f}",
                f"{found['final_bytes_per_record']:.1f}",
                f"{found['finalise_seconds']:.2f}",
                f"{found['resident_growth_bytes'] / 1024:.0f} ({found['resident_growth_bytes_unrecorded'] / 1024:.0f})",
            ]
            for name, found in figures.items()
        ],
        figures,
    )


if __name__ == "__main__":
    main()

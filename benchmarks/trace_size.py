"""Bytes on disk per record after finalising, and growth of resident memory, for a trace shaped like a training run.

One rank, a fake process group: each step sends as many tagged bucket reductions, norms and gathers as a ZeRO-2 step of a
48-layer model would, from several call sites, with the times that the machine really gives. Memory is read 100 times; its
growth is what its peak in the second half has beyond that in the first: recorded, and before that not recorded.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch
import torch.distributed as dist
from results import arguments, publish
from torch.testing._internal.distributed.fake_pg import FakeStore

from commprof import hooks

READINGS = 100


def resident_bytes() -> int:
    """Resident memory of this process, mapped files included."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def growth(resident: list[int]) -> int:
    """From the peak in the first half to that in the second."""
    half = len(resident) // 2
    return max(resident[half:]) - max(resident[:half])


def train(steps: int, buckets: int) -> tuple[int, list[int]]:
    """Issue the collectives of ``steps`` steps; returns how many, and the resident bytes meanwhile."""
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


def main() -> None:
    """Measure, print, write."""
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--buckets", type=int, default=97)
    args = parser.parse_args()
    from commprof.trace.reader import open_run

    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        steps = args.records // (args.buckets + 3)
        _, unrecorded = train(steps, args.buckets)
        hooks.attach(str(out))
        issued, resident = train(steps, args.buckets)
        hooks.detach()
        raw = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
        begin = time.perf_counter()
        run = open_run(out)
        seconds = time.perf_counter() - begin
        recorded = run.table("collectives").num_rows
        final = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    dist.destroy_process_group()
    if recorded != issued:
        raise SystemExit(f"{issued} collectives were issued and {recorded} recorded")
    figures = {
        "records": recorded,
        "raw_bytes_per_record": raw / recorded,
        "final_bytes_per_record": final / recorded,
        "finalise_seconds": seconds,
        "resident_growth_bytes": growth(resident),
        "resident_growth_bytes_unrecorded": growth(unrecorded),
    }
    publish(
        args,
        "Trace size, whole run directory, and memory of the rank",
        [
            "records",
            "bytes per record while running",
            "bytes per record after finalising",
            "seconds to finalise",
            "resident memory, growth in KiB: recorded (not recorded)",
        ],
        [
            [
                f"{recorded:,}",
                f"{raw / recorded:.1f}",
                f"{final / recorded:.1f}",
                f"{seconds:.2f}",
                f"{growth(resident) / 1024:.0f} ({growth(unrecorded) / 1024:.0f})",
            ]
        ],
        figures,
    )


if __name__ == "__main__":
    main()

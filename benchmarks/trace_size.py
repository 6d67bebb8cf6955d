"""Bytes on disk per record after finalising, for a trace shaped like a training run.

One rank, a fake process group: each step sends as many tagged bucket reductions, norms and gathers as a ZeRO-2 step of a
48-layer model would, from several call sites, with the times that the machine really gives.
"""

from __future__ import annotations

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


def train(steps: int, buckets: int) -> int:
    """Issue the collectives of ``steps`` steps; returns how many."""
    sizes = [8192 - 64 * (number % 7) for number in range(buckets)]
    tensors = [torch.zeros(size) for size in sizes]
    norm, flag = torch.zeros(1), torch.zeros(1, dtype=torch.uint8)
    issued = 0
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
    return issued


def main() -> None:
    """Measure, print, write."""
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--records", type=int, default=100_000)
    parser.add_argument("--buckets", type=int, default=97)
    args = parser.parse_args()
    from commprof.trace.reader import open_run

    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        hooks.attach(str(out))
        issued = train(args.records // (args.buckets + 3), args.buckets)
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
    }
    publish(
        args,
        "Trace size, whole run directory",
        [
            "records",
            "bytes per record while running",
            "bytes per record after finalising",
            "seconds to finalise",
        ],
        [[f"{recorded:,}", f"{raw / recorded:.1f}", f"{final / recorded:.1f}", f"{seconds:.2f}"]],
        figures,
    )


if __name__ == "__main__":
    main()

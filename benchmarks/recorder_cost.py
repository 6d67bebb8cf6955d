"""CPU time that recording adds to one collective, on a fake process group that sends nothing.

Thread CPU time, in paired blocks: off, on, off, on ... in one process; each pair gives one difference. The default state:
all columns, call site, tag, the wait wrapper. Peers, in the same run: torch.profiler (plain, and with shapes and stacks).
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch
import torch.distributed as dist
from results import arguments, median_interval, publish
from torch.testing._internal.distributed.fake_pg import FakeStore

from commprof import hooks


def block(call: Callable[[], object], calls: int) -> float:
    """Thread CPU nanoseconds per call."""
    begin = time.thread_time_ns()
    for _ in range(calls):
        call()
    return (time.thread_time_ns() - begin) / calls


def recorded(call: Callable[[], object], calls: int, out: str) -> float:
    """The same while commprof records into ``out``."""
    hooks.attach(out)
    try:
        if not hooks.recording():
            raise SystemExit("recording did not start; see the message above")
        hooks.step(0)
        for _ in range(50):  # the first calls intern their strings
            call()
        return block(call, calls)
    finally:
        hooks.detach()


def profiled(call: Callable[[], object], calls: int, **options: bool) -> float:
    """The same under torch.profiler."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], **options):
        for _ in range(50):
            call()
        return block(call, calls)


def main() -> None:
    """Measure, print, write."""
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--calls", type=int, default=2000)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    small, bucket = torch.zeros(8), torch.zeros(1024)
    gathered = torch.zeros(4 * 1024)
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    tag = hooks.tag(
        "gradient_reduce", bucket=3, owner=1, parameters=("a.weight", "a.bias"), bucket_bytes=4096
    )
    cases: dict[str, tuple[Callable[[], object], object]] = {
        "all_reduce, sync": (lambda: dist.all_reduce(small), nullcontext()),
        "all_reduce, sync, tagged": (lambda: dist.all_reduce(small), tag),
        "all_reduce, async and wait": (lambda: dist.all_reduce(small, async_op=True).wait(), nullcontext()),
        "reduce to a rank, tagged": (lambda: dist.reduce(bucket, 2), tag),
        "all_gather of a buffer": (lambda: gather(gathered, bucket), nullcontext()),
    }
    rows, figures = [], {}
    with tempfile.TemporaryDirectory() as folder:
        for name, (call, context) in cases.items():
            bases, added = [], []
            with context:
                block(call, args.calls)
                for number in range(args.rounds):
                    off = block(call, args.calls)
                    on = recorded(call, args.calls, f"{folder}/{len(rows)}-{number}")
                    bases.append((off + block(call, args.calls)) / 2)
                    added.append((on - bases[-1]) / 1000)
            cost, base = median_interval(added), median_interval([value / 1000 for value in bases])
            rows.append(["commprof, default", name, base.text(), cost.text()])
            figures[name] = {"base_us": base, "added_us": cost}
        for peer, options in (
            ("torch.profiler, plain", {}),
            ("torch.profiler, shapes and stacks", {"record_shapes": True, "with_stack": True}),
        ):
            call = cases["all_reduce, sync"][0]
            added, bases = [], []
            for _ in range(max(3, args.rounds // 3)):
                off = block(call, args.calls)
                on = profiled(call, args.calls, **options)
                bases.append(off)
                added.append((on - off) / 1000)
            cost, base = median_interval(added), median_interval([value / 1000 for value in bases])
            rows.append([peer, "all_reduce, sync", base.text(), cost.text()])
            figures[peer] = {"base_us": base, "added_us": cost}
    dist.destroy_process_group()
    publish(
        args,
        "CPU time added per collective (fake process group), microseconds: median (95 % interval)",
        ["recorder", "call", "call alone", "added"],
        rows,
        figures,
    )


if __name__ == "__main__":
    main()

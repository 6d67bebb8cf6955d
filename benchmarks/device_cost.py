"""Measures the cost of recording on a GPU: host time of one NCCL call, and time of a training step.

The benchmark needs NCCL and a GPU. It uses one process with one rank on one GPU. Blocks alternate: recorder off, on,
off. Each round gives one difference or one ratio for each case. A block of calls does not fill the queue of the
device, so that the host never waits for the device. A block of steps ends with a synchronization and is timed as a
whole. torch.profiler (CUPTI) is measured for comparison in the same rounds.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from results import arguments, median_interval, publish

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "train_gpt.py"
WIDTH, LAYERS, HEADS, CONTEXT, VOCABULARY, BATCH = 1024, 12, 16, 512, 256, 8
Recorder = Callable[[Path], AbstractContextManager[object]]


@contextlib.contextmanager
def commprof_on(folder: Path, **options: Any) -> Iterator[None]:
    """Record with commprof into ``folder``."""
    from commprof import hooks

    hooks.attach(str(folder), quiet=True, **options)
    try:
        yield
    finally:
        hooks.detach()


@contextlib.contextmanager
def profiler_on(folder: Path) -> Iterator[None]:
    """Profile the CPU and the GPU, and discard the result."""
    import torch

    kinds = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[kinds.CPU, kinds.CUDA]):
        yield


RECORDERS: dict[str, Recorder] = {
    "commprof": commprof_on,
    "commprof, no events": lambda folder: commprof_on(folder, completion_every=0),
    "torch.profiler": profiler_on,
}


def call_us(call: Callable[[], object], calls: int) -> float:
    """Return the host time of one call, in us. The device is idle when the timing begins."""
    import torch

    for _ in range(20):
        call()
    torch.cuda.synchronize()
    begin = time.perf_counter_ns()
    for _ in range(calls):
        call()
    taken = time.perf_counter_ns() - begin
    torch.cuda.synchronize()
    return taken / calls / 1000


def make_step() -> Callable[[], None]:
    """Return a function that runs one training step of a 152 M GPT with zero_runtime at stage 2."""
    import torch

    import zero_runtime

    spec = importlib.util.spec_from_file_location("train_gpt", EXAMPLE)
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    torch.manual_seed(0)
    model = example.GPT(width=WIDTH, layers=LAYERS, heads=HEADS, context=CONTEXT, vocabulary=VOCABULARY)
    config = json.loads(EXAMPLE.with_name("ds_zero2.json").read_text())
    config |= {"train_micro_batch_size_per_gpu": BATCH, "bf16": {"enabled": True}}
    config.pop("train_batch_size", None)
    engine, *_ = zero_runtime.initialize(model=model, model_parameters=model.parameters(), config=config)
    tokens = torch.randint(0, VOCABULARY, (2, BATCH, CONTEXT), device="cuda")

    def step() -> None:
        loss = engine(*tokens)
        engine.backward(loss)
        engine.step()

    return step


def make_short_step(program: str) -> Callable[[], None]:
    """Return a function that runs one host-bound training step: 24 layers of 256 x 256 with Adam.

    Args:
        program: The data parallelism of torch, DDP or FSDP2.
    """
    import torch

    torch.manual_seed(0)
    layers = [torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU()) for _ in range(24)]
    model: Any = torch.nn.Sequential(*layers).cuda()
    if program == "DDP":
        model = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1)
    else:
        for layer in layers:
            torch.distributed.fsdp.fully_shard(layer)
        torch.distributed.fsdp.fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters(), 1e-4)
    rows = torch.randn(64, 256, device="cuda")

    def step() -> None:
        model(rows).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def step_ms(step: Callable[[], None], steps: int) -> float:
    """Return the time of a step in ms. The device has finished all steps when the timing ends."""
    import torch

    step()
    torch.cuda.synchronize()
    begin = time.perf_counter_ns()
    for _ in range(steps):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter_ns() - begin) / steps / 1e6


def measured(
    block: Callable[[], float], recorders: dict[str, Recorder], rounds: int
) -> dict[str, list[tuple[float, float]]]:
    """Return one pair per round for each recorder: the figure with the recorder off, and the figure with it on.

    The figure with the recorder off is the mean of the blocks before and after the block with the recorder on.
    """
    pairs: dict[str, list[tuple[float, float]]] = {name: [] for name in recorders}
    block()
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds):
            for name, recorder in recorders.items():
                before = block()
                with recorder(Path(folder, f"{number}-{name}")):
                    during = block()
                pairs[name].append(((before + block()) / 2, during))
    return pairs


def main() -> None:
    """Measure, print the table and write it."""
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--calls", type=int, default=300, help="in one block")
    parser.add_argument("--steps", type=int, default=10, help="in one block")
    parser.add_argument(
        "--recorder", action="append", choices=list(RECORDERS), help="repeatable; default: all"
    )
    parser.add_argument("--short-steps", type=int, default=30, help="in one block of a short step")
    parser.add_argument("--only-short", action="store_true", help="neither calls nor the step of the GPT")
    options = parser.parse_args()
    recorders = {name: RECORDERS[name] for name in options.recorder or RECORDERS}

    import torch
    import torch.distributed as dist

    if not torch.cuda.is_available() or not dist.is_nccl_available():
        print("not measured: this needs NCCL and a GPU, and here is none. Nothing was written")
        return
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    source, target = torch.ones(1024, device="cuda"), torch.ones(1024, device="cuda")

    def wait_for_gather() -> None:
        dist.all_gather_into_tensor(target, source, async_op=True).wait()

    calls = {
        "all_gather, sync": lambda: dist.all_gather_into_tensor(target, source),
        "all_gather, async and wait": wait_for_gather,
    }
    rows: list[list[str]] = []
    figures: dict[str, Any] = {"gpu": torch.cuda.get_device_name(0), "torch": torch.__version__}
    for call_name, call in {} if options.only_short else calls.items():
        pairs = measured(lambda call=call: call_us(call, options.calls), recorders, options.rounds)
        for name, values in pairs.items():
            alone = median_interval([off for off, _ in values])
            added = median_interval([on - off for off, on in values])
            rows.append([f"{call_name}, us", name, alone.text(2), added.text(2), ""])
            figures[f"{call_name}, {name}"] = {"alone": alone, "added": added}
    steps = {} if options.only_short else {"152 M, zero_runtime": (make_step, options.steps)}
    for program in ("DDP", "FSDP2"):
        steps[f"short, {program}"] = (functools.partial(make_short_step, program), options.short_steps)
    for step_name, (make, count) in steps.items():
        step = make()
        pairs = measured(lambda step=step, count=count: step_ms(step, count), recorders, options.rounds)
        for name, values in pairs.items():
            alone = median_interval([off for off, _ in values])
            added = median_interval([on - off for off, on in values])
            ratio = median_interval([on / off for off, on in values])
            rows.append([f"step ({step_name}), ms", name, alone.text(2), added.text(2), ratio.text(4)])
            figures[f"step, {step_name}, {name}"] = {"alone": alone, "added": added, "ratio": ratio}
    publish(
        options,
        "What recording adds on a GPU: median (95 % interval)",
        ["what", "recorder", "alone", "added", "ratio on/off"],
        rows,
        figures,
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

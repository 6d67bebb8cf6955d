"""The recorded exposed time of waits in C++ and on side streams agrees with the kernels that CUPTI saw.

The host runs ahead of the GPU, so within a step the default stream is idle only if it waits. Communication is
exposed while a kernel of NCCL runs and no kernel of the default stream runs.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from support.recording import record

pytestmark = [pytest.mark.ranks, pytest.mark.filterwarnings("ignore")]
WIDTH, LAYERS, ROWS, WARM, STEPS = 2048, 6, 2048, 2, 6
AHEAD = 60_000_000  # cycles for which the GPU is busy while the host queues a step
DEFAULT_STREAM = 7  # the number of the default stream in CUPTI


def layers() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        *[torch.nn.Linear(WIDTH, WIDTH, bias=False, device="cuda") for _ in range(LAYERS)]
    )


def ddp(**options) -> torch.nn.Module:
    return torch.nn.parallel.DistributedDataParallel(layers(), bucket_cap_mb=20, **options)


def fsdp2(**options) -> torch.nn.Module:
    from torch.distributed.fsdp import fully_shard

    net = layers()
    for layer in net:
        fully_shard(layer, **options)
    return fully_shard(net, **options)


def loop(net: torch.nn.Module) -> Callable[[], None]:
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-6)
    data = torch.randn(ROWS, WIDTH, device="cuda")

    def step() -> None:
        net(data).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def zero(**options) -> Callable[[], None]:
    import zero_runtime

    net = layers()
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "optimizer": {"type": "SGD", "params": {"lr": 1e-6}},
        "zero_optimization": {"reduce_bucket_size": 5_000_000, "allgather_bucket_size": 5_000_000, **options},
    }
    engine, *_ = zero_runtime.initialize(model=net, model_parameters=net.parameters(), config=config)
    data = torch.randn(ROWS, WIDTH, device="cuda")

    def step() -> None:
        engine.backward(engine(data).square().mean())
        engine.step()

    return step


def ahead(step: Callable[[], None]) -> None:
    """Queue a step while the GPU is busy with a different kernel."""
    torch.cuda.synchronize()
    torch.cuda._sleep(AHEAD)
    step()


CASES = {
    "ddp": lambda: loop(ddp()),
    "ddp, gradients in the buckets": lambda: loop(ddp(gradient_as_bucket_view=True)),
    "fsdp2": lambda: loop(fsdp2()),
    "fsdp2, no reshard": lambda: loop(fsdp2(reshard_after_forward=False)),
    "stage 1": lambda: zero(stage=1),
    "stage 2, overlap": lambda: zero(stage=2, overlap_comm=True),
    "stage 2, overlap, reduce_scatter": lambda: zero(
        stage=2, overlap_comm=True, gradient_reduction="reduce_scatter"
    ),
}


def union(intervals):
    merged = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([begin, end])
    return merged


def length(intervals) -> float:
    return sum(end - begin for begin, end in union(intervals))


def seen_by_cupti(profile) -> float:
    """Return the nanoseconds in which a kernel of NCCL ran and no kernel of the default stream ran."""
    events = [
        event
        for event in profile.profiler.kineto_results.events()
        if str(event.device_type()).endswith("CUDA")
    ]
    spans = [(event, (event.start_ns(), event.start_ns() + event.duration_ns())) for event in events]
    nccl = [span for event, span in spans if event.name().startswith("ncclDevKernel")]
    default = [
        span
        for event, span in spans
        if event.device_resource_id() == DEFAULT_STREAM and not event.name().startswith("ncclDevKernel")
    ]
    return length(nccl + default) - length(default)


def recorded(run, rank: int) -> tuple[float, float]:
    """Return the lower and upper bound of the recorded exposed time of the profiled steps, in ns."""
    rows, stalls = (
        [row for row in run.table(name).to_pylist() if row["rank"] == rank and row["step"] >= WARM]
        for name in ("collectives", "stalls")
    )
    known = [row for row in rows if row["exposed_ns"] is not None]
    least = length((row["device_end_ns"] - row["exposed_ns"], row["device_end_ns"]) for row in known)
    assert len(known) == len(rows) or stalls
    return least, least + sum(row["exposed_high_ns"] for row in stalls if row["device_end_ns"])


@pytest.mark.parametrize("case", CASES)
def test_exposed_time_is_what_cupti_shows(tmp_path, case):
    def body(rank, world):
        step = CASES[case]()
        for _ in range(WARM):
            ahead(step)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(STEPS):
                ahead(step)
            torch.cuda.synchronize()
        return seen_by_cupti(profile)

    run, outcomes = record(tmp_path / "run", 2, body)
    for rank in range(2):
        truth, (low, high) = outcomes[rank]["result"], recorded(run, rank)
        print(
            f"{case}, rank {rank}: CUPTI {truth / 1e6:.2f} ms, recorded {low / 1e6:.2f} to {high / 1e6:.2f} ms"
        )
        print(
            f"{case}, rank {rank}: CUPTI {truth / 1e6:.2f}, recorded {low / 1e6:.2f} to {high / 1e6:.2f} ms"
        )
        assert low <= 1.05 * truth + 1_000_000
        assert high >= 0.95 * truth - 1_000_000
        assert case.startswith("ddp") or low == high

"""Trainings over NCCL.

The records agree with the NCCL kernels that CUPTI saw, and the losses agree with a training on one GPU alone.
"""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch
import torch.distributed as dist

from support.recording import calls, record

pytestmark = [pytest.mark.ranks, pytest.mark.filterwarnings("ignore")]
WIDTH, STEPS = 64, 4


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(WIDTH, WIDTH, device="cpu") for _ in range(4)]
    return torch.nn.Sequential(*layers).to("cuda")


def batch(step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator(device="cpu").manual_seed(10 * step + rank)
    return torch.randn(8, WIDTH, generator=generator, device="cpu").to("cuda")


def kernels(profile: torch.profiler.profile) -> list[str]:
    """Return the names of the NCCL kernels that CUPTI saw."""
    return [
        event.name()
        for event in profile.profiler.kineto_results.events()
        if str(event.device_type()).endswith("CUDA") and event.name().startswith("ncclDevKernel")
    ]


def kind_of_kernel(name: str) -> str:
    """Return the operation of a kernel: ``allreduce`` for ``ncclDevKernel_AllReduce_Sum_f32_RING_LL(...)``."""
    return name.removeprefix("ncclDevKernel_").partition("_")[0].partition("(")[0].lower()


def kind_of_record(op: str) -> str:
    """Return the kernel that runs an operation. A barrier is an all_reduce of one element."""
    return {"barrier": "allreduce"}.get(op, op.replace("_", ""))


def profiled(body):
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        result = body()
        torch.cuda.synchronize()
    return result, kernels(profile)


def alone(world: int) -> list[float]:
    """Return the mean losses of a training of one process on the batches of all ranks."""
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    losses = []
    for step in range(STEPS):
        loss = torch.stack([net(batch(step, rank)).square().mean() for rank in range(world)]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def ddp(rank: int) -> list[float]:
    return torch_loop(torch.nn.parallel.DistributedDataParallel(model()), rank)


def fsdp2(rank: int) -> list[float]:
    from torch.distributed.fsdp import fully_shard

    net = model()
    for layer in net:
        fully_shard(layer)
    return torch_loop(fully_shard(net), rank)


def torch_loop(net: torch.nn.Module, rank: int) -> list[float]:
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    losses = []
    for step in range(STEPS):
        loss = net(batch(step, rank)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def zero(config: dict, rank: int) -> list[float]:
    import zero_runtime

    net = model()
    engine, *_ = zero_runtime.initialize(
        model=net, model_parameters=net.parameters(), config=copy.deepcopy(config)
    )
    losses = []
    for step in range(STEPS):
        loss = engine(batch(step, rank)).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def config(stage: int, **options) -> dict:
    return {
        "train_micro_batch_size_per_gpu": 8,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01}},
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": 5000,
            "allgather_bucket_size": 5000,
            "stage3_param_persistence_threshold": 0,
            **options,
        },
    }


CASES = {
    "ddp": ddp,
    "fsdp2": fsdp2,
    **{f"stage {stage}": config(stage) for stage in range(4)},
    "stage 1, one owner a bucket": config(1, use_multi_rank_bucket_allreduce=False),
    "stage 2, all_reduce": config(2, reduce_scatter=False),
    "stage 2, overlap": config(2, overlap_comm=True),
    "stage 3, overlap": config(3, overlap_comm=True),
    "stage 3, by block": config(3, stage3_gather_unit="block"),
    "stage 3, by block, gathered again": config(3, stage3_gather_unit="block", stage3_max_reuse_distance=0),
    "stage 2, compared messages": config(2) | {"traffic_contract": "stop"},
    "stage 3, by block, compared messages": config(3, stage3_gather_unit="block")
    | {"traffic_contract": "stop"},
    "stage 2, optimizer on the host": config(2, offload_optimizer={"device": "cpu"}),
    "stage 3, all on the host": config(
        3, offload_optimizer={"device": "cpu"}, offload_param={"device": "cpu"}
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_each_kernel_of_nccl_has_its_record_and_the_losses_are_those_of_one_gpu(tmp_path, case):
    def body(rank, world):
        dist.all_reduce(torch.ones(2))
        torch.cuda.synchronize()
        run = CASES[case]
        losses, names = profiled(lambda: zero(run, rank) if isinstance(run, dict) else run(rank))
        return losses, names, alone(world)

    run, outcomes = record(tmp_path / "run", 2, body)
    together = [
        sum(losses) / 2 for losses in zip(*(outcome["result"][0] for outcome in outcomes), strict=True)
    ]
    assert together == pytest.approx(outcomes[0]["result"][2], rel=2e-5)
    for rank in range(2):
        # NCCL launches no kernel for an empty message.
        rows = calls(run, rank, "op", "payload_bytes")[1:]
        ops = [op for op, payload in rows if payload or op == "barrier"]
        names = outcomes[rank]["result"][1]
        assert Counter(map(kind_of_kernel, names)) == Counter(kind_of_record(op) for op in ops)
    assert run.health.unseen == run.health.lost == run.health.raised == 0

"""A benchmark of collectives by operation and size, like nccl-tests, with the calls of this runtime.

``commprof run`` records this benchmark like any other program, and the dashboard's page Bandwidth shows the result.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from itertools import product
from statistics import median
from typing import Any, Final, NamedTuple

import torch

from commprof import hooks
from zero_runtime import comm
from zero_runtime.bench.option_types import count, size
from zero_runtime.comm import DataParallelGroup, ReduceOp
from zero_runtime.errors import UsageError

_DTYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_WHY: Final = hooks.tag("other")


class Operation(NamedTuple):
    """One operation of the benchmark.

    Attributes:
        prepare: A function of a group and a message that returns a function that runs the operation once. The
            size of the message is S of nccl-tests.
        factor: A function of the number of ranks that returns bus bandwidth / algorithm bandwidth (nccl-tests,
            doc/PERFORMANCE.md).
    """

    prepare: Callable[[DataParallelGroup, torch.Tensor], Callable[[], Any]]
    factor: Callable[[int], float]


def _share(ranks: int) -> float:
    return (ranks - 1) / ranks


def _shard(group: DataParallelGroup, message: torch.Tensor) -> torch.Tensor:
    return message.new_ones(message.numel() // group.world_size)


def _all_gather(group: DataParallelGroup, message: torch.Tensor) -> Callable[[], Any]:
    shard = _shard(group, message)
    return lambda: group.all_gather_single(message, shard, why=_WHY)


def _reduce_scatter(group: DataParallelGroup, message: torch.Tensor) -> Callable[[], Any]:
    shard = _shard(group, message)
    return lambda: group.reduce_scatter_single(shard, message, why=_WHY)


def _all_to_all(group: DataParallelGroup, message: torch.Tensor) -> Callable[[], Any]:
    received = torch.empty_like(message)
    split_sizes = [message.numel() // group.world_size] * group.world_size
    return lambda: group.all_to_all_single(received, message, split_sizes, why=_WHY)


OPERATIONS: Final[dict[str, Operation]] = {
    "all_reduce": Operation(
        lambda group, message: lambda: group.all_reduce(message, op=ReduceOp.MAX, why=_WHY),
        lambda ranks: 2 * _share(ranks),
    ),
    "reduce_scatter": Operation(_reduce_scatter, _share),
    "all_gather": Operation(_all_gather, _share),
    "all_to_all": Operation(_all_to_all, _share),
    "broadcast": Operation(
        lambda group, message: lambda: group.broadcast(message, 0, why=_WHY), lambda _: 1.0
    ),
    "reduce": Operation(lambda group, message: lambda: group.reduce(message, 0, why=_WHY), lambda _: 1.0),
}


class Timing(NamedTuple):
    """The result for one operation and size: the median time of the calls, on the slowest rank.

    Attributes:
        operation: The name of the operation.
        payload_bytes: The payload in bytes, S of nccl-tests.
        seconds: The time of a call in seconds.
        algorithm: The algorithm bandwidth in bytes per second, which is S divided by the time.
        bus: The bus bandwidth in bytes per second. It is comparable between operations and numbers of ranks.
    """

    operation: str
    payload_bytes: int
    seconds: float
    algorithm: float
    bus: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command on this rank and return the exit code 0. The caller reports errors."""
    parser = argparse.ArgumentParser(
        prog="python -m zero_runtime.bench comm",
        description="Time collectives among the ranks of a launcher: commprof run --nproc 4 -m zero_runtime.bench comm",
    )
    parser.add_argument("--ops", nargs="+", choices=list(OPERATIONS), default=list(OPERATIONS), metavar="OP")
    parser.add_argument(
        "--sizes",
        type=size,
        nargs="+",
        default=[4 << 10, 64 << 10, 1 << 20, 16 << 20],
        help="payloads in bytes, S of nccl-tests (4k 64k 1m 16m)",
    )
    parser.add_argument("--dtype", choices=list(_DTYPES), default="fp32")
    parser.add_argument("--iterations", type=count, default=20, help="timed calls per size (default: 20)")
    parser.add_argument("--warmup", type=count, default=3, help="calls before them (default: 3)")
    parser.add_argument("--backend", help="gloo or nccl (default: nccl with GPUs)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args(arguments)
    comm.init_distributed(options.backend)
    group = DataParallelGroup()
    if group.world_size < 2:
        raise UsageError(
            "one rank sends nothing; start several: commprof run --nproc 2 -m zero_runtime.bench comm, or torchrun"
        )
    dtype = _DTYPES[options.dtype]
    timings = []
    for number, (operation, payload) in enumerate(product(options.ops, options.sizes)):
        hooks.step(number)
        timings.append(measure(group, operation, payload, dtype, options.iterations, options.warmup))
    if group.rank == 0:
        print(
            _as_json(timings, group, options.dtype)
            if options.json
            else _as_table(timings, group, options.dtype)
        )
    group.barrier(why=_WHY)
    return 0


def measure(
    group: DataParallelGroup, operation: str, payload: int, dtype: torch.dtype, iterations: int, warmup: int
) -> Timing:
    """Run ``operation`` on about ``payload`` bytes and return the result. Every rank must call this function.

    The payload is rounded so that each rank has the same whole number of elements.

    Args:
        group: The ranks that take part.
        operation: A key of ``OPERATIONS``.
        payload: The payload in bytes, S of nccl-tests.
        dtype: The dtype of the elements.
        iterations: The number of timed calls.
        warmup: The number of calls before the timed ones.
    """
    each = max(1, payload // dtype.itemsize // group.world_size)
    message = torch.ones(each * group.world_size, dtype=dtype, device=group.device)
    chosen = OPERATIONS[operation]
    call = chosen.prepare(group, message)
    for _ in range(warmup):
        call()
    took = [_seconds(call, group.device) for _ in range(iterations)]
    slowest = torch.tensor([median(took)], dtype=torch.float64, device=group.device)
    group.all_reduce(slowest, op=ReduceOp.MAX, why=hooks.tag("metric"))
    seconds, num_bytes = slowest.item(), message.numel() * dtype.itemsize
    speed = num_bytes / seconds
    return Timing(operation, num_bytes, seconds, speed, speed * chosen.factor(group.world_size))


def _seconds(call: Callable[[], Any], device: torch.device) -> float:
    begin = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin


def _as_table(timings: Sequence[Timing], group: DataParallelGroup, dtype: str) -> str:
    lines = [
        f"{group.world_size} ranks, {group.backend}, {group.device.type}, {dtype}; the slowest rank's median; "
        "GB/s are 10^9 bytes per second",
        "",
        f"{'operation':<15} {'bytes':>12} {'time us':>12} {'algbw GB/s':>11} {'busbw GB/s':>11}",
    ]
    lines += [
        f"{each.operation:<15} {each.payload_bytes:>12} {1e6 * each.seconds:>12.1f} {each.algorithm / 1e9:>11.3f} "
        f"{each.bus / 1e9:>11.3f}"
        for each in timings
    ]
    return "\n".join(lines)


def _as_json(timings: Sequence[Timing], group: DataParallelGroup, dtype: str) -> str:
    rows = [
        {
            "operation": each.operation,
            "payload_bytes": each.payload_bytes,
            "time_ns": round(1e9 * each.seconds),
            "algbw_bytes_per_s": round(each.algorithm),
            "busbw_bytes_per_s": round(each.bus),
        }
        for each in timings
    ]
    facts = {
        "world_size": group.world_size,
        "backend": group.backend,
        "device": group.device.type,
        "dtype": dtype,
    }
    return json.dumps({**facts, "rows": rows}, indent=1)

"""The smallest message that reaches a share of the bandwidth, for sizes that are ``auto``.

By Hockney's model t(S) = alpha + S / beta, messages of at least S = p / (1 - p) alpha beta bytes reach the
share p of beta. For 90 % this is 9 alpha beta. Alpha and beta are from a calibration (docs/calibration.md), or
from a short measurement.
"""

from __future__ import annotations

from typing import Final

import torch

from zero_runtime.bench.message_times import measure
from zero_runtime.comm import DataParallelGroup
from zero_runtime.experimental.topology_aware.costs import Cost, bus_factor

SHARE: Final = 0.9
# The parameters of a measurement: payloads in bytes, calls of each, and the time limit.
PAYLOADS: Final = (2**12, 2**15, 2**18, 2**21, 2**24)
_WARMUP: Final = 1
_CALLS: Final = 3
_SECONDS: Final = 0.5


def smallest_payload(cost: Cost, operation: str, ranks: int) -> float:
    """Return the payload in bytes from which ``operation`` reaches :data:`SHARE` of its bandwidth.

    The payload is S of nccl-tests, among ``ranks`` ranks.
    """
    return SHARE / (1 - SHARE) * cost.alpha_ns / (bus_factor(operation, ranks) * cost.bus_ns_per_byte)


def measured_cost(group: DataParallelGroup, operation: str, dtype: torch.dtype) -> Cost:
    """Time ``operation`` at a few sizes, in less than a second on links that are not slower than 100 Mbit/s.

    Every rank of ``group`` must call this function. All ranks get the same times, which are the times of the
    slowest rank, and therefore stop at the same size.
    """
    times: list[tuple[int, float]] = []
    passed = 0.0
    for payload in PAYLOADS:
        timing = measure(group, operation, payload, dtype, _CALLS, _WARMUP)
        times.append((timing.payload_bytes, timing.seconds * 1e9))
        passed += timing.seconds * (_CALLS + _WARMUP)
        following = timing.seconds * (_CALLS + _WARMUP) * 8
        if len(times) > 1 and passed + following > _SECONDS:
            break
    alpha, per_byte = fitted(times)
    return Cost(alpha, per_byte / bus_factor(operation, group.world_size))


def fitted(times: list[tuple[int, float]]) -> tuple[float, float]:
    """Return the latency in ns and the ns per byte, by least squares of the relative residuals. Both are above 0.

    Args:
        times: Pairs (payload in bytes, ns), with at least two different payloads.
    """
    weights = [1 / ns**2 for _, ns in times]
    total = sum(weights)
    mean_size = sum(weight * size for weight, (size, _) in zip(weights, times, strict=True)) / total
    mean_time = sum(weight * ns for weight, (_, ns) in zip(weights, times, strict=True)) / total
    spread = sum(weight * (size - mean_size) ** 2 for weight, (size, _) in zip(weights, times, strict=True))
    joint = sum(
        weight * (size - mean_size) * (ns - mean_time)
        for weight, (size, ns) in zip(weights, times, strict=True)
    )
    largest, its_time = times[-1]
    per_byte = joint / spread
    alpha = mean_time - per_byte * mean_size
    if per_byte <= 0.0:
        # The times do not grow with the size. Half of the time of the largest message counts as latency, the other
        # half as transfer.
        return its_time / 2, its_time / 2 / largest
    # A latency of 0 would make every size large enough. The latency is at most the time of the fastest message.
    return (alpha, per_byte) if alpha > 0.0 else (min(ns for _, ns in times), its_time / largest)

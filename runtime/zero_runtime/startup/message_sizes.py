"""The smallest message that reaches a share of the bandwidth, for sizes that are ``auto``.

By Hockney's model t(S) = alpha + S / beta, a message reaches the share p of beta from S = p / (1 - p) alpha beta bytes on: 9
alpha beta for 90 %. Alpha and beta are those of a calibration (docs/calibration.md), or of a short measurement.
"""

from __future__ import annotations

from typing import Final

import torch

from zero_runtime.bench.message_times import measure
from zero_runtime.comm import DataParallelGroup
from zero_runtime.experimental.topology_aware.costs import Cost, bus_factor

SHARE: Final = 0.9
# A measurement: payloads in bytes, calls of each, and the time that they may take.
PAYLOADS: Final = (2**12, 2**15, 2**18, 2**21, 2**24)
_WARMUP: Final = 1
_CALLS: Final = 3
_SECONDS: Final = 0.5


def smallest_payload(cost: Cost, operation: str, ranks: int) -> float:
    """The bytes (S of nccl-tests) from which ``operation`` among ``ranks`` ranks reaches :data:`SHARE` of its bandwidth."""
    return SHARE / (1 - SHARE) * cost.alpha_ns / (bus_factor(operation, ranks) * cost.bus_ns_per_byte)


def measured_cost(group: DataParallelGroup, operation: str, dtype: torch.dtype) -> Cost:
    """Time ``operation`` at a few sizes, in less than a second on links that are not slower than 100 Mbit/s.

    Every rank of ``group`` must call it. All find the same times, those of the slowest rank, and so stop at the same size.
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
    """Latency in ns and ns per byte, by least squares of the relative residuals; both are above 0.

    Args:
        times: (payload in bytes, ns), of two payloads or more.
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
        # Times do not grow: the largest message is latency, with the bandwidth that it reached.
        return its_time / 2, its_time / 2 / largest
    # A latency of 0 would make every size large enough. It is at most the time of the fastest message.
    return (alpha, per_byte) if alpha > 0.0 else (min(ns for _, ns in times), its_time / largest)

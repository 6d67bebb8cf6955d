"""Which states a config offloads to host memory or NVMe, with DeepSpeed 0.19's defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from commprof.requested.config_keys import count, flag, number, section, wrong
from commprof.requested.errors import RequestedError

DEVICES = ("none", "cpu", "nvme")


class Offload(NamedTuple):
    """The settings in the blocks ``offload_optimizer`` and ``offload_param``. Sizes are in elements.

    Attributes:
        optimizer: The place of masters and optimizer states: ``none`` (the device), ``cpu`` or ``nvme``.
        optimizer_buffers: With nvme, the number of chunks of masters and optimizer states in memory at once.
        ratio: The share of masters and optimizer states that is offloaded. The rest is on the device.
        parameters: The place of the shards of parameters at stage 3: ``none`` (the device), ``cpu`` or ``nvme``.
        buffers: The total size of the buffers for shards that are read from or written to files.
        max_in_cpu: With nvme, the number of elements of each rank's shards that stay in host memory.
    """

    optimizer: str = "none"
    optimizer_buffers: int = 4
    ratio: float = 1.0
    parameters: str = "none"
    buffers: int = 0
    max_in_cpu: int = 0


def read_offload(zero: Mapping[str, Any], stage: int) -> Offload:
    """Return the offload settings of ``zero_optimization``. Keys without effect at ``stage`` are ignored.

    Raises:
        RequestedError: a key has a value of the wrong type or outside its range.
    """
    optimizer, ratio, buffers = "none", 1.0, 4
    if stage:
        block = section(zero, "offload_optimizer")
        optimizer = _device(zero, "cpu_offload", block, "offload_optimizer")
        ratio = min(number(block, "offload_optimizer.ratio", 1.0), 1.0)
        buffers = count(block, "offload_optimizer.buffer_count", 4, least=0) or 0
    if stage != 3:
        return Offload(optimizer, buffers, ratio)
    if zero.get("offload_param") is not None and zero.get("offload_params") is not None:
        raise RequestedError(
            "zero_optimization has offload_param and offload_params, which are one key; keep the first"
        )
    key = "offload_params" if zero.get("offload_params") is not None else "offload_param"
    block = section(zero, key)
    size = count(block, f"{key}.buffer_size", 100_000_000, least=0) or 0
    return Offload(
        optimizer,
        buffers,
        ratio,
        _device(zero, "cpu_offload_param", block, key),
        size * (count(block, f"{key}.buffer_count", 5, least=0) or 0),
        count(block, f"{key}.max_in_cpu", 1_000_000_000, least=0) or 0,
    )


def _device(zero: Mapping[str, Any], old: str, block: Mapping[str, Any], key: str) -> str:
    if flag(zero, f"zero_optimization.{old}", None):
        return "cpu"
    device = block.get("device")
    if device is None:
        return "none"
    if device not in DEVICES:
        raise wrong(f"zero_optimization.{key}.device", device, "none, cpu or nvme")
    return str(device)

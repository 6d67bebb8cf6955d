"""The configuration block ``offload_param``: shards of parameters in host memory or in files (stage 3)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from zero_runtime.configuration.reading.checks import (
    boolean,
    choice,
    integer,
    mapping,
    optional,
    text,
    unknown_key,
)
from zero_runtime.configuration.reading.key_table import Table, read, stage_3
from zero_runtime.errors import ConfigError
from zero_runtime.sharding.gather_schedule.policy import SliceOffload

KEY: Final = "zero_optimization.offload_param"
OTHER_NAME: Final = "offload_params"
_SIZE: Final = integer(0)

OFFLOAD_PARAM: Final[Table] = {
    "device": stage_3(
        choice("none", "cpu", "nvme"),
        "none",
        "where the shards of parameters are stored: on the device (`none`), in host memory (`cpu`) or in "
        "files (`nvme`)",
    ),
    "nvme_path": stage_3(
        optional(text), None, "the directory for the files. It is required if device is nvme"
    ),
    "buffer_count": stage_3(
        _SIZE, 5, "the number of buffers for shards that are prefetched or written, if device is nvme"
    ),
    "buffer_size": stage_3(
        _SIZE, 100_000_000, "the number of elements in a buffer. A larger shard is moved in chunks"
    ),
    "max_in_cpu": stage_3(
        _SIZE,
        1_000_000_000,
        "the number of elements of each rank that stay in host memory. The other elements are in files",
    ),
    "pin_memory": stage_3(boolean, True, "use page-locked host memory if a GPU copies from this memory"),
}


def modern(zero: Any, notices: list[str]) -> Any:
    """Return ``zero_optimization`` with ``offload_params`` renamed to ``offload_param``.

    Raises ConfigError if both keys are present and their values differ.
    """
    if not isinstance(zero, Mapping) or OTHER_NAME not in zero:
        return zero
    renamed = dict(zero)
    value = renamed.pop(OTHER_NAME)
    current = renamed.get("offload_param")
    if current is not None and current != value:
        raise ConfigError(
            f"zero_optimization has offload_param {current!r} and {OTHER_NAME} {value!r}, two names of one key; keep "
            "offload_param"
        )
    notices.append(
        f"zero_optimization.{OTHER_NAME} is read as offload_param, which is DeepSpeed's name of it"
    )
    return {**renamed, "offload_param": value}


def read_slice_offload(values: Mapping[str, Any]) -> SliceOffload:
    """Return the offload of shards in the checked values of ``zero_optimization``.

    Raises:
        ConfigError: Keys contradict each other, ``nvme_path`` is missing with ``nvme``, or the size or number
            of buffers is 0.
    """
    block = dict(values["offload_param"] or {})
    device = block.get("device") or "none"
    if values["cpu_offload_param"]:
        if values["offload_param"] is not None and device != "cpu":
            raise ConfigError(
                f"zero_optimization.cpu_offload_param is true, and {KEY}.device is {device!r}; keep offload_param"
            )
        device = "cpu"
    if device == "none":
        return SliceOffload()
    path, pinned = block.get("nvme_path"), block.get("pin_memory", True)
    if device == "cpu":
        return SliceOffload(device, pinned=pinned)
    if not path:
        raise ConfigError(
            f"{KEY}.device is 'nvme' without nvme_path; set {KEY}.nvme_path to a folder on a fast local disk"
        )
    for name in ("buffer_count", "buffer_size"):
        if block[name] == 0:
            raise ConfigError(f"{KEY}.{name} is 0, and files are read through buffers; expected at least 1")
    return SliceOffload(
        device, path, pinned, block["buffer_count"], block["buffer_size"], block["max_in_cpu"]
    )


def slice_offload_of(zero: Mapping[str, Any]) -> SliceOffload:
    """Return the offload of shards in an unchecked ``zero_optimization`` block."""
    zero = modern(zero, [])
    block = zero.get("offload_param")
    if block is not None:
        block = mapping(KEY, block)
        for name in block:
            if name not in OFFLOAD_PARAM:
                raise ConfigError(unknown_key(f"{KEY}.{name}", name, OFFLOAD_PARAM, KEY, {}))
        block = read(OFFLOAD_PARAM, KEY, block)
    return read_slice_offload(
        {"offload_param": block, "cpu_offload_param": zero.get("cpu_offload_param") is True}
    )

"""The configuration blocks ``offload_optimizer`` and ``aio``: placement of the optimizer's state, and file access."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from zero_runtime.configuration.reading.checks import (
    Check,
    boolean,
    choice,
    coerced_number,
    integer,
    number,
    optional,
    text,
)
from zero_runtime.configuration.reading.key_table import Table, inert, later, used
from zero_runtime.errors import ConfigError
from zero_runtime.offload.tensor_files import AsynchronousIO

OPTIMIZER_KEY: Final = "zero_optimization.offload_optimizer"


def _share(name: str, value: Any) -> float:
    share = float(number(0.0)(name, value))
    if share > 1.0:
        raise ConfigError(f"{name} is {value!r}; expected a number from 0 to 1")
    return share


_SHARE: Final = Check("number from 0 to 1", _share, coerce=coerced_number)

OFFLOAD_OPTIMIZER: Final[Table] = {
    "device": used(
        choice("none", "cpu", "nvme"),
        "none",
        "where the optimizer state is stored: on the device (`none`), in host memory (`cpu`) or in "
        "files (`nvme`)",
    ),
    "nvme_path": used(optional(text), None, "the directory for the files. It is required if device is nvme"),
    "buffer_count": used(
        integer(0),
        4,
        "the number of chunks of the state that are in memory at the same time, if device is nvme",
    ),
    "pin_memory": used(boolean, True, "use page-locked host memory if a GPU copies from this memory"),
    "pipeline": used(optional(boolean), None, "the default value of the next two keys"),
    "pipeline_read": used(
        optional(boolean),
        None,
        "read the next chunk while the optimizer updates a chunk. With null, the value of pipeline is "
        "used, or true if pipeline is not set",
    ),
    "pipeline_write": used(
        optional(boolean),
        None,
        "write a chunk while the optimizer updates the next one. With null, the value of pipeline is used, "
        "or true if pipeline is not set",
    ),
    "fast_init": used(boolean, False, "write master weights only after the first step, if device is nvme"),
    "ratio": used(_SHARE, 1.0, "the share of the state that is offloaded. The rest stays on the device"),
    "super_offload": later(
        boolean, False, "SuperOffload", "SuperOffload", "use device cpu together with ratio instead"
    ),
    "cpuadam_cores_perc": inert(
        number(0.0),
        0.8,
        "the share of the CPU cores that update parameters",
        "it has an effect only with super_offload",
    ),
}

AIO: Final[Table] = {
    "block_size": used(integer(1), 1_048_576, "the number of bytes in a block"),
    "queue_depth": used(integer(1), 8, "the number of blocks that are read or written in one request"),
    "intra_op_parallelism": used(
        integer(1), 1, "the number of threads that read, and also the number of threads that write"
    ),
    "thread_count": used(optional(integer(1)), None, "the old name of intra_op_parallelism"),
    "single_submit": used(boolean, False, "each request reads or writes one block"),
    "overlap_events": used(
        boolean,
        True,
        "each thread computes the checksum of one request while the disk processes another request",
    ),
    "use_gds": later(
        boolean,
        False,
        "move data directly between the GPU and NVMe",
        "GPUDirect Storage",
        "files go through host memory",
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerOffload:
    """The offload of the optimizer's master weights and states.

    Attributes:
        device: The place of the offloaded state: ``cpu`` or ``nvme``.
        nvme_path: The directory for the files; None with ``cpu``.
        buffer_count: The number of chunks that are in memory at the same time, with ``nvme``.
        pin_memory: Whether host memory is page-locked, if there is a GPU.
        pipeline_read: Whether the next chunk is read while a chunk is updated.
        pipeline_write: Whether a chunk is written while the next chunk is updated.
        fast_init: Whether master weights are written only after the first step.
        ratio: The fraction of the state that is offloaded.
    """

    device: str
    nvme_path: str | None = None
    buffer_count: int = 4
    pin_memory: bool = True
    pipeline_read: bool = True
    pipeline_write: bool = True
    fast_init: bool = False
    ratio: float = 1.0


def read_optimizer_offload(zero: Mapping[str, Any]) -> OptimizerOffload | None:
    """Return the offload of the optimizer in the checked values of ``zero_optimization``; None without offload.

    Raises:
        ConfigError: Keys contradict each other, ``nvme_path`` is missing with ``nvme``, or there are no buffers.
    """
    block = dict(zero["offload_optimizer"] or {})
    device = block.get("device", "none")
    if zero["cpu_offload"]:
        if zero["offload_optimizer"] is not None and device != "cpu":
            raise ConfigError(
                f"zero_optimization.cpu_offload is true, and {OPTIMIZER_KEY}.device is {device!r}; keep offload_optimizer"
            )
        device = "cpu"
    if device == "none":
        return None
    path = block.get("nvme_path")
    if device == "nvme" and not path:
        raise ConfigError(
            f"{OPTIMIZER_KEY}.device is 'nvme' without nvme_path; set {OPTIMIZER_KEY}.nvme_path to a folder on a fast local "
            "disk"
        )
    if device == "nvme" and block.get("buffer_count") == 0:
        raise ConfigError(
            f"{OPTIMIZER_KEY}.buffer_count is 0, and files are read through buffers; expected at least 1"
        )
    both = block.get("pipeline")
    read, write = (
        each if each is not None else both is not False
        for each in (block.get("pipeline_read"), block.get("pipeline_write"))
    )
    return OptimizerOffload(
        device=device,
        nvme_path=path if device == "nvme" else None,
        buffer_count=block.get("buffer_count", 4),
        pin_memory=block.get("pin_memory", True),
        pipeline_read=read,
        pipeline_write=write,
        fast_init=block.get("fast_init", False),
        ratio=block.get("ratio", 1.0),
    )


def read_aio(block: Mapping[str, Any] | None) -> AsynchronousIO:
    """Return the settings in the checked values of the block ``aio``.

    Raises:
        ConfigError: The two names of one key have different values.
    """
    if block is None:
        return AsynchronousIO()
    threads, old = block["intra_op_parallelism"], block["thread_count"]
    if old is not None and old != threads and threads != AIO["intra_op_parallelism"].default:
        raise ConfigError(
            f"aio has intra_op_parallelism {threads} and thread_count {old}, two names of one key; keep intra_op_parallelism"
        )
    return AsynchronousIO(
        block_size=block["block_size"],
        queue_depth=block["queue_depth"],
        threads=threads if old is None else old,
        single_submit=block["single_submit"],
        overlap_events=block["overlap_events"],
    )


def effective_aio(aio: AsynchronousIO) -> dict[str, Any]:
    """Return the settings ``aio`` by their configuration keys."""
    values: dict[str, Any] = aio._asdict()
    values["intra_op_parallelism"] = values.pop("threads")
    return values

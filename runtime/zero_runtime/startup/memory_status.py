"""Memory in use, on the device and on the host."""

from __future__ import annotations

import gc
import os
import resource
from pathlib import Path
from typing import Final, NamedTuple

import torch

from zero_runtime import comm

_GIB: Final = 2**30
_STATUS: Final = Path("/proc/self/statm")
_HOST: Final = Path("/proc/meminfo")


class Memory(NamedTuple):
    """The memory in use, in bytes. Device values are 0 without a device.

    Attributes:
        allocated: Memory of tensors on the device.
        peak: The largest ``allocated`` since the last reset.
        reserved: Memory that torch's allocator has reserved on the device.
        resident: Host memory of this process.
        peak_resident: The largest ``resident``.
        host_used: Host memory that all processes use.
        host: The size of the host memory.
    """

    allocated: int
    peak: int
    reserved: int
    resident: int
    peak_resident: int
    host_used: int
    host: int

    def shown(self) -> str:
        """Return the figures in GiB as text."""
        device = ""
        if self.reserved:
            device = f"device {_gib(self.allocated)} allocated (peak {_gib(self.peak)}), {_gib(self.reserved)} reserved; "
        process = f"process {_gib(self.resident)} resident (peak {_gib(self.peak_resident)})"
        host = f"; host {_gib(self.host_used)} of {_gib(self.host)}" if self.host else ""
        return f"{device}{process}{host}"


def memory_in_use() -> Memory:
    """Return the memory that is in use now, without a synchronization."""
    cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
    peak_resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    host, free = _host()
    return Memory(
        torch.cuda.memory_allocated() if cuda else 0,
        torch.cuda.max_memory_allocated() if cuda else 0,
        torch.cuda.memory_reserved() if cuda else 0,
        _resident(peak_resident),
        peak_resident,
        host - free,
        host,
    )


def free_bytes(device: torch.device) -> int:
    """Return the free memory of ``device`` in bytes.

    On a CPU this is this rank's share of the host memory that the system reports as available.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return _host()[1] // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def see_memory_usage(message: str, force: bool = False) -> None:
    """Print ``message`` and the memory in use, on rank 0. Do nothing without ``force``.

    Garbage is collected first, so that unreachable tensors do not count. The device's peak is reset afterwards.
    """
    if not force or (comm.is_initialized() and comm.get_rank() != 0):
        return
    gc.collect()
    print(f"{message}: {memory_in_use().shown()}", flush=True)
    _reset_peak()


_last = (0, 0)


def memory_status(msg: str, print_rank: int = -1, reset_max: bool = False) -> None:
    """Print the memory in use, and the changes since the last call.

    Args:
        msg: A text that is printed before the figures.
        print_rank: The rank that prints; -1 for all ranks.
        reset_max: Whether the peak is reset first.
    """
    global _last
    rank = comm.get_rank() if comm.is_initialized() else 0
    if print_rank not in (-1, rank):
        return
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    if reset_max:
        _reset_peak()
    now = memory_in_use()
    allocated, reserved = now.allocated - _last[0], now.reserved - _last[1]
    _last = now.allocated, now.reserved
    print(
        f"rank {rank}, {msg}: {now.shown()}; since the last call {allocated / _GIB:+.4f} GiB allocated, "
        f"{reserved / _GIB:+.4f} GiB reserved",
        flush=True,
    )


def _reset_peak() -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()


def _resident(otherwise: int) -> int:
    try:
        pages = int(_STATUS.read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return otherwise
    return pages * os.sysconf("SC_PAGESIZE")


def _host() -> tuple[int, int]:
    """Return the (total, available) bytes of host memory; zeros if the system does not report them."""
    try:
        lines = dict(line.split(":", 1) for line in _HOST.read_text().splitlines() if ":" in line)
        return tuple(int(lines[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))  # type: ignore[return-value]
    except (OSError, KeyError, ValueError):
        return 0, 0


def _gib(count: int) -> str:
    return f"{count / _GIB:.2f} GiB"

"""Writes how many tokens chose each expert, as published by the expert layers, without waiting for a device.

Counts in host memory are read immediately. Counts on a device are copied into pinned memory, in stream order after the
work that computes them, and an event follows the copy. Later calls, and the end of the recording, query the event to
find out whether the copy is complete. Nothing waits for the event.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import torch

from commprof.recorder.device.device_events import CudaEvents, Event, EventPool, EventSource
from commprof.recorder.process.journal import Journal

MOST_UNDER_WAY: Final = 512  # copies of counts that are in progress
_MOST_BYTES: Final = 4 << 20  # bytes of pinned memory for these copies
MOST_EXPERTS: Final = 1 << 16
_SOURCES: Final[dict[str, Callable[[], EventSource]]] = {"cuda": CudaEvents}


class _Copy(NamedTuple):
    """A copy of counts from a device that is in progress."""

    row: dict[str, Any]
    slot: torch.Tensor  # the destination, in the recorder's own memory
    size: int  # the number of counts in the slot
    event: Event
    pool: EventPool


class ExpertLoads:
    """Writes the lines of ``expert_loads``. No method waits for a device or keeps a tensor of the program.

    Args:
        journal: The journal that receives the lines.
        sources: The constructors of event sources, by device type.
    """

    def __init__(
        self, journal: Journal, sources: Mapping[str, Callable[[], EventSource]] | None = None
    ) -> None:
        self.cost_ns = 0
        self._journal = journal
        self._sources = _SOURCES if sources is None else sources
        self._pools: dict[torch.device, EventPool] = {}
        self._memory: torch.Tensor | None = None  # one row for each copy that may be in progress
        self._free: list[torch.Tensor] = []  # the free rows of the memory
        self._under_way: deque[_Copy] = deque()
        self._missing: dict[str, int] = {}  # the number of forward passes that are not recorded, by reason
        self._lock = threading.Lock()

    def reserve(self, num_experts: object) -> None:
        """Allocate the memory for a layer of ``num_experts`` before the layer runs, because pinning memory is slow."""
        if type(num_experts) is int and torch.cuda.is_initialized():
            with self._lock:
                self._make_room(num_experts)

    def add(self, layer: str, counts: torch.Tensor, capacity: int, tokens: int) -> None:
        """Record one forward pass of ``layer``; see :func:`commprof.hooks.expert_load`."""
        begin = time.perf_counter_ns()
        with self._lock:
            self._write_complete()
            reason = self._refusal(counts, capacity, tokens)
            if reason is None:
                row = {**self._journal.moment(), "layer": layer, "capacity": capacity, "tokens": tokens}
                if counts.device.type in self._sources:
                    reason = self._copy(row, counts)
                else:
                    self._journal.write("expert_load", {**row, "counts": counts.tolist()})
            if reason is not None:
                self._missing[reason] = self._missing.get(reason, 0) + 1
        self.cost_ns += time.perf_counter_ns() - begin

    def finish(self) -> None:
        """Write the counts that have arrived, and note the missing counts, when recording ends."""
        with self._lock:
            self._write_complete()
            if self._under_way:
                self._missing["the device had not computed them when recording ended"] = len(self._under_way)
            self._under_way.clear()
            self._free.clear()
            self._memory = None
        for reason, number in self._missing.items():
            self._journal.note(f"expert loads of {number} forward passes were not recorded: {reason}")
        self._missing.clear()

    def _refusal(self, counts: object, capacity: object, tokens: object) -> str | None:
        """Return the reason why these counts cannot be recorded; None if they can."""
        if not isinstance(counts, torch.Tensor) or counts.dim() != 1 or counts.is_floating_point():
            return "the counts were not an integer tensor of one dimension"
        if type(capacity) is not int or type(tokens) is not int:
            return "capacity and tokens were not Python integers, which cost no synchronization"
        kind = counts.device.type
        if kind != "cpu" and kind not in self._sources:
            return f"counts of the device type {kind} cannot be read without waiting for it"
        return None if counts.numel() <= MOST_EXPERTS else f"there were more than {MOST_EXPERTS:,} experts"

    def _copy(self, row: dict[str, Any], counts: torch.Tensor) -> str | None:
        """Begin to copy ``counts``. Return the reason if this is not possible, or else None."""
        device, size = counts.device, counts.numel()
        pool = self._pools.get(device)
        if pool is None:
            pool = self._pools[device] = EventPool(self._sources[device.type](), device.index or 0)
        if pool.source.is_capturing():
            return "a CUDA graph was being captured"
        if not self._make_room(size):
            return "too many others were on their way from the device"
        slot = self._free.pop()
        slot[:size].copy_(counts, non_blocking=True)
        self._under_way.append(_Copy(row, slot, size, pool.mark(), pool))
        return None

    def _make_room(self, size: int) -> bool:
        """Return whether there is a free slot for ``size`` counts; allocate or replace the memory if necessary."""
        if self._memory is None or self._memory.shape[1] < size:
            if self._under_way:
                return False  # copies in progress use the memory that would be replaced
            size = min(max(size, 1), MOST_EXPERTS)
            with torch.inference_mode(False):
                self._memory = torch.empty(
                    (min(MOST_UNDER_WAY, _MOST_BYTES // (8 * size)), size),
                    dtype=torch.int64,
                    device="cpu",
                    pin_memory=torch.cuda.is_initialized(),
                )
                self._free = list(self._memory)
        return bool(self._free)

    def _write_complete(self) -> None:
        """Write the counts that have arrived, in the order in which they were computed."""
        under_way = self._under_way
        while under_way and not under_way[0].pool.source.is_capturing() and under_way[0].event.query():
            row, slot, size, event, pool = under_way.popleft()
            self._journal.write("expert_load", {**row, "counts": slot[:size].tolist()})
            self._free.append(slot)
            pool.give(event)

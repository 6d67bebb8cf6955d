"""Masters and states of an optimizer in files, and in memory only around their update.

A step walks through the stretches. While one is updated the next ones are read and the last ones written, each in its own
set of buffers: there are ``buffer_count`` of them, which is all the memory that it takes::

    buffers 0   read 0 | update 0 | write 0            | read 4 ...
    buffers 1   read 1            | update 1 | write 1 | ...
    buffers 2   read 2                       | update 2 | write 2
    buffers 3   read 3                                  | update 3 | ...

The optimizer knows each stretch by one tensor, its master. While the values are in files it holds NaN, one element in memory
for all of them, and so do the tensors of its state: they have their shape, and what is written to them is lost, or an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import torch

from zero_runtime.configuration.offload import OptimizerOffload
from zero_runtime.offload.blocks import aligned_empty
from zero_runtime.offload.files import TensorFiles, Transfer

MASTER: Final = "master"
_GRADIENT: Final = "gradient"


class _Buffers:
    """Memory for one stretch.

    Attributes:
        writes: what is being written from it.
        used: whether a stretch is in it.
    """

    def __init__(self, pinned: bool) -> None:
        self.writes: list[Transfer] = []
        self.used = False
        self._pinned = pinned
        self._memory: dict[str, torch.Tensor] = {}

    def tensor(self, name: str, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory for ``numel`` elements, which keeps its place."""
        size = numel * dtype.itemsize
        memory = self._memory.get(name)
        if memory is None or memory.numel() < size:
            memory = self._memory[name] = aligned_empty(size, self._pinned)
        return memory[:size].view(dtype)

    @property
    def idle(self) -> bool:
        """Whether a stretch can be read into it at once."""
        return not self.used and all(write.done for write in self.writes)

    def settle(self) -> None:
        """Wait for what is being written. Raises OffloadError."""
        writes, self.writes = self.writes, []
        for write in writes:
            write.wait()


class _Reading(NamedTuple):
    """A stretch that is on its way into memory: its tensors, by name, and their transfers."""

    buffers: _Buffers
    tensors: dict[str, torch.Tensor]
    transfers: list[Transfer]

    def wait(self) -> None:
        for transfer in self.transfers:
            transfer.wait()


class _Entry:
    """A stretch whose state is in files.

    Attributes:
        master: what the optimizer updates.
        numel, dtype: of the master.
        fill: fills the master with the model's values; None where the master is the model's own memory, and stays.
        kept: the tensors in files, by name, with their dtypes.
        reading: while it is in memory, or on its way.
    """

    def __init__(self, master: torch.Tensor, fill: Callable[[torch.Tensor], None] | None) -> None:
        self.master = master
        self.numel = master.numel()
        self.dtype = master.dtype
        self.fill = fill
        self.stored_dtypes: dict[str, torch.dtype] = {}
        self.reading: _Reading | None = None


class StateFiles:
    """The masters and states of some tensors of an optimizer, in files.

    Args:
        optimizer: whose state it is; one that updates tensor by tensor.
        files: where they are kept; closed with this.
        policy: how many buffers there are, and what goes on at the same time.
        pinned: page-locked buffers.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, files: TensorFiles, policy: OptimizerOffload, pinned: bool
    ) -> None:
        self._optimizer = optimizer
        self._files = files
        self._policy = policy
        self._entries: dict[int, _Entry] = {}
        self._buffers = [_Buffers(pinned) for _ in range(policy.buffer_count)]
        self._shown: int | None = None  # the stretch that was read for a checkpoint

    def __contains__(self, number: int) -> bool:
        """Whether the state of that master is in files."""
        return number in self._entries

    def close(self) -> None:
        """Remove the files; nothing of what is in them can be used any more."""
        self._entries.clear()
        self._files.close()

    @torch.no_grad()
    def add(
        self, number: int, numel: int, dtype: torch.dtype, fill: Callable[[torch.Tensor], None]
    ) -> torch.Tensor:
        """A master of ``numel`` elements, in files, which ``fill`` fills; written now, unless ``fast_init`` is set."""
        master = torch.empty(numel, dtype=dtype)
        entry = self._entries[number] = _Entry(master, fill)
        master.data = absent(numel, dtype)
        if not self._policy.fast_init:
            self._begin(number)
            self._land(entry)
            self._store(number)
        return master

    def add_state(self, number: int, master: torch.Tensor) -> None:
        """A master that stays in memory, and whose state goes to files."""
        self._entries[number] = _Entry(master, None)
        self._store(number)  # of an optimizer that makes its state when it is made

    def begin(self) -> None:
        """Begin to read what the next walk begins with, if it may be read ahead."""
        if self._policy.pipeline_read:
            self._drop_shown()
            self._read_ahead(list(self._entries))

    def walk(self, numbers: Iterable[int] | None = None) -> Iterator[int]:
        """Every stretch in turn, in memory until the next is asked for; what has changed in it is kept.

        Raises:
            OffloadError: something cannot be read or written.
        """
        self._drop_shown()
        queue = list(self._entries if numbers is None else numbers)
        try:
            for place, number in enumerate(queue):
                entry = self._entries[number]
                if entry.reading is None:
                    self._begin(number)
                if self._policy.pipeline_read:
                    self._read_ahead(queue[place + 1 :])
                self._land(entry)
                try:
                    yield number
                finally:
                    self._store(number)
        finally:
            for number in queue:
                self._forget(number)  # what was read ahead of a walk that was broken off
        for buffers in self._buffers:
            buffers.settle()

    @contextmanager
    def resident(self, number: int) -> Iterator[None]:
        """Inside, the stretch is in memory; what has changed in it is kept."""
        for _ in self.walk([number]):
            yield

    def gradient(self, number: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory for the gradient of a stretch that is in memory."""
        entry = self._entries[number]
        assert entry.reading is not None
        return entry.reading.buffers.tensor(_GRADIENT, entry.numel, dtype)

    def pending(self, number: int) -> bool:
        """Whether the master is still to be filled, since nothing has written it."""
        entry = self._entries[number]
        return entry.fill is not None and MASTER not in entry.stored_dtypes

    def kept(self, number: int) -> dict[str, torch.dtype]:
        """The state tensors in files, by name."""
        return {name: dtype for name, dtype in self._entries[number].stored_dtypes.items() if name != MASTER}

    def show(self, number: int, name: str, span: slice) -> torch.Tensor:
        """A copy of a part of one state tensor, or of the master. Cheap where the last call was for the same stretch."""
        entry = self._entries[number]
        if name == MASTER and entry.fill is None:
            return entry.master.detach()[span].clone()
        if self._shown != number:
            self._drop_shown()
            if entry.reading is None:
                self._begin(number)
            self._shown = number
        assert entry.reading is not None
        entry.reading.wait()
        if name == MASTER and self.pending(number):
            self._fill(entry)
        return entry.reading.tensors[name][span].clone()

    def _drop_shown(self) -> None:
        if self._shown is not None:
            self._forget(self._shown)
            self._shown = None

    def _forget(self, number: int) -> None:
        """Free the buffers of a stretch that was read and not changed."""
        entry = self._entries.get(number)
        if entry is not None and entry.reading is not None:
            for transfer in entry.reading.transfers:
                transfer.settle()
            entry.reading.buffers.used = False
            entry.reading = None

    def _read_ahead(self, queue: list[int]) -> None:
        for number in queue[: len(self._buffers) - 1]:
            if self._entries[number].reading is not None:
                continue
            if not any(buffers.idle for buffers in self._buffers):
                return
            self._begin(number)

    def _begin(self, number: int) -> None:
        """Begin to read a stretch, once there are buffers for it."""
        entry = self._entries[number]
        free = [buffers for buffers in self._buffers if not buffers.used]
        buffers = next((each for each in free if each.idle), free[0])
        buffers.settle()
        buffers.used = True
        tensors = {
            name: buffers.tensor(name, entry.numel, dtype) for name, dtype in entry.stored_dtypes.items()
        }
        transfers = [self._files.read(f"{number}.{name}", tensor) for name, tensor in tensors.items()]
        entry.reading = _Reading(buffers, tensors, transfers)

    def _land(self, entry: _Entry) -> None:
        """Give the optimizer a stretch that has been read."""
        assert entry.reading is not None
        entry.reading.wait()
        if entry.fill is not None:
            if MASTER not in entry.stored_dtypes:
                self._fill(entry)
            entry.master.data = entry.reading.tensors[MASTER]
        state = self._optimizer.state[entry.master] if entry.stored_dtypes.keys() - {MASTER} else {}
        state.update((name, each) for name, each in entry.reading.tensors.items() if name != MASTER)

    def _fill(self, entry: _Entry) -> None:
        """Make the master that nothing has written yet."""
        assert entry.reading is not None and entry.fill is not None
        master = entry.reading.buffers.tensor(MASTER, entry.numel, entry.dtype)
        entry.fill(master)
        entry.reading.tensors[MASTER] = master

    def _store(self, number: int) -> None:
        """Take a stretch from the optimizer, and begin to write it."""
        entry = self._entries[number]
        state: dict[str, Any] = self._optimizer.state.get(entry.master, {})
        tensors: dict[str, torch.Tensor] = {name: state[name] for name in _elementwise(state, entry.master)}
        state.update((name, absent(entry.numel, each.dtype)) for name, each in tensors.items())
        if entry.fill is not None:
            tensors[MASTER] = entry.master.data
        for name in entry.stored_dtypes.keys() - tensors.keys():
            self._files.remove(f"{number}.{name}")
        entry.stored_dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
        writes = [self._files.write(f"{number}.{name}", each.detach()) for name, each in tensors.items()]
        if entry.fill is not None:
            entry.master.data = absent(entry.numel, entry.dtype)
        if entry.reading is not None:
            entry.reading.buffers.writes = writes
            entry.reading.buffers.used = False
            entry.reading = None
        if not self._policy.pipeline_write or not self._buffers:
            for write in writes:
                write.wait()


def absent(numel: int, dtype: torch.dtype, device: torch.device | None = None) -> torch.Tensor:
    """What stands for a tensor that is in a file."""
    value = float("nan") if dtype.is_floating_point else 0
    return torch.full((1,), value, dtype=dtype, device=device).expand(numel)


def _elementwise(state: dict[str, Any], master: torch.Tensor) -> list[str]:
    """The state tensors with an element for each of the master's."""
    return [
        name
        for name, value in state.items()
        if isinstance(value, torch.Tensor) and value.dim() and value.shape == master.shape
    ]

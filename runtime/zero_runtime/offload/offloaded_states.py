"""Masters and states of an optimizer in files. They are in memory only around their update.

A step walks through the chunks of the state. While one chunk is updated, the next chunks are read and the
previous chunks are written, each in its own set of buffers. There are ``buffer_count`` sets, and no further
memory is needed::

    buffers 0   read 0 | update 0 | write 0            | read 4 ...
    buffers 1   read 1            | update 1 | write 1 | ...
    buffers 2   read 2                       | update 2 | write 2
    buffers 3   read 3                                  | update 3 | ...

The optimizer identifies each chunk by one tensor, its master. While the values are in files, the master and its
state tensors keep their shapes and contain NaN. All elements of such a tensor are one element in memory.
Writing to such a tensor has no effect or is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import torch

from zero_runtime.configuration.blocks.offload_block import OptimizerOffload
from zero_runtime.offload.file_ranges import aligned_empty
from zero_runtime.offload.tensor_files import TensorFiles, Transfer

MASTER: Final = "master"
_GRADIENT: Final = "gradient"


class _Buffers:
    """The memory for one chunk.

    Attributes:
        writes: The outstanding writes from this memory.
        used: Whether this memory contains a chunk.
    """

    def __init__(self, pinned: bool) -> None:
        self.writes: list[Transfer] = []
        self.used = False
        self._pinned = pinned
        self._memory: dict[str, torch.Tensor] = {}

    def tensor(self, name: str, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return memory for ``numel`` elements of tensor ``name``. Later calls reuse the memory."""
        size = numel * dtype.itemsize
        memory = self._memory.get(name)
        if memory is None or memory.numel() < size:
            memory = self._memory[name] = aligned_empty(size, self._pinned)
        return memory[:size].view(dtype)

    @property
    def idle(self) -> bool:
        """Whether a chunk can be read into this memory immediately."""
        return not self.used and all(write.done for write in self.writes)

    def settle(self) -> None:
        """Wait for outstanding writes. Raise OffloadError if a write failed."""
        writes, self.writes = self.writes, []
        for write in writes:
            write.wait()


class _Reading(NamedTuple):
    """A chunk that is in memory or is being read: its tensors, by name, and their transfers."""

    buffers: _Buffers
    tensors: dict[str, torch.Tensor]
    transfers: list[Transfer]

    def wait(self) -> None:
        for transfer in self.transfers:
            transfer.wait()


class _Entry:
    """A chunk whose state is in files.

    Attributes:
        master: The tensor that the optimizer updates.
        numel, dtype: The number of elements and the dtype of the master.
        fill: A function that fills the master with the model's values. None if the master is the model's own
            memory, which stays in memory.
        stored_dtypes: The dtypes of the tensors in files, by name.
        reading: The buffers and transfers while the chunk is in memory or is being read. None otherwise.
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
        optimizer: The optimizer that owns the state. It must update tensor by tensor.
        files: The files that store the tensors. They are closed with this object.
        policy: The number of buffers, and whether reads and writes overlap updates.
        pinned: Whether the buffers are page-locked.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, files: TensorFiles, policy: OptimizerOffload, pinned: bool
    ) -> None:
        self._optimizer = optimizer
        self._files = files
        self._policy = policy
        self._entries: dict[int, _Entry] = {}
        self._buffers = [_Buffers(pinned) for _ in range(policy.buffer_count)]
        self._shown: int | None = None  # The number of the chunk that was read for a checkpoint.

    def __contains__(self, number: int) -> bool:
        """Return whether the state of master ``number`` is in files."""
        return number in self._entries

    def close(self) -> None:
        """Remove the files. Their tensors cannot be used afterwards."""
        self._entries.clear()
        self._files.close()

    @torch.no_grad()
    def add(
        self, number: int, numel: int, dtype: torch.dtype, fill: Callable[[torch.Tensor], None]
    ) -> torch.Tensor:
        """Add a master of ``numel`` elements in files. ``fill`` fills its values.

        The master is written immediately, unless ``fast_init`` is set.
        """
        master = torch.empty(numel, dtype=dtype)
        entry = self._entries[number] = _Entry(master, fill)
        master.data = absent(numel, dtype)
        if not self._policy.fast_init:
            self._begin(number)
            self._land(entry)
            self._store(number)
        return master

    def add_state(self, number: int, master: torch.Tensor) -> None:
        """Add a master that stays in memory while its state is in files."""
        self._entries[number] = _Entry(master, None)
        self._store(number)  # Some optimizers create their state in the constructor.

    def begin(self) -> None:
        """Start to read the first chunks of the next walk, if ``pipeline_read`` is set."""
        if self._policy.pipeline_read:
            self._drop_shown()
            self._read_ahead(list(self._entries))

    def walk(self, numbers: Iterable[int] | None = None) -> Iterator[int]:
        """Yield the number of every chunk in turn.

        A chunk is in memory until the next number is requested. Changes to the chunk are written.

        Raises:
            OffloadError: A file cannot be read or written.
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
                self._forget(number)  # If the walk was interrupted, prefetched chunks remain.
        for buffers in self._buffers:
            buffers.settle()

    @contextmanager
    def resident(self, number: int) -> Iterator[None]:
        """Keep the chunk in memory within the ``with`` block. Changes to the chunk are written."""
        for _ in self.walk([number]):
            yield

    def gradient(self, number: int, dtype: torch.dtype) -> torch.Tensor:
        """Return memory for the gradient of a chunk that is in memory."""
        entry = self._entries[number]
        assert entry.reading is not None
        return entry.reading.buffers.tensor(_GRADIENT, entry.numel, dtype)

    def pending(self, number: int) -> bool:
        """Return whether the master has not been written yet, so that it must be filled."""
        entry = self._entries[number]
        return entry.fill is not None and MASTER not in entry.stored_dtypes

    def kept(self, number: int) -> dict[str, torch.dtype]:
        """Return the dtypes of the state tensors in files, by name."""
        return {name: dtype for name, dtype in self._entries[number].stored_dtypes.items() if name != MASTER}

    def show(self, number: int, name: str, span: slice) -> torch.Tensor:
        """Return a copy of a range of one state tensor or of the master.

        The call is cheap if the previous call was for the same chunk.
        """
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
        """Free the buffers of a chunk that was read and not modified."""
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
        """Start to read a chunk, after buffers for the chunk are free."""
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
        """Pass a chunk that has been read to the optimizer."""
        assert entry.reading is not None
        entry.reading.wait()
        if entry.fill is not None:
            if MASTER not in entry.stored_dtypes:
                self._fill(entry)
            entry.master.data = entry.reading.tensors[MASTER]
        state = self._optimizer.state[entry.master] if entry.stored_dtypes.keys() - {MASTER} else {}
        state.update((name, each) for name, each in entry.reading.tensors.items() if name != MASTER)

    def _fill(self, entry: _Entry) -> None:
        """Fill a master that has not been written yet."""
        assert entry.reading is not None and entry.fill is not None
        master = entry.reading.buffers.tensor(MASTER, entry.numel, entry.dtype)
        entry.fill(master)
        entry.reading.tensors[MASTER] = master

    def _store(self, number: int) -> None:
        """Take a chunk from the optimizer and start to write it."""
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
    """Return the placeholder of a tensor that is in a file.

    The placeholder has ``numel`` elements, all in the memory of one element. The value is NaN, or 0 for
    integers.
    """
    value = float("nan") if dtype.is_floating_point else 0
    return torch.full((1,), value, dtype=dtype, device=device).expand(numel)


def _elementwise(state: dict[str, Any], master: torch.Tensor) -> list[str]:
    """Return the names of the state tensors that have the master's shape."""
    return [
        name
        for name, value in state.items()
        if isinstance(value, torch.Tensor) and value.dim() and value.shape == master.shape
    ]

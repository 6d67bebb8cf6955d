"""Slices that live in files while nobody needs them, and the buffers in which they come and go (stage 3).

A slice is kept in pages of at most ``buffer_size`` elements, and of a few MiB, one file each. Pages are read ahead of
their use into buffers, and copied from there to where slices are sent from; changed slices are copied into buffers page by
page, and written while the training goes on. All buffers together have at most ``buffer_count * buffer_size`` elements, and
no more than a share of what is in files, or than is gathered ahead at once::

    pager.adopt(shard)             # keeps the slice in memory while there is room for it, else in files
    pager.refill(coming)           # reads ahead what ``coming`` tells, as far as there are buffers
    pager.read(shard, out)         # fills ``out``; waits only for what has not been read yet
    pager.write(shard, values)     # the slice has changed
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from zero_runtime.offload.files import TensorFiles, Transfer
from zero_runtime.offload.folders import new_folder
from zero_runtime.sharding.page_memory import Page, PageMemory
from zero_runtime.sharding.policy import SliceOffload

if TYPE_CHECKING:
    from zero_runtime.sharding.shards import Shard

KEY: Final = "zero_optimization.offload_param.nvme_path"
# Elements of a page: enough for a disk, and a small part of what is in memory at once.
_LARGEST: Final = 2**20
# Buffers may have this share of what is in files, or at least so many elements.
_SHARE: Final = 8
_LEAST: Final = 4 * _LARGEST


class _Buffer(NamedTuple):
    """A page in memory, on its way from its file or to it."""

    values: torch.Tensor
    transfer: Transfer


class Pager:
    """Keeps slices of one rank in files.

    Args:
        offload: where, and through how many buffers.
        rank: of this process.
        pinned: whether buffers are page-locked.

    Attributes:
        offload: as given.
        pinned: as given.
        ahead: elements of slices that are gathered ahead at once, which buffers should have room for.
        in_files: elements of the slices that are in files.
        largest: elements that were in buffers at one time, at most.
    """

    def __init__(self, offload: SliceOffload, rank: int, pinned: bool) -> None:
        self.offload = offload
        self.pinned = pinned
        self.ahead = 0
        self.in_files = 0
        self.largest = 0
        self._rank = rank
        self._files: TensorFiles | None = None
        self._room = offload.max_in_cpu
        self._in_memory: set[int] = set()  # numbers of the shards that ``max_in_cpu`` has room for
        self._used = 0  # elements of all buffers
        self._memory = PageMemory(pinned)
        self._ahead: dict[Page, _Buffer] = {}  # read, in the order in which that was begun
        self._leaving: dict[Page, _Buffer] = {}  # being written, likewise
        self._wanted: dict[Page, None] = {}  # to be read when there are buffers, in this order

    @property
    def _limit(self) -> int:
        """Elements that all buffers together may have."""
        given = self.offload.buffer_count * self.offload.buffer_size
        return min(given, max(self.in_files // _SHARE, self.ahead, _LEAST))

    # What is kept where.

    def adopt(self, shard: Shard) -> None:
        """Take over the slice of ``shard``: it stays in memory if it is persistent, or while there is room, else goes."""
        if (
            shard.persistent
            or shard.pager is self
            or shard.number in self._in_memory
            or not shard.slice_numel
        ):
            return
        if shard.slice_numel <= self._room:
            self._room -= shard.slice_numel
            self._in_memory.add(shard.number)
            return
        self.write(shard, shard.own)
        self.in_files += shard.slice_numel
        shard.page_out(self)

    def forget(self, shard: Shard) -> None:
        """The slice is not kept here any longer; with the last one the files go."""
        for page in self._pages(shard):
            self._discard(page)
            self._open_files().remove(page.name)
        self.in_files -= shard.slice_numel
        if not self.in_files:
            self.close()

    def close(self) -> None:
        """Remove all files."""
        self._wanted.clear()
        for page in (*self._ahead, *self._leaving):
            self._discard(page)
        if self._files is not None:
            self._files.close()
            self._files = None

    def _open_files(self) -> TensorFiles:
        if self._files is None:
            assert self.offload.nvme_path is not None
            folder = new_folder(self.offload.nvme_path, self._rank, "parameters", KEY)
            self._files = TensorFiles(folder, self.offload.io, key=KEY)
        return self._files

    def _pages(self, shard: Shard, first: int = 0, last: int | None = None) -> Sequence[Page]:
        """The pages that have elements from ``first`` to before ``last``; all by default."""
        size, numel = min(self.offload.buffer_size, _LARGEST), shard.slice_numel
        starts = range(first // size * size, numel if last is None else last, size)
        return [Page(shard.number, start, min(size, numel - start), shard.dtype) for start in starts]

    # Reading.

    def read(self, shard: Shard, out: torch.Tensor, start: int = 0) -> None:
        """Fill ``out``, 1-D and of any dtype on any device, with the slice's elements from ``start``."""
        pages = self._pages(shard, start, start + out.numel())
        self._want(pages)
        for page in pages:
            first, last = max(start, page.start), min(start + out.numel(), page.start + page.numel)
            values = self._arrived(page).narrow(0, first - page.start, last - first)
            out.narrow(0, first - start, last - first).copy_(values)
            if page in self._ahead:
                self._discard(page)
                self._pump()

    def begin(self, shards: Iterable[Shard], first: int = 0, last: int | None = None) -> None:
        """The slices of ``shards``, or these elements of them, are read next, before what else was wanted: begin to."""
        self._want([page for shard in shards for page in self._pages(shard, first, last)])

    def refill(self, coming: Callable[[], Iterable[Shard]]) -> None:
        """Read ahead the slices that ``coming`` tells, in that order; not before what was wanted earlier has been read."""
        if not self._wanted:
            wanted: list[Page] = []
            numel = 0
            for shard in coming():
                wanted += self._pages(shard)
                numel += shard.slice_numel
                if numel >= self._limit:
                    break
            for page in set(self._ahead).difference(wanted):
                self._discard(page)  # nobody has come for it
            self._wanted = dict.fromkeys(wanted)
        self._pump()

    def cancel(self) -> None:
        """What was to be read ahead is not needed."""
        self._wanted.clear()

    def _want(self, pages: Sequence[Page]) -> None:
        self._wanted = dict.fromkeys((*pages, *self._wanted))
        self._pump()

    def _arrived(self, page: Page) -> torch.Tensor:
        """The values of a page."""
        leaving = self._leaving.get(page)
        if leaving is not None:
            return leaving.values
        if page not in self._ahead:
            self._wanted.pop(page, None)
            self._begin(page)
        buffer = self._ahead[page]
        buffer.transfer.wait()
        return buffer.values

    def _pump(self) -> None:
        """Begin to read what is wanted while there are buffers."""
        while self._wanted:
            page = next(iter(self._wanted))
            if page not in self._ahead and page not in self._leaving:
                if page.numel > self._limit - self._used:
                    self._reap()
                if page.numel > self._limit - self._used:
                    return
                self._begin(page)
            del self._wanted[page]

    def _begin(self, page: Page) -> None:
        values = self._buffer(page)
        self._ahead[page] = _Buffer(values, self._open_files().read(page.name, values))

    # Writing.

    def write(self, shard: Shard, values: torch.Tensor, start: int = 0) -> None:
        """Begin to write ``values``, 1-D and of any dtype on any device, as the slice's elements from ``start``.

        They may change afterwards. Of pages of which this is a part only, the rest is read first.
        """
        end = start + values.numel()
        for page in self._pages(shard, start, end):
            first, last = max(start, page.start), min(end, page.start + page.numel)
            buffer = self._emptied(page) if last - first == page.numel else self._taken(page)
            part = buffer.narrow(0, first - page.start, last - first)
            part.copy_(values.narrow(0, first - start, last - first))
            self._leaving[page] = _Buffer(buffer, self._open_files().write(page.name, buffer))

    def _emptied(self, page: Page) -> torch.Tensor:
        """A buffer for other values of a page."""
        self._discard(page)
        return self._buffer(page)

    def _taken(self, page: Page) -> torch.Tensor:
        """A buffer with the values of a page, which is in nobody's way any more."""
        if page not in self._leaving:
            self._arrived(page)
        buffer = (self._leaving if page in self._leaving else self._ahead).pop(page)
        buffer.transfer.wait()
        return buffer.values

    # Buffers.

    def _buffer(self, page: Page) -> torch.Tensor:
        """Memory for a page: where there is too little, the oldest write is waited for, or what was read last dropped."""
        while page.numel > self._limit - self._used:
            self._discard(next(iter(self._leaving)) if self._leaving else next(reversed(self._ahead)))
        self._used += page.numel
        self.largest = max(self.largest, self._used)
        return self._memory.take(page, self._limit - self._used)

    def _reap(self) -> None:
        """Give up the buffers of what has been written."""
        for page, buffer in list(self._leaving.items()):
            if buffer.transfer.done:
                self._discard(page)

    def _discard(self, page: Page) -> None:
        """Give up the buffer of a page, if it has one, when its transfer has ended."""
        for buffers in (self._ahead, self._leaving):
            buffer = buffers.pop(page, None)
            if buffer is not None:
                self._used -= page.numel
                buffer.transfer.wait()
                self._memory.give_back(buffer.values)

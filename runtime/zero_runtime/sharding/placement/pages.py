"""Paging of released shards to NVMe through a set of buffers (stage 3).

A shard is stored in pages of at most ``buffer_size`` elements and a few MiB, with one file for each page. Pages
are read into buffers ahead of their use, and copied from there to the send buffer. Changed shards are copied to
buffers page by page, and written while the training continues. All buffers together have at most
``buffer_count * buffer_size`` elements. They also have at most the largest of three numbers: a share of the
elements in files, the elements that are prefetched at once, and a fixed minimum::

    pager.adopt(shard)             # keeps the shard in memory while there is room for it, else in files
    pager.refill(coming)           # reads the shards of ``coming`` ahead, as far as there are buffers
    pager.read(shard, out)         # fills ``out``; waits only for pages that have not been read yet
    pager.write(shard, values)     # writes the changed shard
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple, Protocol

import torch

from zero_runtime.offload.folders import new_folder
from zero_runtime.offload.tensor_files import TensorFiles, Transfer
from zero_runtime.sharding.gather_schedule.policy import SliceOffload
from zero_runtime.sharding.placement.page_memory import Page, PageMemory

KEY: Final = "zero_optimization.offload_param.nvme_path"
# The largest number of elements of a page: large enough for a disk, and small compared with all buffers.
_LARGEST: Final = 2**20
# Buffers may have this share of the elements in files, or at least _LEAST elements.
_SHARE: Final = 8
_LEAST: Final = 4 * _LARGEST


class Pageable(Protocol):
    """The part of a :class:`zero_runtime.sharding.shards.Shard` that a pager needs. The shard refers to its pager."""

    number: int
    dtype: torch.dtype
    slice_numel: int
    pager: Pager | None

    @property
    def persistent(self) -> bool:
        """Whether the parameter stays gathered between steps."""

    @property
    def own(self) -> torch.Tensor:
        """The shard, which must be in memory: 1-D, ``slice_numel`` elements of ``dtype``."""

    def page_out(self, pager: Pager) -> None:
        """Let ``pager`` store the shard."""


class _Buffer(NamedTuple):
    """A page in memory, and its transfer from or to its file."""

    values: torch.Tensor
    transfer: Transfer


class Pager:
    """Stores the shards of one rank in files.

    Args:
        offload: The settings: the folder, and the number and size of buffers.
        rank: The rank of this process.
        pinned: whether buffers are page-locked.

    Attributes:
        offload: The settings, as given.
        pinned: Whether buffers are page-locked, as given.
        ahead: The number of elements of shards that are prefetched at once. Buffers should have room for them.
        in_files: The number of elements of the shards in files.
        largest: The largest number of elements that were in buffers at the same time.
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
        # The numbers of the shards that stay in memory because of ``max_in_cpu``.
        self._in_memory: set[int] = set()
        self._used = 0  # number of elements of all buffers in use
        self._memory = PageMemory(pinned)
        # The pages that are being read or were read, in the order of their start.
        self._ahead: dict[Page, _Buffer] = {}
        self._leaving: dict[Page, _Buffer] = {}  # pages that are being written, in the order of their start
        self._wanted: dict[Page, None] = {}  # pages to read when there are buffers, in this order

    @property
    def _limit(self) -> int:
        """The largest number of elements that all buffers together may have."""
        configured = self.offload.buffer_count * self.offload.buffer_size
        return min(configured, max(self.in_files // _SHARE, self.ahead, _LEAST))

    # Shards in memory and in files.

    def adopt(self, shard: Pageable) -> None:
        """Take over the shard.

        The shard stays in memory if it is persistent or if there is room in memory. Otherwise it is written to
        files.
        """
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

    def forget(self, shard: Pageable) -> None:
        """Remove the files of the shard. With the last shard, remove the folder."""
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

    def _pages(self, shard: Pageable, first: int = 0, last: int | None = None) -> Sequence[Page]:
        """Return the pages that have elements from ``first`` to before ``last``; all pages by default."""
        size, numel = min(self.offload.buffer_size, _LARGEST), shard.slice_numel
        starts = range(first // size * size, numel if last is None else last, size)
        return [Page(shard.number, start, min(size, numel - start), shard.dtype) for start in starts]

    # Reading.

    def read(self, shard: Pageable, out: torch.Tensor, start: int = 0) -> None:
        """Fill ``out``, 1-D and of any dtype on any device, with the shard's elements from ``start``."""
        pages = self._pages(shard, start, start + out.numel())
        self._want(pages)
        for page in pages:
            first, last = max(start, page.start), min(start + out.numel(), page.start + page.numel)
            values = self._arrived(page).narrow(0, first - page.start, last - first)
            out.narrow(0, first - start, last - first).copy_(values)
            if page in self._ahead:
                self._discard(page)
                self._pump()

    def begin(self, shards: Iterable[Pageable], first: int = 0, last: int | None = None) -> None:
        """Start to read ``shards``, or only these elements of them, before all other requested pages."""
        self._want([page for shard in shards for page in self._pages(shard, first, last)])

    def refill(self, coming: Callable[[], Iterable[Pageable]]) -> None:
        """Read the shards of ``coming`` ahead, in this order, after all pages that were requested earlier."""
        if not self._wanted:
            wanted: list[Page] = []
            numel = 0
            for shard in coming():
                wanted += self._pages(shard)
                numel += shard.slice_numel
                if numel >= self._limit:
                    break
            for page in set(self._ahead).difference(wanted):
                self._discard(page)  # the page was read but never used
            self._wanted = dict.fromkeys(wanted)
        self._pump()

    def cancel(self) -> None:
        """Cancel the reading of pages that has not started."""
        self._wanted.clear()

    def _want(self, pages: Sequence[Page]) -> None:
        self._wanted = dict.fromkeys((*pages, *self._wanted))
        self._pump()

    def _arrived(self, page: Page) -> torch.Tensor:
        """Return the values of a page, and wait for them if necessary."""
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
        """Start to read requested pages while there are free buffers."""
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

    def write(self, shard: Pageable, values: torch.Tensor, start: int = 0) -> None:
        """Start to write ``values`` as the shard's elements from ``start``.

        ``values`` is 1-D and may have any dtype on any device.

        The caller may change ``values`` afterwards. Pages that ``values`` covers only in part are read first.
        """
        end = start + values.numel()
        for page in self._pages(shard, start, end):
            first, last = max(start, page.start), min(end, page.start + page.numel)
            buffer = self._emptied(page) if last - first == page.numel else self._taken(page)
            target = buffer.narrow(0, first - page.start, last - first)
            target.copy_(values.narrow(0, first - start, last - first))
            self._leaving[page] = _Buffer(buffer, self._open_files().write(page.name, buffer))

    def _emptied(self, page: Page) -> torch.Tensor:
        """Return a buffer for new values of a page."""
        self._discard(page)
        return self._buffer(page)

    def _taken(self, page: Page) -> torch.Tensor:
        """Return a buffer with the values of a page, and remove it from the pages in flight."""
        if page not in self._leaving:
            self._arrived(page)
        buffer = (self._leaving if page in self._leaving else self._ahead).pop(page)
        buffer.transfer.wait()
        return buffer.values

    # Buffers.

    def _buffer(self, page: Page) -> torch.Tensor:
        """Return a buffer for a page.

        If there is no room, wait for the oldest write, or drop the page whose read started last.
        """
        while page.numel > self._limit - self._used:
            self._discard(next(iter(self._leaving)) if self._leaving else next(reversed(self._ahead)))
        self._used += page.numel
        self.largest = max(self.largest, self._used)
        return self._memory.take(page, self._limit - self._used)

    def _reap(self) -> None:
        """Return the buffers of pages that have been written."""
        for page, buffer in list(self._leaving.items()):
            if buffer.transfer.done:
                self._discard(page)

    def _discard(self, page: Page) -> None:
        """Return the buffer of a page to the pool after its transfer has ended, if the page has a buffer."""
        for buffers in (self._ahead, self._leaving):
            buffer = buffers.pop(page, None)
            if buffer is not None:
                self._used -= page.numel
                buffer.transfer.wait()
                self._memory.give_back(buffer.values)

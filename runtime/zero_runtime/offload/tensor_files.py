"""Tensors in files. Background threads write and read the files, and checksums verify them.

A transfer consists of requests of ``block_size * queue_depth`` bytes. Each request is usually one read or write
system call. A direct request whose end is not aligned needs a second call. With ``single_submit`` each request
is one block. Reads and writes have separate threads, so that prefetching never waits for writes. The checksum
of every written request stays in memory, and is compared when the request is read.
"""

from __future__ import annotations

import errno
import os
import shutil
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import quote

import torch

from zero_runtime.errors import OffloadError
from zero_runtime.offload.allocation import give_back_freed_memory
from zero_runtime.offload.checksums import ALGORITHM, checksum
from zero_runtime.offload.file_ranges import aligned, as_memory, read_range, takes_direct, write_range
from zero_runtime.offload.folders import remove_folder

_FULL: Final = (errno.ENOSPC, errno.EDQUOT)
_NO_RESERVATION: Final = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)
_LONGEST_NAME: Final = 80


class AsynchronousIO(NamedTuple):
    """How files are read and written. The fields and defaults are those of the configuration block ``aio``.

    Attributes:
        block_size: The size of a block in bytes.
        queue_depth: The number of blocks of one request.
        threads: The number of threads for reads. Writes have the same number of threads.
        single_submit: Whether every block is a separate request.
        overlap_events: Whether each thread has a second request in progress, so that the checksum of one
            request is computed while the disk transfers the other.
    """

    block_size: int = 1_048_576
    queue_depth: int = 8
    threads: int = 1
    single_submit: bool = False
    overlap_events: bool = True

    @property
    def request(self) -> int:
        """The size of a request in bytes."""
        return aligned(self.block_size) * (1 if self.single_submit else self.queue_depth)


_DEFAULT: Final = AsynchronousIO()


class Transfer:
    """A transfer of a tensor to or from its file. Do not use the memory of the tensor before ``wait`` returns."""

    def __init__(
        self, requests: Sequence[Future[None]], describe: Callable[[BaseException], OffloadError]
    ) -> None:
        self._requests = requests
        self._describe = describe

    @property
    def done(self) -> bool:
        """Whether ``wait`` would return or raise immediately."""
        return all(request.done() for request in self._requests)

    def settle(self) -> None:
        """Wait until all requests have ended, successfully or not."""
        wait_for(self._requests)

    def wait(self) -> None:
        """Wait until the transfer is complete.

        Raises:
            OffloadError: A request failed. The message names the file, what happened and what to do.
        """
        self.settle()
        for request in self._requests:
            error = request.exception()
            if isinstance(error, OffloadError):
                raise error
            if isinstance(error, OSError | EOFError):
                raise self._describe(error) from error
            if error is not None:
                raise error


class _File:
    """The file of one tensor.

    Attributes:
        path: The path of the file.
        size: The size of the tensor in bytes.
        checksums: The checksums of the requests.
        last: The transfer that was started last.
    """

    __slots__ = ("checksums", "last", "path", "size")

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 0
        self.checksums: list[int] = []
        self.last: Transfer | None = None


class TensorFiles:
    """Named tensors in the files of one folder.

    Args:
        folder: An existing folder. It is removed by ``close``, or when this object is deleted or its process
            exits.
        io: How files are read and written.
        checked: Whether checksums are compared.
        direct: Whether to bypass the page cache. None bypasses it if the file system supports this.
        key: The configuration key that names ``folder``, for error messages.
    """

    def __init__(
        self,
        folder: Path,
        io: AsynchronousIO = _DEFAULT,
        *,
        checked: bool = True,
        direct: bool | None = None,
        key: str = "nvme_path",
    ) -> None:
        give_back_freed_memory()
        self.folder = folder
        self.direct = takes_direct(folder) if direct is None else direct
        self._io = io
        self._checked = checked
        self._key = key
        self._files: dict[str, _File] = {}
        self._count = 0
        workers = io.threads * (2 if io.overlap_events else 1)
        self._readers = ThreadPoolExecutor(workers, "zero_runtime-read")
        self._writers = ThreadPoolExecutor(workers, "zero_runtime-write")
        self._end = weakref.finalize(self, _end, os.getpid(), folder, self._readers, self._writers)

    def __contains__(self, name: str) -> bool:
        """Return whether a tensor with this name was written."""
        return name in self._files

    def write(self, name: str, tensor: torch.Tensor) -> Transfer:
        """Start to write a tensor. It replaces an earlier tensor with the same name.

        Raises:
            OffloadError: There is no space for the file.
            ValueError: The tensor is not contiguous host memory.
        """
        memory = as_memory(tensor)
        file = self._file(name)
        self._settle(file)
        self._reserve(name, file, len(memory))
        spans = self._spans(len(memory))
        file.checksums = [0] * len(spans)
        requests = [
            self._writers.submit(self._write_request, file, number, memory[span], span.start)
            for number, span in enumerate(spans)
        ]
        file.last = Transfer(requests, lambda error: self._error("writing", name, file, error))
        return file.last

    def read(self, name: str, out: torch.Tensor) -> Transfer:
        """Start to fill ``out`` with the tensor ``name``.

        Raises:
            OffloadError: The tensor could not be written.
            KeyError: There is no tensor with this name.
            ValueError: ``out`` has a different number of bytes, or is not contiguous host memory.
        """
        file = self._files[name]
        memory = as_memory(out)
        if len(memory) != file.size:
            raise ValueError(f"{name} has {file.size} bytes, and its destination has {len(memory)}")
        self._settle(file)
        requests = [
            self._readers.submit(self._read_request, name, file, number, memory[span], span.start)
            for number, span in enumerate(self._spans(file.size))
        ]
        file.last = Transfer(requests, lambda error: self._error("reading", name, file, error))
        return file.last

    def remove(self, name: str) -> None:
        """Remove a tensor and its file, if they exist."""
        file = self._files.pop(name, None)
        if file is not None:
            if file.last is not None:
                file.last.settle()
            file.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Wait for requests in progress and remove the folder. This method may be called twice."""
        self._files.clear()
        self._end()

    def _file(self, name: str) -> _File:
        file = self._files.get(name)
        if file is None:
            self._count += 1
            safe = quote(name, safe="")[:_LONGEST_NAME]
            file = self._files[name] = _File(self.folder / f"{self._count:06d}-{safe}")
        return file

    def _settle(self, file: _File) -> None:
        """Wait for the last transfer of the file, if it is still in progress."""
        if file.last is not None:
            last, file.last = file.last, None
            last.wait()

    def _reserve(self, name: str, file: _File, size: int) -> None:
        """Allocate the complete space of the file before the first write, to detect a full disk immediately."""
        if size == file.size and file.checksums:
            return
        try:
            descriptor = os.open(file.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            try:
                if size:
                    os.posix_fallocate(descriptor, 0, aligned(size))
            except OSError as error:
                if error.errno not in _NO_RESERVATION:
                    raise
            finally:
                os.close(descriptor)
        except OSError as error:
            file.path.unlink(missing_ok=True)
            del self._files[name]
            file.size = size
            raise self._error("writing", name, file, error) from error
        file.size = size

    def _spans(self, size: int) -> list[slice]:
        step = self._io.request
        return [slice(start, min(start + step, size)) for start in range(0, size, step)]

    def _write_request(self, file: _File, number: int, data: memoryview, offset: int) -> None:
        if self._checked:
            file.checksums[number] = checksum(data)
        write_range(file.path, data, offset, self.direct)

    def _read_request(self, name: str, file: _File, number: int, target: memoryview, offset: int) -> None:
        read_range(file.path, target, offset, self.direct)
        if self._checked and (checksum_read := checksum(target)) != file.checksums[number]:
            raise OffloadError(
                f"{file.path} ({name}) has other bytes at {offset} than were written: the {ALGORITHM} of {len(target)} "
                f"bytes is {checksum_read:08x}, expected {file.checksums[number]:08x}; the disk, or another program, has "
                f"changed it; check the disk, and resume from the last checkpoint with another {self._key}"
            )

    def _error(self, doing: str, name: str, file: _File, error: BaseException) -> OffloadError:
        what = f"{doing} {file.size} bytes of {name} ({file.path}) failed"
        if isinstance(error, EOFError):
            return OffloadError(
                f"{what}: the file is shorter than it was written; something has changed it; resume from the last checkpoint"
            )
        number = error.errno if isinstance(error, OSError) else None
        reason = f"{what}: {getattr(error, 'strerror', error)} (errno {number})"
        if number in _FULL:
            return OffloadError(
                f"{reason}; {_free(self.folder)} Free some, or set {self._key} to a folder on a larger disk, and resume "
                "from the last checkpoint, which is unchanged"
            )
        return OffloadError(
            f"{reason}; expected a disk that can be read and written; check it, or set {self._key} to another, and resume "
            "from the last checkpoint"
        )


def _free(folder: Path) -> str:
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return "the disk is full."
    return f"{usage.free} of {usage.total} bytes are free there."


def _end(pid: int, folder: Path, *pools: ThreadPoolExecutor) -> None:
    if os.getpid() != pid:
        return  # This process is a fork. The files and threads belong to its parent.
    for pool in pools:
        pool.shutdown(wait=True, cancel_futures=True)
    remove_folder(folder)

"""Blocks of logs read by several processes side by side, and their scans handed on in the order of the blocks."""

from __future__ import annotations

import multiprocessing
import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Final

from commprof.errors import LogError
from commprof.nccl.scan import Scan, Scanner
from commprof.nccl.sources import Block

MOST_WORKERS: Final = 3
# A worker reads one span while the next one waits for it. Bytes do not wait: both ends of a pipe would.
_SPANS_EACH, _BYTES_EACH = 2, 1


def default_workers() -> int:
    """One per processor that this process may use, but not more than fit into the memory that is allowed."""
    return min(len(os.sched_getaffinity(0)), MOST_WORKERS)


def scan_blocks(blocks: Iterable[Block], workers: int, careful: bool = False) -> Iterator[Scan]:
    """The scans of ``blocks``, in their order; ``workers`` processes, or this one for 0.

    Raises:
        LogError: a worker died, as when the machine is out of memory.
    """
    if workers <= 0:
        scanner = Scanner(careful)
        for block in blocks:
            yield scanner.scan(_bytes(block))
        return
    crew: list[_Worker] = []
    try:
        for _ in range(workers):
            crew.append(_Worker(careful, crew))
        waiting: deque[_Worker] = deque()
        for number, block in enumerate(blocks):
            most = workers * (_BYTES_EACH if isinstance(block, bytes) else _SPANS_EACH)
            while len(waiting) >= most:
                yield waiting.popleft().receive()
            worker = crew[number % workers]
            worker.send(block)
            waiting.append(worker)
        while waiting:
            yield waiting.popleft().receive()
    finally:
        for worker in crew:
            worker.stop()


def _bytes(block: Block) -> bytes:
    if isinstance(block, bytes):
        return block
    with block.path.open("rb", buffering=0) as stream:
        data = os.pread(stream.fileno(), block.length, block.begin)
        while len(data) < block.length:
            more = os.pread(stream.fileno(), block.length - len(data), block.begin + len(data))
            if not more:
                break
            data += more
    return data


class _Worker:
    """One process that scans blocks, and the pipe to it."""

    def __init__(self, careful: bool, earlier: Sequence[_Worker]) -> None:
        # A forked process has numpy and Arrow loaded, and needs no importable main module.
        context = multiprocessing.get_context("fork")
        self._pipe, other = context.Pipe()
        # The child has them all, and would keep itself and the others waiting when this process is gone.
        pipes = [self._pipe, *(worker._pipe for worker in earlier)]
        self._process = context.Process(target=_work, args=(other, careful, pipes), daemon=True)
        self._process.start()
        other.close()

    def send(self, block: Block) -> None:
        """Hand over a block; returns at once for a span, and once the worker takes it for bytes."""
        try:
            self._pipe.send(block)
        except OSError as error:
            raise self._died() from error

    def receive(self) -> Scan:
        """The scan of the earliest block that was sent and not received."""
        try:
            answer = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise self._died() from error
        if isinstance(answer, BaseException):
            raise answer
        scan: Scan = answer
        return scan

    def stop(self) -> None:
        """End the process, whatever it does."""
        self._pipe.close()
        self._process.terminate()
        self._process.join()

    def _died(self) -> LogError:
        self._process.join(1)
        return LogError(
            f"a process that read a part of the log ended with exit code {self._process.exitcode}; expected it to "
            "finish: is the machine out of memory?"
        )


def _work(pipe: Connection, careful: bool, not_its_own: Sequence[Connection]) -> None:
    """What a worker does until its pipe closes."""
    for other in not_its_own:
        other.close()
    scanner = Scanner(careful)
    try:
        while True:
            block = pipe.recv()
            try:
                pipe.send(scanner.scan(_bytes(block)))
            except (OSError, MemoryError, ValueError) as error:
                pipe.send(error)
    except (EOFError, OSError, KeyboardInterrupt):
        return

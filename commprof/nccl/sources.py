"""Reads logs block by block from files, globs, directories and standard input, which may be plain, gzip or zstd.

Only one block of a log is in memory at a time.
"""

from __future__ import annotations

import glob
import gzip
import io
import os
import sys
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple

import pyarrow as pa

from commprof.errors import LogError

STANDARD_INPUT: Final = "-"
BLOCK_BYTES: Final = 4 << 20
SPAN_BYTES: Final = 8 << 20
_LOOK_BYTES: Final = 1 << 16
LONGEST_LINE_BYTES: Final = 16 << 20

_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
# The suffixes of files that commprof, or a generator of logs, writes next to logs.
_NOT_LOGS: Final = frozenset({".csv", ".json", ".jsonl", ".md", ".parquet", ".records", ".events"})


def find_logs(paths: Sequence[str | Path]) -> list[Path]:
    """Return the log files of ``paths`` in order, without duplicates.

    Args:
        paths: Files, globs, directories, or ``-`` for standard input. All files below a directory are included.

    Raises:
        LogError: A path does not exist, a glob or a directory has no file, or ``paths`` is empty.
    """
    logs: dict[Path, None] = {}
    for text in map(str, paths):
        path = Path(text)
        if text == STANDARD_INPUT:
            files = [path]
        elif path.is_dir():
            files = sorted(f for f in path.rglob("*") if f.is_file() and f.suffix not in _NOT_LOGS)
        elif path.exists():
            files = [path]
        else:
            files = sorted(f for f in map(Path, glob.glob(text, recursive=True)) if f.is_file())  # noqa: PTH207 - absolute patterns
        if not files:
            raise LogError(_no_log_text(path, text))
        logs |= dict.fromkeys(files)
    if not logs:
        raise LogError(
            "no log was named; expected at least one file, glob or directory, or - for standard input"
        )
    return list(logs)


def _no_log_text(path: Path, text: str) -> str:
    if path.is_dir():
        return (
            f"directory {text} has no log file; NCCL writes one per process with "
            "NCCL_DEBUG_FILE=<directory>/%h.%p"
        )
    return f"no file is called or matches {text}; expected an NCCL log, a glob, a directory of logs, or -"


class Span(NamedTuple):
    """A range of complete lines in a plain file: the position of its first byte, and its length in bytes."""

    path: Path
    begin: int
    length: int


Block = Span | bytes


def read_block(block: Block) -> bytes:
    """Return the bytes of a block. If the file was truncated in the meantime, only the remaining bytes are returned."""
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


class LogSource:
    """One log that is read once, as blocks of lines.

    Attributes:
        path: The path of the log.
        name: The name of the log, by default its path.
        num_bytes: The number of bytes read so far, after decompression.
        overlong: The number of lines longer than ``LONGEST_LINE_BYTES``, which are skipped.
        trouble: The reason why reading ended early; None if the whole log was read.
    """

    def __init__(self, path: Path, name: str | None = None) -> None:
        self.path = path
        self.name = str(path) if name is None else name
        self.num_bytes = 0
        self.overlong = 0
        self.trouble: str | None = None

    def blocks(self) -> Iterator[bytes]:
        """Yield the log as blocks of complete lines. The last line may lack its newline.

        Raises:
            LogError: The file cannot be opened.
        """
        with ExitStack() as opened:
            try:
                stream = _open(self.path, opened)
            except OSError as error:
                raise LogError(
                    f"cannot read {self.path}: {error.strerror or error}; expected a readable file"
                ) from error
            yield from self._complete_lines(self._raw_blocks(stream))

    def is_plain(self) -> bool:
        """Return whether blocks of the log can be read independently, as in a regular file that is not compressed."""
        try:
            if not self.path.is_file():
                return False
            with self.path.open("rb") as stream:
                return not is_packed(stream)
        except OSError:
            return False

    def spans(self) -> Iterator[Block]:
        """Yield the log as spans of complete lines, with the same lines as :meth:`blocks`.

        The log must be plain (see :meth:`is_plain`).

        Raises:
            LogError: The file cannot be opened.
        """
        try:
            with self.path.open("rb") as stream:
                size = stream.seek(0, io.SEEK_END)
                begin = 0
                while begin < size:
                    end = _after_newline(stream, begin + SPAN_BYTES, size)
                    line = begin
                    if end - begin > LONGEST_LINE_BYTES:
                        line = _last_line(stream, begin, min(begin + SPAN_BYTES, size))
                    if end - line > LONGEST_LINE_BYTES + 1:
                        if line > begin:
                            yield Span(self.path, begin, line - begin)
                        self.overlong += 1
                        yield b"\n"
                    else:
                        yield Span(self.path, begin, end - begin)
                    self.num_bytes += end - begin
                    begin = end
        except OSError as error:
            raise LogError(
                f"cannot read {self.path}: {error.strerror or error}; expected a readable file"
            ) from error

    def _complete_lines(self, raw_blocks: Iterator[bytes]) -> Iterator[bytes]:
        """Yield blocks of complete lines.

        A line that is too long is replaced by an empty line, so that the following lines keep their numbers.
        """
        rest: list[bytes] = []
        length, skipping = 0, False
        for block in raw_blocks:
            end = block.rfind(b"\n") + 1
            if end and skipping:
                begin = block.find(b"\n")
                yield block[begin:end]
                rest, length, skipping = [block[end:]], len(block) - end, False
            elif end:
                yield b"".join([*rest, block[:end]])
                rest, length = [block[end:]], len(block) - end
            elif not skipping:
                rest.append(block)
                length += len(block)
            if length > LONGEST_LINE_BYTES and not skipping:
                rest, length, skipping = [], 0, True
                self.overlong += 1
        if length or skipping:
            yield b"".join(rest) or b"\n"

    def _raw_blocks(self, stream: io.BufferedIOBase) -> Iterator[bytes]:
        while True:
            try:
                block = stream.read1(BLOCK_BYTES)  # read1 also returns the readable part of a damaged archive
            except (OSError, EOFError, zlib.error, pa.ArrowException) as error:
                self.trouble = (
                    f"{self.path} could not be read to its end: {error}; the part before it is used"
                )
                return
            if not block:
                return
            self.num_bytes += len(block)
            yield block


def _after_newline(stream: io.BufferedReader, position: int, size: int) -> int:
    """Return the position of the first line that begins at or after ``position``; at most ``size``."""
    position -= 1
    while position < size:
        stream.seek(position)
        offset = stream.read(_LOOK_BYTES).find(b"\n")
        if offset >= 0:
            return position + offset + 1
        position += _LOOK_BYTES
    return size


def _last_line(stream: io.BufferedReader, begin: int, end: int) -> int:
    """Return the position of the last line that begins between ``begin`` and ``end``. A line begins at ``begin``."""
    stream.seek(begin)
    return begin + stream.read(end - begin).rfind(b"\n") + 1


def is_packed(stream: BinaryIO) -> bool:
    """Return whether a file that was just opened is compressed."""
    magic = stream.read(4)
    return magic.startswith(_GZIP) or magic == _ZSTD


def _open(path: Path, opened: ExitStack) -> io.BufferedIOBase:
    """Open ``path`` as a stream of decompressed bytes. The compression is detected by the first bytes of the file."""
    if str(path) == STANDARD_INPUT:
        return sys.stdin.buffer  # type: ignore[return-value]
    stream = opened.enter_context(path.open("rb"))
    magic = stream.peek(4)[:4]
    if magic.startswith(_GZIP):
        return opened.enter_context(gzip.GzipFile(fileobj=stream))
    if magic == _ZSTD:
        compressed = opened.enter_context(pa.CompressedInputStream(pa.PythonFile(stream), "zstd"))
        return io.BufferedReader(compressed)
    return stream

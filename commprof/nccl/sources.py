"""Where log lines come from: files, globs, directories, standard input; plain, gzip or zstd; block by block.

Memory stays bounded by one block, whatever the size of the log.
"""

from __future__ import annotations

import glob
import gzip
import io
import sys
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import pyarrow as pa

from commprof.errors import LogError

STANDARD_INPUT: Final = "-"
BLOCK_BYTES: Final = 4 << 20
LONGEST_LINE_BYTES: Final = 16 << 20

_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
# What commprof itself, or a generator, writes beside logs.
_NOT_LOGS: Final = frozenset({".csv", ".json", ".jsonl", ".md", ".parquet", ".records", ".events"})


def find_logs(paths: Sequence[str | Path]) -> list[Path]:
    """The log files that ``paths`` mean, in order, each once: files, globs, directories with all files below them.

    Raises:
        LogError: a path that does not exist, a glob or a directory without a file.
    """
    found: dict[Path, None] = {}
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
            raise LogError(_nothing_found(path, text))
        found |= dict.fromkeys(files)
    if not found:
        raise LogError(
            "no log was named; expected at least one file, glob or directory, or - for standard input"
        )
    return list(found)


def _nothing_found(path: Path, text: str) -> str:
    if path.is_dir():
        return (
            f"directory {text} holds no log file; NCCL writes one per process with "
            "NCCL_DEBUG_FILE=<directory>/%h.%p"
        )
    return f"no file is called or matches {text}; expected an NCCL log, a glob, a directory of logs, or -"


class LogSource:
    """One log, read once, as blocks of lines.

    Attributes:
        num_bytes: bytes read so far, after decompression.
        overlong: lines longer than ``LONGEST_LINE_BYTES``, which are skipped.
        trouble: why reading ended early, None when it did not.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_bytes = 0
        self.overlong = 0
        self.trouble: str | None = None

    def blocks(self) -> Iterator[bytes]:
        """The log as blocks of whole lines; the last line may lack its newline.

        Raises:
            LogError: the file cannot be opened.
        """
        with ExitStack() as opened:
            try:
                stream = _open(self.path, opened)
            except OSError as error:
                raise LogError(
                    f"cannot read {self.path}: {error.strerror or error}; expected a readable file"
                ) from error
            yield from self._whole_lines(self._raw_blocks(stream))

    def _whole_lines(self, raw_blocks: Iterator[bytes]) -> Iterator[bytes]:
        """Cut at newlines. A line that is too long leaves an empty one, so that lines keep their numbers."""
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
                block = stream.read1(BLOCK_BYTES)  # what a damaged archive still gives, too
            except (OSError, EOFError, zlib.error, pa.ArrowException) as error:
                self.trouble = f"{self.path} could not be read to its end: {error}; what came before is used"
                return
            if not block:
                return
            self.num_bytes += len(block)
            yield block


def _open(path: Path, opened: ExitStack) -> io.BufferedIOBase:
    """``path`` as a stream of plain bytes; compression is told by the first bytes, not by the name."""
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

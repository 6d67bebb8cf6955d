"""Follows logs while they are written: files grow, appear, are rotated or truncated.

Lines are only counted while following. The tables come from the final files, so they equal those of a plain parse. Each
file is also copied, compressed, to the temporary directory, and the copy is read where the file was truncated, replaced or
removed. Memory holds one block of one file.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple

import pyarrow as pa

from commprof.errors import LogError
from commprof.nccl.sources import LONGEST_LINE_BYTES, LogSource, find_logs, is_packed

_PIECE_BYTES: Final = 4 << 20
_FINGERPRINT_BYTES: Final = 64
_MOST_UNFINISHED_BYTES: Final = 1 << 14
_LEAST_WAIT_SECONDS: Final = 0.2
# Polling takes at most a sixth of the time, for any number of files.
_WAITS_PER_LOOK: Final = 5
_OPERATION: Final = re.compile(rb": opCount |NCCL CALL nccl(?!Group|Comm|Get|Red)")


class Followed(NamedTuple):
    """What was read so far: complete lines, and operation lines among them."""

    files: int
    bytes: int
    lines: int
    operations: int


_NOTHING: Final = Followed(0, 0, 0, 0)


@dataclass(slots=True)
class _File:
    """One file with one identity. ``position``: where its last complete line ends, before ``unfinished``."""

    path: Path
    identity: tuple[int, int]
    copy: Path | None
    position: int = 0
    seen: tuple[int, int] = (-1, -1)
    before: bytes = b""
    unfinished: bytes = b""
    packed: bool = False
    gone: str | None = None


@dataclass(slots=True)
class Follower:
    """Follows logs until :meth:`sources` is called.

    Attributes:
        paths: files, globs and directories; they need not exist yet.
        scratch: an existing directory for copies.
    """

    paths: Sequence[str]
    scratch: Path
    count: Followed = _NOTHING
    _files: list[_File] = field(default_factory=list)
    _troubles: list[str] = field(default_factory=list)

    def follow(self, idle: float | None, report: Callable[[Followed], None]) -> None:
        """Read new lines until there were none for ``idle`` seconds; forever for None.

        Args:
            idle: seconds.
            report: called after each poll that found new lines.

        Raises:
            LogError: a file cannot be read.
        """
        quiet_since = time.monotonic()
        while True:
            begun = time.monotonic()
            if self.look():
                quiet_since = time.monotonic()
                report(self.count)
            elif idle is not None and begun - quiet_since >= idle:
                return
            time.sleep(max(_LEAST_WAIT_SECONDS, _WAITS_PER_LOOK * (time.monotonic() - begun)))

    def look(self) -> bool:
        """Read what was written since the last poll; return whether there was any."""
        try:
            paths = find_logs(self.paths)
        except LogError:
            paths = []
        changed = False
        for file in [file for file in self._files if file.gone is None]:
            changed |= self._settle(file)
        known = {file.identity for file in self._files if file.gone is None}
        for path in paths:
            status = _status(path)
            if status is not None and _identity(status) not in known:
                known.add(_identity(status))
                copy = self.scratch / f"{len(self._files)}.zst"
                file = _File(path, _identity(status), copy)
                self._files.append(file)
                self._read(file)
                changed = True
        self.count = self.count._replace(files=len(self._files))
        return changed

    def sources(self) -> list[LogSource]:
        """The logs to parse: in the order of a plain parse, removed files before their replacements.

        Raises:
            LogError: no file was found.
        """
        try:
            paths = find_logs(self.paths)
        except LogError:
            if not self._files:
                raise
            paths = []
        present = {path: status for path in paths if (status := _status(path)) is not None}
        listed = {_identity(status) for status in present.values()}
        earlier = [f for f in self._files if f.gone is not None or f.identity not in listed]
        current: list[LogSource] = []
        for path in present:
            current += [_source(file) for file in earlier if file.path == path]
            current.append(LogSource(path))
        others = [_source(file) for file in earlier if file.path not in present]
        return [source for source in [*others, *current] if source.path.exists()]

    def _settle(self, file: _File) -> bool:
        """Continue in a known file, which may have moved."""
        status = _status(file.path)
        if status is None or _identity(status) != file.identity:
            moved = _find(file)
            if moved is None:
                self._end(file, "replaced" if status is not None else "removed")
                return True
            file.path, status = moved, _status(moved)
            if status is None:
                return False
        if (status.st_size, status.st_mtime_ns) == file.seen:
            return False
        return self._read(file)

    def _read(self, file: _File) -> bool:
        """Read the complete lines after those already read; whether there were any, or the file was truncated."""
        try:
            with file.path.open("rb") as stream:
                status = os.fstat(stream.fileno())
                file.seen = (status.st_size, status.st_mtime_ns)
                if status.st_size < file.position or not _goes_on(stream, file):
                    self._begin_again(file)
                    return True
                if file.position == 0:
                    file.packed = is_packed(stream)
                return self._read_lines(stream, file)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise LogError(
                f"cannot read {file.path}: {error.strerror or error}; expected a readable file"
            ) from error

    def _read_lines(self, stream: BinaryIO, file: _File) -> bool:
        begin = file.position
        stream.seek(begin)
        rest = b""
        while block := stream.read(_PIECE_BYTES):
            block = rest + block
            end = len(block) if file.packed else block.rfind(b"\n") + 1
            if len(block) - end > LONGEST_LINE_BYTES:
                end = len(block)
            lines, rest = block[:end], block[end:]
            if lines:
                self._keep(file, lines)
        file.unfinished = rest[:_MOST_UNFINISHED_BYTES]
        return file.position > begin

    def _keep(self, file: _File, text: bytes) -> None:
        """Count ``text`` and copy it."""
        file.position += len(text)
        file.before = (file.before + text[-_FINGERPRINT_BYTES:])[-_FINGERPRINT_BYTES:]
        lines = 0 if file.packed else text.count(b"\n")
        operations = 0 if file.packed else sum(1 for _ in _OPERATION.finditer(text))
        count = self.count
        self.count = Followed(
            count.files, count.bytes + len(text), count.lines + lines, count.operations + operations
        )
        if file.copy is None:
            return
        try:
            # A compressed file is compressed once more, so that the copy decompresses to the file.
            with file.copy.open("ab") as copy:
                copy.write(text if file.packed else pa.compress(text, "zstd", asbytes=True))
        except OSError as error:
            self._troubles.append(
                f"{file.path} is followed without a copy in {self.scratch}: {error.strerror or error}"
            )
            file.copy.unlink(missing_ok=True)
            file.copy = None

    def _begin_again(self, file: _File) -> None:
        """``file`` was truncated: its old and new contents are two logs."""
        self._end(file, "cut")
        copy = self.scratch / f"{len(self._files)}.zst"
        again = _File(file.path, file.identity, copy)
        self._files.append(again)
        self._read(again)

    def _end(self, file: _File, how: str) -> None:
        """``file`` will not be read again: the text after its last complete line remains unread."""
        if file.unfinished:
            self._keep(file, file.unfinished)
        file.gone = how

    @property
    def troubles(self) -> tuple[str, ...]:
        """Sentences about texts that could not be copied."""
        lost = [f for f in self._files if f.gone is not None and f.copy is None and f.position]
        return (
            *self._troubles,
            *(f"The content of {f.path} until it was {f.gone} is lost: it was not copied." for f in lost),
        )


def _source(file: _File) -> LogSource:
    """The log of ``file``: its copy, if the file is gone."""
    if file.gone is None:
        return LogSource(file.path)
    name = f"{file.path} (until it was {file.gone})"
    source = LogSource(file.copy or file.path.with_name(".gone"), name)
    source.trouble = (
        f"{file.path} was {file.gone} while it was followed: its content until then is called '{name}'."
    )
    return source


def _goes_on(stream: BinaryIO, file: _File) -> bool:
    """Whether the last text read is still at its position: a file may be truncated and grow again."""
    stream.seek(file.position - len(file.before))
    return stream.read(len(file.before)) == file.before


def _find(file: _File) -> Path | None:
    """The new path of a moved file, if it is still in the same directory."""
    try:
        with os.scandir(file.path.parent) as entries:
            for entry in entries:
                if entry.inode() == file.identity[1] and entry.is_file():
                    return Path(entry.path)
    except OSError:
        pass
    return None


def _status(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError:
        return None


def _identity(status: os.stat_result) -> tuple[int, int]:
    return (status.st_dev, status.st_ino)

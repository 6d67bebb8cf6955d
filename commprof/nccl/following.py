"""Follows logs while they are written, although files grow, appear, are rotated or are truncated.

While it follows the logs, this module only counts lines. The tables are built from the final files, so they equal the
tables of a plain parse. Each file is also copied, compressed, to the temporary directory. The copy is used if the file
was truncated, replaced or removed. Only one block of one file is in memory at a time.
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
    """The numbers of files, bytes, complete lines, and operation lines that were read so far."""

    files: int
    bytes: int
    lines: int
    operations: int


_NOTHING: Final = Followed(0, 0, 0, 0)


@dataclass(slots=True)
class _File:
    """One file that is followed, as long as its identity stays the same.

    Attributes:
        path: The current path of the file.
        identity: The device and inode of the file.
        copy: The path of the compressed copy; None if the file could not be copied.
        position: The position in the file after its last complete line.
        seen: The size and the modification time (ns) at the last poll.
        before: The last bytes before ``position``, by which a rewritten file is detected.
        unfinished: The text after the last complete line, truncated to ``_MOST_UNFINISHED_BYTES``.
        packed: Whether the file is compressed.
        gone: How the file ended: ``cut``, ``replaced`` or ``removed``; None if it still exists.
    """

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
        paths: The files, globs and directories to follow, which need not exist yet.
        scratch: An existing directory for the copies.
        count: The numbers of files, bytes and lines that were read so far.
    """

    paths: Sequence[str]
    scratch: Path
    count: Followed = _NOTHING
    _files: list[_File] = field(default_factory=list)
    _troubles: list[str] = field(default_factory=list)

    def follow(self, idle: float | None, report: Callable[[Followed], None]) -> None:
        """Read new lines until there are none for ``idle`` seconds.

        Args:
            idle: The time without new lines in seconds after which this method returns; None to never return.
            report: A function that is called after each poll that found new lines.

        Raises:
            LogError: A file cannot be read.
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
        """Read the text that was written since the last poll, and return whether any file changed."""
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
        """Return the logs to parse, in the order of a plain parse. A removed file precedes its replacement.

        Raises:
            LogError: No file was found.
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
        """Read the new lines of a known file, which may have moved, and return whether the file changed."""
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
        """Read the complete lines after the lines that were already read.

        Return whether there are new lines or the file was truncated.
        """
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
        """Count the lines of ``text`` and append ``text`` to the copy of the file."""
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
            # The bytes of a compressed file are copied unchanged, so that the copy has the same format as the file.
            with file.copy.open("ab") as copy:
                copy.write(text if file.packed else pa.compress(text, "zstd", asbytes=True))
        except OSError as error:
            self._troubles.append(
                f"{file.path} is followed without a copy in {self.scratch}: {error.strerror or error}"
            )
            file.copy.unlink(missing_ok=True)
            file.copy = None

    def _begin_again(self, file: _File) -> None:
        """Handle a truncated file: its old content and its new content become two logs."""
        self._end(file, "cut")
        copy = self.scratch / f"{len(self._files)}.zst"
        again = _File(file.path, file.identity, copy)
        self._files.append(again)
        self._read(again)

    def _end(self, file: _File, how: str) -> None:
        """Mark ``file`` as ended. The text after its last complete line is counted and copied first.

        Args:
            file: The file, which will not be read again.
            how: ``cut``, ``replaced`` or ``removed``.
        """
        if file.unfinished:
            self._keep(file, file.unfinished)
        file.gone = how

    @property
    def troubles(self) -> tuple[str, ...]:
        """Sentences about content that could not be copied."""
        lost = [f for f in self._files if f.gone is not None and f.copy is None and f.position]
        return (
            *self._troubles,
            *(f"The content of {f.path} until it was {f.gone} is lost: it was not copied." for f in lost),
        )


def _source(file: _File) -> LogSource:
    """Return the log of ``file``, or its copy if the file was truncated, replaced or removed."""
    if file.gone is None:
        return LogSource(file.path)
    name = f"{file.path} (until it was {file.gone})"
    source = LogSource(file.copy or file.path.with_name(".gone"), name)
    source.trouble = (
        f"{file.path} was {file.gone} while it was followed: its earlier content is listed as '{name}'."
    )
    return source


def _goes_on(stream: BinaryIO, file: _File) -> bool:
    """Return whether the text before ``file.position`` is unchanged. A file may be truncated and then grow again."""
    stream.seek(file.position - len(file.before))
    return stream.read(len(file.before)) == file.before


def _find(file: _File) -> Path | None:
    """Return the new path of a moved file; None if the file is no longer in the same directory."""
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

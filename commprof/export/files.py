"""Writes the files of an export under temporary names, counts and hashes them, and renames them together."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

import pyarrow as pa

from commprof.errors import TraceError, UsageError
from commprof.trace.directory import is_run
from commprof.trace.liveness import refuse_live

Progress = Callable[[str], None]


class ExportedFile(NamedTuple):
    """One file of an export.

    Attributes:
        path: The path of the file.
        rows: The number of rows without the header; None if the file is not a table.
        bytes: The size of the file in bytes.
        sha256: The SHA-256 checksum as hexadecimal digits.
    """

    path: Path
    rows: int | None
    bytes: int
    sha256: str


class Sink:
    """A file that is written sequentially. Its bytes are counted and hashed while they are written."""

    def __init__(self, stream: IO[bytes]) -> None:
        self.stream = stream
        self.digest = hashlib.sha256()
        self.bytes = 0
        self.closed = False

    def write(self, data: bytes) -> int:
        """Append ``data``."""
        self.digest.update(data)
        self.bytes += len(data)
        return self.stream.write(data)

    def flush(self) -> None:
        """Flush the buffer to the system."""
        self.stream.flush()


class _Counted:
    """Batches whose rows are counted while they are read."""

    def __init__(self, batches: Iterable[pa.Table], tell: Callable[[int], None]) -> None:
        self._batches = batches
        self._tell = tell
        self.rows = 0

    def __iter__(self) -> Iterator[pa.Table]:
        for part in self._batches:
            yield part
            self.rows += len(part)
            self._tell(self.rows)


class Staging:
    """The temporary directory in which the files of one export are written.

    Args:
        directory: The path of the directory. It is inside the target directory, so that its files can be renamed.
        progress: A function that is called with the name of each file before the file is written.
    """

    def __init__(self, directory: Path, progress: Progress) -> None:
        self.directory = directory
        self.files: list[ExportedFile] = []
        self._progress = progress

    def write(self, name: str, fill: Callable[[Any], Any], rows: int | None = None) -> ExportedFile:
        """Write file ``name`` by calling ``fill`` with a :class:`Sink`."""
        self._progress(name)
        path = self.directory / name
        with path.open("wb") as stream:
            sink = Sink(stream)
            fill(sink)
            stream.flush()
            os.fsync(stream.fileno())
        file = ExportedFile(path, rows, sink.bytes, sink.digest.hexdigest())
        self.files.append(file)
        return file

    def write_rows(
        self, name: str, batches: Iterable[pa.Table], fill: Callable[[Iterator[pa.Table], Any], Any]
    ) -> ExportedFile:
        """Write file ``name`` by calling ``fill`` with ``batches`` and a :class:`Sink`, and count the rows."""
        counted = _Counted(batches, lambda rows: self._progress(f"{name}: {rows:,} rows"))
        self.write(name, lambda sink: fill(iter(counted), sink))
        return self.with_rows(counted.rows)

    def adopt_rows(
        self, name: str, batches: Iterable[pa.Table], make: Callable[[Iterator[pa.Table], Path], Any]
    ) -> ExportedFile:
        """Write file ``name`` by calling ``make`` with ``batches`` and the path of the file, and count the rows."""
        counted = _Counted(batches, lambda rows: self._progress(f"{name}: {rows:,} rows"))
        self.adopt(name, lambda path: make(iter(counted), path))
        return self.with_rows(counted.rows)

    def with_rows(self, rows: int) -> ExportedFile:
        """Set the number of rows of the file that was written last."""
        self.files[-1] = self.files[-1]._replace(rows=rows)
        return self.files[-1]

    def tell(self, text: str) -> None:
        """Report the progress of the current file."""
        self._progress(text)

    def write_text(self, name: str, text: str) -> ExportedFile:
        """Write file ``name``, UTF-8."""
        return self.write(name, lambda sink: sink.write(text.encode("utf-8")))

    def adopt(self, name: str, make: Callable[[Path], Any], rows: int | None = None) -> ExportedFile:
        """Write file ``name`` by calling ``make`` with the path of the file, then count and hash its bytes."""
        self._progress(name)
        path = self.directory / name
        make(path)
        digest = hashlib.sha256()
        with path.open("rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
            os.fsync(stream.fileno())
        file = ExportedFile(path, rows, path.stat().st_size, digest.hexdigest())
        self.files.append(file)
        return file


@contextmanager
def staged(
    out: Path, names: Sequence[str], force: bool, progress: Progress | None = None
) -> Iterator[Staging]:
    """Yield a :class:`Staging` for the files ``names`` of directory ``out``.

    The files appear in ``out`` together when the block ends without an error.

    Args:
        out: The target directory. It is created if it does not exist.
        names: The names of all files that the block may write.
        force: Whether to write into a directory that is not empty. Only files in ``names`` are replaced. Existing files
            in ``names`` that the block does not write are removed.
        progress: A function that is called with the name of each file before the file is written.

    Raises:
        UsageError: ``out`` is not a directory, or is not empty and ``force`` is off.
        TraceError: ``out`` cannot be written to. Nothing was replaced.
    """
    _check_target(out, names, force)
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out, prefix=".export-") as directory:
            staging = Staging(Path(directory), progress or _say_nothing)
            yield staging
            for file in staging.files:
                file.path.replace(out / file.path.name)
            for name in {*names} - {file.path.name for file in staging.files}:
                # An earlier export, possibly of other runs, may have written this file.
                (out / name).unlink(missing_ok=True)
            staging.files = [file._replace(path=out / file.path.name) for file in staging.files]
    except OSError as error:
        raise TraceError(
            f"{error.filename or out} cannot be written: {error.strerror or error}. Nothing was replaced; choose "
            "another --out, or make room there"
        ) from error


def _say_nothing(name: str) -> None:
    return None


def _check_target(out: Path, names: Sequence[str], force: bool) -> None:
    try:
        if not out.exists():
            return
        if not out.is_dir():
            raise UsageError(f"{out} is a file; an export needs a directory. Choose another --out")
        if is_run(out):
            refuse_live(out, "nothing is exported into it")
            raise UsageError(
                f"{out} is a run, and an export would mix its files with the run's. Choose another --out"
            )
        if not force and any(out.iterdir()):
            raise UsageError(
                f"{out} is not empty, and an export would not overwrite it unasked. Choose another --out, or use --force: "
                f"it replaces the files of an export ({names[0]}, ...) and leaves the rest"
            )
    except PermissionError:
        raise UsageError(f"{out} cannot be read: permission denied. Choose another --out") from None
    blocked = [out / name for name in names if (out / name).is_dir()]
    if blocked:
        raise UsageError(f"{blocked[0]} is a directory where a file is to be written. Choose another --out")

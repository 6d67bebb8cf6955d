"""Collects NCCL's log files into the run after a job, and counts their bytes and lines."""

from __future__ import annotations

import contextlib
import glob
import re
import shutil
import socket
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final, NamedTuple

from commprof.launch.logs.nccl_log import DIRECTORY

_BLOCK: Final = 1 << 20
# Timestamps of files have the resolution of the kernel's clock tick.
_CLOCK_SLACK_NS: Final = 20_000_000


class Cost(NamedTuple):
    """The size of a log."""

    files: int
    size: int  # bytes
    lines: int
    operations: int  # the number of COLL lines, or of CALL lines if there are no COLL lines
    warnings: int  # lines with NCCL WARN

    def sentence(self, shown_run: str) -> str:
        """Return one line of text about the log.

        Args:
            shown_run: The run directory as messages show it.
        """
        files = f"{self.files} {'file' if self.files == 1 else 'files'}"
        text = f"NCCL log: {self.size:,} bytes, {self.lines:,} lines in {files} in {shown_run}/{DIRECTORY}"
        if self.operations:
            text += (
                f": {self.lines / self.operations:.1f} lines and {self.size / self.operations:,.0f} bytes "
                f"per operation ({self.operations:,} operations)"
            )
        if self.warnings:
            text += f"; NCCL warns {self.warnings:,} {'time' if self.warnings == 1 else 'times'}: see NCCL WARN there"
        return text


def make_directory(run: Path) -> None:
    """Create the directory of the log. Without the directory, NCCL prints to standard output."""
    with contextlib.suppress(OSError):
        (run / DIRECTORY).mkdir(exist_ok=True)


def collect(pattern: str, run: Path, since_ns: int, pids: Collection[int] | None = None) -> list[Path]:
    """Copy the files of this host's processes whose names match ``pattern`` into ``run``.

    Args:
        pattern: A value of NCCL_DEBUG_FILE, in which ``%h`` is the host and ``%p`` is the process id.
        run: The run directory.
        since_ns: The time in ns on the real-time clock at which the job started. Files that were last written before
            this time are skipped.
        pids: The processes whose files are copied. None means all processes.

    Returns:
        The paths of the copies. A file that cannot be read is left out.
    """
    copies = []
    for file in _written(pattern, since_ns, pids):
        with contextlib.suppress(OSError):
            make_directory(run)
            target = _free(run / DIRECTORY / file.name)
            shutil.copyfile(file, target)
            copies.append(target)
    return copies


def _written(pattern: str, since_ns: int, pids: Collection[int] | None) -> Iterator[Path]:
    searched, exact = _expanded(pattern, socket.gethostname().partition(".")[0])
    for name in sorted(glob.glob(searched)):  # noqa: PTH207 - the pattern may be absolute
        matched = exact.fullmatch(name)
        file = Path(name)
        if matched is None or (pids is not None and any(int(pid) not in pids for pid in matched.groups())):
            continue
        with contextlib.suppress(OSError):
            if file.is_file() and file.stat().st_mtime_ns >= since_ns - _CLOCK_SLACK_NS:
                yield file


def _expanded(pattern: str, host: str) -> tuple[str, re.Pattern[str]]:
    """Return ``pattern`` as a glob pattern, and as a regular expression with a capture group for each process id."""
    searched, exact = "", ""
    for part in re.findall(r"%.|[^%]+|%", pattern):
        text = {"%h": host, "%%": "%"}.get(part, part)
        searched += "*" if part == "%p" else glob.escape(text)
        exact += r"(\d+)" if part == "%p" else re.escape(text)
    return searched, re.compile(exact)


def _free(file: Path) -> Path:
    number, candidate = 1, file
    while candidate.exists():
        number += 1
        candidate = file.with_name(f"{file.stem}-{number}{file.suffix}")
    return candidate


def measure(run: Path) -> Cost | None:
    """Return the size of the logs in ``run``, or None if there are no logs. Remove the log directory if it is empty."""
    directory = run / DIRECTORY
    with contextlib.suppress(OSError):
        directory.rmdir()
    try:
        files = [file for file in sorted(directory.iterdir()) if file.is_file()]
    except OSError:
        return None
    counts = [_count(file) for file in files]
    size, lines, printed, called, warnings = (sum(column) for column in zip(*counts, strict=True))
    return Cost(len(files), size, lines, printed or called, warnings) if size else None


def _count(file: Path) -> tuple[int, int, int, int, int]:
    """Return the bytes, lines, COLL lines, CALL lines and warnings of the part of ``file`` that can be read."""
    words = (b"\n", b": opCount ", b" NCCL CALL ", b" NCCL WARN ")
    size, counts, rest = 0, [0] * len(words), b""
    with contextlib.suppress(OSError), file.open("rb") as stream:
        while block := stream.read(_BLOCK):
            size += len(block)
            complete_lines, newline, rest = (rest + block).rpartition(b"\n")
            complete_lines += newline
            counts = [count + complete_lines.count(word) for count, word in zip(counts, words, strict=True)]
            if len(rest) > _BLOCK:
                rest = rest[-_BLOCK:]
    counts = [count + rest.count(word) for count, word in zip(counts, words, strict=True)]
    return size, counts[0], counts[1], counts[2], counts[3]


def rank_processes(run: Path) -> set[int] | None:
    """Return the ids of the processes that are recorded in ``run``, or None if there are no such processes."""
    from commprof.trace.directory import COLLECTIVES_DIRECTORY
    from commprof.trace.rank_files.layout import parse_stem

    files = [*run.glob("rank-*"), *(run / COLLECTIVES_DIRECTORY).glob("rank-*")]
    pids = {identity.pid for file in files if (identity := parse_stem(file.stem)) is not None}
    return pids or None

"""Recognizes the tool that wrote a file by its content, and imports the file as a run."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, NamedTuple

from commprof.errors import LogError, UsageError
from commprof.imports import comms_logger, flight_recorder, inspector, kineto
from commprof.imports.inspector_log import InspectorLog, parse_log
from commprof.imports.recording import Imported
from commprof.imports.run_writer import write_run

MOST_BYTES: Final = 8 << 30  # the maximum size of a file after decompression
_GZIP: Final = b"\x1f\x8b"


class Format(StrEnum):
    """A tool whose files can be imported."""

    FLIGHT_RECORDER = "flight-recorder"
    KINETO = "kineto"
    INSPECTOR = "inspector"
    DEEPSPEED = "deepspeed"


class _Recognised(NamedTuple):
    """A file whose format was recognized, with its parsed content."""

    format: Format
    path: Path
    content: Any


_READERS: Final[dict[Format, Callable[[Sequence[tuple[Path, Any]]], Imported]]] = {
    Format.FLIGHT_RECORDER: flight_recorder.read_dumps,
    Format.KINETO: kineto.read_traces,
    Format.INSPECTOR: inspector.read_logs,
    Format.DEEPSPEED: comms_logger.read_logs,
}


def import_files(
    paths: Sequence[Path], out: Path, wanted: Format | None = None, force: bool = False
) -> Imported:
    """Import files as the run directory ``out``. All files must be of one tool and one job.

    Args:
        paths: Files, and directories whose files are imported.
        out: The path of the run directory.
        wanted: The format of the files. By default commprof recognizes the format of each file by its content.
        force: Whether to replace a run that is already in ``out``.

    Raises:
        LogError: A file cannot be read, the files are of an unknown tool or of several tools, or no file contains an
            operation.
        UsageError: There is no file, or ``out`` is in use.
    """
    files = _files(paths)
    recognised = [recognise(file, wanted) for file in files]
    formats = sorted({each.format for each in recognised})
    if len(formats) > 1:
        first = {each.format: each.path for each in reversed(recognised)}
        files_by_tool = ", ".join(f"{first[each]} is {each}" for each in formats)
        raise LogError(f"the files are of several tools ({files_by_tool}); import the files of one tool")
    try:
        imported = _READERS[formats[0]]([(each.path, each.content) for each in recognised])
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise LogError(
            f"{recognised[0].path} and the other files look like {formats[0]}, but are damaged: "
            f"{type(error).__name__}: {error}"
        ) from None
    _check_content(imported, files)
    write_run(out, imported, files, force)
    return imported


def inspector_logs(names: Sequence[str]) -> list[tuple[Path, InspectorLog]] | None:
    """Return the logs of the NCCL Inspector in the files and directories ``names``.

    The result is None if a path does not exist or if the first file is not a log of the Inspector.

    Raises:
        LogError: Some of the files are logs of the Inspector and others are not.
    """
    paths = [Path(name) for name in names]
    if not all(path.exists() for path in paths):
        return None
    logs: list[tuple[Path, InspectorLog]] = []
    for file in _files(paths):
        log = parse_log(_content(file).decode("utf-8", "replace")) if _may_be_inspector(file) else None
        if log is None and not logs:
            return None
        if log is None:
            raise LogError(
                f"{logs[0][0]} is a log of the NCCL Inspector and {file} is not; align with the logs of one tool"
            )
        logs.append((file, log))
    return logs


def _may_be_inspector(path: Path) -> bool:
    """Return whether a file begins like a log of the Inspector.

    Only the beginning of the file is read, because NCCL logs may be very large.
    """
    try:
        with path.open("rb") as stream:
            begin = stream.read(1 << 16)
        if begin[:2] == _GZIP:
            with gzip.open(path) as stream:
                begin = stream.read(1 << 16)
    except (OSError, EOFError, zlib.error):
        return False
    return begin.lstrip().startswith(b"{") and b'"inspector_output_format_version"' in begin


def _check_content(imported: Imported, files: Sequence[Path]) -> None:
    """Check that a rank has an operation, and add a note about the ranks that have none.

    Raises:
        LogError: No file contains an operation.
    """
    empty = [rank.rank for rank in imported.ranks if not rank.collectives]
    if len(empty) == len(imported.ranks):
        which = str(files[0]) if len(files) == 1 else f"{files[0]} and {len(files) - 1} more"
        left_out = [note for note in imported.notes if "left out" in note]
        why = f" ({'; '.join(left_out)})" if left_out else ""
        raise LogError(
            f"nothing was imported: {which}, of {imported.tool}, {'holds' if len(files) == 1 else 'hold'} no collective "
            f"and no message{why}; record again while the program communicates"
        )
    if empty:
        imported.notes.append(f"the files of rank(s) {', '.join(map(str, sorted(empty)))} hold no operation")


def _files(paths: Sequence[Path]) -> list[Path]:
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = sorted(
                each for each in path.iterdir() if each.is_file() and not each.name.startswith(".")
            )
            if not inside:
                raise UsageError(
                    f"{path} is a directory without files; give the files that the other tool wrote"
                )
            files += inside
        elif path.exists():
            files.append(path)
        else:
            raise UsageError(
                f"{path} does not exist; give the files that the other tool wrote, or their directory"
            )
    return list(dict.fromkeys(files))


def recognise(path: Path, wanted: Format | None = None) -> _Recognised:
    """Return the format and the content of ``path``.

    Args:
        path: The file.
        wanted: The only format to try. By default all formats are tried.

    Raises:
        LogError: The file cannot be read, or its format is unknown.
    """
    data = _content(path)
    try:
        dump = flight_recorder.parse_dump(data) if wanted in (None, Format.FLIGHT_RECORDER) else None
    except LogError as error:
        raise LogError(f"{path} was not read: {error}") from None
    if dump is not None:
        return _Recognised(Format.FLIGHT_RECORDER, path, dump)
    text = data.decode("utf-8", "replace")
    value = _json(text)
    if wanted in (None, Format.KINETO) and kineto.is_trace(value):
        return _Recognised(Format.KINETO, path, value)
    if wanted in (None, Format.INSPECTOR):
        records = parse_log(text)
        if records is not None:
            return _Recognised(Format.INSPECTOR, path, records)
    if wanted in (None, Format.DEEPSPEED):
        log = comms_logger.parse_json(value) or comms_logger.parse_text(text)
        if log is not None and log.calls:
            return _Recognised(Format.DEEPSPEED, path, log)
    broken = _break_in(text) if value is None else None
    if broken is not None:
        raise LogError(
            f"{path} ({len(data):,} bytes) is JSON that is truncated or damaged at {broken}; copy it again, or let "
            "the tool finish writing it"
        )
    expected = f"a {wanted} file" if wanted else f"a file of {', '.join(Format)}"
    raise LogError(
        f"{path} ({len(data):,} bytes) is not {expected}: a dump of the Flight Recorder, a trace of torch.profiler, a log "
        "of NCCL Inspector, or the output or data of DeepSpeed's comms logger was expected. NCCL's own log is read by: "
        "commprof nccl parse"
    )


def _content(path: Path) -> bytes:
    try:
        with path.open("rb") as stream:
            packed = stream.read(2) == _GZIP
        with gzip.open(path) if packed else path.open("rb") as stream:
            data: bytes = stream.read(MOST_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise LogError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if len(data) > MOST_BYTES:
        raise LogError(f"{path} holds more than {MOST_BYTES >> 30} GiB; import a part of it")
    return data


def _break_in(text: str) -> str | None:
    """Return the position of the first syntax error in a text that begins like JSON; None for other texts."""
    if not text.lstrip().startswith(("{", "[")):
        return None
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        return f"line {error.lineno}, column {error.colno}"
    except RecursionError:
        return None
    return None


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None

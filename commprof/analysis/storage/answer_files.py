"""Small answers about runs, stored as files in the user's cache directory for later commands.

The name of a file is a hash of everything that the answer depends on:

- the question
- the paths of the runs, and the names, sizes and times of all their files
- the names, sizes and times of the source files of commprof
- the version of Python and the time of the directory of installed packages

If any of these changes, the name changes too.

The answers are not tables in the index of the run for two reasons. Only runs of 300,000 records and more have an index.
In addition, DuckDB lets no process write to a database that another process, such as the dashboard, has open.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from commprof.trace.fingerprint import fingerprint

_PACKAGE: Final = Path(__file__).resolve().parents[2]
_SOURCES: Final = (".py", ".sql")
_LARGEST: Final = 4 << 20  # maximum number of bytes of an answer that is stored
_MOST_BYTES: Final = 64 << 20
_MOST_FILES: Final = 512


def remembered(question: str, runs: Sequence[Path], answer: Callable[[], tuple[Any, bool]]) -> Any:
    """Return the stored answer about ``runs`` if their files are unchanged, or else the result of ``answer``.

    Args:
        question: A text that, together with ``runs``, contains everything that the answer depends on.
        runs: The run directories.
        answer: A function that returns JSON values, and whether these stay valid while the files of the runs are
            unchanged.
    """
    before = _name(question, runs)
    directory = cache_directory()
    if before is None or directory is None:
        return answer()[0]
    try:
        return json.loads((directory / before).read_bytes())
    except (OSError, ValueError):  # missing or unreadable; the new answer replaces the file
        pass
    new_answer, holds = answer()
    if holds and _name(question, runs) == before:
        _store(directory / before, new_answer)
    return new_answer


def cache_directory() -> Path | None:
    """Return the directory of stored answers in the user's cache directory, or None if there is no cache directory."""
    return user_cache("answers")


def user_cache(kind: str) -> Path | None:
    """Return the directory for files of ``kind`` in the user's cache directory (XDG specification).

    The result is None if there is no cache directory.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not cache.is_absolute():
        cache = Path(os.environ.get("HOME", ""), ".cache")
    return cache / "commprof" / kind if cache.is_absolute() else None


def _name(question: str, runs: Sequence[Path]) -> str | None:
    """Return the file name of the answer, or None if a run is being written or cannot be read."""
    fingerprints = [fingerprint(run) for run in runs]
    if not all(each.is_still for each in fingerprints):
        return None
    named = [(str(run), each.key) for run, each in zip(runs, fingerprints, strict=True)]
    return hashlib.sha256(repr((question, named, _code())).encode("utf-8", "surrogatepass")).hexdigest()


def _code() -> tuple[Any, ...]:
    """Return the state of the code that computes answers.

    It consists of the version of Python, the time of the directory of installed packages, and the source files of
    commprof.
    """
    packages = Path(sys.prefix, "lib", f"python{sys.version_info[0]}.{sys.version_info[1]}", "site-packages")
    installed = packages.stat().st_mtime_ns if packages.is_dir() else 0
    sources = [each for each in fingerprint(_PACKAGE).files if each[0].endswith(_SOURCES)]
    return (sys.version, installed, sources)


def _store(file: Path, answer: Any) -> None:
    """Write ``answer`` to ``file``. If this fails, the next command computes the answer again."""
    text = json.dumps(answer, allow_nan=False).encode()
    if len(text) > _LARGEST:
        return
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=file.parent, prefix=".")
        try:
            with os.fdopen(descriptor, "wb") as out:
                out.write(text)
            os.replace(name, file)  # noqa: PTH105 - as the other calls on the name
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(name)  # noqa: PTH108
            raise
        _prune(file.parent)


def _prune(directory: Path) -> None:
    """Remove the oldest files until half of the limits is reached, if the files exceed the limits."""
    files = []
    with os.scandir(directory) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                status = entry.stat()
                files.append((status.st_mtime_ns, status.st_size, entry.path))
    size = sum(each for _, each, _ in files)
    if len(files) <= _MOST_FILES and size <= _MOST_BYTES:
        return
    files.sort()
    count = len(files)
    for _, each, path in files:
        if count <= _MOST_FILES // 2 and size <= _MOST_BYTES // 2:
            break
        with contextlib.suppress(OSError):
            os.unlink(path)  # noqa: PTH108
        count, size = count - 1, size - each

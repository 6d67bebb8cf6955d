"""Reads the files of a run directory. Only regular files are read, because a pipe or a device could block forever.

Standard library only.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO


def open_content(path: Path) -> BinaryIO:
    """Open ``path`` for reading.

    Raises:
        OSError: The file does not exist, may not be read, or is not a regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_content(path: Path) -> bytes:
    """Return all bytes of ``path``.

    Raises:
        OSError: The file does not exist, cannot be read, or is not a regular file.
    """
    with open_content(path) as stream:
        return stream.read()


def printable(value: Any) -> Any:
    """Return a copy of a JSON value whose texts can be encoded as UTF-8. Lone surrogates become question marks."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, list):
        return [printable(item) for item in value]
    if isinstance(value, dict):
        return {printable(key): printable(item) for key, item in value.items()}
    return value

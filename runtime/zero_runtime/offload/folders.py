"""Folders for the files of offloaded tensors: one for each process, removed at its exit, or after a crash by the next one.

A folder is ``<nvme_path>/zero_runtime/<host>-<pid>-<start time>/rank<k>/<kind>``. Its process locks the file ``lock`` in it
while it lives. A folder is a leftover if no process with that number and start time runs on this host *and* the file is not
locked. The lock protects folders of processes in other containers, whose process numbers mean nothing here.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import shutil
import socket
from pathlib import Path
from typing import Final

from zero_runtime.errors import ConfigError

_LOCK: Final = "lock"


class _Claim:
    """The folder of this process below one path.

    Attributes:
        folder: of the process.
        pid: of the process; a fork of it must leave the folder alone.
    """

    def __init__(self, nvme_path: Path) -> None:
        self.pid = os.getpid()
        parent = nvme_path / "zero_runtime"
        self.folder = parent / f"{socket.gethostname()}-{self.pid}-{_start_time(self.pid)}"
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self.folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_SH)
        _remove_leftovers(parent)
        self._used: dict[str, int] = {}
        self._open: set[Path] = set()
        atexit.register(self.remove)

    def new(self, rank: int, kind: str) -> Path:
        """A new folder, which was not used before."""
        key = f"rank{rank}/{kind}"
        number = self._used[key] = self._used.get(key, 0) + 1
        folder = self.folder / (key if number == 1 else f"{key}-{number}")
        folder.mkdir(parents=True)
        self._open.add(folder)
        return folder

    def give_back(self, folder: Path) -> None:
        """Remove one folder; after the last one, remove the folder of the process too."""
        shutil.rmtree(folder, ignore_errors=True)
        self._open.discard(folder)
        if not self._open:
            self.remove()

    def remove(self) -> None:
        """Remove the folder of the process, unless this is a fork of it."""
        if os.getpid() != self.pid or self._lock < 0:
            return
        atexit.unregister(self.remove)
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)
        self._lock = -1
        try:
            self.folder.parent.rmdir()
        except OSError:
            pass  # other processes have folders in it
        for path, claim in list(_claims.items()):
            if claim is self:
                del _claims[path]


_claims: Final[dict[Path, _Claim]] = {}


def new_folder(nvme_path: str | Path, rank: int, kind: str, key: str = "nvme_path") -> Path:
    """Make a folder for files of this process; leftovers of dead processes of this host are removed.

    Args:
        nvme_path: created if it is missing.
        rank: of this process.
        kind: of the files, such as ``optimizer``.
        key: the configuration key that names ``nvme_path``, for errors.

    Raises:
        ConfigError: the folder cannot be made.
    """
    path = Path(nvme_path).expanduser().absolute()
    try:
        claim = _claims.get(path)
        if claim is None or claim.pid != os.getpid():
            claim = _claims[path] = _Claim(path)
        return claim.new(rank, kind)
    except OSError as error:
        raise ConfigError(
            f"{key} is {str(nvme_path)!r}, where no folder can be made ({error.strerror}: {error.filename}); name a folder "
            "on a local disk that this user may write to"
        ) from error


def remove_folder(folder: Path) -> None:
    """Remove a folder that ``new_folder`` made, or any other; in a fork of its process, do nothing."""
    for claim in list(_claims.values()):
        if claim.folder in folder.parents:
            if claim.pid == os.getpid():
                claim.give_back(folder)
            return
    shutil.rmtree(folder, ignore_errors=True)


def _remove_leftovers(parent: Path) -> None:
    host = socket.gethostname()
    for folder in parent.iterdir():
        name, _, start = folder.name.rpartition("-")
        owner, _, pid = name.rpartition("-")
        if owner != host or not pid.isdigit() or _start_time(int(pid)) == start:
            continue
        if not _is_locked(folder / _LOCK):
            shutil.rmtree(folder, ignore_errors=True)


def _is_locked(path: Path) -> bool:
    try:
        lock = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return False
    except OSError:
        return True  # another user's
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(lock)
    return False


def _start_time(pid: int) -> str:
    """The start time of process ``pid``, in clock ticks since boot; empty if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return ""
    return text.rpartition(")")[2].split()[19]

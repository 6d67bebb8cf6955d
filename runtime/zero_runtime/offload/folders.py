"""Folders for the files of offloaded tensors.

Each process has its own folder, which is removed when the process exits. After a crash, the next process
removes it. A folder is ``<nvme_path>/zero_runtime/<host>-<pid>-<start time>/rank<k>/<kind>``. While the process
runs, it locks the file ``lock`` in its folder. A folder is a leftover if no process with its number and start
time runs on this host *and* the file is not locked. The lock protects folders of processes in other containers,
whose process numbers have no meaning here.
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
    """The folder of this process in one ``nvme_path``.

    Attributes:
        folder: The folder of the process.
        pid: The number of the process. A fork of the process must not change the folder.
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
        """Make and return a new folder that was not used before."""
        key = f"rank{rank}/{kind}"
        number = self._used[key] = self._used.get(key, 0) + 1
        folder = self.folder / (key if number == 1 else f"{key}-{number}")
        folder.mkdir(parents=True)
        self._open.add(folder)
        return folder

    def give_back(self, folder: Path) -> None:
        """Remove one folder. After the last folder, remove the folder of the process too."""
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
            pass  # The directory is not empty, because other processes have folders in it.
        for path, claim in list(_claims.items()):
            if claim is self:
                del _claims[path]


_claims: Final[dict[Path, _Claim]] = {}


def new_folder(nvme_path: str | Path, rank: int, kind: str, key: str = "nvme_path") -> Path:
    """Make a folder for files of this process, and remove leftovers of dead processes of this host.

    Args:
        nvme_path: The path in which the folder is made. It is created if it is missing.
        rank: The rank of this process.
        kind: The kind of the files, such as ``optimizer``.
        key: The configuration key that names ``nvme_path``, for error messages.

    Raises:
        ConfigError: The folder cannot be made.
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
    """Remove a folder, whether or not ``new_folder`` made it.

    A folder of ``new_folder`` is not removed in a fork of its process.
    """
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
        return True  # The file belongs to another user, so its process may still run.
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(lock)
    return False


def _start_time(pid: int) -> str:
    """Return the start time of process ``pid`` in clock ticks since boot, or "" if the process does not exist."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return ""
    return text.rpartition(")")[2].split()[19]

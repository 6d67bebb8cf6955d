"""Checks whether a process is recording into a run directory. Uses only the standard library, so the check is cheap."""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any, Final

from commprof.errors import UsageError
from commprof.trace.content import open_content
from commprof.trace.directory import MANIFEST_NAME
from commprof.trace.process import is_alive
from commprof.trace.rank_files.layout import EVENTS_SUFFIX, RECORDS_SUFFIX, rank_files

# If the processes of a host cannot be checked, its files count as abandoned after this time without a change.
QUIET_SECONDS: Final = 600
_LINE_BYTES: Final = 1 << 14  # the first and the last line of a rank's events are shorter
_RUNNING: Final = "running"


def recording_process(run: Path) -> str | None:
    """Return a process that is recording into ``run``, such as ``rank 0 (process 4711)``, and None if there is none."""
    launcher = _launcher(run)
    if launcher is not None and launcher.get("pid") != os.getpid() and is_alive(launcher):
        return f"its launcher (process {launcher['pid']})"
    try:
        files = rank_files(run)
    except OSError:
        return None
    for identity, stem in files:
        begin, has_ended = _ends(stem.with_name(stem.name + EVENTS_SUFFIX))
        if has_ended or identity.pid == os.getpid():
            continue
        alive = is_alive(begin)
        if alive:
            return f"rank {identity.rank} (process {identity.pid})"
        if alive is None and recently_touched(stem):
            return f"rank {identity.rank} (process {identity.pid} on {begin.get('host') or 'another host'})"
    return None


def refuse_live(run: Path, wanted: str) -> None:
    """Raise an error if a process is recording into ``run``.

    Args:
        run: The run directory.
        wanted: The clause of the error message that states the refused action, such as ``it is not replaced``.

    Raises:
        UsageError: A process is recording into ``run``.
    """
    who = recording_process(run)
    if who is not None:
        raise UsageError(
            f"{run} is being recorded by {who}, so {wanted}, --force or not. Wait for its end, or choose another directory"
        )


def recently_touched(stem: Path) -> bool:
    """Return whether the files of the rank at ``stem`` were written to within the last :data:`QUIET_SECONDS`."""
    newest = 0.0
    for suffix in (RECORDS_SUFFIX, EVENTS_SUFFIX):
        with contextlib.suppress(OSError):
            newest = max(newest, stem.with_name(stem.name + suffix).stat().st_mtime)
    return time.time() - newest < QUIET_SECONDS


def _launcher(run: Path) -> dict[str, Any] | None:
    try:
        with open_content(run / MANIFEST_NAME) as file:
            content = json.load(file)
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(content, dict) or content.get("state") != _RUNNING:
        return None
    launcher = content.get("launcher")
    return launcher if isinstance(launcher, dict) else None


def host_of(stem: Path) -> str | None:
    """Return the host of the rank whose files are ``<stem>.records`` and ``<stem>.events``, and None if not known."""
    host = _ends(stem.with_name(stem.name + EVENTS_SUFFIX))[0].get("host")
    return host if isinstance(host, str) else None


def _ends(events: Path) -> tuple[dict[str, Any], bool]:
    """Return the first line of ``events``, which describes the process, and whether the last line is the end mark."""
    try:
        with open_content(events) as file:
            begin = json.loads(file.readline(_LINE_BYTES))
            file.seek(max(0, os.fstat(file.fileno()).st_size - _LINE_BYTES))
            last = json.loads(file.read().splitlines()[-1])
    except (OSError, ValueError, IndexError, RecursionError):
        return {}, False
    return begin if isinstance(begin, dict) else {}, isinstance(last, dict) and last.get("kind") == "end"

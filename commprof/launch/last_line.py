"""Finalizes a run when its program has ended, and returns the last line: path, counts, gaps, next command."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from commprof.analysis.columns.units import format_ns
from commprof.errors import CommprofError, MissingExtraError
from commprof.launch import injection
from commprof.printable import command_line
from commprof.trace.liveness import host_of
from commprof.trace.manifest import read_manifest
from commprof.trace.rank_files.layout import rank_files

_IMPORT_AFTER_S: Final = 2.0  # a job shorter than this waits for the imports at its end


def shown(path: Path) -> str:
    """Return ``path`` as a relative path if it is below the current directory, otherwise unchanged."""
    try:
        return str(path.absolute().relative_to(Path.cwd()))
    except (ValueError, OSError):
        return str(path)


def last_line(run: Path) -> str:
    """Finalize ``run`` if this is possible here, and return a line about the content of the run.

    Never raises, because the exit code of the program is more important than this line.
    """
    where = shown(run)
    try:
        from commprof.trace.finaliser import finalise

        health = finalise(run)
    except MissingExtraError as error:
        return f"{where}  recorded; the records stay in binary form for now: {error}"
    except Exception as error:  # after any error, the exit code of the program must still be returned
        return f"{where}  the records are kept, but could not be converted to tables yet: {error}"
    if not (health.ranks_recorded or health.records or health.lost):
        code = _exit_code(run)
        why = injection.explain_silence(injection.notes(run), code)
        return f"{where}  nothing was recorded: {why}" + ("" if code else "  next: commprof doctor")
    return f"{where}  {counts(health)}{own_cost(health)}  next: {command_line('report', where)}"


def keep_summaries(run: Path) -> None:
    """Write the summaries that most answers use into ``run``, which has ended.

    Never raises, because the summaries are optional.
    """
    with contextlib.suppress(Exception):
        from commprof.analysis.storage.run_totals import summarise

        summarise(run)


def keep_host(run: Path) -> None:
    """Write the file of this host into ``run``, a run on several hosts. The ranks of this host must have ended.

    Never raises, because the file is optional.
    """
    with contextlib.suppress(Exception):
        from commprof.analysis.storage import host_files

        host_files.keep_host(run, socket.gethostname())


def keep_missing_hosts(run: Path) -> int:
    """Write the missing files of hosts into ``run``, which has ended, and return the number of these files.

    Never raises, because the files are optional.
    """
    with contextlib.suppress(Exception):
        from commprof.analysis.storage import host_files

        return host_files.keep_missing(run)
    return 0


def has_several_hosts(run: Path) -> bool:
    """Return whether ranks of several hosts have recorded into ``run``, which is not finalized yet."""
    try:
        return len({host_of(stem) for _, stem in rank_files(run)}) > 1
    except OSError:
        return False


@contextlib.contextmanager
def prepared() -> Iterator[None]:
    """Import the modules that :func:`keep_summaries` needs, in a thread.

    Otherwise the end of a job waits for these imports (1 s).
    """
    ended = threading.Event()
    thread = threading.Thread(target=_import, args=(ended,), name="commprof-imports")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _import(ended: threading.Event) -> None:
    if ended.wait(_IMPORT_AFTER_S):
        return
    with contextlib.suppress(OSError):  # lower the priority of this thread, because the ranks take precedence
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
    with contextlib.suppress(Exception):
        import_module("commprof.trace.finaliser")
        import_module("commprof.analysis.storage.run_totals")


def _exit_code(run: Path) -> int:
    try:
        return read_manifest(run).exit_code or 0
    except CommprofError:
        return 0


def own_cost(health: Any) -> str:
    """Return the measured cost of recording as text; empty if no rank reported its cost."""
    if health.recorder_ns is None:
        return ""
    share = f" ({100 * health.recorder_ns / health.wall_ns:.2f} %)" if health.wall_ns else ""
    return f", recording took {format_ns(health.recorder_ns)} of a rank{share}"


def counts(health: Any) -> str:
    """Return the contents of a run as text: ``2 ranks, 1,234 records, 0 dropped, 0 unseen``."""
    ranks = health.ranks_recorded
    number = f"{ranks} {'rank' if ranks == 1 else 'ranks'}"
    if health.ranks_expected and ranks < health.ranks_expected:
        number = f"{ranks} of {health.ranks_expected} ranks"
    records = f"{health.records:,} {'record' if health.records == 1 else 'records'}"
    text = f"{number}, {records}, {health.lost:,} dropped, {health.unseen:,} unseen"
    return text + "".join(
        f", {value:,} {name}"
        for name, value in (
            ("in sums", health.summed),
            ("outside the steps recorded", health.outside),
            ("truncated", health.torn),
            ("raised", health.raised),
            ("incomplete", health.incomplete),
        )
        if value
    )

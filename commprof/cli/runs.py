"""Opens the run directories that are given as arguments of a command."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

import typer

from commprof.cli.console import say
from commprof.cli.extras import needed
from commprof.errors import CommprofError, TraceError

if TYPE_CHECKING:
    from commprof.trace.reader import Run

Answer = TypeVar("Answer")
_ATTEMPTS: Final = 5
_PAUSE_S: Final = 0.5
RunArgument = Annotated[
    str, typer.Argument(metavar="RUN", help="A run directory, or 'latest'.", show_default=False)
]


def opened(text: str, frames: bool = True) -> Run:
    """Open the run that ``text`` names.

    If the run has ended and is not finalized, finalize the run first and report this in one line.

    Args:
        text: The path of a run directory, or ``latest``.
        frames: Whether the command needs data frames. If not, pandas is not loaded.

    Raises:
        TraceError: there is no such run, or the run cannot be read.
        MissingExtraError: the packages that read tables are not installed.
    """
    from commprof.trace.directory import resolve

    path = resolve(text)
    with needed("analysis", "to read a run"):
        from commprof.trace.reader import open_run

        finalise_first(path)
        if not frames:
            _leave_out_pandas()
        return open_run(path)


def _leave_out_pandas() -> None:
    """Hide pandas from Arrow. Otherwise Arrow imports pandas when it converts the first list to an array (0.2 s)."""
    import pyarrow as pa

    if "pandas" not in sys.modules:
        sys.meta_path.insert(0, _NoPandas)
        try:
            pa.array([])
        finally:
            sys.meta_path.remove(_NoPandas)


class _NoPandas:
    """A meta path finder that reports pandas as not installed."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        """Raise ModuleNotFoundError for pandas, so that Python does not try the other finders."""
        if name == "pandas":
            raise ModuleNotFoundError(name=name)


def remembered(question: str, text: str, answer: Callable[[Run], Any], frames: bool = True) -> Any:
    """Return the result of ``answer`` for the run that ``text`` names, as JSON values.

    If the result was computed before, the result is read from the cache.

    Args:
        question: The key of the result in the cache.
        text: The path of a run directory, or ``latest``.
        answer: The function that computes the result from the run.
        frames: Whether the command needs data frames, as in :func:`opened`.

    Raises:
        TraceError: there is no such run, or the run cannot be read.
        MissingExtraError: the packages that read tables are not installed.
    """
    from commprof.analysis.storage import answer_files
    from commprof.cli.rendering import plain
    from commprof.trace.directory import resolve

    path = resolve(text)

    def ask() -> tuple[Any, bool]:
        run = opened(str(path), frames)
        return plain(answer(run)), has_ended(run)

    return answer_files.remembered(question, [path], ask)


def has_ended(run: Run) -> bool:
    """Return whether answers about ``run`` stay valid as long as the files of ``run`` do not change."""
    from commprof.trace.manifest import RUNNING

    return run.health.state != RUNNING and not run.pending


def finalise_first(run: Path) -> None:
    """Finalize ``run`` if it has ended and is not finalized, and report this in one line.

    Raises:
        TraceError: the run cannot be read.
    """
    from commprof.trace.finaliser import finalise_ended

    health = finalise_ended(run)
    if health is not None:
        from commprof.launch.last_line import counts, keep_summaries, shown

        keep_summaries(run)
        say(f"{shown(run)} was not finalised when it ended; it is now: {counts(health)}")


def asked(texts: list[str], question: Callable[[list[Run]], Answer]) -> tuple[list[Run], Answer]:
    """Open the runs that ``texts`` name, and return the runs and the result of ``question`` for them.

    Finalizing a run replaces its files. If this happens meanwhile, all runs are opened and evaluated again.

    Raises:
        TraceError: a run does not exist, cannot be read, or its files are replaced faster than they can be read.
    """
    for _ in range(_ATTEMPTS):
        paths = each_path(texts)
        before = [_files(path) for path in paths]
        try:
            runs = [opened(str(path)) for path in paths]
            answer = question(runs)
        except CommprofError:
            if not any(map(_were_replaced, paths, before)):
                raise
        else:
            if not any(
                run.pending and _were_replaced(run.path, files)
                for run, files in zip(runs, before, strict=True)
            ):
                return runs, answer
        time.sleep(_PAUSE_S)
    raise TraceError(
        f"{', '.join(map(str, paths))}: another command is finalizing the run and replaces its files. Try again when "
        "that command has exited"
    )


def _files(run: Path) -> set[tuple[str, int]]:
    """Return the names and inodes of the files of a run. They change when files are replaced, not when files grow."""
    from commprof.trace.fingerprint import fingerprint

    return {(name, inode) for name, _, inode, *_ in fingerprint(run).files}


def _were_replaced(run: Path, before: set[tuple[str, int]]) -> bool:
    """Return whether any of the files ``before`` has been removed or replaced."""
    return not before <= _files(run)


def each_opened(texts: list[str]) -> list[Run]:
    """Open the runs that ``texts`` name, each run once. A directory of runs means all runs in it."""
    return [opened(str(path)) for path in each_path(texts)]


def each_path(texts: list[str]) -> list[Path]:
    """Return the directories of the runs that ``texts`` name, each directory once."""
    from commprof.trace.directory import find_runs, is_run, resolve

    by_target: dict[Path, Path] = {}
    for text in texts:
        path = Path(text)
        below = [] if text == "latest" or not path.is_dir() or is_run(path) else find_runs(path)
        for run in below or [resolve(text)]:
            by_target.setdefault(run.resolve(), run)
    return list(by_target.values())

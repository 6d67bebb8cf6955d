"""Opened runs in the cache of answers: a page that asks ten questions about a run reads its manifest once."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from commprof.analysis.storage.answer_cache import answer_cache
from commprof.trace.manifest import COMPLETE, FAILED, KILLED
from commprof.trace.reader import Run, open_run


def opened(path: Path) -> Run:
    """The run at ``path``; its tables are read again for each caller.

    Raises:
        TraceError: there is no run at ``path``, or nothing in it can be read. SchemaError: a newer version wrote it.
    """
    return answer_cache.of_files([path], "opened", partial(open_run, path), _has_ended).without_tables()


def _has_ended(run: Run) -> bool:
    """Whether only a change of its files can change what is known of ``run``."""
    return run.health.state in (COMPLETE, FAILED, KILLED) and isinstance(run.state, str)

"""Opened runs in the answer cache, so that a page with ten questions about a run reads its manifest only once."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from commprof.analysis.storage.answer_cache import answer_cache
from commprof.trace.manifest import COMPLETE, FAILED, KILLED
from commprof.trace.reader import Run, open_run


def opened(path: Path) -> Run:
    """Return the opened run at ``path``. Its tables are read again for each caller.

    Raises:
        TraceError: There is no run at ``path``, or nothing in it can be read.
        SchemaError: A newer version of commprof wrote the run.
    """
    return answer_cache.of_files([path], "opened", partial(open_run, path), _has_ended).without_tables()


def _has_ended(run: Run) -> bool:
    """Return whether the facts about ``run`` can change only if its files change."""
    return run.health.state in (COMPLETE, FAILED, KILLED) and isinstance(run.state, str)

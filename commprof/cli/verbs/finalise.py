"""``commprof finalise``: converts the records of a run to tables, and writes files of hosts and the index."""

from __future__ import annotations

from typing import Annotated

import typer

from commprof.cli.console import say
from commprof.cli.extras import needed
from commprof.cli.runs import each_path
from commprof.launch.last_line import counts, keep_missing_hosts, keep_summaries, shown

HELP_ORDER = 160


def finalise(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN...",
            help="Run directories, directories of runs, or 'latest'.",
            show_default=False,
        ),
    ],
) -> int:
    """Finalise runs that have ended: convert the records to tables (Parquet), and index large runs.

    commprof run finalises its run when the program has ended. Use finalise if the launcher was killed,
    or if another launcher started the run. Runs that are still being recorded are skipped, and so are
    runs that are already finalised. For a run on several hosts, the command writes the
    missing files of hosts (RUN/hosts, docs/scale.md). A run with 300,000 records or more gets an index. The
    index (index.duckdb) is in the run directory, or in the user's cache directory if the run is not
    writable.
    """
    with needed("analysis", "to finalise a run"):
        from commprof.analysis.storage.index import index_of
        from commprof.trace.finaliser import finalise as finalise_run
    for path in each_path(runs):
        health = finalise_run(path)
        if health.state == "running":
            say(f"{shown(path)}  is still being recorded, and was skipped")
            continue
        hosts = keep_missing_hosts(path)
        written_hosts = f", {hosts:,} {'file' if hosts == 1 else 'files'} of hosts written" if hosts else ""
        indexed = ", indexed" if index_of(path, write=True).path is not None else ""
        keep_summaries(path)
        say(f"{shown(path)}  finalised{written_hosts}{indexed}: {counts(health)}")
    return 0

"""``commprof finalise``: what a run recorded, as tables, with the files of hosts and the index for quick answers."""

from __future__ import annotations

from typing import Annotated

import typer

from commprof.cli.console import say
from commprof.cli.extras import needed
from commprof.cli.runs import each_path
from commprof.launch.summary import counts, keep_missing_hosts, keep_summaries, shown


def finalise(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN...",
            help="Run directories, directories that hold several, or 'latest'.",
            show_default=False,
        ),
    ],
) -> int:
    """Finalise runs that have ended: make tables (Parquet) of what was recorded, and index the large ones.

    commprof run does so when its program has ended. This is for a run whose launcher was killed, or that another launcher
    started. A run that still works is left alone, and so is one that is finalised. In a run of several hosts, files of hosts
    that are missing are made (RUN/hosts, docs/scale.md). The index (index.duckdb, for 300,000 records and more) lies beside
    the run, or in the cache directory of the user where that cannot be written to.
    """
    with needed("analysis", "to finalise a run"):
        from commprof.analysis.storage.index import index_of
        from commprof.trace.finaliser import finalise as finalise_run
    for path in each_path(runs):
        health = finalise_run(path)
        if health.state == "running":
            say(f"{shown(path)}  still works, and was left alone")
            continue
        hosts = keep_missing_hosts(path)
        made = f", {hosts:,} {'file' if hosts == 1 else 'files'} of hosts made" if hosts else ""
        indexed = ", indexed" if index_of(path, write=True).path is not None else ""
        keep_summaries(path)
        say(f"{shown(path)}  finalised{made}{indexed}: {counts(health)}")
    return 0

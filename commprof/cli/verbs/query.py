"""``commprof query``: evaluates a SQL query over the tables of a run."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from commprof.cli import rendering
from commprof.cli.console import say
from commprof.cli.engine_options import Engine, Master, spark_session
from commprof.cli.extras import needed
from commprof.cli.rendering import Heading, Rows
from commprof.cli.runs import RunArgument, opened
from commprof.errors import UsageError

HELP_ORDER = 120

_SHOWN_ROWS = 100


def query(
    run: RunArgument,
    sql: Annotated[
        str, typer.Argument(metavar="SQL", help="One SELECT over the tables of the run.", show_default=False)
    ],
    csv: Annotated[bool, typer.Option("--csv", help="Print all rows as CSV.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print all rows as JSON.")] = False,
    engine: Annotated[
        Engine, typer.Option("--engine", help="The engine that runs the query. It also sets the SQL dialect.")
    ] = Engine.DUCKDB,
    master: Master = None,
) -> int:
    """Query a run with SQL.

    docs/schema.md lists the tables, and docs/relations.md lists the relations. A query can read only
    these tables and relations. Example:
    commprof query latest "select op, sum(collectives), sum(payload_bytes) from operations group by op".
    """
    if csv and as_json:
        raise UsageError("--csv and --json exclude each other; choose one")
    session_of = spark_session(engine, master)
    opened_run = opened(run)
    with needed("analysis", "to query a run"):
        from commprof.analysis import api

        frame = api.query(opened_run, sql, session_of())
    for text in opened_run.health.damaged:
        say(text)
    if csv:
        sys.stdout.write(api.frame_csv(frame))
    elif as_json:
        rendering.show_json(rendering.records(frame))
    else:
        headings = [Heading(str(name), number=frame[name].dtype.kind in "iuf") for name in frame.columns]
        cells = [
            tuple(rendering.text(value) for value in row)
            for row in frame.head(_SHOWN_ROWS).itertuples(index=False)
        ]
        rendering.show(Rows(headings, cells))
        if len(frame) > _SHOWN_ROWS:
            say(f"the first {_SHOWN_ROWS} of {len(frame):,} rows; --csv writes all of them")
    return 0

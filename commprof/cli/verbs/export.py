"""``commprof export``: writes the tables of runs for other programs."""

from __future__ import annotations

import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from commprof.cli import rendering
from commprof.cli.console import say
from commprof.cli.extras import needed
from commprof.cli.rendering import Heading, Rows
from commprof.cli.runs import each_opened, opened
from commprof.errors import CommprofError, TraceError, UsageError
from commprof.printable import command_line, escaped

if TYPE_CHECKING:
    from commprof.export.files import ExportedFile, Progress
    from commprof.trace.reader import Run

HELP_ORDER = 130


class Format(StrEnum):
    """The file formats of an export."""

    CSV = "csv"
    PARQUET = "parquet"
    DUCKDB = "duckdb"
    PERFETTO = "perfetto"
    CHAKRA = "chakra"
    HTML = "html"


# Formats whose files or directories contain only one run each.
_OF_ONE_RUN = (Format.PERFETTO, Format.CHAKRA)
_WITHOUT_TABLES = (*_OF_ONE_RUN, Format.HTML)
_MOST_PREDICTED = 1_000_000  # the most records of a run from which the HTML report predicts other settings


def export(
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RUN...", help="Run directories, directories of runs, or 'latest'.", show_default=False
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="DIR", help="The directory for the files.", show_default=False),
    ] = None,
    kind: Annotated[Format, typer.Option("--format", help="The format of the files.")] = Format.CSV,
    tables: Annotated[
        list[str] | None,
        typer.Option(
            "--table",
            metavar="NAME",
            help="Export only this table. Repeat the option to export several tables.",
        ),
    ] = None,
    empty: Annotated[bool, typer.Option("--empty", help="Also write tables without rows.")] = False,
    force: Annotated[
        bool, typer.Option("--force", "-f", help="Replace the files of an earlier export.")
    ] = False,
    check: Annotated[
        Path | None,
        typer.Option(
            "--check", metavar="DIR", help="Compare the CSV files in DIR with the runs. Nothing is written."
        ),
    ] = None,
) -> int:
    """Write the data of runs to files, with their provenance.

    The formats csv and parquet write one file per table, the comparison, and a data dictionary. The
    format duckdb writes one database. The format perfetto writes a Chrome trace for ui.perfetto.dev and
    chrome://tracing. The format chakra writes MLCommons execution traces for ASTRA-sim, one per rank.
    The format html writes one file that opens offline. With --check, the exit code is 1 if the export
    differs from its runs.
    """
    if check is not None:
        return _check(check, runs or [])
    if not runs:
        raise UsageError("export needs a RUN: a run directory, or latest")
    if out is None:
        raise UsageError(f"export needs --out DIR, for example: --out {Path(runs[0]).name or 'run'}-{kind}")
    if kind in _WITHOUT_TABLES and tables:
        raise UsageError(f"--format {kind} always writes all tables; leave out --table")
    if empty and (kind in _WITHOUT_TABLES or tables):
        raise UsageError("--empty is for --format csv, parquet and duckdb without --table; leave it out")
    opened_runs = each_opened(runs)
    with needed("dash" if kind is Format.HTML else "export", "to export a run"):
        # These formats show single collectives, which sums do not contain.
        for run in opened_runs if kind in _OF_ONE_RUN else ():
            if run.table("aggregates").num_rows:
                say(
                    f"{run.path} holds sums per step (--aggregate, or beyond --max-size): {kind} shows single collectives "
                    "only, without those in the sums"
                )
        if kind in _OF_ONE_RUN and len(opened_runs) > 1:
            return _each_apart(kind, opened_runs, out, force)
        files = _write(kind, opened_runs, out, tables or None, force, empty)
    _show(files)
    say(f"{out}  {len(files)} files of {', '.join(str(run.path) for run in opened_runs)}")
    return 0


def _each_apart(kind: Format, runs: list[Run], out: Path, force: bool) -> int:
    """Export each run into a separate directory below ``out`` that has the name of the run."""
    names = [run.path.name for run in runs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UsageError(
            f"several runs are named {twice[0]}, and each needs a directory of its own; export one at a time"
        )
    taken = [out / name for name in names if (out / name).exists()]
    if taken and not force:
        raise UsageError(f"{taken[0]} exists already; give --force to replace it, or another --out")
    for run in runs:
        files = _write(kind, [run], out / run.path.name, None, force)
        _show(files)
        say(f"{out / run.path.name}  {len(files)} files of {run.path}")
    return 0


def _show(files: list[ExportedFile]) -> None:
    headings = (Heading("file"), Heading("rows", number=True), Heading("size", number=True))
    cells = [
        (file.path.name, rendering.count(file.rows), rendering.number_of_bytes(file.bytes)) for file in files
    ]
    rendering.show(Rows(headings, cells))


def _write(
    kind: Format, runs: list[Run], out: Path, tables: list[str] | None, force: bool, empty: bool = False
) -> list[ExportedFile]:
    progress = _progress()
    try:
        if kind is Format.CSV:
            from commprof.export.csv import export_csv

            return export_csv(runs, out, tables, force, progress, empty)
        if kind is Format.PARQUET:
            from commprof.export.parquet import export_parquet

            return export_parquet(runs, out, tables, force, progress, empty)
        if kind is Format.DUCKDB:
            from commprof.export.database import export_database

            return export_database(runs, out, tables, force, progress, empty)
        if kind is Format.HTML:
            from commprof.export.html import export_html

            return export_html(runs, out, force, progress, _worth_trying(runs))
        if kind is Format.PERFETTO:
            from commprof.export.perfetto import export_perfetto

            return export_perfetto(runs[0], out, force, progress)
        from commprof.export.chakra import export_chakra

        return export_chakra(runs[0], out, force, progress)
    finally:
        progress("")


def _worth_trying(runs: list[Run]) -> list[str]:
    """Return sentences about the changes of settings that are worth trying, or the reason why there are none.

    The result is empty for several runs. For a large run, the sentence names the command that predicts them.
    """
    from commprof.analysis import api
    from commprof.prediction.api import promising

    if len(runs) > 1:
        return []
    (run,) = runs
    if api.overview(run)["records"] > _MOST_PREDICTED:
        command = command_line("predict", run.path)
        return [
            f"The run has more than {_MOST_PREDICTED:,} records. To predict other settings from it: {command}"
        ]
    try:
        best = promising(run.path)
    except CommprofError as error:
        return [f"No change can be predicted: {error}"]
    shown = rendering.duration
    return [
        *(
            f"{' '.join(each.words)}: {shown(each.gain_ns)} less per step ({shown(each.gain_low_ns)} to "
            f"{shown(each.gain_high_ns)}, 80 % interval), {each.why}."
            for each in best.changes
        ),
        *best.sentences,
    ]


def _progress() -> Progress:
    """Return a function that shows which file is being written.

    The function does nothing if standard error is not a terminal.
    """
    if not sys.stderr.isatty():
        return lambda name: None

    def show(name: str) -> None:
        sys.stderr.write(f"\r\x1b[K{'commprof: writing ' + escaped(name) if name else ''}")
        sys.stderr.flush()

    return show


def _check(directory: Path, runs: list[str]) -> int:
    with needed("export", "to check an export"):
        from commprof.export.csv import check_csv
        from commprof.export.provenance import PROVENANCE

        opened_runs = [opened(run) for run in runs or _sources(directory / PROVENANCE)]
        problems = check_csv(directory, opened_runs)
    for problem in problems:
        say(problem)
    if problems:
        say(
            f"{directory} is not an export of {', '.join(str(run.path) for run in opened_runs)} as it is now: "
            f"{len(problems)} differences"
        )
        return 1
    say(
        f"{directory} agrees with {', '.join(str(run.path) for run in opened_runs)}: every file, row and value"
    )
    return 0


def _sources(provenance: Path) -> list[str]:
    """Return the paths that the runs of an export had when the export was written."""
    try:
        provenance_record: Any = json.loads(provenance.read_text("utf-8"))
        paths = [str(each["run"]["path"]) for each in provenance_record["runs"]]
    except (OSError, ValueError, KeyError, TypeError):
        raise TraceError(
            f"{provenance} cannot be read, or does not name the runs of the export; name them: "
            + command_line("export", "RUN...", "--check", provenance.parent)
        ) from None
    missing = [path for path in paths if not Path(path).is_dir()]
    if missing:
        raise TraceError(
            f"the run of this export is no longer at {missing[0]}; give its new path: "
            + command_line("export", "RUN...", "--check", provenance.parent)
        )
    return paths

"""``commprof align``: the records of a run beside the lines of its NCCL logs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from commprof.cli import rendering
from commprof.cli.console import say
from commprof.cli.extras import needed
from commprof.cli.nccl import LogsArgument, read_logs
from commprof.cli.rendering import Heading, Rows
from commprof.cli.runs import RunArgument, opened
from commprof.errors import TraceError, UsageError

if TYPE_CHECKING:
    from commprof.align.matching import MatchReport
    from commprof.nccl.parser import ParsedLogs
    from commprof.trace.reader import Run


def align(
    run: RunArgument,
    logs: LogsArgument,
    force: Annotated[
        bool, typer.Option("--force", "-f", help="Replace an earlier alignment of this run.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The counts as JSON.")] = False,
) -> int:
    """Match each record of a run with its NCCL log line: matched, missing in the log, extra in the log.

    The tables nccl_ops and matches are kept in the run.
    """
    found = opened(run)
    if not force and found.table("matches").num_rows:
        raise UsageError(f"{found.path} holds an alignment already; give --force to replace it")
    parsed = read_logs(logs)
    with needed("analysis", "to align a run"):
        from commprof.align import matching

        report = matching.align(found, parsed.ops)
    if as_json:
        counts = {name: getattr(report, name) for name in ("matched", "missing", "extra", "torn", "unclear")}
        communicators = [communicator._asdict() for communicator in report.communicators]
        rendering.show_json(
            {**counts, "communicators": communicators, "notes": report.notes, "generated": parsed.generated}
        )
    else:
        rendering.show(*_parts(parsed, report))
    _keep(found, parsed, report)
    return 0


def _parts(parsed: ParsedLogs, report: MatchReport) -> list[Rows | str]:
    total = f"matched {report.matched:,}, missing {report.missing:,}, extra {report.extra:,}, torn {report.torn:,}"
    legend = (
        "missing: a record without its line. extra: a line without its record. Counted in lines of the log."
    )
    notes = [rendering.paragraph(note) for note in dict.fromkeys((*parsed.notes, *report.notes))]
    return [_communicators(report), total, rendering.paragraph(legend), *notes]


def _communicators(report: MatchReport) -> Rows:
    headings = (
        Heading("communicator"),
        Heading("rank", number=True),
        Heading("group"),
        Heading("matched", number=True),
        Heading("missing", number=True),
        Heading("extra", number=True),
    )
    cells: list[tuple[str, ...]] = []
    for found in report.communicators:
        group = rendering.text(found.pg)
        if found.group_ranks:
            group += f" ({found.group_ranks})"
        counts = (rendering.count(value) for value in (found.matched, found.missing, found.extra))
        cells.append((found.comm, rendering.text(found.rank), group, *counts))
        if found.reason:
            cells.append((f"  {found.reason}", *[""] * 5))
    return Rows(headings, cells)


def _keep(run: Run, parsed: ParsedLogs, report: MatchReport) -> None:
    from commprof.trace.tables import write_table

    try:
        write_table(run.path, "nccl_ops", parsed.ops)
        write_table(run.path, "matches", report.matches)
    except TraceError as error:
        say(f"the tables could not be kept in the run: {error}")
        return
    say(f"{run.path}  kept nccl_ops and matches  next: commprof export {run.path} --format csv --out DIR")

"""``commprof align``: matches the records of a run with the lines of its NCCL logs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from commprof.cli import rendering
from commprof.cli.console import say
from commprof.cli.extras import needed
from commprof.cli.rendering import Heading, Rows
from commprof.cli.runs import RunArgument, opened
from commprof.cli.sections.inspector_section import align_inspector
from commprof.cli.verbs.nccl import read_logs
from commprof.errors import TraceError, UsageError
from commprof.exit_codes import ExitCode
from commprof.printable import command_line
from commprof.trace.liveness import recording_process, refuse_live

if TYPE_CHECKING:
    from pathlib import Path

    from commprof.align.divergence import Divergence
    from commprof.align.matching import MatchReport
    from commprof.align.sequences.count_bounds import Bounds
    from commprof.imports.inspector_log import InspectorLog
    from commprof.nccl.parser import ParsedLogs
    from commprof.trace.reader import Run

HELP_ORDER = 60

OwnLogsArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[LOG]...",
        help="Logs of NCCL or of the NCCL Inspector, directories of such logs, or - for standard input. "
        "Default: the logs in the directory nccl/ of the run.",
        show_default=False,
    ),
]
_SHOWN_DIVERGENCES: Final = 4
_STATES: Final = ("matched", "missing", "extra", "ambiguous", "torn")
_GENERATED: Final = "The log states that it was generated: it is not output of NCCL."
_LEGEND: Final = (
    "missing: a record without a line. extra: a line without a record. ambiguous: several candidates match; 1 to 8 "
    "missing: at least 1, and 8 candidates cannot be distinguished. Counts are lines of the log; a COLL line and its CALL "
    "line count once. torn: a truncated line."
)


def align(
    run: RunArgument,
    logs: OwnLogsArgument = None,
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            "-f",
            help="Replace an earlier alignment of this run, even if the new alignment has no matches.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the counts as JSON.")] = False,
) -> int:
    """Match each record of a run with its line in the NCCL log.

    The states are matched, missing, extra, ambiguous and torn (a truncated line).

    If any record matches, commprof stores the tables of the log in the run. It stores the result of the
    matching in two more tables, which are called "matches" and "comm_matches".

    If LOG is not given and the run has an alignment, commprof shows the stored
    alignment. With logs of the NCCL Inspector, collectives are matched by their number, and the
    algorithms are stored.
    """
    opened_run = opened(run)
    if force:
        refuse_live(opened_run.path, "no alignment is stored in it")
    inspected = _inspector_logs(logs) if logs else None
    if inspected is not None:
        return align_inspector(opened_run, inspected, force=force, as_json=as_json)
    is_aligned = bool(opened_run.table("matches").num_rows)
    if is_aligned and logs and not force:
        raise UsageError(
            f"{opened_run.path} already has an alignment; give --force to replace it, or no log to see it"
        )
    with needed("analysis", "to align a run"):
        from commprof.align import matching
    if is_aligned and not force:
        return _show_stored(opened_run, as_json=as_json)
    parsed = read_logs(logs or [str(matching.logs_of(opened_run.path))])
    tables = _tables(parsed)
    report = matching.align(
        opened_run, parsed.ops, tables.get("nccl_communicators"), generated=parsed.generated
    )
    if as_json:
        rendering.show_json(_facts(parsed, report))
    else:
        rendering.show(*_parts(parsed, report))
    if report.matched or force:
        _keep(opened_run, {**tables, "nccl_ops": parsed.ops}, report)
    else:
        say(f"nothing matches: no alignment is stored in {opened_run.path}; --force stores it anyway")
    return 0


def _inspector_logs(logs: list[str]) -> list[tuple[Path, InspectorLog]] | None:
    with needed("analysis", "to align a run"):
        from commprof.imports.formats import inspector_logs
    return inspector_logs(logs)


def _show_stored(run: Run, *, as_json: bool) -> int:
    """Print the alignment that is stored in the run."""
    from commprof.align.sequences.count_bounds import bounds_of

    matches, communicators = run.table("matches"), run.table("comm_matches")
    counted = {row["values"]: row["counts"] for row in matches["state"].value_counts().to_pylist()}
    counts = {state: counted.get(state, 0) for state in _STATES}
    bounds = bounds_of(matches, communicators)
    rows = communicators.to_pylist()
    if as_json:
        facts = {"stored": True, "generated": _is_generated(rows), "communicators": rows}
        rendering.show_json(_counts(counts, bounds) | facts)
        return ExitCode.DONE
    notes = [_GENERATED] if _is_generated(rows) else []
    rendering.show(_communicators(rows), _total(counts, bounds), rendering.paragraph(_LEGEND), *notes)
    say(f"{run.path}  the alignment stored in the run; --force repeats it from the logs")
    return ExitCode.DONE


def _is_generated(communicators: Sequence[Mapping[str, Any]]) -> bool:
    return any(row["generated"] for row in communicators)


def _counts(counts: Mapping[str, int], bounds: Bounds) -> dict[str, Any]:
    """Return the counts for JSON.

    Missing and extra are lower bounds if equal neighboring operations make the counts ambiguous.
    """
    certain = {"missing": bounds.missing_at_least, "extra": bounds.extra_at_least}
    return {**counts, **certain, **bounds._asdict(), "states": dict(counts)}


def _total(counts: Mapping[str, int], bounds: Bounds) -> str:
    shown = {state: f"{count:,}" for state, count in counts.items()}
    shown |= {"missing": bounds.missing, "extra": bounds.extra} if counts["ambiguous"] else {}
    return ", ".join(f"{state} {text}" for state, text in shown.items())


def _tables(parsed: ParsedLogs) -> dict[str, Any]:
    return dict(getattr(parsed, "tables", {}))


def _facts(parsed: ParsedLogs, report: MatchReport) -> dict[str, Any]:
    return {
        **_counts(report.counts, report.bounds),
        "unclear": report.unclear,
        "communicators": report.comm_matches.to_pylist(),
        "divergences": [
            divergence._asdict() | {"sides": [side._asdict() for side in divergence.sides]}
            for divergence in report.divergences
        ],
        "notes": report.notes,
        "generated": parsed.generated,
    }


def _parts(parsed: ParsedLogs, report: MatchReport) -> list[Rows | str]:
    notes = [rendering.paragraph(note) for note in dict.fromkeys((*parsed.notes, *report.notes))]
    shown = [_divergence(divergence) for divergence in report.divergences[:_SHOWN_DIVERGENCES]]
    more = len(report.divergences) - len(shown)
    rest = [f"{more} more ranks and groups diverge; --json lists them"] if more else []
    total = _total(report.counts, report.bounds)
    table = _communicators(report.comm_matches.to_pylist())
    return [table, total, rendering.paragraph(_LEGEND), *shown, *rest, *notes]


def _communicators(rows: Sequence[Mapping[str, Any]]) -> Rows:
    from commprof.align.sequences.count_bounds import interval

    headings = (
        Heading("communicator"),
        Heading("rank", number=True),
        Heading("group"),
        Heading("confidence"),
        *(Heading(name, number=True) for name in _STATES),
    )
    cells: list[tuple[str, ...]] = []
    for row in rows:
        group = rendering.text(row["pg"])
        if row["group_ranks"]:
            group += f" ({row['group_ranks']})"
        bounded = {
            "missing": interval(
                row["missing"] + (row["ambiguous_missing"] or 0),
                row["missing"] + (row["ambiguous_records"] or 0),
            ),
            "extra": interval(row["extra"] + (row["ambiguous_extra"] or 0), row["extra"] + row["ambiguous"]),
        }
        numbers = (bounded.get(name) or rendering.count(row[name]) for name in _STATES)
        cells.append((row["comm"], rendering.text(row["rank"]), group, row["confidence"], *numbers))
        if row["reason"]:
            cells.append((f"  {row['reason']}", *[""] * (len(headings) - 1)))
    return Rows(headings, cells)


def _divergence(divergence: Divergence) -> Rows:
    title = (
        f"rank {divergence.rank}, group {divergence.pg} ({divergence.group_ranks}): first divergence after "
        f"{divergence.matched_before:,} matched"
    )
    headings = (Heading("state"), Heading("record"), Heading("line"))
    cells = [(side.state, side.record or "", side.line or "") for side in divergence.sides]
    return Rows(headings, cells, title)


def _keep(run: Run, tables: dict[str, Any], report: MatchReport) -> None:
    from commprof.trace.pending_ranks import list_tables
    from commprof.trace.tables import write_table

    recorder = recording_process(run.path)
    if recorder is not None:
        say(f"{run.path} is being recorded by {recorder}: no alignment is stored in it yet")
        return
    try:
        for name, table in tables.items():
            write_table(run.path, name, table)
        write_table(run.path, "matches", report.matches)
        write_table(run.path, "comm_matches", report.comm_matches)
        list_tables(run.path, (*tables, "matches", "comm_matches"))
    except TraceError as error:
        say(f"the tables could not be stored in the run: {error}")
        return
    follow = command_line("export", run.path, "--format", "csv", "--out", "DIR")
    say(f"{run.path}  stored nccl_ops and matches  next: {follow}")

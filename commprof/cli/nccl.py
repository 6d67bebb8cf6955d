"""``commprof nccl``: what NCCL's own log says."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from commprof.cli import rendering
from commprof.cli.console import say
from commprof.cli.extras import needed
from commprof.cli.rendering import Heading, Rows
from commprof.errors import LogError

if TYPE_CHECKING:
    from commprof.nccl.parser import ParsedLogs

app = typer.Typer(help="Read the logs that NCCL writes with NCCL_DEBUG=INFO.", no_args_is_help=True)

LogsArgument = Annotated[
    list[str],
    typer.Argument(
        metavar="LOG...", help="Log files, directories of them, or - for standard input.", show_default=False
    ),
]
_SILENT: Final = ("ignored",)


@app.callback()
def _nccl() -> None:
    """Makes ``parse`` a verb of its own, not the only thing that ``commprof nccl`` does."""


@app.command("parse")
def parse(
    logs: LogsArgument,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="DIR",
            help="Write nccl_ops.parquet there, and communicators, rings, trees, links, tuning, messages.",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", "-f", help="Replace these files in --out.")] = False,
    csv: Annotated[bool, typer.Option("--csv", help="Write each table to --out as CSV, too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The counts as JSON.")] = False,
) -> int:
    """Turn the operation lines of NCCL logs into the table nccl_ops, and say what was read."""
    if out is not None and not force:
        with needed("analysis", "to read NCCL logs"):
            from commprof.nccl.parser import refuse_taken
        refuse_taken(out, csv)
    parsed = read_logs(logs)
    counts = parsed.counts._asdict()
    if counts["lines"] and not parsed.is_nccl:
        raise LogError(
            f"none of {counts['lines']:,} lines in {', '.join(logs)} is a line of NCCL's log; expected lines like "
            "'host:pid:tid [device] NCCL INFO ...', which NCCL prints with NCCL_DEBUG=INFO"
        )
    if as_json:
        rendering.show_json({"counts": counts, "unknown_ops": parsed.unknown_ops, "notes": parsed.notes})
    else:
        shown = ", ".join(
            f"{value:,} {name.removesuffix('s') if value == 1 else name}"
            for name, value in counts.items()
            if value and name not in _SILENT
        )
        rendering.show(f"read {shown}", "", operations(parsed), *parsed.notes)
    if out is not None:
        from commprof.nccl.parser import write

        paths = write(parsed, out, force, csv)
        say(
            f"wrote {len(paths)} tables to {out}: {', '.join(path.name for path in paths)}  next: commprof align RUN LOG..."
        )
    return 0


def read_logs(logs: list[str]) -> ParsedLogs:
    """The logs, parsed, with a bar on a terminal.

    Raises:
        LogError: one cannot be read.
        MissingExtraError: the packages that hold tables are not installed.
    """
    with needed("analysis", "to read NCCL logs"):
        from commprof.nccl.parser import parse_logs
    with rendering.byte_progress(_total_bytes(logs)) as advance:
        return parse_logs(logs, advance)


def _total_bytes(logs: list[str]) -> int | None:
    """The size of the named files; None where it cannot be told before (standard input, patterns, directories)."""
    paths = [Path(log) for log in logs]
    return sum(path.stat().st_size for path in paths) if all(path.is_file() for path in paths) else None


def operations(parsed: ParsedLogs) -> Rows:
    """Whole lines and their bytes by operation and kind of line."""
    lines, sent = parsed.operations.totals()
    headings = (
        Heading("operation"),
        Heading("line"),
        Heading("lines", number=True),
        Heading("payload", number=True),
    )
    cells = [
        (op, kind.upper(), rendering.count(lines[op, kind]), rendering.number_of_bytes(sent[op, kind]))
        for op, kind in sorted(lines)
    ]
    return Rows(headings, cells)

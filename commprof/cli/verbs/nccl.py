"""``commprof nccl``: reads the logs that NCCL writes."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from commprof.cli import rendering
from commprof.cli.console import say
from commprof.cli.extras import needed
from commprof.cli.rendering import Heading, Rows
from commprof.errors import LogError, UsageError
from commprof.printable import escaped
from commprof.trace.liveness import refuse_live

if TYPE_CHECKING:
    from commprof.nccl.following import Followed
    from commprof.nccl.parser import ParsedLogs

HELP_ORDER = 50

nccl = typer.Typer(help="Read the logs that NCCL writes with NCCL_DEBUG=INFO.", no_args_is_help=True)

STANDARD_INPUT: Final = "-"
LogsArgument = Annotated[
    list[str],
    typer.Argument(
        metavar="LOG...",
        help="Log files, directories of log files, or - for standard input.",
        show_default=False,
    ),
]
# The singular and the plural name of each kind of line, in the order of the output.
_TITLES: Final = {
    "coll": ("COLL line", "COLL lines"),
    "call": ("CALL line", "CALL lines"),
    "torn": ("torn operation", "torn operations"),
    "unknown_op": ("operation of unknown name", "operations of unknown names"),
    "init": ("init line", "init lines"),
    "end": ("end of a communicator", "ends of communicators"),
    "group": ("start or end of a group", "starts and ends of groups"),
    "topology": ("topology line", "topology lines"),
    "tuning": ("tuning line", "tuning lines"),
    "message": ("warning or error trace", "warnings and error traces"),
    "banner": ("version banner", "version banners"),
    "torch": ("line of torch", "lines of torch"),
    "fragment": ("fragment of an operation", "fragments of operations"),
    "overlong": ("overlong line", "overlong lines"),
}


@nccl.callback()
def _nccl() -> None:
    """Keep ``parse`` a subcommand. Without a callback, typer would drop the name of a single command."""


@nccl.command("parse")
def parse(
    logs: LogsArgument,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="DIR",
            help="Write the tables to DIR: nccl_ops.parquet, and one file for each other table "
            "(communicators, rings, ...).",
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", "-f", help="Replace existing tables in the directory of --out.")
    ] = False,
    csv: Annotated[
        bool, typer.Option("--csv", help="Also write each table as CSV to the directory of --out.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the counts as JSON.")] = False,
    follow: Annotated[
        bool,
        typer.Option(
            "--follow",
            help="Keep reading while the logs grow, until Ctrl-C. The files of --out are written at the end.",
        ),
    ] = False,
    idle: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="With --follow, exit when the logs have not grown for SECONDS."),
    ] = None,
) -> int:
    """Parse NCCL logs into tables, and report which lines were read and which lines were not read."""
    if idle is not None and not follow:
        raise UsageError("--idle applies to --follow only; add --follow")
    if idle is not None and not idle >= 0:
        raise UsageError(f"--idle is {idle:g}; expected seconds, 0 or more")
    # Refuse before the log is read, because parsing a large log may take minutes.
    if out is not None:
        refuse_live(out, "no table is stored in it")
    if out is not None and not force:
        with needed("analysis", "to read NCCL logs"):
            from commprof.nccl.parser import refuse_taken
        refuse_taken(out, csv)
    parsed = follow_logs(logs, idle) if follow else read_logs(logs)
    counts = parsed.counts._asdict()
    if counts["lines"] and not parsed.is_nccl:
        raise LogError(
            f"none of {counts['lines']:,} lines in {', '.join(logs)} is a line of NCCL's log; expected lines like "
            "'host:pid:tid [device] NCCL INFO ...', which NCCL prints with NCCL_DEBUG=INFO"
        )
    if as_json:
        kinds = [
            {**kind._asdict(), "examples": [e._asdict() for e in kind.examples]} for kind in parsed.kinds
        ]
        rendering.show_json(
            {"counts": counts, "kinds": kinds, "unknown_ops": parsed.unknown_ops, "notes": parsed.notes}
        )
    else:
        rendering.show(*summary(parsed))
    if out is not None:
        from commprof.nccl.parser import write

        paths = write(parsed, out, force, csv)
        say(
            f"wrote {len(paths)} tables to {out}: {', '.join(path.name for path in paths)}  next: commprof align RUN LOG..."
        )
    return 0


def read_logs(logs: list[str]) -> ParsedLogs:
    """Parse the logs, with a progress bar on a terminal.

    Raises:
        LogError: a log cannot be read.
        MissingExtraError: the packages that hold tables are not installed.
    """
    with needed("analysis", "to read NCCL logs"):
        from commprof.nccl.parser import parse_logs
    with rendering.byte_progress(_total_bytes(logs)) as advance:
        return parse_logs(logs, advance)


def follow_logs(logs: list[str], idle: float | None) -> ParsedLogs:
    """Parse the logs while they grow, until nothing was written for ``idle`` seconds or Ctrl-C.

    Raises:
        LogError: a log cannot be read, or there is none.
        UsageError: standard input was named.
        MissingExtraError: the packages that hold tables are not installed.
    """
    with needed("analysis", "to read NCCL logs"):
        from commprof.nccl.following import Follower
        from commprof.nccl.parser import parse_sources
    if STANDARD_INPUT in logs:
        raise UsageError(
            "standard input is always read to its end; give files with --follow, or leave it out"
        )
    end = "Ctrl-C ends it" if idle is None else f"{idle:g} s without a new line, or Ctrl-C, stops it"
    say(f"following {', '.join(logs)}; {end}")
    with tempfile.TemporaryDirectory(prefix="commprof-") as scratch:
        follower = Follower(logs, Path(scratch))
        with _live_line() as show, contextlib.suppress(KeyboardInterrupt):
            follower.follow(idle, lambda so_far: show(_so_far(so_far)))
        sources = follower.sources()
        for trouble in follower.troubles:
            say(trouble)
        with rendering.byte_progress(sum(source.path.stat().st_size for source in sources)) as advance:
            return parse_sources(sources, advance)


def _so_far(count: Followed) -> str:
    return (
        f"{_number(count.files, 'file')}, {rendering.number_of_bytes(count.bytes)}, {_number(count.lines, 'line')}, "
        f"{_number(count.operations, 'operation')}"
    )


@contextlib.contextmanager
def _live_line() -> Iterator[Callable[[str], None]]:
    """Yield a function that replaces the status line on standard error.

    The function does nothing if standard error is not a terminal.
    """
    if not sys.stderr.isatty():
        yield lambda text: None
        return
    erase = "\r\x1b[K"

    def show(text: str) -> None:
        print(f"{erase}{escaped(text)}", end="", file=sys.stderr, flush=True)

    try:
        yield show
    finally:
        print(erase, end="", file=sys.stderr, flush=True)


def _total_bytes(logs: list[str]) -> int | None:
    """Return the total size of ``logs`` in bytes.

    The result is None if one of them is not a regular file, for example standard input, a pattern or a directory.
    """
    paths = [Path(log) for log in logs]
    return sum(path.stat().st_size for path in paths) if all(path.is_file() for path in paths) else None


def summary(parsed: ParsedLogs) -> list[str | Rows]:
    """Return what was read, which lines have no table, which were not recognized, and what to do about it."""
    counts = parsed.counts._asdict()
    read = [
        f"{rendering.count(counts[name])} {title if counts[name] == 1 else titles}"
        for name, (title, titles) in _TITLES.items()
        if counts[name]
    ]
    size = f"{_number(counts['files'], 'file')}, {rendering.number_of_bytes(counts['bytes'])}, "
    blocks: list[str | Rows] = [rendering.paragraph(f"read {size}{_number(counts['lines'], 'line')}")]
    if read:
        blocks.append(rendering.paragraph(f"found {', '.join(read)}"))
    versions = parsed.tables["nccl_communicators"]["version"].unique().drop_null().to_pylist()
    if versions:
        blocks.append(rendering.paragraph(f"version of NCCL: {', '.join(sorted(versions))}"))
    if counts["coll"] + counts["call"]:
        blocks += ["", operations(parsed)]
        unsized = parsed.operations.totals().unsized.total()
        if unsized:
            blocks.append(
                rendering.paragraph(
                    f"payload does not include {_number(unsized, 'line')} of unknown size: the datatype or the "
                    "number of ranks is not known"
                )
            )
    elsewhere = [
        f"{k.kind} {rendering.count(k.lines)}" for k in parsed.kinds if k.understood and k.kind != "read"
    ]
    if elsewhere:
        blocks.append(rendering.paragraph(f"recognized lines that are in no table: {', '.join(elsewhere)}"))
    blocks += unread(parsed)
    if parsed.notes:
        blocks += ["", *(rendering.paragraph(note) for note in parsed.notes)]
    return blocks


def unread(parsed: ParsedLogs) -> list[str]:
    """Return how many lines were not recognized, by kind, with examples."""
    kinds = [kind for kind in parsed.kinds if not kind.understood]
    if not kinds:
        return ["unrecognized lines: 0"]
    total = sum(kind.lines for kind in kinds)
    lines = [f"unrecognized lines: {rendering.count(total)} of {rendering.count(parsed.counts.lines)}"]
    width = max(len(rendering.count(kind.lines)) for kind in kinds)
    for kind in kinds:
        lines.append(f"  {rendering.count(kind.lines):>{width}}  {kind.kind}")
        for example in kind.examples:
            name = "line " if len(parsed.files) == 1 else f"{example.file}:"
            lines.append(rendering.shortened(f"  {'':{width}}    {name}{example.line}: {example.text}"))
    return lines


def _number(value: int, thing: str) -> str:
    return f"{rendering.count(value)} {thing if value == 1 else thing + 's'}"


def operations(parsed: ParsedLogs) -> Rows:
    """Return complete lines and their bytes by operation and kind of line."""
    totals = parsed.operations.totals()
    headings = (
        Heading("operation"),
        Heading("line"),
        Heading("lines", number=True),
        Heading("payload", number=True),
    )
    cells = [
        (
            op,
            kind.upper(),
            rendering.count(lines),
            rendering.number_of_bytes(None if totals.unsized[op, kind] == lines else totals.bytes[op, kind]),
        )
        for (op, kind), lines in sorted(totals.lines.items())
    ]
    return Rows(headings, cells)

"""Formats tables and facts for a terminal, a pipe or a program (JSON).

Text output escapes control characters in text from other programs (:mod:`commprof.printable`). JSON needs no escapes.

Numbers are never truncated, and words are never broken. A table that is wider than the terminal keeps its width, and
the terminal wraps the lines of the table.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from commprof.printable import escaped

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console
    from rich.table import Table

MISSING = "-"
_LAYOUT = "\n\t"
_READING_WIDTH = 100
_PIPE_WIDTH = 10_000  # so wide that no row wraps, so each row is one line


class Heading(NamedTuple):
    """The title of a column. A column with ``number`` is right-aligned and never truncated."""

    title: str
    number: bool = False


class Rows(NamedTuple):
    """A table whose cells are formatted text. An empty tuple among the rows becomes a dividing line."""

    headings: Sequence[Heading]
    rows: Sequence[Sequence[str]]
    title: str = ""


def show(*blocks: Rows | str) -> None:
    """Print tables and lines of text on standard output."""
    console = _console()
    for block in blocks:
        print(escaped(block, _LAYOUT) if isinstance(block, str) else _as_text(console, block))


def paragraph(text: str) -> str:
    """Wrap ``text`` between words at the width of the terminal, or at a readable width if the terminal is wider."""
    width = _console().width if sys.stdout.isatty() else _READING_WIDTH
    plain_text = escaped(text, _LAYOUT)
    return textwrap.fill(
        plain_text, min(width, _READING_WIDTH), break_long_words=False, break_on_hyphens=False
    )


def shortened(line: str) -> str:
    """Return ``line``, truncated to the width of the terminal."""
    width, line = _console().width, escaped(line)
    return line if len(line) <= width else f"{line[: width - 3]}..."


def fits(rows: Rows) -> bool:
    """Return whether ``rows`` can be printed without wrapping a row."""
    console = _console()
    return _least_width(console, _drawn(_escaped(rows))) <= console.width


def show_json(value: Any) -> None:
    """Print ``value`` as JSON on standard output. Missing values become null."""
    json.dump(plain(value), sys.stdout, indent=1, default=str, allow_nan=False)
    sys.stdout.write("\n")


def plain(value: Any) -> Any:
    """Return ``value`` as JSON values. Values of pandas and numpy are converted, and not-a-number becomes null."""
    if hasattr(value, "to_dict") and hasattr(value, "columns"):
        return [plain(row) for row in value.to_dict("records")]
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if value is None or isinstance(value, str | bool | int):
        return value
    if hasattr(value, "item"):
        return plain(value.item())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return None if is_missing(value) else str(value)


def is_missing(value: Any) -> bool:
    """Return whether ``value`` is None, not-a-number, or the NA of pandas."""
    return value is None or type(value).__name__ in ("NAType", "NaTType") or value != value


def text(value: Any) -> str:
    """Format ``value`` for a cell. A missing value becomes a dash."""
    return MISSING if is_missing(value) else str(value)


def count(value: Any) -> str:
    """Format a count: ``1,234``. A mean that is not an integer gets two decimals."""
    if is_missing(value):
        return MISSING
    number = float(value)
    return f"{number:,.0f}" if abs(number - round(number)) < 0.005 else f"{number:,.2f}"


def number_of_bytes(value: Any) -> str:
    """Format a number of bytes with a suitable unit."""
    from commprof.analysis.columns.units import format_bytes

    return MISSING if is_missing(value) else format_bytes(float(value))


def duration(value: Any) -> str:
    """Format a duration in ns with a suitable unit."""
    from commprof.analysis.columns.units import format_ns

    return MISSING if is_missing(value) else format_ns(float(value))


def spread(center: Any, low: Any, high: Any) -> str:
    """Format a duration in ns with half the width of its interval: ``67.9 +-1.2 ms``."""
    text = duration(center)
    if is_missing(center) or is_missing(low) or is_missing(high):
        return text
    half = (float(high) - float(low)) / 2
    number, _, unit = text.partition(" ")
    if " " in unit or not float(number):  # minutes and seconds
        return f"{text} +-{duration(round(half))}"
    in_unit = half * float(number) / float(center)
    return f"{number} +-{in_unit:.0f} {unit}" if in_unit >= 9.95 else f"{number} +-{in_unit:.2g} {unit}"


def loss(value: Any) -> str:
    """Format a loss with six significant digits."""
    return MISSING if is_missing(value) else f"{float(value):.6g}"


def facts(pairs: Iterable[tuple[str, str]]) -> str:
    """Format each pair of name and value as one line, with the values aligned in a column.

    On a terminal, long values wrap within this column.
    """
    listed = [(escaped(name), escaped(value)) for name, value in pairs if value]
    width = max((len(name) for name, _ in listed), default=0)
    lines = [f"{name:<{width}}  {value}" for name, value in listed]
    if not sys.stdout.isatty():
        return "\n".join(lines)
    fold = textwrap.TextWrapper(
        _console().width, subsequent_indent=" " * (width + 2), break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(fold.fill(line) for line in lines)


def records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Return each row of ``frame`` as a mapping from column name to value."""
    return [{str(key): value for key, value in row.items()} for row in frame.to_dict("records")]


def _console() -> Console:
    from rich.console import Console

    return Console(highlight=False) if sys.stdout.isatty() else Console(width=_PIPE_WIDTH, highlight=False)


def _escaped(rows: Rows) -> Rows:
    """Return ``rows`` with escaped control characters in all cells, except the line ends within a cell."""
    headings = [heading._replace(title=escaped(heading.title, "\n")) for heading in rows.headings]
    cells = [tuple(escaped(text, "\n") for text in row) for row in rows.rows]
    return Rows(headings, cells, escaped(rows.title))


def _drawn(rows: Rows) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    for position, heading in enumerate(rows.headings):
        cells = [row[position] for row in rows.rows if row]
        table.add_column(
            Text(heading.title),
            justify="right" if heading.number else "left",
            no_wrap=heading.number,
            min_width=_least_cell(cells, unbroken=heading.number),
            overflow="fold",
        )
    for row in rows.rows:
        if row:
            table.add_row(*map(Text, row))
        else:
            table.add_section()
    return table


def _least_cell(cells: Sequence[str], unbroken: bool) -> int:
    """Return the minimum width for ``cells``: the longest cell if ``unbroken``, else the longest word."""
    texts = cells if unbroken else [word for cell in cells for word in cell.split()]
    return max(map(len, texts), default=0)


def _least_width(console: Console, table: Table) -> int:
    from rich.measure import Measurement

    return Measurement.get(console, console.options.update(width=_PIPE_WIDTH), table).minimum


def _as_text(console: Console, rows: Rows) -> str:
    rows = _escaped(rows)
    table = _drawn(rows)
    with console.capture() as capture:
        if rows.title:
            console.print(rows.title, style="bold", soft_wrap=True, markup=False)
        console.print(table, width=max(console.width, _least_width(console, table)), crop=False)
    # rich pads every line to the width of the table and adds empty lines around it.
    lines = [line.rstrip() for line in capture.get().splitlines()]
    return "\n".join(line for line in lines if line) + "\n"


@contextlib.contextmanager
def byte_progress(total: int | None) -> Iterator[Callable[[int], None]]:
    """Show how much of ``total`` bytes was read, if standard error is a terminal.

    Yield a function that adds a number of bytes to the progress.
    """
    if not sys.stderr.isatty():
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

    with Progress(
        BarColumn(), DownloadColumn(), TimeRemainingColumn(), console=Console(stderr=True), transient=True
    ) as bar:
        task = bar.add_task("", total=total)
        yield lambda count: bar.advance(task, count)

"""The tables for a paper: LaTeX with the rules of the booktabs package, as wide as one column of a page.

Columns that do not fit beside each other are divided into blocks below each other. Each block begins with the names of
the settings. The settings have the same short names as in the figures, and the caption spells them out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from commprof.export.paper_figures import letters, number, operation, spelled, stack_order

Row = Mapping[str, str]

NEEDED: Final = (
    "label",
    "requested_op",
    "issued_op",
    "intended_op",
    "payload_bytes_per_step",
    "wire_bytes_per_step",
    "collectives_per_step",
    "step_time_ns",
    "step_time_low_ns",
    "step_time_high_ns",
    "final_loss",
    "repeats",
)
_ESCAPES: Final = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_\allowbreak{}",
    "=": r"=\allowbreak{}",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
}
_UNITS: Final = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))
# The head and the meaning of each column of bytes. A column after the first is shown only if a row has such bytes.
_BYTES: Final = {
    "wire_bytes_per_step": ("Issued", ""),
    "executed_wire_bytes_per_step": ("Executed", ""),
    "moved_bytes_per_step": (
        "Moved",
        "Moved: sent by the network interfaces of all hosts per step, with all other traffic, divided by the ranks.",
    ),
    "between_hosts_bytes_per_step": (
        "Between hosts",
        "Between hosts: the part of the issued bytes of groups and messages with ranks on several hosts.",
    ),
    "padding_bytes_per_step": ("Padding", "Padding: the part of the payload without data."),
}
_ALWAYS: Final = ("wire_bytes_per_step",)
_INTERVALS: Final = {
    "repeats": "mean over repeats of the medians of their steps, with its 95 % interval by Student's t over the repeats",
    "steps": "median of the steps of one run, with its 95 % interval by order statistics over these steps",
}
_NOTE: Final = "% Made by commprof paper from the CSV files of an export; needs \\usepackage{booktabs}.\n"
# The width of a column of 3.2 in, in points. The widths of text are the widths of Computer Modern at 8 points, rounded
# up.
_COLUMN: Final = 225.0
_LETTER: Final = 4.3
_GAP: Final = 6.0


class Job(NamedTuple):
    """The facts about the job in a caption: ranks and backends, the trained model, and the version of torch."""

    ranks: str
    model: str
    torch: str

    def sentence(self) -> str:
        """Return the facts as a sentence, without the unknown ones.

        For example: ``2 ranks, gloo, torch 2.13; model: train_gpt.py with 867072 parameters.``
        """
        ranks = ", ".join(part for part in (self.ranks, self.torch and f"torch {self.torch}") if part)
        return "; ".join(part for part in (ranks, self.model and f"model: {self.model}") if part) + "."


class _Column(NamedTuple):
    """A column of a table.

    Attributes:
        head: The text of the head, which is escaped when the table is written.
        align: The alignment in LaTeX, ``l`` or ``r``.
        cells: The cells as LaTeX.
        letters: The number of letters in the longest line of a cell.
    """

    head: str
    align: str
    cells: Sequence[str]
    letters: int

    @property
    def width(self) -> float:
        """The width of the column in points, including the gap before the column."""
        return _GAP + _LETTER * max(len(self.head), self.letters)


def escaped(text: str) -> str:
    r"""Return ``text`` for LaTeX: special characters are escaped, and unprintable ones are left out.

    >>> escaped("a & 50%")
    'a \\& 50\\%'
    """
    return "".join(_ESCAPES.get(letter, letter) for letter in text if letter.isprintable())


def job_of(runs: Sequence[Row], parameters: Sequence[Row], provenance: Mapping[str, Any]) -> Job:
    """Return the job of an export, from its ``runs.csv``, ``parameters.csv`` and provenance.

    If the runs have different values of a fact, the text lists all of them, separated by "or".
    """

    def every(name: str) -> str:
        return " or ".join(dict.fromkeys(row[name] for row in runs if row.get(name)))

    run_facts = [each.get("run") or {} for each in provenance.get("runs", []) if isinstance(each, dict)]
    of_run: dict[str, dict[str, int]] = {}
    for row in parameters:
        of_run.setdefault(row.get("run", ""), {})[row["name"]] = int(number(row["numel"]) or 0)
    sizes = " or ".join(dict.fromkeys(f"{sum(of.values()):,}" for of in of_run.values()))
    script = every("script")
    ranks = every("world_size")
    model = " with ".join(part for part in (script, sizes and f"{sizes} parameters") if part)
    return Job(
        ", ".join(part for part in (ranks and f"{ranks} ranks", every("backend")) if part),
        model,
        " or ".join(dict.fromkeys(str(run["torch"]) for run in run_facts if run.get("torch"))),
    )


def comparison(rows: Sequence[Row], job: Job) -> str:
    """Return the table of the settings.

    Its columns are the requested and the issued operation, bytes at each level, step time, exposed time, memory and
    loss.
    """
    names = letters(rows)
    rows = [_with_moved_of_rank(row) for row in rows]
    beside = [name for name in _BYTES if name in _ALWAYS or any(number(row.get(name, "")) for row in rows)]
    columns = [
        _texts("Requested", [[row["requested_op"]] for row in rows]),
        _texts("Issued", [_issued(row) for row in rows]),
        _numbers("Calls", [_digits(row["collectives_per_step"]) for row in rows]),
        _numbers("Payload", [_amount(row["payload_bytes_per_step"]) for row in rows]),
        *(_numbers(_BYTES[name][0], [_amount(row.get(name, "")) for row in rows]) for name in beside),
        _numbers("Time (ms)", [_interval(row) for row in rows]),
        *_known("Exposed (ms)", [_exposed(row) for row in rows]),
        *_known("Memory", [_amount(row.get("rss_peak_bytes", "")) for row in rows]),
        *_known("Device", [_amount(row.get("device_peak_bytes", "")) for row in rows]),
        *_known("Loss", [_fixed(row["final_loss"]) for row in rows]),
    ]
    meanings = [
        "Operations, bytes and time of a training step.",
        *_settings_and_job(rows, job),
        "Payload: S of nccl-tests. Issued and executed: modelled wire bytes that a rank sends, mean over all ranks, "
        "of the operations that were issued, and of those that the backend ran.",
        *(_BYTES[name][1] for name in beside),
        _times(rows),
    ]
    heads = {column.head for column in columns}
    if "Exposed (ms)" in heads:
        meanings.append("Exposed: the program is blocked on communication, median of the steps.")
        if any(_is_bounded(row) for row in rows):
            meanings.append("Two values of it are bounds.")
    if "Memory" in heads:
        meanings.append("Memory: peak resident memory of the largest rank.")
    return _table([names[row["label"]] for row in rows], columns, meanings, "tab:commprof-comparison")


def _with_moved_of_rank(row: Row) -> Row:
    """Return ``row`` with the moved bytes divided by the number of ranks.

    The other columns are bytes of one rank, but the CSV file contains the moved bytes of all hosts.
    """
    moved, ranks = (number(row.get(name, "")) for name in ("moved_bytes_per_step", "world_size"))
    return {**row, "moved_bytes_per_step": "" if moved is None or not ranks else str(moved / ranks)}


def traffic(settings: Sequence[Row], rows: Sequence[Row], level: str, column: str, job: Job) -> str:
    """Return the table of bytes of a step by setting, purpose and operation, in the order of the stacks in figures."""
    names = letters(settings)
    order = {label: place for place, label in enumerate(names)}
    shown = [row for row in rows if number(row[column]) and row["label"] in order]
    shown.sort(key=lambda row: (order[row["label"]], stack_order(row), row["purpose"]))
    beside = [
        name
        for name in ("between_hosts_bytes_per_step", "padding_bytes_per_step")
        if any(number(row.get(name, "")) for row in shown)
    ]
    purposes = [_purpose(row) for row in shown]
    columns = [
        _Column("Purpose", "l", purposes, max(map(len, purposes), default=0)),
        _texts("Operation", [operation(row, "\n").split("\n") for row in shown]),
        _numbers(level.capitalize(), [_amount(row[column]) for row in shown]),
        *(_numbers(_BYTES[name][0], [_amount(row.get(name, "")) for row in shown]) for name in beside),
    ]
    meanings = [
        "Wire bytes of a training step by purpose and operation.",
        *_settings_and_job(settings, job),
        f"{level.capitalize()}: modelled bytes that a rank sends, mean over all ranks, of the operations as {level}.",
        *(_BYTES[name][1] for name in beside),
    ]
    return _table(
        [names[row["label"]] for row in shown], columns, meanings, "tab:commprof-traffic", anchors=1
    )


def _settings_and_job(rows: Sequence[Row], job: Job) -> list[str]:
    key = "; ".join(f"{name}: {spelled(label)}" for label, name in letters(rows).items())
    repeats = " or ".join(dict.fromkeys(row["repeats"] for row in rows))
    runs = "1 run" if repeats == "1" else f"{repeats} runs"
    return [f"{key}.", f"{runs} of each setting; {job.sentence()}"]


def _times(rows: Sequence[Row]) -> str:
    over = dict.fromkeys(row.get("interval_over", "") for row in rows)
    meanings = "; or ".join(_INTERVALS[each] for each in over if each in _INTERVALS)
    return f"Time: {meanings or 'median of the steps'}, without the first step."


def _issued(row: Row) -> list[str]:
    intended = row["intended_op"]
    is_news = intended and intended not in (row["issued_op"], row["requested_op"])
    return [*row["issued_op"].split(", "), *([f"for {intended}"] if is_news else [])]


def _purpose(row: Row) -> str:
    return escaped(row["purpose"].replace("_", " ") or "--")


def _texts(head: str, cells: Sequence[Sequence[str]]) -> _Column:
    """Return a column of operations in typewriter type. The lines of a cell are set below each other."""
    set_ = [_lines([_op(line) for line in cell]) for cell in cells]
    return _Column(head, "l", set_, max((len(line) for cell in cells for line in cell), default=0))


def _lines(lines: Sequence[str]) -> str:
    if len(lines) == 1:
        return lines[0]
    return r"\begin{tabular}[t]{@{}l@{}}" + r" \\ ".join(lines) + r"\end{tabular}"


def _numbers(head: str, cells: Sequence[str]) -> _Column:
    return _Column(head, "r", cells, max((len(cell.replace("--", "-")) for cell in cells), default=0))


def _known(head: str, cells: Sequence[str]) -> list[_Column]:
    """Return the column in a list, or an empty list if no cell is known."""
    return [_numbers(head, cells)] if any(cell != "--" for cell in cells) else []


def _blocks(
    names: Sequence[str], columns: Sequence[_Column], anchors: Sequence[_Column]
) -> list[list[_Column]]:
    """Divide ``columns`` into blocks that fit into a column of a page.

    Args:
        names: The names of the settings, which begin each row of a block.
        columns: The columns to divide.
        anchors: The columns that are repeated in each block, after the names.
    """
    first = max(map(len, names), default=1) * 2 * _LETTER + sum(column.width for column in anchors)
    blocks = [[*anchors]]
    used = first
    for column in columns:
        if len(blocks[-1]) > len(anchors) and used + column.width > _COLUMN:
            blocks.append([*anchors])
            used = first
        blocks[-1].append(column)
        used += column.width
    return blocks


def _table(
    names: Sequence[str], columns: Sequence[_Column], meanings: Sequence[str], label: str, anchors: int = 0
) -> str:
    """Return a table as LaTeX. Each of its blocks repeats the first ``anchors`` columns."""
    divided = _blocks(names, columns[anchors:], columns[:anchors])
    blocks = [_block(names, block) for block in divided]
    caption = escaped(" ".join(filter(None, meanings)))
    return (
        _NOTE
        + "\\begin{table}\n  \\centering\n"
        + f"  \\caption{{{caption}}}\n  \\label{{{label}}}\n"
        + f"  \\smallskip\n  \\footnotesize\n  \\setlength{{\\tabcolsep}}{{{_GAP / 2:g}pt}}\n"
        + "\n  \\medskip\n\n".join(blocks)
        + "\\end{table}\n"
    )


def _block(names: Sequence[str], columns: Sequence[_Column]) -> str:
    heads = " & ".join(["", *(escaped(column.head) for column in columns)]).strip()
    lines = [" & ".join(cells) + r" \\" for cells in zip(names, *(one.cells for one in columns), strict=True)]
    align = "l" + "".join(column.align for column in columns)
    return (
        f"  \\begin{{tabular}}{{@{{}}{align}@{{}}}}\n    \\toprule\n    {heads} \\\\\n    \\midrule\n"
        + "".join(f"    {line}\n" for line in lines)
        + "    \\bottomrule\n  \\end{tabular}\n"
    )


def _op(text: str) -> str:
    before, _, name = text.rpartition("for ")
    plain = escaped(name).replace(r"\allowbreak{}", "")
    return ("for " if before or text.startswith("for ") else "") + f"\\texttt{{{plain}}}" if text else "--"


def _digits(text: str, scale: float = 1.0) -> str:
    """Return a number with three significant digits, without an exponent; ``--`` if ``text`` is not a number."""
    value = number(text)
    if value is None:
        return "--"
    value /= scale
    return f"{value:,.0f}" if abs(value) >= 100 or value == round(value) else f"{value:#.3g}".rstrip(".")


def _fixed(text: str) -> str:
    value = number(text)
    return "--" if value is None else f"{value:.4f}"


def _amount(text: str) -> str:
    """Return bytes in a suitable unit with three significant digits: ``3.31 MiB``, ``4 B``, ``0``."""
    value = number(text)
    if value is None or value == 0:
        return "--" if value is None else "0"
    for unit, scale in _UNITS:
        if value >= scale:
            return f"{_digits(str(value / scale))} {unit}"
    return f"{_digits(str(value))} B"


def _exposed(row: Row) -> str:
    """Return the exposed time in ms, or its bounds if no exact value is known: ``29.5``, ``3.10--4.00``."""
    exact, low, high = (
        _digits(row.get(name, ""), 1e6) for name in ("exposed_ns", "exposed_low_ns", "exposed_high_ns")
    )
    if exact != "--" or low in ("--", high):
        return exact if exact != "--" else low
    return f"$\\geq$ {low}" if high == "--" else f"{low}--{high}"


def _is_bounded(row: Row) -> bool:
    text = _exposed(row)
    return text != "--" and ("--" in text or "geq" in text)


def _interval(row: Row) -> str:
    """Return the step time in ms with its 95 % interval: ``53.2 (48.0--58.1)``."""
    middle, low, high = (
        _digits(row[name], 1e6) for name in ("step_time_ns", "step_time_low_ns", "step_time_high_ns")
    )
    return middle if "--" in (low, high) else f"{middle} ({low}--{high})"

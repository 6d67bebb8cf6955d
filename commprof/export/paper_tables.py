"""The tables of a paper: LaTeX with the rules of the booktabs package, numbers with their units in the head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from commprof.export.paper_figures import number

Row = Mapping[str, str]

NEEDED: Final = (
    *("label", "requested_op", "issued_op", "intended_op", "payload_bytes_per_step", "wire_bytes_per_step"),
    *(
        "collectives_per_step",
        "step_time_ns",
        "step_time_low_ns",
        "step_time_high_ns",
        "final_loss",
        "repeats",
    ),
)
_ESCAPES: Final = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
}
_MIB: Final = 1 << 20
_NOTE: Final = "% Made by commprof paper from the CSV files of an export; needs \\usepackage{booktabs}.\n"


def escaped(text: str) -> str:
    r"""``text`` as LaTeX sets it: what has a meaning there is written out, and other than printable signs are left out.

    >>> escaped("a_b & 50%")
    'a\\_b \\& 50\\%'
    """
    return "".join(_ESCAPES.get(letter, letter) for letter in text if letter.isprintable())


def comparison(rows: Sequence[Row]) -> str:
    """The settings: what each asked for and issued, and what a step of it sent and took."""
    head = (
        "Setting",
        "Requested",
        "Issued",
        "Operations",
        "Payload (MiB)",
        "Wire (MiB)",
        "Time (ms)",
        "Final loss",
    )
    body = [
        (
            escaped(row["label"] or "all runs"),
            _op(row["requested_op"]),
            _op(row["issued_op"]) + (f" for {_op(row['intended_op'])}" if row["intended_op"] else ""),
            _decimal(row["collectives_per_step"], 1, 1),
            _decimal(row["payload_bytes_per_step"], _MIB, 2),
            _decimal(row["wire_bytes_per_step"], _MIB, 2),
            _interval(row),
            _decimal(row["final_loss"], 1, 4),
        )
        for row in rows
    ]
    caption = (
        "Operations, bytes and time of a training step. Payload is S of nccl-tests; "
        "wire is modelled: what a rank of the job sends, the mean over all its ranks."
    )
    return _table(head, "lllrrrrr", body, caption, "tab:commprof-comparison")


def traffic(rows: Sequence[Row]) -> str:
    """Bytes of a step by setting, purpose and operation."""
    head = ("Setting", "Purpose", "Operation", "Stands for", "Wire (MiB)")
    body = [
        (
            escaped(row["label"] or "all runs"),
            escaped(row["purpose"].replace("_", " ") or "--"),
            _op(row["op"]),
            _op(row["intended_op"]),
            _decimal(row["wire_bytes_per_step"], _MIB, 3),
        )
        for row in rows
        if number(row["wire_bytes_per_step"])
    ]
    caption = (
        "Wire bytes (modelled, mean of a rank of the group) of a training step by purpose and operation."
    )
    return _table(head, "llllr", body, caption, "tab:commprof-traffic")


def _table(head: Sequence[str], columns: str, body: Sequence[Sequence[str]], caption: str, label: str) -> str:
    lines = [" & ".join(row) + r" \\" for row in body]
    return (
        _NOTE
        + "\\begin{table}\n  \\centering\n"
        + f"  \\caption{{{escaped(caption)}}}\n  \\label{{{label}}}\n"
        + f"  \\begin{{tabular}}{{{columns}}}\n    \\toprule\n"
        + f"    {' & '.join(map(escaped, head))} \\\\\n    \\midrule\n"
        + "".join(f"    {line}\n" for line in lines)
        + "    \\bottomrule\n  \\end{tabular}\n\\end{table}\n"
    )


def _op(text: str) -> str:
    return f"\\texttt{{{escaped(text)}}}" if text else "--"


def _decimal(text: str, scale: float, digits: int) -> str:
    value = number(text)
    return "--" if value is None else f"{value / scale:.{digits}f}"


def _interval(row: Row) -> str:
    """The median with its 95 % interval: 53.2 (48.0 to 58.1)."""
    middle, low, high = (
        _decimal(row[name], 1e6, 1) for name in ("step_time_ns", "step_time_low_ns", "step_time_high_ns")
    )
    return middle if "--" in (low, high) else f"{middle} ({low} to {high})"

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
_BESIDE: Final = {  # head and caption of an optional column, shown if a row has such bytes
    "between_hosts_bytes_per_step": (
        "Between hosts (MiB)",
        " Between hosts: the part of the wire bytes as issued of groups and messages with ranks on several hosts.",
    ),
    "padding_bytes_per_step": ("Padding (MiB)", " Padding: the part of the payload without data."),
}
_NOTE: Final = "% Made by commprof paper from the CSV files of an export; needs \\usepackage{booktabs}.\n"


def escaped(text: str) -> str:
    r"""``text`` as LaTeX sets it: special characters are escaped, and unprintable ones are left out.

    >>> escaped("a_b & 50%")
    'a\\_b \\& 50\\%'
    """
    return "".join(_ESCAPES.get(letter, letter) for letter in text if letter.isprintable())


def comparison(rows: Sequence[Row]) -> str:
    """The settings: requested and issued operation, bytes and time of a step."""
    beside = _beside(rows)
    head = (
        *("Setting", "Requested", "Issued", "Operations", "Payload (MiB)", "Wire (MiB)"),
        *(_BESIDE[name][0] for name in beside),
        *("Time (ms)", "Final loss"),
    )
    body = [
        (
            escaped(row["label"] or "all runs"),
            _op(row["requested_op"]),
            _op(row["issued_op"]) + (f" for {_op(row['intended_op'])}" if row["intended_op"] else ""),
            _decimal(row["collectives_per_step"], 1, 1),
            _decimal(row["payload_bytes_per_step"], _MIB, 2),
            _decimal(row["wire_bytes_per_step"], _MIB, 2),
            *(_decimal(row[name], _MIB, 2) for name in beside),
            _interval(row),
            _decimal(row["final_loss"], 1, 4),
        )
        for row in rows
    ]
    caption = (
        "Operations, bytes and time of a training step. Payload is S of nccl-tests; "
        "wire is modelled: what a rank of the job sends, the mean over all its ranks."
    ) + "".join(_BESIDE[name][1] for name in beside)
    return _table(head, "lllrrrrr" + "r" * len(beside), body, caption, "tab:commprof-comparison")


def traffic(rows: Sequence[Row]) -> str:
    """Bytes of a step by setting, purpose and operation."""
    beside = _beside(rows)
    names = (_BESIDE[name][0] for name in beside)
    head = ("Setting", "Purpose", "Operation", "Stands for", "Wire (MiB)", *names)
    body = [
        (
            escaped(row["label"] or "all runs"),
            escaped(row["purpose"].replace("_", " ") or "--"),
            _op(row["op"]),
            _op(row["intended_op"]),
            _decimal(row["wire_bytes_per_step"], _MIB, 3),
            *(_decimal(row[name], _MIB, 3) for name in beside),
        )
        for row in rows
        if number(row["wire_bytes_per_step"])
    ]
    caption = (
        "Wire bytes (modelled, mean of a rank of the job) of a training step by purpose and operation."
    ) + "".join(_BESIDE[name][1] for name in beside)
    return _table(head, "llllr" + "r" * len(beside), body, caption, "tab:commprof-traffic")


def _beside(rows: Sequence[Row]) -> list[str]:
    """The columns of between-hosts and padding bytes that any of ``rows`` has; an older export may lack them."""
    return [name for name in _BESIDE if any(number(row.get(name, "")) for row in rows)]


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

"""The figures of a paper, by matplotlib: embedded fonts, widths in columns of a page, hatches for printing in grey."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any, Final

from commprof.errors import MissingExtraError
from commprof.schema import OPS

Row = Mapping[str, str]

# Inches: one and two columns of most conferences' pages.
WIDTHS: Final = {"one": 3.33, "two": 7.0}
_HEIGHT: Final = 2.3
# A style for each operation, distinguishable without color by hatch and grey value (Okabe and Ito's colors).
_LOOKS: Final = {
    "all_reduce": ("#d55e00", ""),
    "reduce": ("#0072b2", "///"),
    "reduce_scatter": ("#009e73", "..."),
    "all_gather": ("#cc79a7", "\\\\\\"),
    "broadcast": ("#e69f00", "xxx"),
    "all_to_all": ("#56b4e9", "---"),
    "gather": ("#f0e442", "+++"),
    "scatter": ("#999999", "ooo"),
    "send": ("#555555", "|||"),
}
_LINES: Final = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))
_MARKERS: Final = "osD^v*"
_STYLE: Final[Any] = {
    "font.size": 8,
    "axes.labelsize": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 6.5,
    "legend.fontsize": 7,
    "axes.linewidth": 0.6,
    "hatch.linewidth": 0.5,
    "pdf.fonttype": 42,  # TrueType, which publishers require; some refuse the default
    "svg.fonttype": "none",
    "svg.hashsalt": "commprof",  # equal numbers give equal files
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.linewidth": 0.4,
    "grid.color": "#d9d9d9",
    "axes.axisbelow": True,
    "legend.frameon": False,
}
_MOST_LETTERS: Final = {"one": 22, "two": 40}
_LINE_INCHES: Final = 0.13  # of a label
_LEGEND_COLUMNS: Final = {"one": 1, "two": 2}  # of settings


@contextmanager
def _drawn(width: str, labels: Sequence[str] = (), legend: Sequence[str] = ()) -> Iterator[tuple[Any, Any]]:
    """A figure and its axes, in the style of a paper; taller for several lines of labels, and for a legend above."""
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtraError("matplotlib", "export", "to draw figures for a paper") from None
    with mpl.rc_context(_STYLE):
        lines = max((shortened(label, width).count("\n") + 1 for label in labels), default=0)
        height = max(_HEIGHT, 1.0 + len(labels) * max(0.3, 0.12 + lines * _LINE_INCHES))
        columns = _LEGEND_COLUMNS[width]
        height += (
            sum(shortened(name, width).count("\n") + 1 for name in legend) * 1.25 * _LINE_INCHES / columns
        )
        figure = Figure(figsize=(WIDTHS[width], height), layout="constrained")
        yield figure, figure.add_subplot()


def save(figure: Any, path: Path) -> None:
    """Write ``figure`` in the format of the suffix of ``path``, without a date."""
    import matplotlib as mpl

    with mpl.rc_context(_STYLE):
        dateless = {"Date": None} if path.suffix == ".svg" else {"CreationDate": None, "ModDate": None}
        figure.savefig(path, metadata=dateless)


def close(figure: Any) -> None:
    """Close ``figure``."""
    figure.clear()


def number(text: str) -> float | None:
    """A field of a CSV file as a number; None if it is empty."""
    try:
        return float(text)
    except ValueError:
        return None


def traffic(comparison: Sequence[Row], rows: Sequence[Row], width: str) -> Any:
    """Wire bytes of a training step by setting, stacked by operation; None if no setting sent anything."""
    labels = [row["label"] for row in comparison]
    totals: dict[tuple[str, str], dict[str, float]] = {}
    for row in rows:
        amount = number(row["wire_bytes_per_step"]) or 0.0
        if amount:
            of = totals.setdefault((row["op"], row["intended_op"]), {})
            of[row["label"]] = of.get(row["label"], 0.0) + amount
    if not totals:
        return None
    largest = max(sum(of.get(label, 0.0) for of in totals.values()) for label in labels)
    unit, scale = _byte_unit(largest)
    order = {op: place for place, op in enumerate(OPS)}
    with _drawn(width, labels) as (figure, axes):
        left = [0.0] * len(labels)
        for (op, intended), of in sorted(
            totals.items(), key=lambda item: (order.get(item[0][0], 99), item[0][1])
        ):
            colour, hatch = _LOOKS.get(op, ("#777777", "**"))
            amounts = [of.get(label, 0.0) / scale for label in labels]
            name = f"{op} for {intended}" if intended and intended != op else op
            axes.barh(
                range(len(labels)),
                amounts,
                left=left,
                color=colour,
                hatch=hatch,
                edgecolor="black",
                linewidth=0.4,
                label=name,
            )
            left = [a + b for a, b in zip(left, amounts, strict=True)]
        _settings_axis(axes, labels, width)
        axes.set_xlim(right=1.04 * largest / scale)
        axes.grid(visible=True, axis="x")
        axes.grid(visible=False, axis="y")
        axes.set_xlabel(f"wire bytes per step and rank,{_break(width)}modelled ({unit})")
        figure.legend(loc="outside upper center", ncols=2 if width == "one" else 4)
        return figure


def step_time(comparison: Sequence[Row], width: str) -> Any:
    """Median time of a step by setting, with its 95 % interval; None if no run has two steps."""
    timed = [row for row in comparison if number(row["step_time_ns"]) is not None]
    if not timed:
        return None
    unit, scale = _time_unit(max(number(row["step_time_ns"]) or 0.0 for row in timed))
    with _drawn(width, [row["label"] for row in timed]) as (figure, axes):
        for place, row in enumerate(timed):
            middle = (number(row["step_time_ns"]) or 0.0) / scale
            low, high = (number(row[f"step_time_{end}_ns"]) for end in ("low", "high"))
            spread = (
                [[max(0.0, middle - (low or 0.0) / scale)], [max(0.0, (high or 0.0) / scale - middle)]]
                if low is not None and high is not None
                else None
            )
            axes.errorbar(
                [middle],
                [place],
                xerr=spread,
                fmt="o",
                color="black",
                markersize=3.5,
                capsize=2.5,
                elinewidth=0.8,
            )
        _settings_axis(axes, [row["label"] for row in timed], width)
        axes.grid(visible=True, axis="x")
        axes.grid(visible=False, axis="y")
        axes.set_xlim(left=0)
        over = sorted({row.get("interval_over", "") for row in timed} - {""})
        axes.set_xlabel(
            f"time per step ({unit})"
            + (f",{_break(width)}median and 95 % over {' or '.join(over)}" if over else "")
        )
        return figure


def loss(comparison: Sequence[Row], steps: Sequence[Row], width: str) -> Any:
    """The loss of each step, a line for each setting; None if the export has no losses."""
    curves: dict[str, dict[int, float]] = {}
    setting_of = {name.strip(): row["label"] for row in comparison for name in row.get("runs", "").split(",")}
    only = comparison[0]["label"] if len(comparison) == 1 else ""
    for row in steps:
        value = number(row["loss"])
        label = setting_of.get(row.get("run", ""), only)
        if value is not None and label in {each["label"] for each in comparison}:
            curves.setdefault(label, {}).setdefault(int(row["step"]), value)
    if not curves:
        return None
    with _drawn(width, legend=list(curves) if len(curves) > 1 else ()) as (figure, axes):
        for (label, curve), line, marker in zip(curves.items(), cycle(_LINES), cycle(_MARKERS), strict=False):
            at = sorted(curve)
            every = max(1, len(at) // 8)
            name = shortened(label or "all runs", width)
            axes.plot(
                at,
                [curve[step] for step in at],
                linestyle=line,
                linewidth=1,
                marker=marker,
                markevery=every,
                markersize=3,
                label=name,
            )
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_xlabel("training step")
        axes.set_ylabel("loss")
        if len(curves) > 1:
            figure.legend(loc="outside upper center", ncols=_LEGEND_COLUMNS[width])
        return figure


def _settings_axis(axes: Any, labels: Sequence[str], width: str) -> None:
    """Settings from top to bottom. Long labels are wrapped, since they would leave no room for the bars."""
    axes.set_yticks(range(len(labels)), [shortened(label or "all runs", width) for label in labels])
    axes.invert_yaxis()


def shortened(label: str, width: str) -> str:
    """``label`` wrapped to the width of a column, after commas, with long words shortened in the middle."""
    most = _MOST_LETTERS[width]
    lines: list[str] = []
    for part in label.split(", "):
        text = part if len(part) <= most else part[: most // 2 - 1] + "..." + part[-(most - most // 2 - 2) :]
        if lines and len(lines[-1]) + len(text) + 2 <= most:
            lines[-1] += f", {text}"
        else:
            lines.append(text)
    return "\n".join(lines)


def _break(width: str) -> str:
    """The separator between two parts of a label: a line break in one column."""
    return "\n" if width == "one" else " "


def _byte_unit(largest: float) -> tuple[str, float]:
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if largest >= scale:
            return unit, float(scale)
    return "bytes", 1.0


def _time_unit(largest: float) -> tuple[str, float]:
    for unit, scale in (("s", 1e9), ("ms", 1e6)):
        if largest >= scale:
            return unit, scale
    return "us", 1e3

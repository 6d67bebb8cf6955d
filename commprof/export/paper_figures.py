"""Draws the figures for a paper with matplotlib.

Fonts are embedded, widths are one or two columns of a page, and hatches distinguish the operations in gray print.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any, Final, NamedTuple

from commprof.errors import MissingExtraError, UsageError

Row = Mapping[str, str]

# The widths of one and two columns in inches, on the pages of most conferences.
WIDTHS: Final = {"one": 3.33, "two": 7.0}
SANS: Final = "sans"
# matplotlib includes these fonts, so every machine produces the same files.
_FAMILIES: Final = {SANS: "DejaVu Sans", "serif": "STIXGeneral"}
_HEIGHT: Final = 1.9
# A style for each operation. Without color, the hatch and the gray value still distinguish the operations (Okabe and
# Ito's colors). Stacks, legends and tables use this order. Operations that reduce gradients are first.
_LOOKS: Final = {
    "all_reduce": ("#d55e00", ""),
    "reduce": ("#0072b2", "///"),
    "reduce_scatter": ("#009e73", "..."),
    "all_to_all": ("#56b4e9", "---"),
    "all_gather": ("#cc79a7", "\\\\\\"),
    "broadcast": ("#e69f00", "xxx"),
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
    "ytick.labelsize": 7,
    "legend.fontsize": 7,
    "axes.linewidth": 0.6,
    "hatch.linewidth": 0.5,
    "pdf.fonttype": 42,  # TrueType, which publishers require; some refuse matplotlib's default
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
_MOST_LETTERS: Final = {"one": 22, "two": 44}  # in a line of a label
_MOST_LINES: Final = 2
_KEY_LETTERS: Final = {"one": 54, "two": 118}  # in a line of the key below a figure
_DIRECT_LETTERS: Final = 16  # in a line of a label at the end of a curve
_LINE_INCHES: Final = 0.13
_AIR: Final = 1.06  # the length of an axis, relative to the largest value
_SAME: Final = 0.002  # fraction of the range of all curves; less than the width of a line
_LABEL_DISTANCE: Final = 0.09  # between the labels of curves, as a fraction of the height of the axes


class Style(NamedTuple):
    """The width of a figure and its font.

    Attributes:
        width: The width in columns of a page, ``one`` or ``two``.
        font: ``sans``, ``serif``, or the name of an installed font family.
    """

    width: str
    font: str = SANS

    def settings(self) -> Any:
        """Return the rc parameters of matplotlib for this style.

        Raises:
            MissingExtraError: matplotlib is not installed.
            UsageError: The font is not installed.
        """
        try:
            from matplotlib import font_manager
        except ImportError:
            raise MissingExtraError("matplotlib", "export", "to draw figures for a paper") from None
        family = _FAMILIES.get(self.font, self.font)
        try:
            font_manager.findfont(family, fallback_to_default=False)
        except ValueError:
            raise UsageError(
                f"there is no font {self.font!r} on this machine; use sans, serif, or the name of an installed family"
            ) from None
        return {**_STYLE, "font.family": [family], "mathtext.fontset": "stix"}


def letters(comparison: Sequence[Row]) -> dict[str, str]:
    """Return the short name of each setting for figures and tables: A, B, ... in the order of the comparison.

    >>> letters([{"label": "stage=1"}, {"label": "stage=2"}])
    {'stage=1': 'A', 'stage=2': 'B'}
    """
    names = [chr(ord("A") + place) if place < 26 else f"S{place + 1}" for place in range(len(comparison))]
    return {row["label"]: name for row, name in zip(comparison, names, strict=True)}


def spelled(label: str) -> str:
    """Return the text for a setting; an empty label means all runs."""
    return label or "all runs"


def wrapped(label: str, most: int) -> str:
    """Return ``label`` in lines of at most ``most`` letters, broken after commas. A longer part is not broken."""
    lines: list[str] = []
    for part in spelled(label).split(", "):
        if lines and len(lines[-1]) + len(part) + 2 <= most:
            lines[-1] += f", {part}"
        else:
            lines.append(part)
    return ",\n".join(lines)


def named(comparison: Sequence[Row], most: int, lines: int = _MOST_LINES) -> tuple[dict[str, str], list[str]]:
    """Return the text of each setting beside an axis, and the key that spells out short names.

    If all labels fit into ``lines`` lines of ``most`` letters, the texts are the labels and the key is empty.
    """
    texts = {row["label"]: wrapped(row["label"], most) for row in comparison}
    split = [text.split("\n") for text in texts.values()]
    if all(len(each) <= lines and max(map(len, each)) <= most + 1 for each in split):
        return texts, []
    short = letters(comparison)
    return short, [f"{name}: {spelled(label)}" for label, name in short.items()]


@contextmanager
def _drawn(
    style: Style, rows: int = 0, legend: int = 0, key: Sequence[str] = ()
) -> Iterator[tuple[Any, Any]]:
    """Yield a figure and its axes, and add the key below the figure.

    Args:
        style: The width and the font of the figure.
        rows: The number of settings. More than three rows make the figure taller.
        legend: The number of lines of the legend above the axes, which make the figure taller.
        key: The lines of the key below the axes, which make the figure taller.
    """
    settings = style.settings()
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    lines = [textwrap.fill(text, _KEY_LETTERS[style.width], subsequent_indent="     ") for text in key]
    with mpl.rc_context(settings):
        height = max(_HEIGHT, 0.7 + 0.34 * rows) + _LINE_INCHES * 1.15 * (
            legend + sum(line.count("\n") + 1 for line in lines)
        )
        figure = Figure(figsize=(WIDTHS[style.width], height), layout="constrained")
        yield figure, figure.add_subplot()
        if lines:
            figure.legend(
                [Line2D([], [], linestyle="none") for _ in lines],
                lines,
                loc="outside lower left",
                handlelength=0,
                handletextpad=0,
                labelspacing=0.25,
                fontsize=6.5,
            )


def save(figure: Any, style: Style, path: Path) -> None:
    """Write ``figure`` without a date. The suffix of ``path`` determines the format."""
    import matplotlib as mpl

    with mpl.rc_context(style.settings()):
        dateless = {"Date": None} if path.suffix == ".svg" else {"CreationDate": None, "ModDate": None}
        figure.savefig(path, metadata=dateless)


def close(figure: Any) -> None:
    """Close ``figure``."""
    figure.clear()


def number(text: str) -> float | None:
    """Return a field of a CSV file as a number; None if the field is not a number."""
    try:
        return float(text)
    except ValueError:
        return None


def stack_order(row: Row) -> tuple[int, str]:
    """Return the key that sorts operations in stacks, legends and tables."""
    ops = [*_LOOKS]
    return ops.index(row["op"]) if row["op"] in ops else len(ops), row["intended_op"]


def operation(row: Row, separator: str = " ") -> str:
    """Return the issued operation, and the intended one if it differs: ``all_to_all for reduce_scatter``."""
    intended = row["intended_op"]
    return f"{row['op']}{separator}for {intended}" if intended and intended != row["op"] else row["op"]


def traffic(comparison: Sequence[Row], rows: Sequence[Row], level: str, column: str, style: Style) -> Any:
    """Draw the wire bytes of a training step by setting, stacked by operation; None if no setting sent anything.

    Args:
        comparison: The rows of the comparison, which list the settings.
        rows: The rows of the traffic by setting.
        level: The level of the bytes, ``executed`` or ``issued``, for the label of the axis.
        column: The name of the column of ``rows`` with the bytes.
        style: The width and the font.
    """
    labels = [row["label"] for row in comparison]
    totals: dict[str, dict[str, float]] = {}
    ops: dict[str, str] = {}
    for row in sorted(rows, key=stack_order):
        if amount := number(row[column]) or 0.0:
            ops[operation(row)] = row["op"]
            of = totals.setdefault(operation(row), {})
            of[row["label"]] = of.get(row["label"], 0.0) + amount
    if not totals:
        return None
    largest = max(sum(of.get(label, 0.0) for of in totals.values()) for label in labels)
    unit, scale = _byte_unit(largest)
    names, key = named(comparison, _MOST_LETTERS[style.width])
    columns = _legend_columns(list(totals), style.width)
    with _drawn(style, len(labels), -(-len(totals) // columns), key) as (figure, axes):
        left = [0.0] * len(labels)
        bars = []
        for name, of in totals.items():
            colour, hatch = _LOOKS.get(ops[name], ("#777777", "**"))
            amounts = [of.get(label, 0.0) / scale for label in labels]
            look = {"color": colour, "hatch": hatch, "edgecolor": "black", "linewidth": 0.4}
            bars.append(axes.barh(range(len(labels)), amounts, left=left, height=0.6, label=name, **look))
            left = [a + b for a, b in zip(left, amounts, strict=True)]
        _settings_axis(axes, [names[label] for label in labels])
        _from_zero(axes, largest / scale)
        axes.set_xlabel(f"wire bytes per step and rank,{_break(style)}as {level}, modelled ({unit})")
        row_by_row = _in_rows(bars, columns)
        figure.legend(
            row_by_row, [each.get_label() for each in row_by_row], loc="outside upper center", ncols=columns
        )
    return figure


def step_time(comparison: Sequence[Row], style: Style) -> Any:
    """Draw the median step time by setting, with its 95 % interval; None if no setting has a step time."""
    timed = [row for row in comparison if number(row["step_time_ns"]) is not None]
    if not timed:
        return None
    ends = [number(row[name]) or 0.0 for row in timed for name in ("step_time_ns", "step_time_high_ns")]
    unit, scale = _time_unit(max(ends))
    names, key = named(comparison, _MOST_LETTERS[style.width])
    with _drawn(style, len(timed), key=key) as (figure, axes):
        for place, row in enumerate(timed):
            middle = (number(row["step_time_ns"]) or 0.0) / scale
            low, high = (number(row[f"step_time_{end}_ns"]) for end in ("low", "high"))
            spread = None
            if low is not None and high is not None:
                spread = [[max(0.0, middle - low / scale)], [max(0.0, high / scale - middle)]]
            look = {"color": "black", "markersize": 3.5, "capsize": 2.5, "elinewidth": 0.8}
            axes.errorbar([middle], [place], xerr=spread, fmt="o", **look)
        _settings_axis(axes, [names[row["label"]] for row in timed])
        _from_zero(axes, max(ends) / scale)
        axes.set_xlim(left=(1 - _AIR) * max(ends) / scale / 2)  # keeps an interval visible that begins at 0
        over = sorted({row.get("interval_over", "") for row in timed} - {""})
        interval = f",{_break(style)}median and 95 % over {' or '.join(over)}" if over else ""
        axes.set_xlabel(f"time per step ({unit}){interval}")
    return figure


def loss(comparison: Sequence[Row], steps: Sequence[Row], style: Style) -> Any:
    """Draw the loss of each step by setting, labelled at the end of each curve; None if the export has no losses.

    Settings whose losses coincide share one curve and one label.
    """
    curves = loss_curves(comparison, steps)
    if not curves:
        return None
    names, key = named(comparison, _DIRECT_LETTERS, lines=1)
    groups = coinciding(curves)
    is_labelled = len(comparison) > 1
    with _drawn(style, key=key if is_labelled else ()) as (figure, axes):
        ends = []
        for labels, line, marker in zip(groups, cycle(_LINES), cycle(_MARKERS), strict=False):
            curve = curves[labels[0]]
            at = sorted(curve)
            look = {"linestyle": line, "linewidth": 1, "marker": marker, "markersize": 3}
            axes.plot(at, [curve[step] for step in at], markevery=max(1, len(at) // 8), **look)
            ends.append((at[-1], curve[at[-1]], ", ".join(names[label] for label in labels)))
        axes.margins(x=0.05, y=0.08)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_xlabel("training step")
        axes.set_ylabel("loss")
        if is_labelled:
            _label_ends(axes, ends)
    return figure


def loss_curves(comparison: Sequence[Row], steps: Sequence[Row]) -> dict[str, dict[int, float]]:
    """Return the loss by step for each setting that has losses, in the order of the comparison."""
    setting_of = {name.strip(): row["label"] for row in comparison for name in row.get("runs", "").split(",")}
    only = comparison[0]["label"] if len(comparison) == 1 else ""
    known: dict[str, dict[int, float]] = {row["label"]: {} for row in comparison}
    for row in steps:
        value = number(row["loss"])
        label = setting_of.get(row.get("run", ""), only)
        if value is not None and label in known:
            known[label].setdefault(int(row["step"]), value)
    return {label: curve for label, curve in known.items() if curve}


def coinciding(curves: Mapping[str, Mapping[int, float]]) -> list[list[str]]:
    """Return groups of the settings of ``curves``. The curves of the settings in one group coincide."""
    values = [value for curve in curves.values() for value in curve.values()]
    near = _SAME * (max(values) - min(values))
    groups: list[list[str]] = []
    for label, curve in curves.items():
        for group in groups:
            other = curves[group[0]]
            if curve.keys() == other.keys() and all(abs(curve[at] - other[at]) <= near for at in curve):
                group.append(label)
                break
        else:
            groups.append([label])
    return groups


def _label_ends(axes: Any, ends: Sequence[tuple[float, float, str]]) -> None:
    """Write the names of curves to the right of their ends, from bottom to top.

    A label that would overlap the label below is moved up.

    Args:
        axes: The axes of the figure.
        ends: The last step, the last loss and the label of each curve.
    """
    low, high = axes.get_ylim()
    place = low - high
    right = max(step for step, _, _ in ends)
    for step, value, text in sorted(ends, key=lambda end: end[1]):
        place = max(value, place + _LABEL_DISTANCE * (high - low))
        axes.annotate(
            textwrap.fill(text, _DIRECT_LETTERS),
            (step, value),
            xytext=(right + 0.03 * (right or 1), place),
            textcoords="data",
            va="center",
            fontsize=7,
            annotation_clip=False,
        )


def _settings_axis(axes: Any, names: Sequence[str]) -> None:
    """Label the vertical axis with the settings, from top to bottom."""
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.grid(visible=True, axis="x")
    axes.grid(visible=False, axis="y")


def _from_zero(axes: Any, largest: float) -> None:
    """Set the horizontal axis from 0, with a tick at 0, to slightly more than the largest value."""
    from matplotlib.ticker import MaxNLocator

    axes.set_xlim(0, _AIR * largest)
    ticks = MaxNLocator(nbins=6, steps=[1, 2, 2.5, 5, 10]).tick_values(0, _AIR * largest)
    shown = [tick for tick in ticks if 0 <= tick <= _AIR * largest]
    axes.set_xticks(shown, [f"{tick:g}" for tick in shown])


def _legend_columns(names: Sequence[str], width: str) -> int:
    """Return the number of columns of the legend that fit beside each other."""
    letters_of_all = {"one": 50, "two": 115}[width]
    return max(1, min(len(names), letters_of_all // (max(map(len, names)) + 8)))


def _in_rows(entries: Sequence[Any], columns: int) -> list[Any]:
    """Return ``entries`` reordered for a legend, which matplotlib fills column by column.

    In the legend, the rows then list the entries in their original order.
    """
    return [entry for column in range(columns) for entry in entries[column::columns]]


def _break(style: Style) -> str:
    """Return the separator between two parts of a label: a line break if the figure is one column wide."""
    return "\n" if style.width == "one" else " "


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

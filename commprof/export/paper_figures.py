"""The figures of a paper, by matplotlib: embedded fonts, widths in columns of a page, hatches for printing in grey."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any, Final, NamedTuple

from commprof.errors import MissingExtraError, UsageError

Row = Mapping[str, str]

# Inches: one and two columns of most conferences' pages.
WIDTHS: Final = {"one": 3.33, "two": 7.0}
SANS: Final = "sans"
# Fonts that matplotlib brings, so that the same files come out on every machine.
_FAMILIES: Final = {SANS: "DejaVu Sans", "serif": "STIXGeneral"}
_HEIGHT: Final = 1.9
# A style for each operation, distinguishable without color by hatch and grey value (Okabe and Ito's colors). The order is
# that of stacks, legends and tables: what reduces gradients first.
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
_MOST_LETTERS: Final = {"one": 22, "two": 44}  # of a line of a label
_MOST_LINES: Final = 2
_KEY_LETTERS: Final = {"one": 54, "two": 118}  # of a line of the key below a figure
_DIRECT_LETTERS: Final = 16  # of a label at the end of a line
_LINE_INCHES: Final = 0.13
_AIR: Final = 1.06  # an axis is this much longer than what it shows
_SAME: Final = 0.002  # of the range of all curves: less than the width of a line
_LABEL_DISTANCE: Final = 0.09  # of the height of the axes, between labels of lines


class Style(NamedTuple):
    """Width in columns of a page (``one`` or ``two``), and font: ``sans``, ``serif``, or an installed family."""

    width: str
    font: str = SANS

    def settings(self) -> Any:
        """The parameters of matplotlib.

        Raises:
            MissingExtraError: matplotlib is not installed.
            UsageError: there is no such font.
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
    """The short name of each setting, in figures and tables: A, B, ... in the order of the comparison.

    >>> letters([{"label": "stage=1"}, {"label": "stage=2"}])
    {'stage=1': 'A', 'stage=2': 'B'}
    """
    names = [chr(ord("A") + place) if place < 26 else f"S{place + 1}" for place in range(len(comparison))]
    return {row["label"]: name for row, name in zip(comparison, names, strict=True)}


def spelled(label: str) -> str:
    """The setting as text."""
    return label or "all runs"


def wrapped(label: str, most: int) -> str:
    """``label`` in lines of at most ``most`` letters, broken after commas; a longer part stays whole."""
    lines: list[str] = []
    for part in spelled(label).split(", "):
        if lines and len(lines[-1]) + len(part) + 2 <= most:
            lines[-1] += f", {part}"
        else:
            lines.append(part)
    return ",\n".join(lines)


def named(comparison: Sequence[Row], most: int, lines: int = _MOST_LINES) -> tuple[dict[str, str], list[str]]:
    """The text of each setting beside an axis, and the key that spells out short names.

    The key is empty if all labels fit into ``lines`` lines of ``most`` letters.
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
    """A figure and its axes: taller for more than four rows, for lines of a legend above, and for a key below."""
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
    """Write ``figure`` in the format of the suffix of ``path``, without a date."""
    import matplotlib as mpl

    with mpl.rc_context(style.settings()):
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


def stack_order(row: Row) -> tuple[int, str]:
    """The order of operations in stacks, legends and tables."""
    ops = [*_LOOKS]
    return ops.index(row["op"]) if row["op"] in ops else len(ops), row["intended_op"]


def operation(row: Row, separator: str = " ") -> str:
    """``all_to_all for reduce_scatter``: the issued operation, and the intended one if that is another."""
    intended = row["intended_op"]
    return f"{row['op']}{separator}for {intended}" if intended and intended != row["op"] else row["op"]


def traffic(comparison: Sequence[Row], rows: Sequence[Row], level: str, column: str, style: Style) -> Any:
    """Wire bytes of a training step by setting, stacked by operation; None if no setting sent anything.

    Args:
        comparison: rows of the comparison, for the settings.
        rows: rows of the traffic by setting.
        level: what ``column`` is of, in words: ``executed`` or ``issued``.
        column: the bytes of a row.
        style: width and font.
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
    """Median time of a step by setting, with its 95 % interval; None if no run has two steps."""
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
        axes.set_xlim(left=(1 - _AIR) * max(ends) / scale / 2)  # an interval may begin at 0
        over = sorted({row.get("interval_over", "") for row in timed} - {""})
        interval = f",{_break(style)}median and 95 % over {' or '.join(over)}" if over else ""
        axes.set_xlabel(f"time per step ({unit}){interval}")
    return figure


def loss(comparison: Sequence[Row], steps: Sequence[Row], style: Style) -> Any:
    """The loss of each step by setting, labelled at the end of the line; None if the export has no losses.

    Settings whose losses coincide are one line with one label.
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
    """The loss by step of each setting that has losses, in the order of the comparison."""
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
    """The settings of ``curves``, those whose lines coincide in one list."""
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
    """Write the names of lines to the right of their ends, lowest first, moved up where two would overlap."""
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
    """Settings from top to bottom."""
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.grid(visible=True, axis="x")
    axes.grid(visible=False, axis="y")


def _from_zero(axes: Any, largest: float) -> None:
    """An axis from 0, which has a tick, to a little more than the largest value."""
    from matplotlib.ticker import MaxNLocator

    axes.set_xlim(0, _AIR * largest)
    ticks = MaxNLocator(nbins=6, steps=[1, 2, 2.5, 5, 10]).tick_values(0, _AIR * largest)
    shown = [tick for tick in ticks if 0 <= tick <= _AIR * largest]
    axes.set_xticks(shown, [f"{tick:g}" for tick in shown])


def _legend_columns(names: Sequence[str], width: str) -> int:
    """As many columns as fit beside each other."""
    letters_of_all = {"one": 50, "two": 115}[width]
    return max(1, min(len(names), letters_of_all // (max(map(len, names)) + 8)))


def _in_rows(entries: Sequence[Any], columns: int) -> list[Any]:
    """``entries`` so that a legend, which fills column by column, reads in their order row by row."""
    return [entry for column in range(columns) for entry in entries[column::columns]]


def _break(style: Style) -> str:
    """The separator between two parts of a label: a line break in one column."""
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

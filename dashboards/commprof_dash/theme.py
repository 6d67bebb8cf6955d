"""Colours, fonts and the plotly templates, light and dark."""

from __future__ import annotations

from functools import cache
from typing import Final, Literal

import plotly.graph_objects as go

from commprof.schema import Op

Scheme = Literal["light", "dark"]

FONT: Final = "-apple-system, BlinkMacSystemFont, 'Segoe UI', Roboto, 'Helvetica Neue', 'Liberation Sans', Arial, sans-serif"

# An operation has one colour everywhere. Each stands out from both backgrounds (3:1 or better), and those that
# share a figure stay apart for red-, green- and blue-blind eyes; tests/unit/commprof_dash/test_theme.py measures both.
OP_COLOURS: Final[dict[str, str]] = {
    Op.ALL_REDUCE: "#d55e00",
    Op.REDUCE: "#4263eb",
    Op.REDUCE_SCATTER: "#00a372",
    Op.ALL_GATHER: "#b0489c",
    Op.BROADCAST: "#a87d00",
    Op.ALL_TO_ALL: "#7b61c9",
    Op.GATHER: "#5c8f9e",
    Op.SCATTER: "#7a8b3c",
    Op.SEND: "#9c6b4a",
    Op.RECV: "#8f7a86",
    Op.BARRIER: "#7d858c",
}
OTHER_COLOUR: Final = "#7d858c"

# Settings and times are no operations, so they have colours of their own. Charts also give each setting a dash of its own.
SETTING_COLOURS: Final = ("#4c6ef5", "#e8590c", "#0c8599", "#d6336c", "#7d8a00", "#7d858c")

# Purposes and kinds of memory, stacked from the bottom in this order: neighbours differ in hue and lightness.
KIND_COLOURS: Final = (
    "#4c6ef5", "#e8590c", "#0c8599", "#d6336c", "#7d8a00", "#7b61c9", "#a87d00", "#5c8f9e", "#9c6b4a", "#7d858c"
)  # fmt: skip

STEP_COLOUR: Final = "#5b7f9e"
HOLLOW: Final = "rgba(0,0,0,0)"  # the inside of a bar that has an outline only
EXPOSED_COLOUR: Final = "#d6336c"

PAPER: Final[dict[Scheme, str]] = {"light": "#ffffff", "dark": "#242424"}
TEXT: Final[dict[Scheme, str]] = {"light": "#212529", "dark": "#e4e6e9"}
MUTED_TEXT: Final[dict[Scheme, str]] = {"light": "#5c636a", "dark": "#a6abb1"}
GRID: Final[dict[Scheme, str]] = {"light": "#e5e8eb", "dark": "#3a3d41"}

MANTINE: Final = {
    "primaryColor": "indigo",
    "primaryShade": {"light": 8, "dark": 8},  # its text reaches 4.5:1 on white and on its own tint
    "fontFamily": FONT,
    "defaultRadius": "md",
    "headings": {"fontFamily": FONT},
}


def scheme_of(value: str | None) -> Scheme:
    """What the browser reported as a scheme, beside its width; light where it reported nothing known."""
    return "dark" if (value or "").partition(" ")[0] == "dark" else "light"


@cache
def template(scheme: Scheme) -> go.layout.Template:
    """The plotly template of ``scheme``. Cards draw the background and the title, so figures have neither."""
    axis = {
        "gridcolor": GRID[scheme],
        "linecolor": GRID[scheme],
        "zerolinecolor": GRID[scheme],
        "tickfont": {"color": MUTED_TEXT[scheme], "size": 12},
        "title": {"font": {"color": MUTED_TEXT[scheme], "size": 12}, "standoff": 8},
        "automargin": True,
        "fixedrange": True,
    }
    return go.layout.Template(
        layout={
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)",
            "font": {"family": FONT, "color": TEXT[scheme], "size": 13},
            "colorway": list(OP_COLOURS.values()),
            "hoverlabel": {
                "bgcolor": PAPER[scheme],
                "bordercolor": GRID[scheme],
                "font": {"color": TEXT[scheme], "family": FONT, "size": 13},
                "align": "left",
            },
            "showlegend": False,  # cards have their own, which wraps and never covers a bar
            "margin": {"l": 8, "r": 8, "t": 8, "b": 8},
            "xaxis": axis,
            "yaxis": axis,
        }
    )


def luminance(colour: str) -> float:
    """Relative luminance of ``#rrggbb``, 0 to 1 (WCAG 2.2, relative luminance)."""
    channels = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def text_on(colour: str) -> str:
    """Black or white, whichever reads better on ``colour``."""
    return "#ffffff" if luminance(colour) < 0.18 else "#000000"

"""Defines colors, fonts and the plotly templates, light and dark."""

from __future__ import annotations

from functools import cache
from typing import Final, Literal

import plotly.graph_objects as go

from commprof.schema import Op

Scheme = Literal["light", "dark"]

FONT: Final = "-apple-system, BlinkMacSystemFont, 'Segoe UI', Roboto, 'Helvetica Neue', 'Liberation Sans', Arial, sans-serif"

# An operation has the same color everywhere. Each color stands out from both backgrounds (3:1 or better).
# Colors that share a figure can be distinguished by red-, green- and blue-blind readers.
# tests/unit/commprof_dash/test_theme.py measures both.
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

# Settings and times are not operations, so they have separate colors. Charts also give each setting its own
# dash pattern.
SETTING_COLOURS: Final = ("#4c6ef5", "#e8590c", "#0c8599", "#d6336c", "#7d8a00", "#7d858c")

# Colors of purposes and kinds of memory, which are stacked from the bottom in this order. Neighboring colors
# differ in hue and lightness.
KIND_COLOURS: Final = (
    "#4c6ef5", "#e8590c", "#0c8599", "#d6336c", "#7d8a00", "#7b61c9", "#a87d00", "#5c8f9e", "#9c6b4a", "#7d858c"
)  # fmt: skip

STEP_COLOUR: Final = "#5b7f9e"
HOLLOW: Final = "rgba(0,0,0,0)"  # the fill of a bar that is only an outline
EXPOSED_COLOUR: Final = "#d6336c"

PAPER: Final[dict[Scheme, str]] = {"light": "#ffffff", "dark": "#242424"}
TEXT: Final[dict[Scheme, str]] = {"light": "#212529", "dark": "#e4e6e9"}
MUTED_TEXT: Final[dict[Scheme, str]] = {"light": "#5c636a", "dark": "#a6abb1"}
GRID: Final[dict[Scheme, str]] = {"light": "#e5e8eb", "dark": "#3a3d41"}

MANTINE: Final = {
    "primaryColor": "indigo",
    # Text reaches a contrast of 4.5:1 on white and on the tint of this color.
    "primaryShade": {"light": 8, "dark": 8},
    "fontFamily": FONT,
    "defaultRadius": "md",
    "headings": {"fontFamily": FONT},
}


def scheme_of(value: str | None) -> Scheme:
    """Return the scheme in the value that the browser reported, without its width; light if the scheme is unknown."""
    return "dark" if (value or "").partition(" ")[0] == "dark" else "light"


@cache
def template(scheme: Scheme) -> go.layout.Template:
    """Return the plotly template of ``scheme``. It has no background and no title, because cards draw both."""
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
            "showlegend": False,  # cards have their own legend, which wraps and never covers a bar
            "margin": {"l": 8, "r": 8, "t": 8, "b": 8},
            "xaxis": axis,
            "yaxis": axis,
        }
    )


def luminance(colour: str) -> float:
    """Return the relative luminance of ``#rrggbb``, 0 to 1 (WCAG 2.2, relative luminance)."""
    channels = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def text_on(colour: str) -> str:
    """Return black or white, whichever has more contrast to ``colour``."""
    return "#ffffff" if luminance(colour) < 0.18 else "#000000"

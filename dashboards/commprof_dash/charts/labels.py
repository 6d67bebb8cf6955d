"""Text inside figures: plotly reads a little HTML there, so what comes from a trace is escaped first."""

from __future__ import annotations

import html
import textwrap
from typing import Final

# At 400 pixels a line of a figure holds this many characters of 12 pixels, also of a wide font.
LINE_CHARACTERS: Final = 52
_LONGEST: Final = 400


def escape(text: object) -> str:
    """``text`` as plotly must be given it to show it as it stands, cut where it is absurdly long."""
    return html.escape(_shortened(text), quote=False)


def wrap(text: object, width: int = LINE_CHARACTERS) -> str:
    """``text`` escaped, in lines of at most ``width`` characters, broken at blanks where there are any."""
    lines = textwrap.wrap(_shortened(text), width, break_long_words=True, break_on_hyphens=False) or [""]
    return "<br>".join(html.escape(line, quote=False) for line in lines)


def line_count(wrapped: str) -> int:
    """Lines of a wrapped text."""
    return wrapped.count("<br>") + 1


def _shortened(text: object) -> str:
    plain = str(text)
    return plain if len(plain) <= _LONGEST else plain[: _LONGEST - 3] + "..."

"""Text inside figures: plotly reads a little HTML there, so what comes from a trace is escaped first."""

from __future__ import annotations

import html
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

# At 400 pixels a line of a figure holds this many characters of 12 pixels, also of a wide font; at 1200 pixels of
# window, which the browser reports with its scheme, the other.
LINE_CHARACTERS: Final = 52
_WIDE_LINE_CHARACTERS: Final = 110
_WIDE: Final = " wide"
_characters: ContextVar[int] = ContextVar("characters", default=LINE_CHARACTERS)


@contextmanager
def on_screen(reported: str | None) -> Iterator[None]:
    """Draw for the window that the browser reports: a scheme, and ``wide`` where there is room for long lines."""
    is_wide = (reported or "").endswith(_WIDE)
    token = _characters.set(_WIDE_LINE_CHARACTERS if is_wide else LINE_CHARACTERS)
    try:
        yield
    finally:
        _characters.reset(token)


_LONGEST: Final = 400


def escape(text: object) -> str:
    """``text`` as plotly must be given it to show it as it stands, cut where it is absurdly long."""
    return html.escape(_shortened(text), quote=False)


def wrap(text: object, width: int | None = None) -> str:
    """``text`` escaped, in lines of at most ``width`` characters (None: of the screen), broken at blanks if it has any."""
    lines = textwrap.wrap(
        _shortened(text), width or _characters.get(), break_long_words=True, break_on_hyphens=False
    ) or [""]
    return "<br>".join(html.escape(line, quote=False) for line in lines)


def line_count(wrapped: str) -> int:
    """Lines of a wrapped text."""
    return wrapped.count("<br>") + 1


def _shortened(text: object) -> str:
    plain = str(text)
    return plain if len(plain) <= _LONGEST else plain[: _LONGEST - 3] + "..."

"""Prepares text for figures. Plotly interprets some HTML in texts, so texts from a trace are escaped first."""

from __future__ import annotations

import html
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

# The number of characters of 12 pixels in a line of a figure, also in a wide font. The first value is for a
# window of 400 pixels, the second value for a window of 1200 pixels. The browser reports the window's width
# with its scheme.
LINE_CHARACTERS: Final = 52
_WIDE_LINE_CHARACTERS: Final = 110
_WIDE: Final = " wide"
_characters: ContextVar[int] = ContextVar("characters", default=LINE_CHARACTERS)


@contextmanager
def on_screen(reported: str | None) -> Iterator[None]:
    """Use the line length of the reported window: ``reported`` is a scheme, followed by ``wide`` for a wide window."""
    is_wide = (reported or "").endswith(_WIDE)
    token = _characters.set(_WIDE_LINE_CHARACTERS if is_wide else LINE_CHARACTERS)
    try:
        yield
    finally:
        _characters.reset(token)


_LONGEST: Final = 400


def escape(text: object) -> str:
    """Return ``text`` escaped, so that plotly shows it unchanged. Extremely long texts are truncated."""
    return html.escape(_shortened(text), quote=False)


def wrap(text: object, width: int | None = None) -> str:
    """Return ``text`` escaped, in lines of at most ``width`` characters.

    Lines are broken at blanks if possible. With None, the width of the screen applies.
    """
    lines = textwrap.wrap(
        _shortened(text), width or _characters.get(), break_long_words=True, break_on_hyphens=False
    ) or [""]
    return "<br>".join(html.escape(line, quote=False) for line in lines)


def line_count(wrapped: str) -> int:
    """Return the number of lines of a wrapped text."""
    return wrapped.count("<br>") + 1


def _shortened(text: object) -> str:
    plain = str(text)
    return plain if len(plain) <= _LONGEST else plain[: _LONGEST - 3] + "..."

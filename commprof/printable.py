"""Text of others (commands, names, lines of logs) as a terminal may be given it. Standard library only."""

from __future__ import annotations

import unicodedata


def escaped(text: str, keep: str = "") -> str:
    """``text`` with control characters, invisible ones and those that turn the direction of writing in Python's notation.

    A terminal obeys some of them, and a reader sees none. JSON and CSV are not for terminals: they keep texts as they are.

    Args:
        keep: control characters that belong to the layout.
    """
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() or each in keep or unicodedata.category(each) == "Zs" else _escape(each)
        for each in text
    )


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")

"""Text for a terminal: escapes control characters of foreign text, quotes commands. Standard library only."""

from __future__ import annotations

import shlex
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


def command_line(*words: object) -> str:
    """``commprof`` with ``words``, as it can be typed: a path with spaces is quoted for the shell."""
    return shlex.join(["commprof", *map(str, words)])


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")

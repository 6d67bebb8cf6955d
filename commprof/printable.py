"""Functions for text on a terminal: escape control characters, quote commands. Standard library only."""

from __future__ import annotations

import shlex
import unicodedata


def escaped(text: str, keep: str = "") -> str:
    """Return ``text`` with its nonprintable characters replaced by Python escape sequences.

    These are control characters, invisible characters, and characters that change the direction of writing. A terminal
    obeys some of them, and a reader sees none of them. JSON and CSV output is not escaped, because it is not written
    for terminals.

    Args:
        text: The text to print.
        keep: The control characters that belong to the layout and are kept.
    """
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() or each in keep or unicodedata.category(each) == "Zs" else _escape(each)
        for each in text
    )


def command_line(*words: object) -> str:
    """Return a command line of ``commprof`` with ``words``, quoted for the shell, for example a path with spaces."""
    return shlex.join(["commprof", *map(str, words)])


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")

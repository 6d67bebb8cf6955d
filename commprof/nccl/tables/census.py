"""Counts the lines of a log by kind. Each physical line has exactly one kind. Kinds without a table have examples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from commprof.nccl.grammar import line_kinds
from commprof.nccl.grammar.line_kinds import BLANK, READ, RECOGNIZED, TOO_LONG
from commprof.nccl.grammar.lines import clean_line

if TYPE_CHECKING:
    from commprof.nccl.grammar import lines as nccl_lines

MOST_EXAMPLES: Final = 3
_SHOWN_BYTES: Final = 240
_SHOWN_LETTERS: Final = 120


class Example(NamedTuple):
    """An example of a line: its number and its beginning.

    Lines with equal ``message`` count as the same example. If ``message`` is None, each line is a separate example.
    """

    line: int
    text: bytes
    message: bytes | None


class Tally(NamedTuple):
    """The number of lines of one kind in a block, and the first lines with different messages as examples.

    ``forms`` are keys of :data:`commprof.nccl.grammar.versions.FORMS`, which restrict the possible versions of NCCL.
    """

    lines: int
    examples: tuple[Example, ...]
    forms: frozenset[str] = frozenset()


class Place(NamedTuple):
    """An example for display: file, line, and the shortened text with escaped control characters."""

    file: str
    line: int
    text: str


class LineKind(NamedTuple):
    """The lines of one kind in all logs. ``understood``: whether the kind is recognized."""

    kind: str
    understood: bool
    lines: int
    examples: tuple[Place, ...]


def example_of(line: int, raw: bytes, message: bytes | None) -> Example:
    """Return a line as an example. ``message`` has the same meaning as in :class:`Example`, and may be long."""
    shown = None if message is None else message[:_SHOWN_BYTES]
    return Example(line, clean_line(raw)[:_SHOWN_BYTES], shown)


def headless_example(line: int, raw: bytes) -> Example:
    """Return a line without a head as an example, without cleaning the text."""
    return Example(line, raw.rstrip(b"\r")[:_SHOWN_BYTES], None)


class Tallies:
    """Counts lines by kind and stores the first examples. The lines may be added in any order."""

    def __init__(self) -> None:
        self.lines: Counter[str] = Counter()
        self._examples: dict[str, list[Example]] = {}
        self._forms: dict[str, set[str]] = {}

    def note(self, kind: str, form: str | None) -> None:
        """Store the form of a message of this kind, which restricts the possible versions of NCCL."""
        if form is not None:
            self._forms.setdefault(kind, set()).add(form)

    def add_line(self, raw: bytes, messages: Sequence[nccl_lines.Line], line: int) -> None:
        """Add one line, from which the line reader read ``messages``."""
        message = None
        if messages:
            kind = line_kinds.kind_of_messages(messages)
            if kind == READ:
                return
        else:
            kind, message = line_kinds.kind_of_line(raw)
            if message is not None:
                self.note(kind, line_kinds.form_of_message(message))
        if self._has_earlier(kind, line):
            self.lines[kind] += 1
        elif not messages and message is None:
            self.add(kind, 1, [headless_example(line, raw)])
        else:
            self.add(kind, 1, [example_of(line, raw, message)])

    def add(self, kind: str, lines: int, examples: Sequence[Example]) -> None:
        """Add lines of one kind, with the first of them as examples.

        Args:
            kind: The kind.
            lines: The number of lines.
            examples: The first of these lines.
        """
        self.lines[kind] += lines
        earlier = self._examples.setdefault(kind, [])
        if all(self._has_earlier(kind, each.line) for each in examples):
            return
        known = sorted([*earlier, *examples], key=lambda example: example.line)
        chosen: list[Example] = []
        for example in known:
            if example.message is None or all(example.message != other.message for other in chosen):
                chosen.append(example)
        self._examples[kind] = chosen[:MOST_EXAMPLES]

    def _has_earlier(self, kind: str, line: int) -> bool:
        """Return whether there are enough examples of a kind before a line."""
        known = self._examples.get(kind, ())
        return len(known) == MOST_EXAMPLES and known[-1].line < line

    def tallies(self) -> dict[str, Tally]:
        """Return the counts and examples of all lines that were added, by kind."""
        return {
            kind: Tally(count, tuple(self._examples[kind]), frozenset(self._forms.get(kind, ())))
            for kind, count in self.lines.items()
        }


class Census:
    """Sums the tallies of blocks of any number of files. ``forms`` contains the forms of the lines of each file."""

    def __init__(self) -> None:
        self._by_file: dict[int, Tallies] = {}
        self.forms: dict[int, set[str]] = {}

    def add(self, tallies: Mapping[str, Tally], file: int, lines_before: int) -> None:
        """Add the tallies of a block of ``file`` that follows the first ``lines_before`` lines."""
        known = self._by_file.setdefault(file, Tallies())
        for kind, tally in tallies.items():
            moved = [example._replace(line=example.line + lines_before + 1) for example in tally.examples]
            known.add(kind, tally.lines, moved)
            self.forms.setdefault(file, set()).update(tally.forms)

    def add_line(self, raw: bytes, messages: Sequence[nccl_lines.Line], file: int, line: int) -> None:
        """Add a line that was not counted with its block. ``line`` is its number in the file, from 1."""
        alone = Tallies()
        alone.add_line(raw, messages, line - 1)
        self.add(alone.tallies(), file, 0)

    def kinds(self, files: Sequence[str], lines: int, overlong: int = 0) -> tuple[LineKind, ...]:
        """Return all kinds: first lines in tables, then recognized kinds, then unrecognized kinds.

        Recognized and unrecognized kinds are sorted by descending frequency.

        Args:
            files: The names of the files, by number.
            lines: The number of lines of the logs.
            overlong: The number of lines that were skipped because they are too long. They were counted as blank lines.
        """
        counts: Counter[str] = Counter()
        examples: dict[str, list[Place]] = {}
        for file, tallies in sorted(self._by_file.items()):
            for kind, tally in tallies.tallies().items():
                counts[kind] += tally.lines
                examples.setdefault(kind, []).extend(
                    Place(files[file], example.line, printable(example.text)) for example in tally.examples
                )
        counts[READ] = lines - counts.total()
        counts[TOO_LONG] += overlong
        counts[BLANK] -= overlong
        kinds = [
            LineKind(kind, kind in RECOGNIZED, count, tuple(examples.get(kind, ())[:MOST_EXAMPLES]))
            for kind, count in counts.items()
            if count
        ]
        return tuple(sorted(kinds, key=lambda k: (k.kind != READ, not k.understood, -k.lines, k.kind)))


def printable(text: bytes, letters: int = _SHOWN_LETTERS) -> str:
    """Return ``text`` with escaped unprintable characters, truncated to ``letters`` characters.

    >>> printable(bytes([27]) + b"[31mred" + bytes([255]))
    '\\\\x1b[31mred\\\\xff'
    """
    shown = "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode()
        for letter in text.decode("utf-8", "backslashreplace")
    )
    return shown if len(shown) <= letters else shown[: letters - 3] + "..."

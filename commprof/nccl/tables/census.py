"""The census of a log: each physical line has exactly one kind, and kinds without a table have examples."""

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
    """One line: its number and its beginning. ``message`` is None where each line is an example of its own."""

    line: int
    text: bytes
    message: bytes | None


class Tally(NamedTuple):
    """How many lines of a block are of one kind, and the first of them whose messages differ.

    ``forms`` are keys of :data:`commprof.nccl.grammar.versions.FORMS`: which limit the version of NCCL.
    """

    lines: int
    examples: tuple[Example, ...]
    forms: frozenset[str] = frozenset()


class Place(NamedTuple):
    """An example for display: file, line, and the text, shortened, without control characters."""

    file: str
    line: int
    text: str


class LineKind(NamedTuple):
    """Lines of one kind. ``understood``: they are recognized; otherwise their form is unknown."""

    kind: str
    understood: bool
    lines: int
    examples: tuple[Place, ...]


def example_of(line: int, raw: bytes, message: bytes | None) -> Example:
    """A line as an example; ``message`` as in :class:`Example`, of any length."""
    shown = None if message is None else message[:_SHOWN_BYTES]
    return Example(line, clean_line(raw)[:_SHOWN_BYTES], shown)


def headless_example(line: int, raw: bytes) -> Example:
    """A line without a head as an example: as it is."""
    return Example(line, raw.rstrip(b"\r")[:_SHOWN_BYTES], None)


class Tallies:
    """Counts lines by kind and keeps the first examples, whatever the order in which they come."""

    def __init__(self) -> None:
        self.lines: Counter[str] = Counter()
        self._examples: dict[str, list[Example]] = {}
        self._forms: dict[str, set[str]] = {}

    def note(self, kind: str, form: str | None) -> None:
        """Note the form of a message of this kind, which limits the version."""
        if form is not None:
            self._forms.setdefault(kind, set()).add(form)

    def add_line(self, raw: bytes, messages: Sequence[nccl_lines.Line], line: int) -> None:
        """Add one line in which these messages were read."""
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
        """Add lines of one kind, with the first of them."""
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
        """Whether there are enough examples of a kind before a line."""
        known = self._examples.get(kind, ())
        return len(known) == MOST_EXAMPLES and known[-1].line < line

    def tallies(self) -> dict[str, Tally]:
        """What was added, by kind."""
        return {
            kind: Tally(count, tuple(self._examples[kind]), frozenset(self._forms.get(kind, ())))
            for kind, count in self.lines.items()
        }


class Census:
    """Adds up the tallies of blocks, in any number of files; ``forms`` has, by file, the forms of lines."""

    def __init__(self) -> None:
        self._by_file: dict[int, Tallies] = {}
        self.forms: dict[int, set[str]] = {}

    def add(self, tallies: Mapping[str, Tally], file: int, lines_before: int) -> None:
        """Add a block of ``file`` after its first ``lines_before`` lines."""
        known = self._by_file.setdefault(file, Tallies())
        for kind, tally in tallies.items():
            moved = [example._replace(line=example.line + lines_before + 1) for example in tally.examples]
            known.add(kind, tally.lines, moved)
            self.forms.setdefault(file, set()).update(tally.forms)

    def add_line(self, raw: bytes, messages: Sequence[nccl_lines.Line], file: int, line: int) -> None:
        """Add a line, counted from 1, that was read outside of its block."""
        alone = Tallies()
        alone.add_line(raw, messages, line - 1)
        self.add(alone.tallies(), file, 0)

    def kinds(self, files: Sequence[str], lines: int, overlong: int = 0) -> tuple[LineKind, ...]:
        """All kinds: lines in tables first, then recognized, then unrecognized ones, each by falling frequency.

        Args:
            files: the files by number.
            lines: how many lines the logs have.
            overlong: how many of them were skipped for their length, and passed on as blank ones.
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
    """``text`` with everything escaped that is not printable, truncated to some characters.

    >>> printable(bytes([27]) + b"[31mred" + bytes([255]))
    '\\\\x1b[31mred\\\\xff'
    """
    shown = "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode()
        for letter in text.decode("utf-8", "backslashreplace")
    )
    return shown if len(shown) <= letters else shown[: letters - 3] + "..."

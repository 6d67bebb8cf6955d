"""The census of a log: each physical line is of exactly one kind, and the kinds that no table has show examples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from commprof.nccl import line_kinds
from commprof.nccl.fields import Flags, Positions
from commprof.nccl.line_kinds import BLANK, NO_HEAD, NOT_TEXT, READ, TOO_LONG, UNDERSTOOD
from commprof.nccl.lines import clean_line
from commprof.nccl.repeats import first_of_each, numbered

if TYPE_CHECKING:
    from commprof.nccl import lines as nccl_lines
    from commprof.nccl.line_index import Texts

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

    ``forms`` are keys of :data:`commprof.nccl.versions.FORMS`: what these lines tell about the version of NCCL.
    """

    lines: int
    examples: tuple[Example, ...]
    forms: frozenset[str] = frozenset()


class Place(NamedTuple):
    """An example as it is shown: file, line, and the text, shortened, with nothing in it that a terminal would obey."""

    file: str
    line: int
    text: str


class LineKind(NamedTuple):
    """Lines of one kind. ``understood``: they say what no table has; otherwise it is not known what they say."""

    kind: str
    understood: bool
    lines: int
    examples: tuple[Place, ...]


class Silence(NamedTuple):
    """Lines of a block that gave nothing to any table.

    Attributes:
        lines: those whose head is known.
        is_call: whether these are of level CALL, otherwise INFO.
        codes: the numbers of their messages in ``texts``.
        texts: distinct messages.
        shapes: distinct shapes of them.
        shape_of: the number of each message's shape.
        others: lines of any other look.
        headless: lines that hold neither a head nor control characters other than a return at their end.
    """

    lines: Positions
    is_call: Flags
    codes: Positions
    texts: Texts
    shapes: Sequence[bytes]
    shape_of: Positions
    others: Positions
    headless: Positions


class _Tallies:
    """Counts lines by kind and keeps the first examples, whatever the order in which they come."""

    def __init__(self) -> None:
        self.lines: Counter[str] = Counter()
        self._examples: dict[str, list[Example]] = {}
        self._forms: dict[str, set[str]] = {}

    def note(self, kind: str, form: str | None) -> None:
        """Remember what a message of this kind tells about the version."""
        if form is not None:
            self._forms.setdefault(kind, set()).add(form)

    def add(self, kind: str, lines: int, examples: Sequence[Example]) -> None:
        self.lines[kind] += lines
        if not examples:
            self._examples.setdefault(kind, [])
            return
        known = sorted([*self._examples.get(kind, ()), *examples], key=lambda example: example.line)
        kept: list[Example] = []
        for example in known:
            if example.message is None or all(example.message != other.message for other in kept):
                kept.append(example)
        self._examples[kind] = kept[:MOST_EXAMPLES]

    def lacks(self, kind: str) -> bool:
        """Whether more examples of ``kind`` are wanted when lines come in order."""
        return len(self._examples.get(kind, ())) < MOST_EXAMPLES

    def tallies(self) -> dict[str, Tally]:
        return {
            kind: Tally(count, tuple(self._examples[kind]), frozenset(self._forms.get(kind, ())))
            for kind, count in self.lines.items()
        }


def tally_block(
    data: bytes,
    begins: Positions,
    ends: Positions,
    returns: Flags,
    silence: Silence,
    read: Sequence[tuple[int, Sequence[nccl_lines.Line]]],
) -> dict[str, Tally]:
    """The lines of a block that are not of kind ``read``, by kind; lines count from 0.

    Args:
        data: the block.
        begins: where each line begins.
        ends: where its newline is.
        returns: whether a return stands in front of it.
        silence: the lines in which nothing was read.
        read: numbers and messages of lines that were read by themselves.
    """
    tallies = _Tallies()

    def text(line: int) -> bytes:
        return data[begins[line] : ends[line]]

    def example(line: int, message: bytes | None) -> Example:
        return Example(line, clean_line(text(line))[:_SHOWN_BYTES], message)

    def headless(line: int) -> Example:
        return Example(line, text(line).rstrip(b"\r")[:_SHOWN_BYTES], None)

    for line, messages in read:
        kind = line_kinds.kind_of_messages(messages)
        if kind != READ:
            tallies.add(kind, 1, [example(line, None)])
    for kind, count, firsts, codes in _by_kind(silence, tallies):
        tallies.add(kind, count, [])
        # In the order of lines, so that the first few are the examples.
        for index, code in zip(firsts, codes, strict=True):
            if not tallies.lacks(kind):
                break
            body = silence.texts[int(code)].rstrip(b"\r\n")
            tallies.add(kind, 0, [example(int(silence.lines[index]), body[:_SHOWN_BYTES])])
    for line in silence.others.tolist():
        kind, message = line_kinds.kind_of_line(text(line))
        shown = headless(line) if message is None else example(line, message[:_SHOWN_BYTES])
        tallies.add(kind, 1, [shown])
        tallies.note(kind, None if message is None else line_kinds.form_of_message(message))
    for kind, lines in _headless(data, begins, ends, returns, silence.headless):
        if len(lines):
            tallies.add(kind, len(lines), [headless(line) for line in lines[:MOST_EXAMPLES].tolist()])
    return tallies.tallies()


def _by_kind(silence: Silence, tallies: _Tallies) -> Iterator[tuple[str, int, Positions, Positions]]:
    """Each kind of lines whose head is known, how many there are, and where each of their messages stands first.

    ``tallies`` gets what their forms tell.
    """
    if not len(silence.codes):
        return
    found, first, times = first_of_each(silence.codes.astype(np.int64) * 2 + silence.is_call)
    order = np.argsort(first)
    found, first, times = found[order], first[order], times[order]
    shapes, number = numbered(silence.shape_of[found // 2] * 2 + found % 2)
    kinds: dict[str, int] = {}
    kind_of = np.empty(len(shapes), np.int64)
    for place, code in enumerate(shapes):
        body = silence.shapes[code // 2].rstrip(b"\r\n")
        kind, form = line_kinds.kind_of_shape(b"CALL" if code % 2 else b"INFO", body)
        kind_of[place] = kinds.setdefault(kind, len(kinds))
        tallies.note(kind, form)
    chosen = kind_of[number]
    for kind, place in kinds.items():
        members = np.flatnonzero(chosen == place)
        yield kind, int(times[members].sum()), first[members], found[members] // 2


def _headless(
    data: bytes, begins: Positions, ends: Positions, returns: Flags, lines: Positions
) -> list[tuple[str, Positions]]:
    """Lines without a head by kind."""
    blank = ends[lines] - returns[lines] <= begins[lines]
    text = np.ones(len(lines), bool)
    if not data.isascii():
        high = np.flatnonzero(np.frombuffer(data, np.uint8) >= 0x80)
        suspects = np.isin(lines, np.unique(np.searchsorted(ends, high)))
        for number in np.flatnonzero(suspects).tolist():
            text[number] = line_kinds.is_text(data[begins[lines[number]] : ends[lines[number]]])
    return [(BLANK, lines[blank]), (NOT_TEXT, lines[~text]), (NO_HEAD, lines[text & ~blank])]


class Census:
    """Adds up the tallies of blocks, in any number of files; ``forms`` tells, by file, of the version."""

    def __init__(self) -> None:
        self._by_file: dict[int, _Tallies] = {}
        self.forms: dict[int, set[str]] = {}

    def add(self, tallies: Mapping[str, Tally], file: int, lines_before: int) -> None:
        """Add a block of ``file`` in front of which that file has ``lines_before`` lines."""
        known = self._by_file.setdefault(file, _Tallies())
        for kind, tally in tallies.items():
            moved = [example._replace(line=example.line + lines_before + 1) for example in tally.examples]
            known.add(kind, tally.lines, moved)
            self.forms.setdefault(file, set()).update(tally.forms)

    def add_line(self, raw: bytes, messages: Sequence[nccl_lines.Line], file: int, line: int) -> None:
        """Add a line, counted from 1, that was read apart from its block."""
        kind, message = (
            (line_kinds.kind_of_messages(messages), None) if messages else line_kinds.kind_of_line(raw)
        )
        if kind != READ:
            known = self._by_file.setdefault(file, _Tallies())
            shown = None if message is None else message[:_SHOWN_BYTES]
            known.add(kind, 1, [Example(line, raw[:_SHOWN_BYTES], shown)])
            form = None if message is None else line_kinds.form_of_message(message)
            if form is not None:
                self.forms.setdefault(file, set()).add(form)

    def kinds(self, files: Sequence[str], lines: int, overlong: int = 0) -> tuple[LineKind, ...]:
        """All kinds: what was read first, what was understood next, then what was not, each the most frequent first.

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
            LineKind(kind, kind in UNDERSTOOD, count, tuple(examples.get(kind, ())[:MOST_EXAMPLES]))
            for kind, count in counts.items()
            if count
        ]
        return tuple(sorted(kinds, key=lambda k: (k.kind != READ, not k.understood, -k.lines, k.kind)))


def printable(text: bytes, letters: int = _SHOWN_LETTERS) -> str:
    """``text`` with everything escaped that is not printable, cut after some letters.

    >>> printable(bytes([27]) + b"[31mred" + bytes([255]))
    '\\\\x1b[31mred\\\\xff'
    """
    shown = "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode()
        for letter in text.decode("utf-8", "backslashreplace")
    )
    return shown if len(shown) <= letters else shown[: letters - 3] + "..."

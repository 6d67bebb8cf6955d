"""Typical damage of logs: changed bytes, and truncated, joined or interleaved lines.

The same seed always produces the same damage.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence

_NUMBER = re.compile(rb"\d+")
_ODD_BYTES = (
    b"\x00",
    b"\xff",
    b"\x80",
    b"\r",
    b"\x1b[31m",
    b"\t",
    b" ",
    b":",
    b"[",
    b"(",
    b"0x",
    b"\xc3\x28",
    b"-",
)


def change_byte(rng: random.Random, line: bytes, other: bytes) -> bytes:
    """Change one byte."""
    place = rng.randrange(len(line) + 1)
    return (
        line[:place]
        + bytes([rng.choice((10, 0, 255, *range(32, 127)))]).replace(b"\n", b"?")
        + line[place + 1 :]
    )


def insert_odd_bytes(rng: random.Random, line: bytes, other: bytes) -> bytes:
    """Insert bytes that have a meaning for a reader of logs at a place where they are wrong."""
    place = rng.randrange(len(line) + 1)
    return line[:place] + rng.choice(_ODD_BYTES) * rng.randint(1, 3) + line[place:]


def drop_bytes(rng: random.Random, line: bytes, other: bytes) -> bytes:
    """Remove a few bytes."""
    place = rng.randrange(len(line) + 1)
    return line[:place] + line[place + rng.randint(1, 12) :]


def cut_tail(rng: random.Random, line: bytes, other: bytes) -> bytes:
    """Remove the end of the line."""
    return line[: rng.randrange(len(line) + 1)]


def cut_head(rng: random.Random, line: bytes, other: bytes) -> bytes:
    """Remove the beginning of the line."""
    return line[rng.randrange(len(line) + 1) :]


def glue(rng: random.Random, line: bytes, other: bytes) -> bytes:
    """Join two lines without a newline."""
    return line + other


def tear(rng: random.Random, line: bytes, other: bytes) -> bytes:
    """Insert a line of another process into the middle of the line."""
    place = rng.randrange(len(line) + 1)
    return line[:place] + other + b"\n" * rng.randint(0, 1) + line[place:]


def swap_tails(rng: random.Random, line: bytes, other: bytes) -> bytes:
    """Join the beginning of one line and the end of another line."""
    return line[: rng.randrange(len(line) + 1)] + other[rng.randrange(len(other) + 1) :]


def repeat(rng: random.Random, line: bytes, other: bytes) -> bytes:
    """Write the line twice."""
    return line + b"\n" + line


def repeat_inside(rng: random.Random, line: bytes, other: bytes) -> bytes:
    """Repeat a part of the line many times."""
    begin = rng.randrange(len(line) + 1)
    end = begin + rng.randint(1, 40)
    return line[:end] + line[begin:end] * rng.randint(1, 30) + line[end:]


def change_number(rng: random.Random, line: bytes, other: bytes) -> bytes:
    """Replace a number by a value that is too large for its column or not valid there."""
    found = list(_NUMBER.finditer(line))
    if not found:
        return line
    number = rng.choice(found)
    instead = rng.choice(
        (b"9" * 30, b"-1", b"9223372036854775808", b"4294967296", b"", b"0", b"00007", b"1e9")
    )
    return line[: number.start()] + instead + line[number.end() :]


def change_case(rng: random.Random, line: bytes, other: bytes) -> bytes:
    """Swap the case of all letters."""
    return line.swapcase()


MUTATIONS: tuple[Callable[[random.Random, bytes, bytes], bytes], ...] = (
    change_byte, insert_odd_bytes, drop_bytes, cut_tail, cut_head, glue, tear, swap_tails, repeat, repeat_inside,
    change_number, change_case,
)  # fmt: skip


def mutate(lines: Sequence[bytes], num_lines: int, seed: int, share: float = 0.5) -> bytes:
    """Return a log of about ``num_lines`` lines that are drawn from ``lines``.

    A fraction ``share`` of the lines is damaged, and some of these lines are damaged more than once.
    """
    rng = random.Random(seed)
    out = []
    for _ in range(num_lines):
        line = rng.choice(lines)
        while rng.random() < share:
            line = rng.choice(MUTATIONS)(rng, line, rng.choice(lines))
        out.append(line)
    return b"\n".join(out) + b"\n" * rng.randint(0, 1)

"""Damage as logs meet it: bytes changed, lines cut, glued, torn into each other. The same seed, the same damage."""

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
    """One byte becomes another."""
    place = rng.randrange(len(line) + 1)
    return (
        line[:place]
        + bytes([rng.choice((10, 0, 255, *range(32, 127)))]).replace(b"\n", b"?")
        + line[place + 1 :]
    )


def insert_odd_bytes(rng: random.Random, line: bytes, other: bytes) -> bytes:
    """Bytes that mean something to a reader, where they do not belong."""
    place = rng.randrange(len(line) + 1)
    return line[:place] + rng.choice(_ODD_BYTES) * rng.randint(1, 3) + line[place:]


def drop_bytes(rng: random.Random, line: bytes, other: bytes) -> bytes:
    """A few bytes are gone."""
    place = rng.randrange(len(line) + 1)
    return line[:place] + line[place + rng.randint(1, 12) :]


def cut_tail(rng: random.Random, line: bytes, other: bytes) -> bytes:
    """The line ends early."""
    return line[: rng.randrange(len(line) + 1)]


def cut_head(rng: random.Random, line: bytes, other: bytes) -> bytes:
    """The line begins late."""
    return line[rng.randrange(len(line) + 1) :]


def glue(rng: random.Random, line: bytes, other: bytes) -> bytes:
    """Two lines without the newline between them."""
    return line + other


def tear(rng: random.Random, line: bytes, other: bytes) -> bytes:
    """Another process writes in the middle of the line."""
    place = rng.randrange(len(line) + 1)
    return line[:place] + other + b"\n" * rng.randint(0, 1) + line[place:]


def swap_tails(rng: random.Random, line: bytes, other: bytes) -> bytes:
    """The head of one line with the tail of another."""
    return line[: rng.randrange(len(line) + 1)] + other[rng.randrange(len(other) + 1) :]


def repeat(rng: random.Random, line: bytes, other: bytes) -> bytes:
    """The line twice."""
    return line + b"\n" + line


def repeat_inside(rng: random.Random, line: bytes, other: bytes) -> bytes:
    """A stretch of the line many times."""
    begin = rng.randrange(len(line) + 1)
    end = begin + rng.randint(1, 40)
    return line[:end] + line[begin:end] * rng.randint(1, 30) + line[end:]


def change_number(rng: random.Random, line: bytes, other: bytes) -> bytes:
    """A number that no column holds, or that means nothing."""
    found = list(_NUMBER.finditer(line))
    if not found:
        return line
    number = rng.choice(found)
    instead = rng.choice(
        (b"9" * 30, b"-1", b"9223372036854775808", b"4294967296", b"", b"0", b"00007", b"1e9")
    )
    return line[: number.start()] + instead + line[number.end() :]


def change_case(rng: random.Random, line: bytes, other: bytes) -> bytes:
    """Letters of the other case."""
    return line.swapcase()


MUTATIONS: tuple[Callable[[random.Random, bytes, bytes], bytes], ...] = (
    change_byte, insert_odd_bytes, drop_bytes, cut_tail, cut_head, glue, tear, swap_tails, repeat, repeat_inside,
    change_number, change_case,
)  # fmt: skip


def mutate(lines: Sequence[bytes], num_lines: int, seed: int, share: float = 0.5) -> bytes:
    """A log of about ``num_lines`` lines drawn from ``lines``, of which ``share`` were damaged, some of them twice."""
    rng = random.Random(seed)
    out = []
    for _ in range(num_lines):
        line = rng.choice(lines)
        while rng.random() < share:
            line = rng.choice(MUTATIONS)(rng, line, rng.choice(lines))
        out.append(line)
    return b"\n".join(out) + b"\n" * rng.randint(0, 1)

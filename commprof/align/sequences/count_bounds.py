"""Bounds of the numbers of missing and extra lines, where equal neighbors make single ones ambiguous. Pure.

Records and lines between two certain pairs match in several ways. However they are paired, a record beyond the
number of lines with its values has no line, and a line beyond the number of such records has no record.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from commprof.align.match_rows import UNCLEAR
from commprof.align.sequences.edits import Codes


class Bounds(NamedTuple):
    """At least and at most so many lines are missing, and are extra."""

    missing_at_least: int
    missing_at_most: int
    extra_at_least: int
    extra_at_most: int

    @property
    def missing(self) -> str:
        """The number of missing lines, or its bounds, as text."""
        return interval(self.missing_at_least, self.missing_at_most)

    @property
    def extra(self) -> str:
        """The same of the extra lines."""
        return interval(self.extra_at_least, self.extra_at_most)


def interval(least: int, most: int) -> str:
    """A number, or its lower bound, as text.

    Only JSON has the upper bound: it counts every ambiguous line as a different one, which is possible but unlikely.
    """
    if least == most:
        return f"{least:,}"
    return f"at least {least:,}" if least else "0 or more"


def surplus(values: Codes, others: Codes) -> int:
    """How many of ``values`` stay without a partner of the same value among ``others``, however they are paired."""
    codes, counts = np.unique(values, return_counts=True)
    other_codes, other_counts = np.unique(others, return_counts=True)
    there = dict(zip(other_codes.tolist(), other_counts.tolist(), strict=True))
    return sum(
        max(0, n - there.get(code, 0)) for code, n in zip(codes.tolist(), counts.tolist(), strict=True)
    )


def bounds_of(matches: pa.Table, comm_matches: pa.Table) -> Bounds:
    """The bounds over a whole alignment, from its tables.

    A record that does not determine its lines may have left them: they are then among the extra ones.
    """
    state, has_record = matches["state"], pc.is_valid(matches["seq"])
    is_missing, is_extra = pc.equal(state, "missing"), pc.equal(state, "extra")
    is_ambiguous = pc.equal(state, "ambiguous")
    unclear = pc.and_(is_missing, pc.fill_null(pc.equal(matches["reason"], UNCLEAR), False))
    missing, extra, unclear_count = _count(is_missing), _count(is_extra), _count(unclear)
    message = pc.is_in(matches["op"], pa.array(["send", "recv"]))
    of_unclear = _count(pc.and_(is_extra, message)) if unclear_count else 0
    return Bounds(
        missing - unclear_count + _total(comm_matches, "ambiguous_missing"),
        missing + _count(pc.and_(is_ambiguous, has_record)),
        extra - of_unclear + _total(comm_matches, "ambiguous_extra"),
        extra + _count(pc.and_(is_ambiguous, pc.invert(has_record))),
    )


def _count(flags: Any) -> int:
    return int(pc.sum(flags).as_py() or 0)


def _total(table: pa.Table, name: str) -> int:
    return int(pc.sum(table[name]).as_py() or 0)

"""Compute bounds of the numbers of missing and extra lines if equal neighbors make individual lines ambiguous.

The functions are pure. Records and lines between two certain pairs can match in several ways. If there are
more records than lines with the same values, the surplus records have no line in any matching. If there are
more lines than records, the surplus lines have no record in any matching.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from commprof.align.match_rows import UNCLEAR
from commprof.align.sequences.edits import Codes


class Bounds(NamedTuple):
    """Lower and upper bounds of the numbers of missing and extra lines."""

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
        """The number of extra lines, or its bounds, as text."""
        return interval(self.extra_at_least, self.extra_at_most)


def interval(least: int, most: int) -> str:
    """Return a number, or its lower bound, as text.

    Only the JSON output contains the upper bound. The upper bound counts every ambiguous line as a different
    line, which is possible but unlikely.
    """
    if least == most:
        return f"{least:,}"
    return f"at least {least:,}" if least else "0 or more"


def surplus(values: Codes, others: Codes) -> int:
    """Return how many of ``values`` have no partner of the same value in ``others``, in any matching."""
    codes, counts = np.unique(values, return_counts=True)
    other_codes, other_counts = np.unique(others, return_counts=True)
    there = dict(zip(other_codes.tolist(), other_counts.tolist(), strict=True))
    return sum(
        max(0, n - there.get(code, 0)) for code, n in zip(codes.tolist(), counts.tolist(), strict=True)
    )


def bounds_of(matches: pa.Table, comm_matches: pa.Table) -> Bounds:
    """Return the bounds over a whole alignment, from its tables.

    It is not known which lines a record leaves if the record does not determine them. Such lines are counted as extra.
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

"""Defines the measures of traffic that a page can show. Every axis and subtitle names its measure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from commprof.analysis import api


class Measure(NamedTuple):
    """One measure of traffic: its column in tables, its label and its definition."""

    key: str  # the value in the address
    column: str  # the column of totals in the tables; the column of means per step has the suffix _per_step
    name: str
    unit: str  # "bytes", or "" for a plain count
    definition: str

    @property
    def per_step(self) -> str:
        """The name of the column with the mean per step."""
        return f"{self.column}_per_step"

    @property
    def format(self) -> Callable[[float], str]:
        """The function that formats a value for the user."""
        return api.format_bytes if self.unit == "bytes" else format_count


def format_count(value: float) -> str:
    """Format a count, or a mean of counts with one decimal: ``1,234`` or ``2.5``."""
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.1f}"


WIRE: Final = Measure(
    "wire",
    "wire_bytes",
    "Wire bytes",
    "bytes",
    "modelled: bytes that a rank sends, mean over all ranks of the job, for the operations that the backend runs if known "
    "(gloo), otherwise as issued; in a group of n ranks 2(n-1)/n of the payload for all_reduce, (n-1)/n for most others, "
    "1 for messages",
)
PAYLOAD: Final = Measure(
    "payload",
    "payload_bytes",
    "Payload bytes",
    "bytes",
    "the size of each operation's whole buffer; each operation counts once; all groups",
)
COUNT: Final = Measure(
    "count",
    "collectives",
    "Collectives",
    "",
    "operations of all groups without barriers; each counts once, not once per rank",
)
MEASURES: Final[dict[str, Measure]] = {measure.key: measure for measure in (WIRE, PAYLOAD, COUNT)}

"""The measures of traffic that a page can show. They are never mixed: every axis and subtitle names its one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from commprof.analysis import api


class Measure(NamedTuple):
    """One measure of traffic, in the tables' words and in people's."""

    key: str  # in the address
    column: str  # in the tables: totals; means per step carry the suffix _per_step
    name: str
    unit: str  # "bytes", or "" for a plain count
    definition: str

    @property
    def per_step(self) -> str:
        """Name of the column with the mean per step."""
        return f"{self.column}_per_step"

    @property
    def format(self) -> Callable[[float], str]:
        """How a value is written for a person."""
        return api.format_bytes if self.unit == "bytes" else format_count


def format_count(value: float) -> str:
    """A count, or a mean of counts with one digit: ``1,234`` or ``2.5``."""
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.1f}"


WIRE: Final = Measure(
    "wire",
    "wire_bytes",
    "Wire bytes",
    "bytes",
    "modelled: what a rank of the job sends, mean over all its ranks, for what the backend runs where that is known (gloo), "
    "else as issued; in a group of n ranks 2(n-1)/n of the payload for all_reduce, (n-1)/n for most others; messages "
    "as they are",
)
PAYLOAD: Final = Measure(
    "payload",
    "payload_bytes",
    "Payload bytes",
    "bytes",
    "the size of each operation's whole buffer, each counted once, however it travels, of all groups",
)
COUNT: Final = Measure(
    "count",
    "collectives",
    "Collectives",
    "",
    "operations of all groups without barriers, each counted once and not once per rank",
)
MEASURES: Final[dict[str, Measure]] = {measure.key: measure for measure in (WIRE, PAYLOAD, COUNT)}

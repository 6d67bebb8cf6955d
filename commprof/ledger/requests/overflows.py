"""Steps that the optimizer skipped because a gradient overflowed, from the metrics of the runtime.

Where all ranks have the same gradients they detect an overflow without a message, so no record shows it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from commprof.ledger.records.issued import StepKey

COLUMNS: Final = ("attempt", "step", "name", "value")
_OVERFLOW: Final = "overflow"  # 1 in a step that was not taken
_SKIPPED: Final = (
    "skipped_steps"  # how many there were before the step, those before a checkpoint too; none where 0
)


class Overflows(NamedTuple):
    """The steps, and before each step how many there had been; steps that have none before them are left out."""

    steps: frozenset[StepKey] = frozenset()
    earlier: Mapping[StepKey, int] = {}

    def before(self, key: StepKey) -> int:
        """How many steps before ``key`` were not taken."""
        return self.earlier.get(key, 0)


NO_OVERFLOWS: Final = Overflows()


def overflows_of(tables: Iterable[pa.Table]) -> Overflows:
    """Read the table ``metrics``, :data:`COLUMNS` of it, some rows at a time."""
    steps: set[StepKey] = set()
    earlier: dict[StepKey, int] = {}
    for part in tables:
        overflow_rows = part.filter(pc.is_in(part["name"], pa.array([_OVERFLOW, _SKIPPED])))
        for row in overflow_rows.select(list(COLUMNS)).to_pylist():
            key = StepKey(row["attempt"], row["step"])
            if row["name"] == _SKIPPED:
                earlier[key] = int(row["value"])
            elif row["value"]:
                steps.add(key)
    return Overflows(frozenset(steps), earlier)

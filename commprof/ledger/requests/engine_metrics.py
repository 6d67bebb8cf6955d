"""What an engine says of its steps that no message shows, from the metrics of the run.

* Steps that the optimizer skipped because a gradient overflowed: ranks that have the same gradients detect it without a
  message.
* At stage 3, how much of the persistent parameters a step finds released: the program may release them between steps, as
  DeepSpeed's ``GatheredParameters`` does at its end, and the next forward pass, also of an evaluation, gathers them again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from commprof.ledger.records.issued import StepKey

COLUMNS: Final = ("attempt", "step", "name", "value")
_OVERFLOW: Final = "overflow"  # 1 in a step that was not taken
# How many there were before the step, those before a checkpoint too; none where 0.
_SKIPPED: Final = "skipped_steps"
# Of the elements of persistent parameters, when the step began, or an evaluation after it; none where 0.
_RELEASED: Final = "released_share"
_RELEASED_BEFORE_EVALUATION: Final = "evaluation_released_share"
_NAMES: Final = (_OVERFLOW, _SKIPPED, _RELEASED, _RELEASED_BEFORE_EVALUATION)


class EngineMetrics(NamedTuple):
    """What the engine says of the steps of a run.

    Attributes:
        skipped: the steps that were not taken since a gradient overflowed.
        earlier: before each step, how many there had been; steps that have none before them are left out.
        released: the share of the elements of persistent parameters that were released when each step began, above 0.
        evaluated: the steps after which an evaluation found some of them released.
    """

    skipped: frozenset[StepKey] = frozenset()
    earlier: Mapping[StepKey, int] = {}
    released: Mapping[StepKey, float] = {}
    evaluated: frozenset[StepKey] = frozenset()

    def skipped_before(self, key: StepKey) -> int:
        """How many steps before ``key`` were not taken."""
        return self.earlier.get(key, 0)


NO_METRICS: Final = EngineMetrics()


def engine_metrics_of(tables: Iterable[pa.Table]) -> EngineMetrics:
    """Read the table ``metrics``, :data:`COLUMNS` of it, some rows at a time."""
    skipped: set[StepKey] = set()
    earlier: dict[StepKey, int] = {}
    released: dict[StepKey, float] = {}
    evaluated: set[StepKey] = set()
    for part in tables:
        is_known = pc.is_in(part["name"], pa.array(_NAMES))
        rows = part.filter(pc.and_(is_known, pc.is_finite(part["value"])))
        for row in rows.select(list(COLUMNS)).to_pylist():
            key = StepKey(row["attempt"], row["step"])
            if row["name"] == _SKIPPED:
                earlier[key] = int(row["value"])
            elif row["name"] == _RELEASED:
                released[key] = min(1.0, max(row["value"], released.get(key, 0.0)))
            elif row["name"] == _RELEASED_BEFORE_EVALUATION:
                evaluated.add(key)
            elif row["value"]:
                skipped.add(key)
    return EngineMetrics(frozenset(skipped), earlier, released, frozenset(evaluated))

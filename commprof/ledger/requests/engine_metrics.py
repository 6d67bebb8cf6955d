"""Reads facts about steps that an engine publishes in the metrics of the run, and that no message shows.

* Steps that the optimizer skipped because a gradient overflowed. Ranks with the same gradients detect the overflow
  without a message.
* At stage 3, the share of the persistent parameters that is released when a step begins. The program may release them
  between steps, as DeepSpeed's ``GatheredParameters`` does at its end. The next forward pass, which may be part of an
  evaluation, gathers them again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from commprof.ledger.records.issued import StepKey

COLUMNS: Final = ("attempt", "step", "name", "value")
_OVERFLOW: Final = "overflow"  # 1 in a skipped step
# The number of skipped steps before the step, including those before a checkpoint. There is no row if it is 0.
_SKIPPED: Final = "skipped_steps"
# The released share of the elements of persistent parameters at the begin of the step, or of an evaluation after the
# step. There is no row if it is 0.
_RELEASED: Final = "released_share"
_RELEASED_BEFORE_EVALUATION: Final = "evaluation_released_share"
_NAMES: Final = (_OVERFLOW, _SKIPPED, _RELEASED, _RELEASED_BEFORE_EVALUATION)


class EngineMetrics(NamedTuple):
    """The facts about the steps of a run that the engine published.

    Attributes:
        skipped: The steps that were skipped because a gradient overflowed.
        earlier: The number of skipped steps before each step. Steps without skipped steps before them are left out.
        released: The share of the elements of persistent parameters that was released when a step began, if above 0.
        evaluated: The steps after which an evaluation found persistent parameters released.
    """

    skipped: frozenset[StepKey] = frozenset()
    earlier: Mapping[StepKey, int] = {}
    released: Mapping[StepKey, float] = {}
    evaluated: frozenset[StepKey] = frozenset()

    def skipped_before(self, key: StepKey) -> int:
        """Return the number of skipped steps before ``key``."""
        return self.earlier.get(key, 0)


NO_METRICS: Final = EngineMetrics()


def engine_metrics_of(tables: Iterable[pa.Table]) -> EngineMetrics:
    """Read the facts from parts of the table ``metrics`` with the columns :data:`COLUMNS`."""
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

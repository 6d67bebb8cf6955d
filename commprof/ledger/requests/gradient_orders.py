"""Determines the order in which gradients arrived, from the buckets that a run published."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import Final, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from commprof.ledger.records.issued import StepKey
from commprof.ledger.records.row_index import combinations

_COLUMNS: Final = ("rank", "attempt", "step", "micro_step", "bucket", "parameters")


class Buckets(Protocol):
    """The members of a run that this module uses. ``commprof.trace.reader.Run`` implements them."""

    def table(self, name: str) -> pa.Table:
        """Return table ``name`` of the schema."""

    def parts(self, name: str, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        """Yield the rows of table ``name`` in parts, with only ``columns`` if given."""


def gradient_orders(run: Buckets) -> dict[StepKey, list[tuple[str, ...]]]:
    """Return the order in which gradients arrived for each micro-batch of a step, as the lowest rank published it.

    If the program stopped in a micro-batch, only a part of the gradients arrived. In this case the order of the
    previous micro-batch is used.
    """
    lowest: int | None = None
    texts_by_micro_batch: dict[tuple[StepKey, int], list[tuple[int, str]]] = defaultdict(list)
    for part in run.parts("buckets", _COLUMNS):
        for (rank,), places in combinations(part, ["rank"]):
            if lowest is None or rank < lowest:
                lowest, texts_by_micro_batch = rank, defaultdict(list)
            if rank == lowest:
                for row in part.take(pa.array(places)).to_pylist():
                    micro_batch = StepKey(row["attempt"], row["step"]), row["micro_step"]
                    texts_by_micro_batch[micro_batch].append(
                        (row["bucket"], sys.intern(row["parameters"] or ""))
                    )
    orders: dict[StepKey, list[tuple[str, ...]]] = defaultdict(list)
    known: dict[tuple[str, ...], tuple[str, ...]] = {}
    for (key, _), buckets in sorted(texts_by_micro_batch.items()):
        texts = tuple(text for _, text in sorted(buckets, key=itemgetter(0)) if text)
        if texts not in known:
            known[texts] = tuple(dict.fromkeys(name for text in texts for name in text.split(",")))
        if texts:
            orders[key].append(known[texts])
    for key in _stopped(run.table("steps")):
        *earlier, last = orders.get(key) or [()]
        known_before = (earlier or orders.get(StepKey(key.attempt, key.step - 1), []))[-1:]
        arrive = known_before[0] if known_before else _trained(run.table("parameters"))
        if set(last) < set(arrive):
            orders[key] = earlier or known_before
    return {key: listed for key, listed in orders.items() if listed}


def _stopped(steps: pa.Table) -> set[StepKey]:
    """Return the steps that at least one rank did not end."""
    open_steps = steps.filter(pc.is_null(steps["end_ns"])).select(["attempt", "step"]).to_pylist()
    return {StepKey(row["attempt"], row["step"]) for row in open_steps}


def _trained(parameters: pa.Table) -> tuple[str, ...]:
    """Return the names of the parameters that get gradients."""
    return tuple(parameters.filter(parameters["requires_grad"])["name"].to_pylist())

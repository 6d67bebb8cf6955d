"""Model parallelism of a job: the process groups that exchange activations. Pure."""

from __future__ import annotations

from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from commprof.schema import Op, Purpose

_SHARING: Final = (Purpose.ACTIVATION, Purpose.PIPELINE)
# Purposes of any program beside its training, which commprof itself assigns.
_BESIDE: Final = (
    Purpose.CONTROL,
    Purpose.OBJECT,
    Purpose.INPUT,
    Purpose.METRIC,
    Purpose.EVALUATION,
    Purpose.CHECKPOINT,
    Purpose.PARAMETER_ACCESS,
)
_NAMELESS: Final = ("", "default_pg", "undefined")  # torch's description of a group without a name


def shape(operations: pa.Table) -> str:
    """Names and sizes of the groups that share a model in training steps, such as ``model 2, pipe 4``; else empty.

    Groups of replicas and of shards of their state do not count: their size does not change the work of a rank. If no
    collective of the training has a purpose, all groups but the largest count, since their purpose is not known.

    Args:
        operations: ``run_totals.operations`` by step, op, purpose, group_desc and group_size at least.
    """
    issued = operations.filter(
        pc.and_(pc.greater_equal(operations["step"], 0), pc.not_equal(operations["op"], Op.BARRIER))
    )
    rows = issued.group_by(["purpose", "group_desc", "group_size"]).aggregate([]).to_pylist()
    rows = [row for row in rows if row["purpose"] not in _BESIDE]
    if any(row["purpose"] for row in rows):
        sharing_groups = {
            (row["group_desc"], row["purpose"], row["group_size"])
            for row in rows
            if row["purpose"] in _SHARING
        }
    else:
        largest = max((row["group_size"] for row in rows), default=1)
        sharing_groups = {
            (row["group_desc"], None, row["group_size"]) for row in rows if row["group_size"] < largest
        }
    return ", ".join(sorted({f"{_name(desc, purpose)} {size}" for desc, purpose, size in sharing_groups}))


def _name(desc: str | None, purpose: str | None) -> str:
    """The name of a group; what it carries if it has no name."""
    name = desc or ""
    return (purpose or "groups of") if name in _NAMELESS else name

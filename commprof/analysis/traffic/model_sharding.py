"""How the ranks of a job share its model: the groups along which activations travel. Pure."""

from __future__ import annotations

from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from commprof.schema import Op, Purpose

_SHARING: Final = (Purpose.ACTIVATION, Purpose.PIPELINE)
# What any program issues beside its training, and commprof has a name for by itself.
_BESIDE: Final = (
    *(Purpose.CONTROL, Purpose.OBJECT, Purpose.INPUT, Purpose.METRIC, Purpose.EVALUATION, Purpose.CHECKPOINT),
    Purpose.PARAMETER_ACCESS,
)
_NAMELESS: Final = ("", "default_pg", "undefined")  # what torch calls a group whose program gave it no name


def shape(operations: pa.Table) -> str:
    """Name and size of the groups of the training steps that share a model, such as ``model 2, pipe 4``; else nothing.

    Replicas of a model, and pieces of its state, are no such groups: however they are divided, a rank does the same work. Of
    a program of whose training nobody says what it sends, all groups but the largest count, as it cannot be told what for.

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
    """What a group is called; what it carries where it has no name."""
    name = desc or ""
    return (purpose or "groups of") if name in _NAMELESS else name

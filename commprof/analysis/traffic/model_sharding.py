"""Model parallelism of a job: the process groups that exchange activations. Pure."""

from __future__ import annotations

from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from commprof.schema import Op, Purpose

_SHARING: Final = (Purpose.ACTIVATION, Purpose.PIPELINE)
# Purposes of traffic outside of the training itself, which commprof assigns in any program.
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
    """Return names and sizes of the groups that share a model in training steps, such as ``model 2, pipe 4``.

    The result is empty if there are no such groups. Groups of replicas, and groups that shard the state of
    replicas, do not count, because their size does not change the work of a rank. If no collective of the
    training has a purpose, all groups except the largest count, because their purpose is not known.

    Args:
        operations: The result of ``run_totals.operations`` by at least step, op, purpose, group_desc and
            group_size.
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
    """Return the name of a group, or the purpose of its traffic if it has no name."""
    name = desc or ""
    return (purpose or "groups of") if name in _NAMELESS else name

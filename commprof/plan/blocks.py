"""The blocks of a model, and what stage 3 sends if it gathers each of them as one unit."""

from __future__ import annotations

from collections.abc import Iterable

from commprof.plan.predictions import Job, Prediction, predict
from commprof.requested.configuration import zero_section
from commprof.requested.expectation import Expectation
from commprof.requested.parameters import Parameter
from commprof.schema import Op, Purpose


def blocks_of(parameters: Iterable[Parameter]) -> list[str]:
    """Return the names of the outermost numbered modules that contain modules, in model order.

    >>> blocks_of([Parameter("h.0.mlp.weight", 4), Parameter("h.0.norm.weight", 2), Parameter("head.weight", 4)])
    ['h.0']
    """
    names: dict[str, None] = {}
    for parameter in parameters:
        parts = parameter.module.split(".")
        depth = next((place for place, part in enumerate(parts) if part.isdecimal()), len(parts))
        if depth + 1 < len(parts):
            names[".".join(parts[: depth + 1])] = None
    return list(names)


def all_gathers(sent: Iterable[Expectation]) -> int:
    """Return the messages of a step that gather parameters."""
    return sum(
        row.count
        for row in sent
        if row.purpose == Purpose.PARAMETER_GATHER and row.issued_op == Op.ALL_GATHER
    )


def all_gathers_by_block(found: Prediction, job: Job) -> int | None:
    """Return the all-gathers of a step if each block is one unit; None without blocks, or if the config names units."""
    zero = zero_section(found.config)
    names = blocks_of(job.model.parameters)
    if not names or zero.get("leaf_module"):
        return None
    by_block = predict({**found.config, "zero_optimization": {**zero, "leaf_module": {"names": names}}}, job)
    return None if by_block.note else all_gathers(by_block.sent)

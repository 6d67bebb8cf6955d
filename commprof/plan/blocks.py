"""Find the blocks of a model, and count the all-gathers of stage 3 if each block is gathered as one unit."""

from __future__ import annotations

from collections.abc import Iterable

from commprof.plan.predictions import Job, Prediction, predict
from commprof.requested.configuration import zero_section
from commprof.requested.errors import RequestedError
from commprof.requested.expectation import Expectation
from commprof.requested.parameters import Parameter
from commprof.requested.zero.parameter_blocks import numbered_module
from commprof.schema import Op, Purpose


def blocks_of(parameters: Iterable[Parameter]) -> list[str]:
    """Return the names of the outermost numbered modules that contain modules, in model order.

    >>> blocks_of([Parameter("h.0.mlp.weight", 4), Parameter("h.0.norm.weight", 2), Parameter("head.weight", 4)])
    ['h.0']
    """
    numbered = {each.module: numbered_module(each.module) for each in parameters}
    return list(dict.fromkeys(name for module, name in numbered.items() if name not in ("", module)))


def all_gathers(sent: Iterable[Expectation]) -> int:
    """Return the number of all-gathers of parameters in a step."""
    return sum(
        row.count
        for row in sent
        if row.purpose == Purpose.PARAMETER_GATHER and row.issued_op == Op.ALL_GATHER
    )


def all_gathers_by_block(prediction: Prediction, job: Job) -> int | None:
    """Return the number of all-gathers of parameters in a step if each block is one unit.

    The result is None if the model has no blocks, if the config names units, or if the messages cannot be predicted.
    """
    zero = zero_section(prediction.config)
    names = blocks_of(job.model.parameters)
    if not names or zero.get("leaf_module"):
        return None
    key = gather_unit_key(job)
    keys = {key: "block"} if key == "stage3_gather_unit" else {key: {"names": names}}
    try:
        by_block = predict({**prediction.config, "zero_optimization": {**zero, **keys}}, job)
    except RequestedError:  # a different key of the config excludes this one
        return None
    return None if by_block.note else all_gathers(by_block.sent)


def gather_unit_key(job: Job) -> str:
    """Return the key of ``zero_optimization`` that makes the framework of ``job`` gather a block as one unit."""
    return "stage3_gather_unit" if job.framework == "zero_runtime" else "leaf_module"

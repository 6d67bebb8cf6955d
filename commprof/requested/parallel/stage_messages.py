"""The messages between the stages of a pipeline: activations, their gradients, and shared weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from commprof.requested.expectation import Expectation, row
from commprof.requested.parallel.activation_shapes import Shapes
from commprof.requested.parallel.axes import MODEL, PIPE, Axes, Line
from commprof.requested.parallel.shared_modules import ASSUMED
from commprof.requested.parameters import Parameter, item_bytes
from commprof.schema import Op, Purpose

OPENING_BYTES: Final = 4  # one number, so that neighbours are connected before the first step
RECORDED: Final = "sizes of activations as recorded: no config determines them"
BUILT_DTYPE: Final = "the element type in which the model was built"


def opened_channels(axes: Axes, wraps: bool) -> Expectation:
    """The number that each stage sends the next one at the start; with ``wraps`` the last one the first too."""
    lines = axes.lines(PIPE)
    payloads = [OPENING_BYTES] * (axes.size(PIPE) - 1 + wraps)
    return row("init", Purpose.PIPELINE, Op.SEND, payloads, len(lines[0]))._replace(groups=lines)


def crossing_tensors(axes: Axes, shapes: Shapes, micro_batches: int) -> list[Expectation]:
    """What all stages together send in a step: activations to the next one, and gradients back for each."""
    lines = axes.lines(PIPE)
    sizes = micro_batches * [
        size for each in shapes.crossings.values() for size in (*each.forward, *each.backward)
    ]
    if not sizes:
        return []
    note = ASSUMED if shapes.assumed else RECORDED
    expectation = row("step", Purpose.PIPELINE, Op.SEND, sizes, len(lines[0]), note)
    return [expectation._replace(groups=lines, exact=not shapes.assumed, bytes_exact=not shapes.assumed)]


def tied_groups(axes: Axes, parameter: Parameter) -> tuple[Line, ...]:
    """The groups of the stages that keep copies of ``parameter`` equal."""
    return tuple(tuple(line[stage] for stage in parameter.stage_numbers) for line in axes.lines(PIPE))


def tied_weights(
    axes: Axes, parameters: Sequence[Parameter], model_dtype: str | None, gradient_dtype: str | None
) -> list[Expectation]:
    """Messages that keep copies of a parameter equal: a broadcast at the start, a sum of their gradients in each step.

    Args:
        axes: of all ranks.
        parameters: of all stages.
        model_dtype: in which the model is trained; it is broadcast earlier, as it was built. None: not converted.
        gradient_dtype: in which gradients are summed; None is that of the parameter.
    """
    rows = []
    for each in parameters:
        if not each.is_tied:
            continue
        groups = tied_groups(axes, each)
        payload = each.numel * item_bytes("float32" if model_dtype else each.dtype)
        sent = row("init", Purpose.PARAMETER_BROADCAST, Op.BROADCAST, [payload], len(groups[0]))
        sure = model_dtype is None
        rows.append(
            sent._replace(groups=groups, bytes_exact=sure, least_bytes=each.numel, estimate=BUILT_DTYPE)
        )
        if each.requires_grad:
            size = each.numel * item_bytes(gradient_dtype or model_dtype or each.dtype)
            note = f"{each.name}: stages {', '.join(map(str, each.stage_numbers))} have copies, whose gradients are summed"
            summed = row("step", Purpose.GRADIENT_REDUCE, Op.ALL_REDUCE, [size], len(groups[0]), note)
            rows.append(summed._replace(groups=groups))
    return rows


def model_lines(axes: Axes) -> tuple[Line, ...]:
    """The ranks that hold one model together: its stages and shards."""
    return axes.lines(PIPE, MODEL)

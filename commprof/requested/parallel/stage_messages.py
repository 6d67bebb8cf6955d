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

OPENING_BYTES: Final = 4  # one number, which connects neighbors before the first step
RECORDED: Final = "sizes of activations as recorded: no config determines them"
BUILT_DTYPE: Final = "the element type in which the model was built"


def opened_channels(axes: Axes, wraps: bool) -> Expectation:
    """Return the messages by which each stage sends a number to the next stage at the start.

    With ``wraps`` the last stage also sends a number to the first stage.
    """
    lines = axes.lines(PIPE)
    payloads = [OPENING_BYTES] * (axes.size(PIPE) - 1 + wraps)
    return row("init", Purpose.PIPELINE, Op.SEND, payloads, len(lines[0]))._replace(groups=lines)


def crossing_tensors(axes: Axes, shapes: Shapes, micro_batches: int) -> list[Expectation]:
    """Return the messages of all stages in a step: activations to the next stage, and their gradients back."""
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
    """Return the groups of ranks whose stages keep their copies of ``parameter`` equal."""
    return tuple(tuple(line[stage] for stage in parameter.stage_numbers) for line in axes.lines(PIPE))


def tied_weights(
    axes: Axes, parameters: Sequence[Parameter], model_dtype: str | None, gradient_dtype: str | None
) -> list[Expectation]:
    """Return the messages that keep the copies of a parameter in several stages equal.

    The messages are a broadcast at the start, and a sum of the gradients in each step.

    Args:
        axes: The axes of all ranks.
        parameters: The parameters of all stages.
        model_dtype: The element type in which the model is trained, or None if the config does not convert the model.
            The broadcast is sent before the conversion, in the type in which the model was built.
        gradient_dtype: The element type in which gradients are summed, or None for the type of the parameter.
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
    """Return the groups of ranks that together have one model, with all its stages and shards."""
    return axes.lines(PIPE, MODEL)

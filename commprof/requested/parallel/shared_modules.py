"""Predicts the messages of tensor-parallel modules and of sequence-parallel attention.

R is the number of rows of activations of a layer in a micro-batch. I and O are the bytes of a row of inputs and
outputs of the full layer:

=============== ==================== ==================== ============================ ===========================
module          forward              backward             forward, sequence_parallel   backward, sequence_parallel
=============== ==================== ==================== ============================ ===========================
column          -                    all_reduce R I       all_gather R I               reduce_scatter R I
column_gathered all_gather R O       all_reduce R I       all_gather R I, R O          reduce_scatter R I
row             all_reduce R O       -                    reduce_scatter R O           all_gather R O
vocabulary      all_reduce R O       -                    reduce_scatter R O           all_gather R O
sequence        -                    -                    -                            all_reduce of each gradient
split           -                    -                    -                            all_gather R O
cross entropy   all_reduce 4 R, 8 R  -                    the same                     -
=============== ==================== ==================== ============================ ===========================

With sequence_parallel the gradient of a row layer's bias is summed too. Cross entropy is computed in fp32. Attention
needs one all_to_all each for query, key, value and result, and the same number in the backward pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from fractions import Fraction
from math import prod
from typing import Final, NamedTuple

from commprof.requested.expectation import Expectation, row
from commprof.requested.parallel.activation_shapes import Shapes
from commprof.requested.parallel.axes import Line
from commprof.requested.parameters import Parameter, item_bytes
from commprof.schema import Op, Purpose

_LOSS_BYTES: Final = 4  # fp32
ASSUMED: Final = "the sizes of activations are assumed: those of a transformer of that size"
RECORDED: Final = "rows of activations as recorded: no config determines their number"


class ModuleMessage(NamedTuple):
    """One message that a module sends in each micro-batch.

    Attributes:
        module: The name of the module.
        op: The operation.
        row_bytes: The payload bytes per row of activations.
        fixed_bytes: The payload bytes that do not depend on the activations.
        forward: Whether the message belongs to the forward pass.
    """

    module: str
    op: Op
    row_bytes: int
    fixed_bytes: int = 0
    forward: bool = True


def module_messages(
    parameters: Iterable[Parameter], dtype: str | None, shares_sequence: bool
) -> list[ModuleMessage]:
    """Return the messages of all modules that are partitioned, or that work on partitioned sequences.

    Args:
        parameters: All parameters that a rank has.
        dtype: The element type of the model, or None for the type of each parameter.
        shares_sequence: The value of ``tensor_parallel.sequence_parallel``.
    """
    modules: dict[str, list[Parameter]] = {}
    for parameter in parameters:
        if parameter.cut is not None:
            modules.setdefault(parameter.module, []).append(parameter)
    return [
        message for name, own in modules.items() for message in _of_module(name, own, dtype, shares_sequence)
    ]


def _of_module(
    name: str, own: Sequence[Parameter], dtype: str | None, shares_sequence: bool
) -> list[ModuleMessage]:
    how = own[0].cut
    weight = max(own, key=lambda each: len(each.extents))
    item = item_bytes(dtype or weight.dtype)
    outputs, inputs = _widths(weight)
    messages: list[ModuleMessage] = []
    if how in ("column", "column_gathered"):
        if shares_sequence:
            messages.append(ModuleMessage(name, Op.ALL_GATHER, inputs * item))
        if how == "column_gathered":
            messages.append(ModuleMessage(name, Op.ALL_GATHER, outputs * item))
        back = Op.REDUCE_SCATTER if shares_sequence else Op.ALL_REDUCE
        messages.append(ModuleMessage(name, back, inputs * item, forward=False))
    elif how in ("row", "vocabulary"):
        width = outputs if how == "row" else inputs
        there = Op.REDUCE_SCATTER if shares_sequence else Op.ALL_REDUCE
        messages.append(ModuleMessage(name, there, width * item))
        if shares_sequence:
            messages.append(ModuleMessage(name, Op.ALL_GATHER, width * item, forward=False))
            messages += _summed([each for each in own if each is not weight], name, dtype)
    elif how == "split":
        width = inputs if len(weight.extents) > 1 else 1
        messages.append(ModuleMessage(name, Op.ALL_GATHER, width * item, forward=False))
    elif how == "sequence":
        messages += _summed(own, name, dtype)
    return messages


def _widths(weight: Parameter) -> tuple[int, int]:
    """Return the outputs and inputs of the full layer, or the vocabulary size and width of an embedding."""
    extents = weight.whole_extents
    return (extents[0], prod(extents[1:])) if extents else (0, 0)


def _summed(parameters: Iterable[Parameter], module: str, dtype: str | None) -> list[ModuleMessage]:
    return [
        ModuleMessage(module, Op.ALL_REDUCE, 0, each.numel * item_bytes(dtype or each.dtype), forward=False)
        for each in parameters
        if each.requires_grad
    ]


def loss_messages(modules: Iterable[str]) -> list[ModuleMessage]:
    """Return the messages of vocabulary-parallel cross entropies: a maximum, then the sum and the target logit."""
    return [
        ModuleMessage(name, Op.ALL_REDUCE, size)
        for name in modules
        for size in (_LOSS_BYTES, 2 * _LOSS_BYTES)
    ]


def expected_activations(
    messages: Sequence[ModuleMessage], shapes: Shapes, lines: Sequence[Line], micro_batches: int
) -> list[Expectation]:
    """Return the messages of a step along the model axis, one row for each operation.

    Messages of modules without a known number of rows are left out.

    Args:
        messages: The messages of all modules on the ranks of ``lines``.
        shapes: The number of rows of each module, and how often each message is sent.
        lines: The groups, each of which sends all messages.
        micro_batches: The number of micro-batches of the step.
    """
    counts: Counter[str] = Counter()
    sums: dict[str, Fraction] = {}
    if not lines or len(lines[0]) == 1:
        return []
    for each in messages:
        by_rows = shapes.rows_of(each.module) * each.row_bytes * shapes.scale
        times = micro_batches * shapes.calls.get((each.module, str(each.op)), 1)
        if times and (by_rows or each.fixed_bytes):
            counts[str(each.op)] += times
            sums[str(each.op)] = sums.get(str(each.op), Fraction()) + times * (by_rows + each.fixed_bytes)
    for op, size in (each for sent in shapes.others.values() for each in sent):
        counts[op] += micro_batches
        sums[op] = sums.get(op, Fraction()) + micro_batches * size * shapes.scale
    return [_placed(Op(op), counts[op], total, lines, shapes) for op, total in sums.items()]


def expected_exchanges(shapes: Shapes, lines: Sequence[Line], micro_batches: int) -> list[Expectation]:
    """Return the messages of a step along the sequence axis."""
    sizes = [size for each in shapes.exchanged.values() for size in (*each.forward, *each.backward)]
    if not sizes or not lines or len(lines[0]) == 1:
        return []
    total = sum(sizes) * micro_batches * shapes.scale
    return [_placed(Op.ALL_TO_ALL, len(sizes) * micro_batches, total, lines, shapes)]


def _placed(op: Op, number: int, total: Fraction, lines: Sequence[Line], shapes: Shapes) -> Expectation:
    sure = not shapes.assumed
    expectation = row(
        "step", Purpose.ACTIVATION, op, [int(total)], len(lines[0]), RECORDED if sure else ASSUMED
    )
    return expectation._replace(count=number, groups=tuple(lines), exact=sure, bytes_exact=sure)

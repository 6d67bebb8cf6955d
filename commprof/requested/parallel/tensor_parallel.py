"""Predicts the messages of a module in a plan of ``parallelize_module``, from its style, parameters and input shapes.

A style lays out the input of its module over the ranks of the mesh, and then the output. A layout is replicated
(``R``), sharded along a dimension (``S1`` for dimension 1), or partial sums (``P``). torch's ``redistribute`` converts
between layouts by an all_gather, an all_reduce, a reduce_scatter or an all_to_all. The backward pass converts back.

Between input and output, ``ColwiseParallel`` computes outputs sharded along the last dimension from replicated inputs.
``RowwiseParallel`` computes partial sums from inputs that are sharded along the last dimension.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Final, NamedTuple

from commprof.requested.errors import RequestedError
from commprof.requested.expectation import Expectation
from commprof.requested.parameters import item_bytes
from commprof.requested.wrappers.arguments import DISTRIBUTED, Tensor, Wrapper, matches
from commprof.requested.zero.partition import padded
from commprof.schema import Op, Purpose

COLWISE, ROWWISE, SEQUENCE = "ColwiseParallel", "RowwiseParallel", "SequenceParallel"
PREPARED: Final = ("PrepareModuleInput", "PrepareModuleOutput")
RULED: Final = (COLWISE, ROWWISE, SEQUENCE, *PREPARED)
LOCAL: Final = "L"  # a plain tensor, whose layout the style determines
REPLICATED, PARTIAL = "R", "P"
_LEAVES: Final = (
    "modules of parallelize_module return DTensors, and the run does not publish what the program "
    "does with them"
)
_PARTIAL_GRADIENTS: Final = (
    "how often optimizers other than SGD and Adam sum partial gradients is not covered by the rules"
)
_NO_STYLE: Final = "its style is not covered by the rules"
_NORM: Final = "norms over several meshes are not covered by the rules"
_PASS: Final = re.compile(
    r"(?P<kind>[IOGXY])(?P<extents>[\dx]*):(?P<dtype>\w+):(?P<layout>[LRP]|S\d+):(?P<number>\d+)"
    r"(:(?P<output_dtype>\w+))?(@(?P<gradient>[LRP]|S\d+))?;"
    r"|U(?P<places>[\d.]+):(?P<optimizer>[\w+]+);"
)
_FSDP: Final = "fully_shard"
# How often an optimizer of torch reads a gradient. With partial sums, each read causes an all_reduce.
_READS: Final = {"SGD": 1, "SGD+nesterov": 2, "Adam": 3, "AdamW": 3, "Adam+fused": 1, "AdamW+fused": 1}


class _Argument(NamedTuple):
    """A tensor argument of a module.

    Attributes:
        extents: The full shape.
        dtype: The element type.
        layout: The layout with which the argument arrived.
        local: Whether the argument was a plain tensor.
    """

    extents: tuple[int, ...]
    dtype: str
    layout: str
    local: bool


@dataclass(frozen=True)
class TensorParallel:
    """The rules for one module of a plan.

    Attributes:
        wrapper: The style, the mesh, and the parameters as they were before sharding.
    """

    wrapper: Wrapper

    @property
    def unpredicted(self) -> dict[str, str]:
        """The purposes that the rules do not predict, each with the reason."""
        reasons = {str(Purpose.GRADIENT_NORM): _NORM, str(Purpose.PARAMETER_BROADCAST): DISTRIBUTED}
        if self._style not in RULED:
            reasons[str(Purpose.ACTIVATION)] = reasons[str(Purpose.PARAMETER_BROADCAST)] = _NO_STYLE
            reasons[str(Purpose.GRADIENT_REDUCE)] = _NO_STYLE
        elif not self.wrapper.arguments.get("use_local_output"):
            reasons[str(Purpose.ACTIVATION)] = _LEAVES
        if self._style == SEQUENCE and self.wrapper.trained:
            reasons[str(Purpose.GRADIENT_REDUCE)] = _PARTIAL_GRADIENTS
        return reasons

    def construction(self) -> list[Expectation]:
        """Return the messages that distribute the parameters: a scatter for shards, a broadcast for replicas."""
        arguments = self.wrapper.arguments
        if self._style not in (COLWISE, ROWWISE) or arguments.get("src_data_rank") is None:
            return []
        rows: list[Expectation] = []
        for each in self.wrapper.parameters:
            dimension = self._sharded_dimension(each)
            op = Op.BROADCAST if dimension is None else Op.SCATTER
            numel = each.numel if dimension is None else self._padded_numel(each.extents, dimension)
            rows += self.wrapper.sent(Purpose.PARAMETER_BROADCAST, op, [numel * item_bytes(each.dtype)])
        return rows

    def passes(self, passes: str, state: None) -> tuple[list[Expectation], None]:
        """Return the messages of ``passes``, and None because no state is kept between steps.

        Raises:
            RequestedError: a pass is not known.
        """
        rows: list[Expectation] = []
        known = passes if self._style in RULED else ""
        for match in matches(known, _PASS, "which passes a module of parallelize_module ran"):
            rows += self._ran(match) if match["kind"] else self._stepped(match["places"], match["optimizer"])
        return rows, None

    def _ran(self, match: re.Match[str]) -> list[Expectation]:
        number = int(match["number"])
        if self._style in PREPARED:
            declared, desired = self._layouts(number)
        else:
            declared, desired = self._input_layout, self._desired_input_layout
        extents = tuple(int(each) for each in match["extents"].split("x") if each)
        local = match["layout"] == LOCAL
        layout = _of_rank(declared if local else match["layout"], len(extents))
        argument = _Argument(
            self._full_extents(extents, layout) if local else extents, match["dtype"], layout, local
        )
        kind, gradient = match["kind"], match["gradient"]
        if kind in "IX":
            return self._redistributed(argument, declared, desired)
        if kind == "O":
            output = self._output(argument, match["output_dtype"])
            wanted = _of_rank(self._output_layout, len(output.extents))
            return self._sent(output, output.layout, wanted)
        if gradient is None:
            raise RequestedError("a backward pass of a module of parallelize_module has no gradient")
        if kind == "Y":
            arrived = _of_gradient(gradient, desired, len(extents))
            return self._returned(argument, declared, desired, arrived)
        return self._backward(argument, match["output_dtype"], gradient, needs_gradient=number > 0)

    def _stepped(self, places: str, optimizer: str) -> list[Expectation]:
        """Return the all_reduces of gradients that are partial sums.

        Each time an optimizer reads such a gradient, torch sums it. ``fully_shard`` sums it once, in the element type
        that follows the name ``fully_shard`` in ``optimizer``.
        """
        payloads = []
        kind, _, dtype = optimizer.partition("+")
        for place in map(int, places.split(".")):
            if place >= len(self.wrapper.parameters):
                raise RequestedError(f"module {self.wrapper.unit!r} has no parameter {place}")
            parameter = self.wrapper.parameters[place]
            payloads.append(parameter.numel * item_bytes(dtype) if kind == _FSDP else parameter.nbytes)
        reads = 1 if kind == _FSDP else _READS.get(optimizer, 0)
        return self.wrapper.sent(Purpose.GRADIENT_REDUCE, Op.ALL_REDUCE, payloads * reads)

    def _backward(
        self, argument: _Argument, dtype: str | None, gradient: str, *, needs_gradient: bool
    ) -> list[Expectation]:
        """Return the messages from the gradient of the output to the gradient of the input."""
        output = self._output(argument, dtype)
        if self._style == SEQUENCE:
            return self._returned(argument, self._input_layout, self._desired_input_layout, output.layout)
        wanted = _of_rank(self._output_layout, len(output.extents))
        arrived = _of_gradient(gradient, wanted, len(output.extents))
        rows = []
        if output.layout != wanted:
            rows = self._sent(output, arrived, _back_to(output.layout, arrived))
        if needs_gradient and not self._is_embedding:
            own = PARTIAL if self._style == COLWISE else _of_rank("S-1", len(argument.extents))
            rows += self._returned(argument, self._input_layout, self._desired_input_layout, own)
        return rows

    def _redistributed(self, argument: _Argument, declared: str, desired: str) -> list[Expectation]:
        """Return the messages that convert the input to the layout that the module needs.

        torch compares the layouts of the plan, not the layout of the input.
        """
        asks = argument.layout != _of_rank(desired, len(argument.extents))
        if declared == desired and self._style != SEQUENCE:
            asks = False
        return self._sent(argument, argument.layout, _of_rank(desired, len(argument.extents))) if asks else []

    def _returned(self, argument: _Argument, declared: str, desired: str, gradient: str) -> list[Expectation]:
        """Return the messages that convert the input's gradient back through the layouts of :meth:`_redistributed`."""
        rows = []
        if declared != desired or self._style == SEQUENCE:
            back = _back_to(argument.layout, gradient)
            rows, gradient = self._sent(argument, gradient, back), back
        if argument.local:
            rows += self._sent(argument, gradient, _without_partial(argument.layout))
        return rows

    def _output(self, argument: _Argument, dtype: str | None) -> _Argument:
        """Return the output of the module before its style converts the layout."""
        extents, layout = argument.extents, PARTIAL
        if self._style == SEQUENCE:
            layout = _of_rank(self._desired_input_layout, len(extents))
        elif self._is_embedding:
            extents = (*extents, self._weight.extents[-1])
        else:
            extents = (*extents[:-1], self._weight.extents[0])
        if self._style == COLWISE:
            layout = _of_rank("S-1", len(extents))
        return _Argument(extents, dtype or argument.dtype, layout, local=False)

    def _sent(self, tensor: _Argument, before: str, after: str) -> list[Expectation]:
        """Return the messages that convert the layout ``before`` to ``after``. Replicated tensors need no message."""
        if before in (after, REPLICATED) or len(self.wrapper.ranks) == 1:
            return []
        size = item_bytes(tensor.dtype)
        if before == PARTIAL and after == REPLICATED:
            return self._message(Op.ALL_REDUCE, prod(tensor.extents) * size)
        if before == PARTIAL:
            return self._message(
                Op.REDUCE_SCATTER, self._padded_numel(tensor.extents, _dimension(after)) * size
            )
        if after == REPLICATED:
            return self._message(Op.ALL_GATHER, self._padded_numel(tensor.extents, _dimension(before)) * size)
        if after == PARTIAL:
            raise RequestedError(f"torch does not convert shards (layout {before}) to partial sums (P)")
        numel = self._padded_numel(tensor.extents, _dimension(before), _dimension(after))
        # On CPUs torch gathers the full tensor, and each rank keeps its own shard.
        if self.wrapper.arguments.get("device") == "cpu":
            return self._message(Op.ALL_GATHER, numel * size)
        return self._message(Op.ALL_TO_ALL, numel // len(self.wrapper.ranks) * size)

    def _message(self, op: Op, payload: int) -> list[Expectation]:
        return self.wrapper.sent(Purpose.ACTIVATION, op, [payload])

    def _padded_numel(self, extents: Sequence[int], *dimensions: int) -> int:
        """Return the number of elements if ``dimensions`` are padded to a multiple of the number of ranks."""
        world = len(self.wrapper.ranks)
        return prod(
            padded(each, world) if place in dimensions else each for place, each in enumerate(extents)
        )

    def _full_extents(self, extents: tuple[int, ...], layout: str) -> tuple[int, ...]:
        """Return the full shape of a tensor whose shards have ``extents``."""
        if layout in (REPLICATED, PARTIAL):
            return extents
        world, sharded = len(self.wrapper.ranks), _dimension(layout)
        return tuple(each * world if place == sharded else each for place, each in enumerate(extents))

    def _sharded_dimension(self, parameter: Tensor) -> int | None:
        if self._style == COLWISE:
            return 1 if self._is_embedding else 0
        if self._is_embedding:
            return 0
        return 1 if parameter.name == "weight" else None

    @property
    def _style(self) -> str:
        return str(self.wrapper.arguments.get("style"))

    @property
    def _is_embedding(self) -> bool:
        return self.wrapper.arguments.get("module") == "embedding"

    @property
    def _weight(self) -> Tensor:
        for each in self.wrapper.parameters:
            if each.name == "weight" and len(each.extents) == 2:
                return each
        raise RequestedError(
            f"module {self.wrapper.unit!r} of parallelize_module has no matrix called weight"
        )

    @property
    def _input_layout(self) -> str:
        name = "sequence_layout" if self._style == SEQUENCE else "input_layout"
        return str(self.wrapper.arguments.get(name))

    @property
    def _desired_input_layout(self) -> str:
        if self._style == SEQUENCE:
            return self._input_layout
        return "S-1" if self._style == ROWWISE and not self._is_embedding else REPLICATED

    @property
    def _output_layout(self) -> str:
        if self._style == SEQUENCE:
            return self._input_layout
        return str(self.wrapper.arguments.get("output_layout"))

    def _layouts(self, number: int) -> tuple[str, str]:
        """Return the layouts of argument ``number`` in the plan: on arrival, and as the module needs it."""
        listed = self.wrapper.arguments.get("layouts")
        try:
            declared, desired = listed[number]  # type: ignore[index]
        except (TypeError, ValueError, IndexError) as error:
            raise RequestedError(
                f"layout {number} of module {self.wrapper.unit!r} of parallelize_module is not among {listed!r}"
            ) from error
        return str(declared), str(declared if desired is None else desired)


def _of_rank(layout: str, rank: int) -> str:
    """Return ``layout`` with a dimension that is not negative, for a tensor with ``rank`` dimensions."""
    match = re.fullmatch(r"R|P|S(-?\d+)", layout)
    if match is None:
        raise RequestedError(f"a layout is {layout!r}; expected R, P, or S and a dimension")
    if match[1] is None:
        return layout
    dimension = int(match[1])
    dimension += rank if dimension < 0 else 0
    if not 0 <= dimension < rank:
        raise RequestedError(
            f"layout {layout} is of a dimension that a tensor with {rank} dimensions does not have"
        )
    return f"S{dimension}"


def _dimension(layout: str) -> int:
    return int(layout[1:])


def _without_partial(layout: str) -> str:
    """Return the layout of the gradient of a tensor with this layout."""
    return REPLICATED if layout == PARTIAL else layout


def _of_gradient(gradient: str, layout: str, rank: int) -> str:
    """Return the layout of a gradient. A plain gradient has the layout of its tensor."""
    return _of_rank(_without_partial(layout) if gradient == LOCAL else gradient, rank)


def _back_to(layout: str, gradient: str) -> str:
    """Return the layout to which the gradient of a tensor with ``layout`` is converted.

    Gradients that are partial sums may stay partial sums. Other gradients are never converted to partial sums.
    """
    return layout if gradient == PARTIAL else _without_partial(layout)

"""Composed collectives in the group of all ranks, for gradient sums and parameter gathers along the axes of a grid.

All other messages stay plain: small messages (norms, checks), rooted collectives (reduce, broadcast), and
lists of rows with different lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, Final

import torch

from commprof import hooks
from zero_runtime.comm import Call, ReduceOp
from zero_runtime.experimental.topology_aware import composition
from zero_runtime.experimental.topology_aware.axis_grid import Grid
from zero_runtime.experimental.topology_aware.composition import Composed, Steps
from zero_runtime.experimental.topology_aware.composition_choice import Choice

PURPOSES: Final = ("gradient_reduce", "parameter_gather")
Issue = Callable[[], Any]  # a function that issues the call unchanged


class ComposedMessages:
    """An observer that replaces collectives of the group of all ranks by composed collectives.

    Args:
        grid: The axes, with this rank's groups.
        choice: The choice of the messages that are composed.
        implementation: The implementation of a reduce_scatter along an axis: ``native`` or ``all_to_all``.

    Attributes:
        methods: The observed methods (see :class:`zero_runtime.comm.Observer`), each with the method that
            composes it.
    """

    def __init__(self, grid: Grid, choice: Choice, implementation: str) -> None:
        self._groups = grid.groups
        self._world_size = prod(grid.sizes)
        self._choice = choice
        self._implementation = implementation
        self.methods: Final[Mapping[str, Callable[..., Any]]] = {
            "all_reduce": self._all_reduce,
            "start_all_reduce": self._start_all_reduce,
            "all_gather": self._all_gather,
            "all_gather_single": self._all_gather_single,
            "start_all_gather": self._start_all_gather,
            "reduce_scatter_single": self._reduce_scatter_single,
            "sum_rows": self._sum_rows,
        }

    def observe(self, call: Call, issue: Issue) -> Any:
        """Issue ``call`` along the axes if ``choice`` composes it; see :class:`zero_runtime.comm.Observer`."""
        return self.methods[call.method](issue, **call.arguments)

    def _composes(self, operation: str, numel: int, like: torch.Tensor, why: hooks.tag | None) -> bool:
        """Return whether a message is composed. ``numel`` is the payload, S of nccl-tests, in elements."""
        wanted = why is not None and why.purpose in PURPOSES and numel > 0
        return wanted and self._choice.composes(operation, numel * like.element_size())

    def _all_reduce(
        self, issue: Issue, tensor: torch.Tensor, op: Any, why: hooks.tag | None, asynchronous: bool
    ) -> Any:
        composes = self._composes("all_reduce", tensor.numel(), tensor, why)
        if not composes or op != ReduceOp.SUM or not tensor.is_contiguous():
            return issue()
        return _run(composition.all_reduce(tensor, self._groups, self._implementation, why, asynchronous))

    def _start_all_reduce(self, issue: Issue, tensor: torch.Tensor, why: hooks.tag | None) -> Any:
        if not self._composes("all_reduce", tensor.numel(), tensor, why) or not tensor.is_contiguous():
            return issue()
        return Composed(composition.all_reduce(tensor, self._groups, self._implementation, why, True))

    def _all_gather_single(
        self,
        issue: Issue,
        output: torch.Tensor,
        tensor: torch.Tensor,
        why: hooks.tag | None,
        asynchronous: bool,
    ) -> Any:
        if not self._composes("all_gather", output.numel(), output, why) or not output.is_contiguous():
            return issue()
        return _run(composition.all_gather(output, tensor, self._groups, why, asynchronous))

    def _start_all_gather(
        self, issue: Issue, output: torch.Tensor, tensor: torch.Tensor, why: hooks.tag | None
    ) -> Any:
        if not self._composes("all_gather", output.numel(), output, why) or not output.is_contiguous():
            return issue()
        return Composed(composition.all_gather(output, tensor, self._groups, why, True))

    def _all_gather(
        self,
        issue: Issue,
        outputs: list[torch.Tensor],
        tensor: torch.Tensor,
        why: hooks.tag | None,
        asynchronous: bool,
    ) -> Any:
        """Gather rows of equal length into one buffer, and copy them to the outputs.

        Rows of different lengths are gathered with the plain collective.
        """
        alike = all(each.numel() == tensor.numel() for each in outputs)
        if not alike or not self._composes("all_gather", tensor.numel() * len(outputs), tensor, why):
            return issue()
        return _run(self._gather_apart(outputs, tensor, why, asynchronous))

    def _gather_apart(
        self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, why: hooks.tag | None, asynchronous: bool
    ) -> Steps:
        joined = tensor.new_empty(len(outputs) * tensor.numel())
        yield from composition.all_gather(joined, tensor, self._groups, why, asynchronous)
        for output, row in zip(outputs, joined.chunk(len(outputs)), strict=True):
            output.copy_(row.view(output.shape))

    def _reduce_scatter_single(
        self,
        issue: Issue,
        output: torch.Tensor,
        rows: torch.Tensor,
        why: hooks.tag | None,
        asynchronous: bool,
    ) -> Any:
        if not self._composes("reduce_scatter", rows.numel(), rows, why):
            return issue()
        numels = [output.numel()] * self._world_size
        result: list[torch.Tensor] = []
        return _run(self._scatter_into(output, result, rows, numels, why, asynchronous))

    def _scatter_into(
        self,
        output: torch.Tensor,
        result: list[torch.Tensor],
        rows: torch.Tensor,
        numels: Sequence[int],
        why: hooks.tag | None,
        asynchronous: bool,
    ) -> Steps:
        yield from self._reduce_scatter(result, rows, numels, why, asynchronous)
        output.copy_(result[0].view(output.shape))

    def _sum_rows(
        self,
        issue: Issue,
        received: torch.Tensor,
        rows: torch.Tensor,
        row_numels: Sequence[int],
        why: hooks.tag | None,
        asynchronous: bool,
    ) -> Any:
        """Sum the rows. A composed sum does not use ``received``."""
        if not self._composes("reduce_scatter", rows.numel(), rows, why):
            return issue()
        result: list[torch.Tensor] = []
        work = _run(self._reduce_scatter(result, rows, row_numels, why, asynchronous))
        return work, lambda: result[0]

    def _reduce_scatter(
        self,
        result: list[torch.Tensor],
        rows: torch.Tensor,
        numels: Sequence[int],
        why: hooks.tag | None,
        asynchronous: bool,
    ) -> Steps:
        return composition.reduce_scatter(
            result, rows.view(-1), numels, self._groups, self._implementation, why, asynchronous
        )


def _run(steps: Steps) -> Composed | None:
    """Start ``steps``, and return the work handle, or None if all messages are complete (as blocking messages are)."""
    composed = Composed(steps)
    return None if composed.done else composed

"""Composed collectives in the group of all ranks: gradient sums and parameter gathers along the axes of a grid.

Other messages stay plain: small ones (norms, checks), rooted collectives (reduce, broadcast), and lists of rows of different
lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from commprof import hooks
from zero_runtime.comm import DataParallelGroup, ReduceOp
from zero_runtime.experimental.topology_aware import composition
from zero_runtime.experimental.topology_aware.axis_grid import Grid
from zero_runtime.experimental.topology_aware.composition import Composed, Steps
from zero_runtime.experimental.topology_aware.composition_choice import Choice

PURPOSES: Final = ("gradient_reduce", "parameter_gather")


class ComposedMessages:
    """The composed collectives of one group, which replace its own methods of the same names.

    Args:
        group: all ranks.
        grid: the axes.
        choice: which messages are composed.
        implementation: of a reduce_scatter along an axis: ``native`` or ``all_to_all``.
    """

    def __init__(self, group: DataParallelGroup, grid: Grid, choice: Choice, implementation: str) -> None:
        self._plain_all_reduce = group.all_reduce
        self._plain_start_all_reduce = group.start_all_reduce
        self._plain_all_gather = group.all_gather
        self._plain_all_gather_single = group.all_gather_single
        self._plain_start_all_gather = group.start_all_gather
        self._plain_reduce_scatter_single = group.reduce_scatter_single
        self._plain_sum_rows = group.sum_rows
        self._world_size = group.world_size
        self._groups = grid.groups
        self._choice = choice
        self._implementation = implementation

    def install(self, group: DataParallelGroup) -> None:
        """Replace the methods of ``group``."""
        for name in (
            "all_reduce",
            "start_all_reduce",
            "all_gather",
            "all_gather_single",
            "start_all_gather",
            "reduce_scatter_single",
            "sum_rows",
        ):
            setattr(group, name, getattr(self, name))

    def _composes(self, operation: str, numel: int, like: torch.Tensor, why: hooks.tag | None) -> bool:
        """``numel``: elements of the payload, S of nccl-tests."""
        wanted = why is not None and why.purpose in PURPOSES and numel > 0
        return wanted and self._choice.composes(operation, numel * like.element_size())

    def all_reduce(
        self,
        tensor: torch.Tensor,
        op: Any = ReduceOp.SUM,
        why: hooks.tag | None = None,
        asynchronous: bool = False,
    ) -> Any:
        """As of the group."""
        composes = self._composes("all_reduce", tensor.numel(), tensor, why)
        if not composes or op != ReduceOp.SUM or not tensor.is_contiguous():
            return self._plain_all_reduce(tensor, op=op, why=why, asynchronous=asynchronous)
        return _run(composition.all_reduce(tensor, self._groups, self._implementation, why, asynchronous))

    def start_all_reduce(self, tensor: torch.Tensor, why: hooks.tag | None = None) -> Any:
        """As of the group."""
        if not self._composes("all_reduce", tensor.numel(), tensor, why) or not tensor.is_contiguous():
            return self._plain_start_all_reduce(tensor, why=why)
        return Composed(composition.all_reduce(tensor, self._groups, self._implementation, why, True))

    def all_gather_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        why: hooks.tag | None = None,
        asynchronous: bool = False,
    ) -> Any:
        """As of the group."""
        if not self._composes("all_gather", output.numel(), output, why) or not output.is_contiguous():
            return self._plain_all_gather_single(output, tensor, why=why, asynchronous=asynchronous)
        return _run(composition.all_gather(output, tensor, self._groups, why, asynchronous))

    def start_all_gather(
        self, output: torch.Tensor, tensor: torch.Tensor, why: hooks.tag | None = None
    ) -> Any:
        """As of the group."""
        if not self._composes("all_gather", output.numel(), output, why) or not output.is_contiguous():
            return self._plain_start_all_gather(output, tensor, why=why)
        return Composed(composition.all_gather(output, tensor, self._groups, why, True))

    def all_gather(
        self,
        outputs: list[torch.Tensor],
        tensor: torch.Tensor,
        why: hooks.tag | None = None,
        asynchronous: bool = False,
    ) -> Any:
        """As of the group; rows of one length are gathered in one buffer and copied to the outputs."""
        alike = all(each.numel() == tensor.numel() for each in outputs)
        if not alike or not self._composes("all_gather", tensor.numel() * len(outputs), tensor, why):
            return self._plain_all_gather(outputs, tensor, why=why, asynchronous=asynchronous)
        return _run(self._gather_apart(outputs, tensor, why, asynchronous))

    def _gather_apart(
        self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, why: hooks.tag | None, asynchronous: bool
    ) -> Steps:
        joined = tensor.new_empty(len(outputs) * tensor.numel())
        yield from composition.all_gather(joined, tensor, self._groups, why, asynchronous)
        for output, row in zip(outputs, joined.chunk(len(outputs)), strict=True):
            output.copy_(row.view(output.shape))

    def reduce_scatter_single(
        self,
        output: torch.Tensor,
        rows: torch.Tensor,
        why: hooks.tag | None = None,
        asynchronous: bool = False,
    ) -> Any:
        """As of the group."""
        if not self._composes("reduce_scatter", rows.numel(), rows, why):
            return self._plain_reduce_scatter_single(output, rows, why=why, asynchronous=asynchronous)
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

    def sum_rows(
        self,
        received: torch.Tensor,
        rows: torch.Tensor,
        row_numels: Sequence[int],
        why: hooks.tag | None = None,
        asynchronous: bool = False,
    ) -> tuple[Any, Callable[[], torch.Tensor]]:
        """As of the group; ``received`` is not used."""
        if not self._composes("reduce_scatter", rows.numel(), rows, why):
            return self._plain_sum_rows(received, rows, row_numels, why=why, asynchronous=asynchronous)
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
    """Start ``steps``; None if they are complete, as blocking ones are."""
    composed = Composed(steps)
    return None if composed.done else composed

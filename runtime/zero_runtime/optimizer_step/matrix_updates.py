"""Muon on flat pieces of matrices (stages 1 and 2): every rank orthogonalizes the matrices that it holds a part of.

The gradient of a matrix that lies in the pieces of several ranks is kept whole on each of them. So is its momentum: the
momentum of a piece has the elements of whole matrices. Nothing is sent for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from zero_runtime.config import RuntimeConfig
from zero_runtime.errors import ConfigError
from zero_runtime.gradient_reduction.reducer import ShardedGradients
from zero_runtime.gradient_reduction.reduction import REDUCTIONS
from zero_runtime.optimizer_step.fragments import Master, Part, Source
from zero_runtime.optimizer_step.precision import Precision
from zero_runtime.optimizers.muon import MOMENTUM, Muon, matrix_update


class _Matrix(NamedTuple):
    """A matrix of which a master holds ``part``; its momentum begins at ``start`` of the master's."""

    part: Part
    start: int
    shape: torch.Size

    @property
    def is_whole(self) -> bool:
        return self.part.numel == self.shape.numel()


class MatrixUpdates:
    """Turns the pieces of reduced gradients of matrices into pieces of Muon's updates.

    Args:
        optimizer: whose state has the momentum.
        masters: the flat pieces that it updates, with the parameters in them.
        gradients: where the gradients come from; it is told which to keep whole.
    """

    def __init__(self, optimizer: Muon, masters: Sequence[Master], gradients: ShardedGradients) -> None:
        self._optimizer = optimizer
        self._gradients = gradients
        self._matrices: list[
            tuple[Master, Mapping[str, Any], list[_Matrix]] | None
        ] = []  # one for each master
        for master in masters:
            group = optimizer.param_groups[master.parts[0].group] if master.parts else {"use_muon": False}
            if not group["use_muon"]:
                self._matrices.append(None)
                continue
            matrices, start = [], 0
            for part in master.parts:
                matrices.append(_Matrix(part, start, part.parameter.shape))
                start += part.parameter.numel()
            self._matrices.append((master, group, matrices))
            optimizer.state[master.tensor][MOMENTUM] = master.tensor.new_zeros(start)
            for matrix in matrices:
                if not matrix.is_whole:
                    gradients.keep_whole(matrix.part.name, matrix.shape.numel())

    def apply(self, pieces: Sequence[torch.Tensor], scale: float) -> Callable[[], None]:
        """Replace the gradients of matrices in ``pieces`` by Muon's updates, multiplied by ``scale``.

        Returns:
            What makes the new momentum the optimizer's; not to be called where the step is skipped.
        """
        renewed = []
        for piece, entry in zip(pieces, self._matrices, strict=True):
            if entry is None:
                continue
            master, group, matrices = entry
            momentum = self._optimizer.state[master.tensor][MOMENTUM].clone()
            for matrix in matrices:
                part, begin, shape = matrix
                own = piece.narrow(0, part.offset, part.numel)
                given = own if matrix.is_whole else self._gradients.whole[part.name]
                kept = momentum.narrow(0, begin, shape.numel())
                gradient = given.to(momentum.dtype).view(shape) / scale
                update, latest = matrix_update(gradient, kept.view(shape), group)
                kept.copy_(latest.reshape(-1))
                own.copy_(update.reshape(-1).narrow(0, part.start, part.numel)).mul_(scale)
            renewed.append((master.tensor, momentum))

        def commit() -> None:
            for tensor, momentum in renewed:
                self._optimizer.state[tensor][MOMENTUM].copy_(momentum)

        return commit

    def elementwise(self) -> dict[torch.Tensor, Mapping[str, Any]]:
        """The optimizer's state with momentum cut to what the masters hold, an element for each of theirs."""
        states: dict[torch.Tensor, Mapping[str, Any]] = dict(self._optimizer.state)
        for entry in self._matrices:
            if entry is None:
                continue
            master, _, matrices = entry
            momentum = self._optimizer.state[master.tensor][MOMENTUM]
            cut = torch.zeros_like(master.tensor, requires_grad=False)
            for part, begin, _ in matrices:
                own = momentum.narrow(0, begin + part.start, part.numel)
                cut.narrow(0, part.offset, part.numel).copy_(own)
            states[master.tensor] = {**self._optimizer.state[master.tensor], MOMENTUM: cut}
        return states

    def load(self, source: Source) -> None:
        """Read the momentum of whole matrices from a checkpoint; zeros where it has none."""
        for entry in self._matrices:
            if entry is None:
                continue
            master, _, matrices = entry
            momentum = master.tensor.new_zeros(sum(each.shape.numel() for each in matrices))
            for part, begin, shape in matrices:
                if source.has(part.name) and MOMENTUM in source.state_dtypes(part.name):
                    source.read_state(MOMENTUM, part.name, 0, momentum.narrow(0, begin, shape.numel()))
            self._optimizer.state[master.tensor][MOMENTUM] = momentum.detach()


def check_whole_gradients(optimizer: torch.optim.Optimizer, config: RuntimeConfig, kinds: Precision) -> None:
    """Refuse Muon at stages 1 and 2 where a reduction leaves a rank nothing but its own piece of a gradient.

    Raises:
        ConfigError: naming the reductions that leave all of it.
    """
    if not isinstance(optimizer, Muon):
        return
    kind = config.zero.gradient_reduction
    cast = kinds.autocast is not None or kinds.communication is not (kinds.model or torch.float32)
    if config.accumulates_whole:
        raise ConfigError(
            "Muon at stage 1 with data_types.grad_accum_dtype fp32 is not in this version; use stage 2, or remove the key"
        )
    leaves = REDUCTIONS[kind].leaves
    if leaves == "own" or (leaves == "all unless cast" and cast):
        how = kind if leaves == "own" else f"{kind} in another dtype"
        raise ConfigError(
            f"Muon needs whole gradients of matrices, and zero_optimization.gradient_reduction {how} leaves each rank its "
            "own piece; use all_reduce"
        )

"""Muon on flat shards of matrices (stages 1 and 2).

Every rank orthogonalizes each matrix that its shard has a part of. Several ranks may have parts of the same
matrix. Each of these ranks keeps the whole gradient and the whole momentum of the matrix, so that no
communication is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from zero_runtime.config import RuntimeConfig
from zero_runtime.errors import ConfigError
from zero_runtime.gradient_reduction.reducer import ShardedGradients
from zero_runtime.gradient_reduction.reduction import REDUCTIONS
from zero_runtime.optimizer_step.dtypes import Precision
from zero_runtime.optimizer_step.fragments import Master, Part, Source
from zero_runtime.optimizers.muon import MOMENTUM, Muon, matrix_update


class _Matrix(NamedTuple):
    """A matrix with a ``part`` in a master. Its momentum begins at element ``start`` of the master's momentum."""

    part: Part
    start: int
    shape: torch.Size

    @property
    def is_whole(self) -> bool:
        return self.part.numel == self.shape.numel()


class MatrixUpdates:
    """Replaces the shards of the matrices' reduced gradients by shards of Muon's updates.

    Args:
        optimizer: The optimizer. Its state has the momentum.
        masters: The flat shards that the optimizer updates, with the parameters in each.
        gradients: The reduced gradients. This object keeps the gradients of matrices whole on request.
    """

    def __init__(self, optimizer: Muon, masters: Sequence[Master], gradients: ShardedGradients) -> None:
        self._optimizer = optimizer
        self._gradients = gradients
        # One entry for each master. The entry is None if the master has no matrices.
        self._matrices: list[tuple[Master, Mapping[str, Any], list[_Matrix]] | None] = []
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

    def apply(self, reduced: Sequence[torch.Tensor], scale: float) -> Callable[[], None]:
        """Replace the gradients of matrices in ``reduced`` by Muon's updates, multiplied by ``scale``.

        Returns:
            A function that stores the new momentum in the optimizer. Do not call this function if the step is
            skipped.
        """
        renewed = []
        for shard, entry in zip(reduced, self._matrices, strict=True):
            if entry is None:
                continue
            master, group, matrices = entry
            momentum = self._optimizer.state[master.tensor][MOMENTUM].clone()
            for matrix in matrices:
                part, begin, shape = matrix
                own = shard.narrow(0, part.offset, part.numel)
                reduced_gradient = own if matrix.is_whole else self._gradients.unsharded[part.name]
                matrix_momentum = momentum.narrow(0, begin, shape.numel())
                gradient = reduced_gradient.to(momentum.dtype).view(shape) / scale
                update, latest = matrix_update(gradient, matrix_momentum.view(shape), group)
                matrix_momentum.copy_(latest.reshape(-1))
                own.copy_(update.reshape(-1).narrow(0, part.start, part.numel)).mul_(scale)
            renewed.append((master.tensor, momentum))

        def commit() -> None:
            for tensor, momentum in renewed:
                self._optimizer.state[tensor][MOMENTUM].copy_(momentum)

        return commit

    def elementwise(self) -> dict[torch.Tensor, Mapping[str, Any]]:
        """Return the optimizer's state, with the momentum cut to one element for each element of the masters."""
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
        """Read the momentum of whole matrices from a checkpoint. Momentum that the checkpoint lacks becomes zero."""
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
    """Refuse Muon at stages 1 and 2 with a reduction that leaves a rank only its own shard of a gradient.

    Raises:
        ConfigError: Such a reduction is configured.
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
            "own shard; use all_reduce"
        )

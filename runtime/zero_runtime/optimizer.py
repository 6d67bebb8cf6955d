"""The optimizer step: over flat fp32 pieces (stages 1, 2), or over replicated parameters (stage 0).

``step`` goes: agree on overflow, norm, clip, update, and, where it is sharded, gather the parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch

from commprof import hooks
from zero_runtime.clip import averaged_norm, clip_factor, replicated_norm
from zero_runtime.comm import DataParallelGroup
from zero_runtime.fragments import Fragment, Master, Part, Source, fragments_of, load
from zero_runtime.gradients import ParameterGroup, ShardedGradients
from zero_runtime.precision import agree_on_overflow, any_overflow
from zero_runtime.torch_optimizer import replace_parameters
from zero_runtime.whole_gradients import AccumulatedGradients, ReplicatedGradients

_GATHER: Final = hooks.tag("parameter_gather")


class StepPolicy(NamedTuple):
    """What a step does besides the update. ``gather_bucket`` is in elements; None gathers each param group at once."""

    clipping: float
    compute_norm: bool
    check_overflow: bool
    gather_by_broadcast: bool
    gather_bucket: int | None


class _Wrapper(torch.optim.Optimizer):
    """What both optimizers share: they stand for the torch optimizer that does the arithmetic.

    Param groups and state are that optimizer's own objects, so that a schedule may be made over either.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        # Optimizer.__init__ would make param groups of its own.
        self.optimizer = optimizer
        self.defaults = optimizer.defaults
        self.param_groups = optimizer.param_groups
        self.state = optimizer.state
        self.overflow = False
        self.loss_scale = 1.0
        self.grad_norm: torch.Tensor | None = None

    def state_dict(self) -> dict[str, Any]:
        """The torch optimizer's state, of this rank alone."""
        return self.optimizer.state_dict()

    def held(self) -> list[Master]:
        """The tensors that the torch optimizer updates on this rank, and which parameters they are made of."""
        raise NotImplementedError

    def fragments(self) -> Iterator[Fragment]:
        """What this rank holds of each parameter, its state included, for a checkpoint."""
        return fragments_of(self.optimizer, self.held())

    def load_fragments(self, source: Source, states: bool = True) -> None:
        """Fill the masters and, with ``states``, the state from a checkpoint; the model's parameters stay as they are."""
        load(self.optimizer, self.held(), source, states)


class ShardedOptimizer(_Wrapper):
    """Updates this rank's piece of every param group, and gathers the others' pieces.

    The parameters become views of one flat buffer for each param group. Each rank keeps its piece as a flat
    fp32 tensor, which is all that the torch optimizer sees.

    Args:
        optimizer: the torch optimizer; its param groups are those of ``groups``.
        groups: the trainable parameters.
        gradients: where reduced gradients come from.
        group: the data-parallel ranks.
        policy: what a step does besides the update.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        groups: Sequence[ParameterGroup],
        gradients: ShardedGradients | AccumulatedGradients,
        group: DataParallelGroup,
        policy: StepPolicy,
    ) -> None:
        super().__init__(optimizer)
        self._gradients = gradients
        self._group = group
        self._policy = policy
        self._flat = [flatten(each) for each in groups]
        self._own = [
            flat.narrow(0, group.rank * each.layout.piece_numel, each.layout.piece_numel)
            for flat, each in zip(self._flat, groups, strict=True)
        ]
        self.masters = [own.detach().clone().float().requires_grad_() for own in self._own]
        self._groups = groups
        replace_parameters(optimizer, [[master] for master in self.masters])

    def held(self) -> list[Master]:
        """One master for each param group: this rank's piece of it."""
        held = []
        for number, (each, master) in enumerate(zip(self._groups, self.masters, strict=True)):
            parts = [
                Part(
                    each.names[index], each.parameters[index], number, piece.start, piece.numel, piece.offset
                )
                for index in each.layout.order
                for piece in each.layout.slices(index)
                if piece.owner == self._group.rank
            ]
            held.append(Master(master, tuple(parts)))
        return held

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients; ``set_to_none`` is accepted for torch's signature."""
        self._gradients.clear()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take the step that the reduced gradients ask for, unless one of them overflowed."""
        pieces = self._gradients.pieces
        if self._policy.check_overflow:
            flag = any_overflow(pieces, pieces[0].device)
            self.overflow = agree_on_overflow(flag, self._group)
            if self.overflow:
                self._gradients.clear()
                return
        factor = None
        if self._policy.compute_norm:
            self.grad_norm = self._gradients.norm()
            if self._policy.clipping > 0.0:
                factor = clip_factor(self.grad_norm, self._policy.clipping)
        for master, piece in zip(self.masters, pieces, strict=True):
            master.grad = piece.float()
            if factor is not None:
                master.grad.mul_(factor)
        self.optimizer.step()
        for master, own in zip(self.masters, self._own, strict=True):
            master.grad = None
            own.copy_(master)
        self._gradients.clear()
        self._gather()

    def _gather(self) -> None:
        if self._group.world_size == 1:
            return
        for flat, own in zip(self._flat, self._own, strict=True):
            if self._policy.gather_by_broadcast:
                for owner, piece in enumerate(flat.chunk(self._group.world_size)):
                    self._group.broadcast(piece, owner, why=_GATHER)
            elif self._policy.gather_bucket is not None:
                self._gather_in_parts(flat, own, self._policy.gather_bucket)
            else:
                self._group.all_gather_single(flat, own, why=_GATHER)

    def _gather_in_parts(self, flat: torch.Tensor, own: torch.Tensor, limit: int) -> None:
        """Gather ``flat`` in messages of at most ``limit`` elements; each part of a piece begins at an even element."""
        pieces = flat.chunk(self._group.world_size)
        width = max(2, limit // self._group.world_size // 2 * 2)
        for begin in range(0, own.numel(), width):
            numel = min(width, own.numel() - begin)
            parts = [piece.narrow(0, begin, numel) for piece in pieces]
            self._group.all_gather(parts, parts[self._group.rank], why=_GATHER)


class ReplicatedOptimizer(_Wrapper):
    """Updates all parameters on every rank, those of 16 bits through fp32 copies.

    Args:
        optimizer: the torch optimizer over the parameters.
        gradients: where reduced gradients come from.
        group: the data-parallel ranks.
        policy: what a step does besides the update.
        full_precision: no parameter needs a copy.
        names: of the model's parameters.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        gradients: ReplicatedGradients,
        group: DataParallelGroup,
        policy: StepPolicy,
        full_precision: bool,
        names: Mapping[torch.nn.Parameter, str],
    ) -> None:
        super().__init__(optimizer)
        self._gradients = gradients
        self._group = group
        self._policy = policy
        groups = [[p for p in each["params"] if p.requires_grad] for each in optimizer.param_groups]
        self._parameters = [parameter for each in groups for parameter in each]
        self._labels = [
            (names.get(parameter, f"param_groups[{number}][{index}]"), number)
            for number, each in enumerate(groups)
            for index, parameter in enumerate(each)
        ]
        self.masters = self._parameters
        if not full_precision:
            copies = [[p.detach().clone().float().requires_grad_() for p in each] for each in groups]
            self.masters = [copy for each in copies for copy in each]
            replace_parameters(optimizer, [list(each) for each in copies])

    def held(self) -> list[Master]:
        """One master for each trainable parameter: itself, or its fp32 copy."""
        return [
            Master(master, (Part(name, parameter, group, 0, parameter.numel(), 0),))
            for (name, group), parameter, master in zip(
                self._labels, self._parameters, self.masters, strict=True
            )
        ]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients; ``set_to_none`` is accepted for torch's signature."""
        self._gradients.clear()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take the step that the reduced gradients ask for."""
        if self.masters is self._parameters:
            self._clip_in_place()
            self.optimizer.step()
        elif not self._step_through_copies():
            return
        self._gradients.clear()

    def _clip_in_place(self) -> None:
        # In fp32 the norm is computed for clipping only, and never reported, as in DeepSpeed.
        if self._policy.clipping > 0.0:
            gradients = [p.grad for p in self._parameters if p.grad is not None]
            factor = clip_factor(averaged_norm(gradients, self._group), self._policy.clipping)
            torch._foreach_mul_(gradients, factor)

    def _step_through_copies(self) -> bool:
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._parameters]
        # Every rank holds the same gradients, so there is nothing to agree on.
        self.overflow = bool(any_overflow(gradients, gradients[0].device).item())
        if self.overflow:
            self._gradients.clear()
            return False
        self.grad_norm = replicated_norm(gradients)
        for master, gradient in zip(self.masters, gradients, strict=True):
            master.grad = gradient.float()
        if self._policy.clipping > 0.0:
            factor = clip_factor(self.grad_norm, self._policy.clipping)
            torch._foreach_mul_([master.grad for master in self.masters if master.grad is not None], factor)
        self.optimizer.step()
        for master, parameter in zip(self.masters, self._parameters, strict=True):
            master.grad = None
            parameter.copy_(master)
        return True


def flatten(each: ParameterGroup) -> torch.Tensor:
    """Lay the parameters of a group end to end in one new flat buffer, and make them views of it."""
    first = each.parameters[0]
    flat = torch.zeros(each.layout.numel, dtype=first.dtype, device=first.device)
    for parameter, offset in zip(each.parameters, each.layout.offsets, strict=True):
        view = flat.narrow(0, offset, parameter.numel()).view(parameter.shape)
        view.copy_(parameter.detach())
        parameter.data = view
    return flat

"""The optimizer step: over flat fp32 pieces (stages 1, 2), or over replicated parameters (stage 0).

``step`` goes: agree on overflow, norm, clip, update, and, where it is sharded, gather the parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from zero_runtime.clip import averaged_norm, clip_factor, replicated_norm
from zero_runtime.comm import DataParallelGroup
from zero_runtime.flat_parameters import FlatParameters
from zero_runtime.fragments import Fragment, Master, Part, Source, fragments_of, load
from zero_runtime.gradients import ParameterGroup, ShardedGradients
from zero_runtime.precision import agree_on_overflow, any_overflow
from zero_runtime.sharded_parameters import ShardedParameters
from zero_runtime.torch_optimizer import replace_parameters
from zero_runtime.whole_gradients import AccumulatedGradients, ReplicatedGradients


class StepPolicy(NamedTuple):
    """What a step does besides the update."""

    clipping: float
    compute_norm: bool
    check_overflow: bool


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
    """Updates this rank's piece of every group of parameters, and shares it with the other ranks.

    Each rank keeps its piece as a flat fp32 tensor, which is all that the torch optimizer sees.

    Args:
        optimizer: the torch optimizer.
        groups: the trainable parameters: one or more groups for each of its param groups.
        parameters: their pieces in the model's dtype.
        gradients: where reduced gradients come from.
        group: the data-parallel ranks.
        policy: what a step does besides the update.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        groups: Sequence[ParameterGroup],
        parameters: FlatParameters | ShardedParameters,
        gradients: ShardedGradients | AccumulatedGradients,
        group: DataParallelGroup,
        policy: StepPolicy,
    ) -> None:
        super().__init__(optimizer)
        self._gradients = gradients
        self._group = group
        self._policy = policy
        self._parameters = parameters
        self._groups = groups
        self.masters = [own.detach().clone().float().requires_grad_() for own in parameters.own]
        mine: list[list[torch.Tensor]] = [[] for _ in optimizer.param_groups]
        for each, master in zip(groups, self.masters, strict=True):
            mine[each.number].append(master)
        replace_parameters(optimizer, mine)

    def held(self) -> list[Master]:
        """One master for each group: this rank's piece of it."""
        held = []
        for each, master in zip(self._groups, self.masters, strict=True):
            parts = [
                Part(
                    each.names[index],
                    each.parameters[index],
                    each.number,
                    piece.start,
                    piece.numel,
                    piece.offset,
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
        self._parameters.begin_step()
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
        for master, own in zip(self.masters, self._parameters.own, strict=True):
            master.grad = None
            own.copy_(master)
        self._gradients.clear()
        self._parameters.share()


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

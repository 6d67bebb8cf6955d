"""The optimizer step: over flat pieces (stages 1 to 3), or over replicated parameters (stage 0).

``step`` goes: agree on overflow, norm, unscale and clip, update, and, where it is sharded, gather the parameters. An
overflow, or a norm that is infinite or NaN, ends it there: the parameters stay, and the loss scale falls.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import isfinite
from typing import Any, Final, NamedTuple

import torch

from commprof import hooks
from zero_runtime.bands import BandedGradients
from zero_runtime.clip import averaged_norm, clip_factor, replicated_norm
from zero_runtime.comm import DataParallelGroup
from zero_runtime.errors import ConfigError, UsageError
from zero_runtime.flat_parameters import FlatParameters
from zero_runtime.fragments import Fragment, Master, Part, Source, fragments_of, load
from zero_runtime.gathered_matrices import GatheredMatrices
from zero_runtime.gradients import ParameterGroup, ShardedGradients
from zero_runtime.loss_scale import UNSCALED, LossScale
from zero_runtime.matrix_updates import MatrixUpdates
from zero_runtime.optimizers.lamb import Division, Lamb, Segment
from zero_runtime.optimizers.muon import Muon
from zero_runtime.precision import agree_on_overflow, any_overflow
from zero_runtime.sharded_parameters import ShardedParameters
from zero_runtime.torch_optimizer import replace_parameters
from zero_runtime.whole_gradients import AccumulatedGradients, ReplicatedGradients

_NORM: Final = hooks.tag("gradient_norm")


class StepPolicy(NamedTuple):
    """What a step does besides the update.

    Attributes:
        clipping: the largest norm of gradients; 0 where they are not clipped.
        compute_norm: whether the norm is computed, clipped or not.
        check_overflow: whether the ranks agree on infinite and NaN gradients in a message of its own.
        check_norm: whether a step whose norm is infinite or NaN is skipped.
        masters: dtype of what the optimizer updates in place of 16-bit parameters.
    """

    clipping: float
    compute_norm: bool
    check_overflow: bool
    check_norm: bool
    masters: torch.dtype


class _Wrapper(torch.optim.Optimizer, ABC):
    """What both optimizers share: they stand for the torch optimizer that does the arithmetic.

    Param groups and state are that optimizer's own objects, so that a schedule may be made over either.

    Attributes:
        overflow: whether the last step was skipped, since a gradient was infinite or NaN.
        grad_norm: of the last step, before clipping; infinity where it was skipped; None where it is not computed.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        gradients: ShardedGradients | BandedGradients | AccumulatedGradients | ReplicatedGradients,
        policy: StepPolicy,
        scale: LossScale,
    ) -> None:
        # Optimizer.__init__ would make param groups of its own.
        self.optimizer = optimizer
        self.defaults = optimizer.defaults
        self.param_groups = optimizer.param_groups
        self.state = optimizer.state
        self.overflow = False
        self.grad_norm: torch.Tensor | None = None
        self._gradients = gradients
        self._policy = policy
        self._scale = scale

    @property
    def loss_scale(self) -> float:
        """What the loss of the coming step is multiplied by."""
        return self._scale.value

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        self._scale.value = value

    @property
    def cur_scale(self) -> float:
        """Another name of ``loss_scale``."""
        return self._scale.value

    @property
    def dynamic_loss_scale(self) -> bool:
        """Whether overflows change the loss scale."""
        return self._scale.dynamic

    def override_loss_scale(self, loss_scale: float) -> None:
        """Use ``loss_scale`` from now on, whatever overflows."""
        self._scale.override(loss_scale)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients; ``set_to_none`` is accepted for torch's signature."""
        self._gradients.clear()

    def _measured(self, overflow: bool, norm: Callable[[], torch.Tensor]) -> bool:
        """Take note of an overflow, or of the norm of the scaled gradients, and say whether the step is to be taken.

        It is not where either of them is infinite or NaN; the gradients are dropped then, and the loss scale falls.
        """
        if self._scale.rules is not UNSCALED:
            hooks.metric("loss_scale", self._scale.value)
        if self._policy.compute_norm and not overflow:
            self.grad_norm = norm() / self._scale.value
            if self._policy.check_norm:
                value = float(self.grad_norm.item())
                hooks.metric("grad_norm", value)
                overflow = not isfinite(value)
        elif self._policy.compute_norm:
            self.grad_norm = torch.tensor(float("inf"))
        self.overflow = overflow
        if overflow:
            self._gradients.clear()
            self._scale.update(True)
        return not overflow

    def _factor(self) -> torch.Tensor | float | None:
        """What the scaled gradients are multiplied by, to unscale and to clip them; None for 1."""
        scale = self._scale.value
        if self._policy.clipping > 0.0 and self.grad_norm is not None:
            return clip_factor(self.grad_norm, self._policy.clipping) / scale
        return None if scale == 1.0 else 1.0 / scale

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused here: what is laid out once stays so."""
        raise UsageError(
            "add_param_group works at stage 3 only; at the other stages give the parameters to initialize, a second time "
            "if need be"
        )

    def state_dict(self) -> dict[str, Any]:
        """The torch optimizer's state, of this rank alone."""
        return self.optimizer.state_dict()

    @abstractmethod
    def held(self) -> list[Master]:
        """The tensors that the torch optimizer updates on this rank, and which parameters they are made of."""

    @abstractmethod
    def trained(self) -> dict[str, tuple[torch.nn.Parameter, int]]:
        """The parameters that are updated, on all ranks together, with their param groups."""

    def settle(self) -> None:
        """Wait for parameters that are under way, and take over what a script has changed in them."""

    def adopt(self) -> None:
        """Make the masters copies of the model's parameters anew, whoever has changed those."""

    def fragments(self) -> Iterator[Fragment]:
        """What this rank holds of each parameter, its state included, for a checkpoint."""
        return fragments_of(self.optimizer.state, self.held())

    def load_fragments(self, source: Source, states: bool = True) -> None:
        """Fill the masters and, with ``states``, the state from a checkpoint; the model's parameters stay as they are."""
        load(self.optimizer, self.held(), source, states)


class ShardedOptimizer(_Wrapper):
    """Updates this rank's piece of every group of parameters, and shares it with the other ranks.

    Each rank keeps its piece as a flat fp32 tensor, which is all that the torch optimizer sees: the parameters' own memory
    where they are fp32.

    Args:
        optimizer: the torch optimizer.
        groups: the trainable parameters: one or more groups for each of its param groups.
        parameters: their pieces in the model's dtype.
        gradients: where reduced gradients come from.
        group: the data-parallel ranks.
        policy: what a step does besides the update.
        scale: what the loss was multiplied by.
        chunk: elements of the matrices that Muon gathers at a time, at stage 3.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        groups: Sequence[ParameterGroup],
        parameters: FlatParameters | ShardedParameters,
        gradients: ShardedGradients | BandedGradients | AccumulatedGradients,
        group: DataParallelGroup,
        policy: StepPolicy,
        scale: LossScale,
        chunk: int = 0,
    ) -> None:
        super().__init__(optimizer, gradients, policy, scale)
        self._reduced = gradients
        self._group = group
        self._parameters = parameters
        self._groups = list(groups)
        self.grow: Callable[[int, dict[str, Any]], list[ParameterGroup]] | None = None
        self.masters = [_master(own, policy.masters) for own in parameters.own]
        mine: list[list[torch.Tensor]] = [[] for _ in optimizer.param_groups]
        for each, master in zip(groups, self.masters, strict=True):
            mine[each.number].append(master)
        replace_parameters(optimizer, mine)
        if isinstance(optimizer, Lamb):
            optimizer.divide(self._division())
        self._matrices: MatrixUpdates | GatheredMatrices | None = None
        if isinstance(optimizer, Muon) and isinstance(gradients, ShardedGradients):
            self._matrices = (
                MatrixUpdates(optimizer, self.held(), gradients)
                if isinstance(parameters, FlatParameters)
                else GatheredMatrices(optimizer, self._groups, self.masters, group, chunk)
            )

    def fragments(self) -> Iterator[Fragment]:
        """What this rank holds of each parameter, its state included, for a checkpoint."""
        if isinstance(self._matrices, MatrixUpdates):
            return fragments_of(self._matrices.elementwise(), self.held())
        return super().fragments()

    def load_fragments(self, source: Source, states: bool = True) -> None:
        """Fill the masters and, with ``states``, the state from a checkpoint; the model's parameters stay as they are."""
        super().load_fragments(source, states)
        if isinstance(self._matrices, MatrixUpdates) and states:
            self._matrices.load(source)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Train further parameters of the model, at stage 3; those that are new in it are broadcast from rank 0.

        Raises:
            UsageError: at another stage.
            ConfigError: a parameter is trained already, or is not the model's.
        """
        if self.grow is None:
            super().add_param_group(param_group)
            return
        given = param_group["params"]
        wanted: list[Any] = [given] if isinstance(given, torch.Tensor) else list(given)
        trained = {parameter: name for name, (parameter, _) in self.trained().items()}
        for parameter in wanted:
            if parameter in trained:
                raise ConfigError(f"{trained[parameter]} is trained already; give it to one param group")
        self.optimizer.add_param_group({**param_group, "params": wanted})
        number = len(self.param_groups) - 1
        try:
            groups = self.grow(number, self.param_groups[number])
        except BaseException:
            del self.param_groups[number]
            raise
        first = len(self.masters)
        self._groups += groups
        self.masters += [_master(own, self._policy.masters) for own in self._parameters.own[first:]]
        self.param_groups[number]["params"] = self.masters[first:]
        if isinstance(self.optimizer, torch.optim.Adagrad):
            # Adagrad makes its state when it is made, not in the first step.
            renewed = torch.optim.Adagrad([self.param_groups[number]], **self.optimizer.defaults)
            self.state.update(renewed.state)
        if isinstance(self.optimizer, Lamb):
            self.optimizer.divide(self._division())

    def _division(self) -> Division:
        """Where the parameters lie in the masters."""
        numbers = {name: number for number, name in enumerate(self.trained())}
        segments = {
            master.tensor: [Segment(numbers[part.name], part.offset, part.numel) for part in master.parts]
            for master in self.held()
        }
        return Division(segments, len(numbers), partial(self._group.all_reduce, why=_NORM))

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

    def trained(self) -> dict[str, tuple[torch.nn.Parameter, int]]:
        """The parameters of all groups."""
        return {
            name: (parameter, each.number)
            for each in self._groups
            for name, parameter in zip(each.names, each.parameters, strict=True)
        }

    @torch.no_grad()
    def settle(self) -> None:
        """Wait for parameters that are under way, and bring what a script has changed in its slices into the masters."""
        self._take_over(self._parameters.changes())

    @torch.no_grad()
    def adopt(self) -> None:
        """Make the masters copies of the model's parameters anew, whoever has changed those."""
        self.settle()
        for master, own in zip(self.masters, self._parameters.own, strict=True):
            master.copy_(own)

    def _take_over(self, changes: Sequence[tuple[int, slice]]) -> None:
        for index, part in changes:
            self.masters[index][part] = self._parameters.own[index][part]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take the step that the reduced gradients ask for, unless one of them overflowed."""
        self._take_over(self._parameters.begin_step())
        pieces = self._reduced.pieces
        overflow = self._policy.check_overflow and agree_on_overflow(
            any_overflow(pieces, pieces[0].device), self._group
        )
        commit = None
        if self._matrices is not None and not overflow:
            commit = self._matrices.apply(pieces, self._scale.value)
        if not self._measured(overflow, self._reduced.norm):
            return
        if commit is not None:
            commit()
        factor = self._factor()
        for master, piece in zip(self.masters, pieces, strict=True):
            master.grad = piece.to(master.dtype)
            if factor is not None:
                master.grad.mul_(factor)
        self.optimizer.step()
        self._scale.update(False)
        for master, own in zip(self.masters, self._parameters.own, strict=True):
            master.grad = None
            if own.dtype is not master.dtype:
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
        scale: what the loss was multiplied by.
        full_precision: no parameter needs a copy.
        names: of the model's parameters.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        gradients: ReplicatedGradients,
        group: DataParallelGroup,
        policy: StepPolicy,
        scale: LossScale,
        full_precision: bool,
        names: Mapping[torch.nn.Parameter, str],
    ) -> None:
        super().__init__(optimizer, gradients, policy, scale)
        self._group = group
        groups = [[p for p in each["params"] if p.requires_grad] for each in optimizer.param_groups]
        self._parameters = [parameter for each in groups for parameter in each]
        self._labels = [
            (names.get(parameter, f"param_groups[{number}][{index}]"), number)
            for number, each in enumerate(groups)
            for index, parameter in enumerate(each)
        ]
        self.masters = self._parameters
        if not full_precision:
            copies = [[_master(parameter, policy.masters) for parameter in each] for each in groups]
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

    def trained(self) -> dict[str, tuple[torch.nn.Parameter, int]]:
        """The parameters of all param groups."""
        return {
            name: (parameter, group)
            for (name, group), parameter in zip(self._labels, self._parameters, strict=True)
        }

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take the step that the reduced gradients ask for, unless one of them overflowed."""
        taken = self._step_in_place() if self.masters is self._parameters else self._step_through_copies()
        if taken:
            self._scale.update(False)
            self._gradients.clear()

    @torch.no_grad()
    def adopt(self) -> None:
        """Make the masters copies of the model's parameters anew, whoever has changed those."""
        if self.masters is not self._parameters:
            for master, parameter in zip(self.masters, self._parameters, strict=True):
                master.copy_(parameter)

    def _step_in_place(self) -> bool:
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        if self._scale.rules is not UNSCALED:
            # Every rank holds the same gradients, so there is nothing to agree on.
            overflow = bool(any_overflow(gradients, self._group.device).item())
            if not self._measured(overflow, lambda: replicated_norm(gradients)):
                return False
            torch._foreach_mul_(gradients, 1.0 / self._scale.value)
        # In fp32 the norm is computed for clipping only, and never reported, as in DeepSpeed.
        if self._policy.clipping > 0.0:
            factor = clip_factor(averaged_norm(gradients, self._group), self._policy.clipping)
            torch._foreach_mul_(gradients, factor)
        self.optimizer.step()
        return True

    def _step_through_copies(self) -> bool:
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._parameters]
        if not self._measured(False, lambda: replicated_norm(gradients)):
            return False
        for master, gradient in zip(self.masters, gradients, strict=True):
            master.grad = gradient.to(master.dtype)
        factor = self._factor()
        if factor is not None:
            torch._foreach_mul_([master.grad for master in self.masters if master.grad is not None], factor)
        self.optimizer.step()
        for master, parameter in zip(self.masters, self._parameters, strict=True):
            master.grad = None
            if parameter.dtype is not master.dtype:
                parameter.copy_(master)
        return True


def _master(parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What the optimizer updates instead of ``parameter``: a copy of at least ``dtype``, or itself where it is that."""
    wide = torch.promote_types(parameter.dtype, dtype)
    return parameter.detach().to(wide).requires_grad_()

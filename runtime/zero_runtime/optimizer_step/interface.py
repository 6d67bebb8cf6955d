"""What stands for the torch optimizer that does the arithmetic: its param groups, its state, its loss scale, its fragments.

A step, in :mod:`zero_runtime.optimizer_step.sharded` and :mod:`zero_runtime.optimizer_step.replicated`, goes: agree on
overflow, norm, unscale and clip, update, and, where it is sharded, gather the parameters. An overflow, or a norm that
is infinite or NaN, ends it there: the parameters stay, and the loss scale falls.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from math import isfinite
from typing import Any, NamedTuple

import torch

from commprof import hooks
from zero_runtime.comm import DataParallelGroup
from zero_runtime.errors import UsageError
from zero_runtime.gradient_reduction.clip import clip_factor
from zero_runtime.gradient_reduction.loss_scale import UNSCALED, LossScale
from zero_runtime.gradient_reduction.owner_ordered_buckets import OwnerOrderedGradients
from zero_runtime.gradient_reduction.reducer import ShardedGradients
from zero_runtime.gradient_reduction.whole_gradients import AccumulatedGradients, ReplicatedGradients
from zero_runtime.groups.parallelism import ModelRanks
from zero_runtime.optimizer_step.fragments import Fragment, Master, Source, Stored, fragments_of, load, stored


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


class WrappedOptimizer(torch.optim.Optimizer, ABC):
    """What both optimizers share: they stand for the torch optimizer that does the arithmetic.

    Param groups and state are that optimizer's own objects, so that a schedule may be made over either.

    Attributes:
        overflow: whether the last step was skipped, since a gradient was infinite or NaN.
        grad_norm: of the last step, before clipping; infinity where it was skipped; None where it is not computed.
        is_sharded: whether each rank holds a part of the masters only.
        model_ranks: those that hold the model together with this one, and agree on norm and overflow; None where each holds
            all of it.
    """

    is_sharded: bool

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        gradients: ShardedGradients | OwnerOrderedGradients | AccumulatedGradients | ReplicatedGradients,
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
        self.model_ranks: ModelRanks | None = None
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

    def needs_scaler(self) -> bool:
        """Whether ``loss.backward()`` needs ``engine.scale`` before it: the loss is multiplied by something."""
        return self._scale.dynamic or self._scale.value != 1.0

    @property
    def loss_scaler(self) -> LossScale:
        """What adapts the loss scale, by DeepSpeed's name with ZeRO."""
        return self._scale

    loss_scale_config = loss_scaler  # its name without

    @property
    def _global_grad_norm(self) -> torch.Tensor | None:
        """``grad_norm``, by the name that scripts read."""
        return self.grad_norm

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
            hooks.metric("overflow", 1.0)
            self._gradients.clear()
            self._scale.update(True)
        return not overflow

    def _factor(self) -> torch.Tensor | float | None:
        """What the scaled gradients are multiplied by, to unscale and to clip them; None for 1."""
        scale = self._scale.value
        if self._policy.clipping > 0.0 and self.grad_norm is not None:
            return clip_factor(self.grad_norm, self._policy.clipping) / scale
        return None if scale == 1.0 else 1.0 / scale

    def _model_groups(self) -> list[DataParallelGroup]:
        """The group of the ranks that hold other parts of the model, where there are any."""
        return [] if self.model_ranks is None else [self.model_ranks.group]

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
    def parameter_tensors(self) -> Iterator[torch.Tensor]:
        """The tensors of the model's parameters that the optimizer itself holds, once nothing is under way to them."""

    @abstractmethod
    def reduced(self) -> list[torch.Tensor]:
        """The reduced gradients of the step under way: for each of ``held``, one of the same layout."""

    @abstractmethod
    def trained(self) -> dict[str, tuple[torch.nn.Parameter, int]]:
        """The parameters that are updated, on all ranks together, with their param groups."""

    def settle(self) -> None:
        """Wait for parameters that are under way, and take over what a script has changed in them."""

    def adopt(self) -> None:
        """Make the masters copies of the model's parameters anew, whoever has changed those."""

    def loaded(self) -> None:
        """A checkpoint has been read: have the model's parameters as a step would have left them."""

    def fragments(self, parameter: torch.nn.Parameter | None = None) -> Iterator[Fragment]:
        """What this rank holds of each parameter, or of one, its state included.

        The tensors may be looked at and written to until the next one is asked for.
        """
        held = self.held()
        if parameter is not None:
            held = [master for master in held if any(part.parameter is parameter for part in master.parts)]
        return fragments_of(self.optimizer.state, held)

    def stored(self) -> Iterator[Stored]:
        """What ``fragments`` gives, to be read one by one, in any order: for a checkpoint."""
        return map(stored, self.fragments())

    def load_fragments(self, source: Source, states: bool = True) -> None:
        """Fill the masters and, with ``states``, the state from a checkpoint; the model's parameters stay as they are."""
        load(self.optimizer, self.held(), source, states)


def master_of(parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What the optimizer updates instead of ``parameter``: a copy of at least ``dtype``, or itself where it is that."""
    wide = torch.promote_types(parameter.dtype, dtype)
    return parameter.detach().to(wide).requires_grad_()

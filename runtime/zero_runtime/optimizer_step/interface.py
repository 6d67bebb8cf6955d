"""The wrapper of a torch optimizer: its param groups, state, loss scale and fragments.

A step (:mod:`zero_runtime.optimizer_step.sharded_step` and :mod:`zero_runtime.optimizer_step.replicated_step`) agrees
on overflow, computes the norm, unscales and clips, updates, and, if sharded, gathers the parameters. After an overflow,
or with a norm that is infinite or NaN, the step is skipped: the parameters do not change, and the loss scale falls.
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
    """The options of a step.

    Attributes:
        clipping: the largest norm of gradients; 0 for no clipping.
        compute_norm: whether the norm is computed, clipped or not.
        check_overflow: whether a separate message finds infinite and NaN gradients of any rank.
        check_norm: whether a step whose norm is infinite or NaN is skipped.
        masters: dtype of the masters of 16-bit parameters.
    """

    clipping: float
    compute_norm: bool
    check_overflow: bool
    check_norm: bool
    masters: torch.dtype


class WrappedOptimizer(torch.optim.Optimizer, ABC):
    """The common part of both wrappers of a torch optimizer.

    Param groups and state are the torch optimizer's own objects, so that schedules work with either.

    Attributes:
        overflow: whether the last step was skipped because a gradient was infinite or NaN.
        grad_norm: of the last step, before clipping; infinity if it was skipped; None if it is not computed.
        is_sharded: whether each rank has only a shard of the masters.
        model_ranks: the ranks that the model is divided over, which agree on norm and overflow; None if each rank has all
            of the model.
    """

    is_sharded: bool

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        gradients: ShardedGradients | OwnerOrderedGradients | AccumulatedGradients | ReplicatedGradients,
        policy: StepPolicy,
        scale: LossScale,
    ) -> None:
        # Optimizer.__init__ is not called: it would create its own param groups.
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
        """The factor on the loss of the next step."""
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
        """Whether ``loss.backward()`` needs ``engine.scale`` before it."""
        return self._scale.dynamic or self._scale.value != 1.0

    @property
    def loss_scaler(self) -> LossScale:
        """The loss scale, under DeepSpeed's name with ZeRO."""
        return self._scale

    loss_scale_config = loss_scaler  # DeepSpeed's name without ZeRO

    @property
    def _global_grad_norm(self) -> torch.Tensor | None:
        """``grad_norm``, under the name that scripts read."""
        return self.grad_norm

    def override_loss_scale(self, loss_scale: float) -> None:
        """Use ``loss_scale`` from now on, regardless of overflows."""
        self._scale.override(loss_scale)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients; ``set_to_none`` is accepted for torch's signature."""
        self._gradients.clear()

    def _measured(self, overflow: bool, norm: Callable[[], torch.Tensor]) -> bool:
        """Record overflow and norm of the scaled gradients, and return whether to take the step.

        With an overflow, or a norm that is infinite or NaN, it drops the gradients and lowers the loss scale.
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
        """The factor that unscales and clips the gradients; None for 1."""
        scale = self._scale.value
        if self._policy.clipping > 0.0 and self.grad_norm is not None:
            return clip_factor(self.grad_norm, self._policy.clipping) / scale
        return None if scale == 1.0 else 1.0 / scale

    def _model_groups(self) -> list[DataParallelGroup]:
        """The group of the ranks that the model is divided over; empty if there are none."""
        return [] if self.model_ranks is None else [self.model_ranks.group]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Always raises UsageError: the layout of the flat buffers is fixed."""
        raise UsageError(
            "add_param_group works at stage 3 only; at the other stages pass all parameters to initialize, and call it "
            "again for new ones"
        )

    def state_dict(self) -> dict[str, Any]:
        """The torch optimizer's state on this rank."""
        return self.optimizer.state_dict()

    @abstractmethod
    def masters_with_parts(self) -> list[Master]:
        """The tensors that the torch optimizer updates on this rank, with their parts."""

    @abstractmethod
    def parameter_tensors(self) -> Iterator[torch.Tensor]:
        """The tensors of the model's parameters that the optimizer holds, after all messages in flight."""

    @abstractmethod
    def reduced(self) -> list[torch.Tensor]:
        """The reduced gradients of the current step: one for each master, with the same layout."""

    @abstractmethod
    def trained(self) -> dict[str, tuple[torch.nn.Parameter, int]]:
        """The parameters that all ranks together update, with their param groups."""

    def settle(self) -> None:
        """Wait for parameters in flight, and adopt the changes that a script has made to them."""

    def adopt(self) -> None:
        """Set the masters from the model's parameters, after these have been changed."""

    def loaded(self) -> None:
        """Set the model's parameters as after a step, once a checkpoint has been loaded."""

    def fragments(self, parameter: torch.nn.Parameter | None = None) -> Iterator[Fragment]:
        """This rank's fragments of all parameters or of one, with their state.

        The tensors may be read and written until the next fragment is requested.
        """
        masters = self.masters_with_parts()
        if parameter is not None:
            masters = [
                master for master in masters if any(part.parameter is parameter for part in master.parts)
            ]
        return fragments_of(self.optimizer.state, masters)

    def stored(self) -> Iterator[Stored]:
        """The fragments for a checkpoint, whose tensors are read on demand, in any order."""
        return map(stored, self.fragments())

    def load_fragments(self, source: Source, states: bool = True) -> None:
        """Fill the masters and, with ``states``, the state from a checkpoint; the model's parameters do not change."""
        load(self.optimizer, self.masters_with_parts(), source, states)


def master_of(parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The master of ``parameter``: a copy of at least ``dtype``, or the parameter itself if its dtype is that wide."""
    wide = torch.promote_types(parameter.dtype, dtype)
    return parameter.detach().to(wide).requires_grad_()

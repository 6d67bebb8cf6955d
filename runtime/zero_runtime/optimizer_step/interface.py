"""The wrapper of a torch optimizer: its param groups, state, loss scale and fragments.

:mod:`zero_runtime.optimizer_step.sharded_step` and :mod:`zero_runtime.optimizer_step.replicated_step` implement
the step. In a step the ranks agree on overflow, compute the norm, unscale and clip the gradients, and update
the masters. If the masters are sharded, the ranks then gather the parameters. After an overflow, or if the norm
is infinite or NaN, the step is skipped: the parameters do not change, and the loss scale decreases.
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
        clipping: The largest norm of the gradients. 0 disables clipping.
        compute_norm: Whether the norm is computed, even without clipping.
        check_overflow: Whether a separate message finds infinite and NaN gradients of any rank.
        check_norm: Whether a step whose norm is infinite or NaN is skipped.
        masters: The dtype of the masters of 16-bit parameters.
    """

    clipping: float
    compute_norm: bool
    check_overflow: bool
    check_norm: bool
    masters: torch.dtype


class WrappedOptimizer(torch.optim.Optimizer, ABC):
    """The base class of both wrappers of a torch optimizer.

    Param groups and state are the torch optimizer's own objects, so a learning-rate schedule works with the
    wrapper or with the torch optimizer.

    Attributes:
        overflow: Whether the last step was skipped because a gradient was infinite or NaN.
        grad_norm: The gradient norm of the last step, before clipping. Infinity if that step was skipped. None
            if the norm is not computed.
        is_sharded: Whether each rank has only a shard of the masters.
        model_ranks: The ranks that the model is divided over, which agree on norm and overflow. None if each
            rank has the whole model.
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
        """The factor by which the loss of the next step is multiplied."""
        return self._scale.value

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        self._scale.value = value

    @property
    def cur_scale(self) -> float:
        """An alias of ``loss_scale``."""
        return self._scale.value

    @property
    def dynamic_loss_scale(self) -> bool:
        """Whether overflows change the loss scale."""
        return self._scale.dynamic

    def needs_scaler(self) -> bool:
        """Return whether the loss must pass through ``engine.scale`` before ``loss.backward()``."""
        return self._scale.dynamic or self._scale.value != 1.0

    @property
    def loss_scaler(self) -> LossScale:
        """The loss scale, under the name that DeepSpeed uses with ZeRO."""
        return self._scale

    loss_scale_config = loss_scaler  # This is the name that DeepSpeed uses without ZeRO.

    @property
    def _global_grad_norm(self) -> torch.Tensor | None:
        """``grad_norm``, under the name that scripts read."""
        return self.grad_norm

    def override_loss_scale(self, loss_scale: float) -> None:
        """Use ``loss_scale`` from now on, regardless of overflows."""
        self._scale.override(loss_scale)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients. ``set_to_none`` only matches torch's signature and has no effect."""
        self._gradients.clear()

    def _measured(self, overflow: bool, norm: Callable[[], torch.Tensor]) -> bool:
        """Record the overflow and the norm of the scaled gradients, and return whether to take the step.

        After an overflow, or if the norm is infinite or NaN, drop the gradients and lower the loss scale.
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
        """Return the factor that unscales and clips the gradients. None means 1."""
        scale = self._scale.value
        if self._policy.clipping > 0.0 and self.grad_norm is not None:
            return clip_factor(self.grad_norm, self._policy.clipping) / scale
        return None if scale == 1.0 else 1.0 / scale

    def _model_groups(self) -> list[DataParallelGroup]:
        """Return a list with the group of the ranks that the model is divided over. The list may be empty."""
        return [] if self.model_ranks is None else [self.model_ranks.group]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise UsageError, because the layout of the flat buffers is fixed. Stage 3 overrides this behavior."""
        raise UsageError(
            "add_param_group works at stage 3 only; at the other stages pass all parameters to initialize, and call it "
            "again for new ones"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the torch optimizer's state on this rank."""
        return self.optimizer.state_dict()

    @abstractmethod
    def masters_with_parts(self) -> list[Master]:
        """Return the tensors that the torch optimizer updates on this rank, with their parts."""

    @abstractmethod
    def parameter_tensors(self) -> Iterator[torch.Tensor]:
        """Return the tensors of the model's parameters that the optimizer uses, after all messages in flight."""

    @abstractmethod
    def reduced(self) -> list[torch.Tensor]:
        """Return the reduced gradients of the current step: one for each master, with the layout of the master."""

    @abstractmethod
    def trained(self) -> dict[str, tuple[torch.nn.Parameter, int]]:
        """Return the parameters that all ranks together update, by name, with the number of their param group."""

    def settle(self) -> None:
        """Wait for parameters in flight, and copy changes that a script has made to the parameters."""

    def adopt(self) -> None:
        """Set the masters from the model's parameters after a script has changed the parameters."""

    def loaded(self) -> None:
        """After a checkpoint is loaded, set the model's parameters as the end of a step would set them."""

    def fragments(self, parameter: torch.nn.Parameter | None = None) -> Iterator[Fragment]:
        """Return this rank's fragments of all parameters, or only of ``parameter``, with their optimizer state.

        The tensors may be read and written until the next fragment is requested.
        """
        masters = self.masters_with_parts()
        if parameter is not None:
            masters = [
                master for master in masters if any(part.parameter is parameter for part in master.parts)
            ]
        return fragments_of(self.optimizer.state, masters)

    def stored(self) -> Iterator[Stored]:
        """Return the fragments for a checkpoint. Their tensors are read on demand, in any order."""
        return map(stored, self.fragments())

    def load_fragments(self, source: Source, states: bool = True) -> None:
        """Fill the masters and, with ``states``, the optimizer state from a checkpoint.

        The model's parameters do not change.
        """
        load(self.optimizer, self.masters_with_parts(), source, states)


def master_of(parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the master of ``parameter``.

    The master is a copy whose dtype is at least as wide as ``dtype``, or the parameter itself if its dtype is
    wide enough.
    """
    wide = torch.promote_types(parameter.dtype, dtype)
    return parameter.detach().to(wide).requires_grad_()

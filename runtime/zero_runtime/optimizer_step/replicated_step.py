"""The optimizer step over replicated parameters (stage 0)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from zero_runtime.comm import DataParallelGroup
from zero_runtime.experimental.one_bit import OneBitOptimizer, ZeroOneAdam
from zero_runtime.experimental.topology_aware.delay import DelayedGradients
from zero_runtime.experts.expert_groups import ExpertRanks
from zero_runtime.experts.expert_parameters import group_of, is_expert
from zero_runtime.gradient_reduction.clip import (
    averaged_norm,
    clip_factor,
    joint_norm,
    norm_with_experts,
    replicated_norm,
    sum_of_squares,
)
from zero_runtime.gradient_reduction.loss_scale import UNSCALED, LossScale
from zero_runtime.gradient_reduction.whole_gradients import ReplicatedGradients
from zero_runtime.optimizer_step.dtypes import agree_on_overflow, any_overflow
from zero_runtime.optimizer_step.fragments import Master, Part
from zero_runtime.optimizer_step.interface import StepPolicy, WrappedOptimizer, master_of
from zero_runtime.optimizer_step.torch_optimizer import replace_parameters


class ReplicatedOptimizer(WrappedOptimizer):
    """Updates all parameters on every rank. 16-bit parameters are updated through fp32 copies.

    Args:
        optimizer: The torch optimizer over the parameters.
        gradients: The reduced gradients.
        group: The group of the data-parallel ranks.
        policy: The options of a step.
        scale: The loss scale.
        full_precision: Whether no parameter needs a copy.
        names: The names of the model's parameters.
    """

    is_sharded = False

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
        self.experts: Mapping[str, ExpertRanks] = {}
        groups = [[p for p in each["params"] if p.requires_grad] for each in optimizer.param_groups]
        self._parameters = [parameter for each in groups for parameter in each]
        self._labels = [
            (names.get(parameter, f"param_groups[{number}][{index}]"), number)
            for number, each in enumerate(groups)
            for index, parameter in enumerate(each)
        ]
        self.masters = self._parameters
        if not full_precision:
            copies = [[master_of(parameter, policy.masters) for parameter in each] for each in groups]
            self.masters = [copy for each in copies for copy in each]
            replace_parameters(optimizer, [list(each) for each in copies])
            if isinstance(optimizer, OneBitOptimizer):
                optimizer.rename(dict(zip(self._parameters, self.masters, strict=True)))

    # Without copies, DeepSpeed returns the torch optimizer itself, and scripts test the class of that object.

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The class that ``isinstance`` sees: the torch optimizer's class if it updates the parameters in place."""
        return type(self.optimizer) if self._updates_in_place else ReplicatedOptimizer

    def __eq__(self, other: object) -> bool:
        return other is self or (self._updates_in_place and other is self.optimizer)

    def __hash__(self) -> int:
        return hash(self.optimizer)

    @property
    def _updates_in_place(self) -> bool:
        return self.masters is self._parameters

    @property
    def fp32_groups_flat(self) -> list[torch.Tensor]:
        """The masters, each flat, under DeepSpeed's name."""
        return [master.detach().reshape(-1) for master in self.masters]

    def parameter_tensors(self) -> Iterator[torch.Tensor]:
        """Return the trainable parameters."""
        return iter(self._parameters)

    def masters_with_parts(self) -> list[Master]:
        """Return one master for each trainable parameter: the parameter itself, or its fp32 copy."""
        return [
            Master(master, (Part(name, parameter, group, 0, parameter.numel(), 0),))
            for (name, group), parameter, master in zip(
                self._labels, self._parameters, self.masters, strict=True
            )
        ]

    def reduced(self) -> list[torch.Tensor]:
        """Return the gradient of each trainable parameter. A parameter without a gradient gets zeros."""
        return [
            torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            for parameter in self._parameters
        ]

    def trained(self) -> dict[str, tuple[torch.nn.Parameter, int]]:
        """Return the parameters of all param groups, by name, with the number of their param group."""
        return {
            name: (parameter, group)
            for (name, group), parameter in zip(self._labels, self._parameters, strict=True)
        }

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the parameters with the reduced gradients. Skip the step if a gradient overflowed."""
        taken = self._step_in_place() if self._updates_in_place else self._step_through_copies()
        if taken:
            self._scale.update(False)
            self._gradients.clear()

    def settle(self) -> None:
        """Synchronize ranks that take some steps independently (ZeroOneAdam)."""
        if isinstance(self.optimizer, ZeroOneAdam):
            self.optimizer.meet()
            self._publish()

    @torch.no_grad()
    def adopt(self) -> None:
        """Set the masters from the model's parameters after a script has changed the parameters."""
        if not self._updates_in_place:
            for master, parameter in zip(self.masters, self._parameters, strict=True):
                master.copy_(parameter)

    def _step_in_place(self) -> bool:
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        if self._scale.rules is not UNSCALED:
            # Data-parallel ranks with equal gradients find the same overflows, so they need no message.
            groups = [
                *self._model_groups(),
                *([self._group] if self._is_apart else []),
                *self._expert_parallel(),
            ]
            overflow = agree_on_overflow(any_overflow(gradients, self._group.device), *groups)
            if not self._measured(overflow, self._agreed_norm if self.experts else self._norm):
                return False
            torch._foreach_mul_(gradients, 1.0 / self._scale.value)
        # In fp32 the norm is computed for clipping only, and never reported, as in DeepSpeed.
        if self._policy.clipping > 0.0:
            norm = self._norm()
            # Delayed gradients are bitwise equal on all ranks, so a message would only synchronize the ranks.
            if not isinstance(self._gradients, DelayedGradients):
                norm = averaged_norm(norm, self._group)
            torch._foreach_mul_(gradients, clip_factor(norm, self._policy.clipping))
        self.optimizer.step()
        return True

    @property
    def _is_apart(self) -> bool:
        """Whether each rank takes the next step with its own gradients."""
        alone = self._group.world_size == 1
        return isinstance(self.optimizer, OneBitOptimizer) and not alone and not self.optimizer.wants_mean()

    def _agreed_norm(self) -> torch.Tensor:
        """Return the norm of the whole model's gradients. If the ranks have different norms, return the mean.

        A norm that is infinite on one rank makes the mean infinite on all ranks. With experts, the squares of
        the experts of all ranks are summed.
        """
        if self.experts:
            return self._norm_with_experts()
        return averaged_norm(self._norm(), self._group) if self._is_apart else self._norm()

    def _norm_with_experts(self) -> torch.Tensor:
        dense: list[torch.Tensor] = []
        of_experts: dict[DataParallelGroup, list[torch.Tensor]] = {}
        for parameter in self._parameters:
            if parameter.grad is not None and is_expert(parameter):
                of_experts.setdefault(self.experts[group_of(parameter)].parallel, []).append(parameter.grad)
            elif parameter.grad is not None:
                dense.append(parameter.grad)
        return norm_with_experts(dense, of_experts)

    def _expert_parallel(self) -> list[DataParallelGroup]:
        """Return a list with the largest group of ranks that have different experts.

        The list is empty if the model has no experts.
        """
        groups = [each.parallel for each in self.experts.values()]
        return sorted(groups, key=lambda each: each.world_size)[-1:]

    def _norm(self) -> torch.Tensor:
        """Return the norm of the whole model's gradients."""
        gradients = {p: p.grad for p in self._parameters if p.grad is not None}
        if self.model_ranks is None:
            return replicated_norm(list(gradients.values()))
        counted = [each.reshape(-1) for p, each in gradients.items() if self.model_ranks.counts(p)]
        squares = [sum_of_squares(each) for each in counted] or [torch.zeros((), device=self._group.device)]
        return joint_norm([torch.stack(squares).sum()], self._model_groups())

    def _step_through_copies(self) -> bool:
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._parameters]
        # The ranks have different experts, so they must agree on overflows.
        overflow = bool(self.experts) and agree_on_overflow(
            any_overflow(gradients, self._group.device), *self._expert_parallel()
        )
        if not self._measured(overflow, self._agreed_norm):
            return False
        for master, gradient in zip(self.masters, gradients, strict=True):
            master.grad = gradient.to(master.dtype)
        factor = self._factor()
        if factor is not None:
            torch._foreach_mul_([master.grad for master in self.masters if master.grad is not None], factor)
        self.optimizer.step()
        for master in self.masters:
            master.grad = None
        self._publish()
        return True

    @torch.no_grad()
    def _publish(self) -> None:
        """Copy the masters to the model's parameters."""
        for master, parameter in zip(self.masters, self._parameters, strict=True):
            if parameter.dtype is not master.dtype:
                parameter.copy_(master)

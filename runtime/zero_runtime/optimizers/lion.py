"""Lion: every step moves each element by the same amount, in the direction of the sign of a momentum blend."""

from __future__ import annotations

from typing import Any

import torch

from zero_runtime.optimizers.optimizer_states import GroupwiseOptimizer, check_hyperparameters


class Lion(GroupwiseOptimizer):
    """Lion of Chen et al., "Symbolic Discovery of Optimization Algorithms" (arXiv:2302.06675, algorithm 2).

    With gradient g and momentum m: p <- (1 - lr * weight_decay) p - lr * sign(beta1 m + (1 - beta1) g), then m
    <- beta2 m + (1 - beta2) g. The update is elementwise, so it also works on flat shards.

    Args:
        params: The tensors or param groups.
        lr: The learning rate.
        betas: The coefficient of the blend, and the coefficient of the momentum.
        weight_decay: The decoupled weight decay.
    """

    moments = ("exp_avg",)

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
    ) -> None:
        check_hyperparameters(lr, betas, weight_decay)
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay})

    def update(self, group: dict[str, Any], tensors: list[torch.Tensor]) -> None:
        """Update ``tensors`` of ``group``, which all have gradients."""
        (momenta,) = self.moments_of(tensors)
        gradients = [tensor.grad for tensor in tensors if tensor.grad is not None]
        rate, (beta1, beta2) = float(group["lr"]), group["betas"]
        directions = torch._foreach_mul(momenta, beta1)
        torch._foreach_add_(directions, gradients, alpha=1.0 - beta1)
        torch._foreach_sign_(directions)
        torch._foreach_mul_(tensors, 1.0 - rate * group["weight_decay"])
        torch._foreach_add_(tensors, directions, alpha=-rate)
        torch._foreach_mul_(momenta, beta2)
        torch._foreach_add_(momenta, gradients, alpha=1.0 - beta2)

"""Adam without bias correction, which torch does not offer."""

from __future__ import annotations

from typing import Any

import torch

from zero_runtime.optimizers.optimizer_states import GroupwiseOptimizer, check_hyperparameters


class UncorrectedAdam(GroupwiseOptimizer):
    """Adam or AdamW without bias correction of the moments, which begin at zero.

    Args:
        params: The tensors or param groups.
        lr: The learning rate.
        betas: The coefficients of the moments of the gradient and of its square.
        eps: The value added to the root of the second moment.
        weight_decay: The weight decay.
        decoupled: Whether the weight decay is decoupled (AdamW) or added to the gradient (Adam).
    """

    moments = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        decoupled: bool = True,
    ) -> None:
        check_hyperparameters(lr, betas, weight_decay)
        defaults = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)
        self._decoupled = decoupled

    def update(self, group: dict[str, Any], tensors: list[torch.Tensor]) -> None:
        """Update ``tensors`` of ``group``, which all have gradients."""
        means, squares = self.moments_of(tensors)
        gradients = [tensor.grad for tensor in tensors if tensor.grad is not None]
        rate, decay, (beta1, beta2) = float(group["lr"]), group["weight_decay"], group["betas"]
        if decay and not self._decoupled:
            gradients = list(torch._foreach_add(gradients, tensors, alpha=decay))
        torch._foreach_lerp_(means, gradients, 1.0 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, gradients, gradients, value=1.0 - beta2)
        if decay and self._decoupled:
            torch._foreach_mul_(tensors, 1.0 - rate * decay)
        divisors = torch._foreach_sqrt(squares)
        torch._foreach_add_(divisors, group["eps"])
        torch._foreach_addcdiv_(tensors, means, divisors, value=-rate)

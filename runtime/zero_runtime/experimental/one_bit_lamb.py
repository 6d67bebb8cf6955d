"""1-bit Lamb, a variant of Lamb whose ranks exchange signs at stage 0."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from zero_runtime.errors import ConfigError
from zero_runtime.experimental.one_bit import OneBitOptimizer, count


class OneBitLamb(OneBitOptimizer):
    """1-bit Lamb of Li et al. (arXiv:2104.06069), which is Lamb at first and then exchanges signs of the first moment.

    Let m be the first moment of the gradient and v the second moment, without bias correction. With
    u = m / (sqrt(v) + eps) + weight_decay p, the update is p <- p - lr c u.

    For the first ``freeze_step`` steps c is |p| / |u|, limited to the range from ``min_coeff`` to
    ``max_coeff``, or 1 if a norm is 0. The optimizer computes an exponential mean of c, in which the old value
    has the weight ``coeff_beta``.

    Then v and the mean of c are frozen, and gradients are not reduced. Each rank updates m with its own
    gradient, before m is averaged over the ranks. The m of each parameter is scaled before it is sent, so
    that all parameters have similar magnitudes.

    From the change of m, the optimizer computes the mean gradient of all ranks. From this gradient it
    computes w, the value that v would have now. Then c is the frozen mean times a factor f r + 1 - r. Here f
    is the largest element of (sqrt(v) + eps) / (sqrt(w) + eps), and r <= 1 is the share of u that is not
    weight decay. The factor is limited to the range from ``factor_min`` to ``factor_max``, and changes by at
    most a share of ``factor_threshold`` in a step.

    Args:
        params: The tensors or param groups.
        lr: The learning rate.
        freeze_step: The number of steps with uncompressed gradients.
        betas: The decay factors of the moments.
        eps: The number that is added to the roots.
        weight_decay: The weight decay, which is added to u.
        max_coeff: The largest c of the first steps.
        min_coeff: The smallest c of the first steps.
        coeff_beta: The weight of the old value in the mean of c. 1 / (1 - coeff_beta) should not be above
            ``freeze_step``.
        factor_max: The largest factor.
        factor_min: The smallest factor.
        factor_threshold: The largest relative change of the factor in a step.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        freeze_step: int = 100_000,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        coeff_beta: float = 0.9,
        factor_max: float = 4.0,
        factor_min: float = 0.5,
        factor_threshold: float = 0.1,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay)
        for lowest, low, highest, high in (
            ("min_coeff", min_coeff, "max_coeff", max_coeff),
            ("factor_min", factor_min, "factor_max", factor_max),
        ):
            if not 0.0 <= low <= high:
                raise ConfigError(
                    f"optimizer.params.{lowest} is {low!r} and {highest} {high!r}; expected 0 <= {lowest} <= {highest}"
                )
        for name, value in (("coeff_beta", coeff_beta), ("factor_threshold", factor_threshold)):
            if not 0.0 <= value < 1.0:
                raise ConfigError(
                    f"optimizer.params.{name} is {value!r}; expected a number from 0 and below 1"
                )
        self._freeze_step = count("freeze_step", freeze_step)
        self._coefficients = (min_coeff, max_coeff)
        self._coeff_beta = coeff_beta
        self._factors = (factor_min, factor_max)
        self._threshold = factor_threshold

    def wants_mean(self) -> bool:
        """Return whether v is still measured."""
        return self.taken < self._freeze_step

    def _groups(self) -> Iterator[tuple[dict[str, Any], list[torch.Tensor]]]:
        for group, tensors in super()._groups():
            filled = [each for each in tensors if each.numel()]  # An empty tensor has no largest element.
            if filled:
                yield group, filled

    def _update(self) -> None:
        """Take a step of Lamb, and update the mean of the coefficient c of each parameter."""
        for group, tensors in self._groups():
            means, squares = self.moments_of(tensors)
            for tensor, mean, square in zip(tensors, means, squares, strict=True):
                step = mean.div(square.sqrt().add_(group["eps"])).add_(tensor, alpha=group["weight_decay"])
                ratio = _ratio(tensor, step, 1.0)
                if ratio != 1.0:
                    ratio = _clamped(ratio, *self._coefficients)
                    state, weight = self.state[tensor], self._coeff_beta
                    state["coefficient"] = weight * state.get("coefficient", 0.0) + (1.0 - weight) * ratio
                tensor.add_(step, alpha=-float(group["lr"]) * ratio)

    def _step_apart(self, number: int) -> None:
        self._freeze()
        before, averages = [], []
        for group, tensors in self._groups():
            means, _ = self.moments_of(tensors)
            for tensor, mean in zip(tensors, means, strict=True):
                assert tensor.grad is not None
                before.append(mean.clone())
                averages.append(mean.lerp_(tensor.grad, 1.0 - group["betas"][0]))
        self._exchange("momentum", averages)
        earlier = iter(before)
        for group, tensors in self._groups():
            for tensor in tensors:
                self._move(group, tensor, next(earlier))

    def _freeze(self) -> None:
        """Compute, once, the scale for each parameter's m that makes the magnitudes of all m equal."""
        new = [each for _, tensors in self._groups() for each in tensors if "scale" not in self.state[each]]
        if not new:
            return
        magnitudes = [float(self.state[each]["exp_avg"].square().mean().sqrt()) for each in new]
        united = sum(magnitudes) / len(magnitudes)
        for tensor, magnitude in zip(new, magnitudes, strict=True):
            state = self.state[tensor]
            state["scale"] = united / magnitude if magnitude > 0.0 else 1.0
            state["factor"] = 1.0
            state["exp_avg_sq_fresh"] = state["exp_avg_sq"].clone()

    def _divisor(self, group: dict[str, Any], tensor: torch.Tensor) -> float:
        return 1.0 / float(self.state[tensor]["scale"])

    def _move(self, group: dict[str, Any], tensor: torch.Tensor, before: torch.Tensor) -> None:
        """Update one parameter with its m, which is equal on all ranks. ``before`` is the earlier value of m."""
        state, (beta1, beta2), decay = self.state[tensor], group["betas"], group["weight_decay"]
        mean, square, fresh = state["exp_avg"], state["exp_avg_sq"], state["exp_avg_sq_fresh"]
        gradient = before.mul_(-beta1).add_(mean).div_(1.0 - beta1)
        fresh.mul_(beta2).addcmul_(gradient, gradient, value=1.0 - beta2)
        divisor = square.sqrt().add_(group["eps"])
        step = mean / divisor
        factor = float(divisor.div_(fresh.sqrt().add_(group["eps"])).max())
        if decay > 0.0:
            decayed = step.add(tensor, alpha=decay)
            share = min(1.0, _ratio(step, decayed, 0.0))
            factor, step = factor * share + 1.0 - share, decayed
        last = state["factor"]
        factor = _clamped(factor, *self._factors)
        factor = _clamped(factor, last * (1.0 - self._threshold), last * (1.0 + self._threshold))
        state["factor"] = factor
        tensor.add_(step, alpha=-float(group["lr"]) * state.get("coefficient", 1.0) * factor)


def _ratio(one: torch.Tensor, other: torch.Tensor, without: float) -> float:
    """Return the norm of ``one`` divided by the norm of ``other``, or ``without`` if either norm is 0."""
    above, below = float(torch.linalg.vector_norm(one)), float(torch.linalg.vector_norm(other))
    return above / below if above and below else without


def _clamped(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)

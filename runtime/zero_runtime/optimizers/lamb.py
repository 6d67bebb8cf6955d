"""Lamb: Adam whose step of each parameter is scaled by the ratio of the parameter's norm to the step's norm."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from zero_runtime.errors import ConfigError
from zero_runtime.optimizers.optimizer_states import MomentOptimizer, check_hyperparameters


class Segment(NamedTuple):
    """The range of a flat tensor that belongs to one parameter.

    Attributes:
        parameter: The number of the parameter, which is equal on all ranks.
        offset: The first element of the range within the tensor.
        numel: The number of elements.
    """

    parameter: int
    offset: int
    numel: int


class Division(NamedTuple):
    """The positions of parameters in the updated tensors.

    Attributes:
        segments: The segments of each tensor. Elements outside of all segments are padding.
        parameters: The number of parameters on all ranks together.
        sum_over_ranks: A function that sums a tensor over the ranks, in place.
    """

    segments: Mapping[torch.Tensor, Sequence[Segment]]
    parameters: int
    sum_over_ranks: Callable[[torch.Tensor], object]


class Lamb(MomentOptimizer):
    """Lamb of You et al., "Large Batch Optimization for Deep Learning" (arXiv:1904.00962), as DeepSpeed scales it.

    With the moments m of the gradient and v of its square, u = m / (sqrt(v) + eps) + weight_decay p, and p <- p
    - rate * clamp(|p| / |u|, min_coeff, max_coeff) u. The ratio is 1 if either norm is 0. The rate is lr *
    sqrt(1 - beta2^t) / (1 - beta1^t), or lr without bias correction.

    The norms are those of whole parameters. If tensors contain shards of parameters, ``divide`` must be called
    to set the positions of the parameters. The squares are then summed over the ranks, in one message of two
    numbers for each parameter in each step.

    Args:
        params: The tensors or param groups.
        lr: The learning rate.
        bias_correction: Whether the learning rate corrects for moments that begin at zero.
        betas: The coefficients of the moments.
        eps: The value added to the root of the second moment.
        eps_inside_sqrt: Whether eps is added to the second moment instead of to its root.
        weight_decay: The weight decay, which is added to the step.
        max_coeff: The largest ratio.
        min_coeff: The smallest ratio.
    """

    moments = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
    ) -> None:
        check_hyperparameters(lr, betas, weight_decay)
        if not 0.0 <= min_coeff <= max_coeff:
            raise ConfigError(
                f"optimizer.params.min_coeff is {min_coeff!r} and max_coeff {max_coeff!r}; expected "
                "0 <= min_coeff <= max_coeff"
            )
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": tuple(betas),
            "eps": eps,
            "weight_decay": weight_decay,
            "max_coeff": max_coeff,
            "min_coeff": min_coeff,
        }
        super().__init__(params, defaults)
        self._eps_inside_sqrt = eps_inside_sqrt
        self._division: Division | None = None

    def divide(self, division: Division) -> None:
        """Set the positions of parameters in the tensors."""
        self._division = division

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient.

        If the parameters are sharded, all ranks must call this method.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        steps = {
            tensor: (group, self._direction(group, tensor))
            for group in self.param_groups
            for tensor in group["params"]
            if tensor.grad is not None
        }
        ratios = self._ratios({tensor: direction for tensor, (_, direction) in steps.items()})
        for number, (tensor, (group, direction)) in enumerate(steps.items()):
            flat = direction.view(-1) if self._division else direction
            for segment, ratio in ratios[number]:
                low, high = group["min_coeff"], group["max_coeff"]
                part = flat if segment is None else flat.narrow(0, segment.offset, segment.numel)
                part.mul_(torch.where(ratio.isfinite(), ratio.clamp(low, high), 1.0).to(part.dtype))
            tensor.add_(direction, alpha=-self._rate(group, tensor))
        return loss

    def _direction(self, group: dict[str, Any], tensor: torch.Tensor) -> torch.Tensor:
        """Update the moments of ``tensor``, and return the unscaled step."""
        assert tensor.grad is not None
        (mean,), (square,) = self.moments_of([tensor])
        state = self.state[tensor]
        state["step"] = state.get("step", 0) + 1
        beta1, beta2 = group["betas"]
        mean.lerp_(tensor.grad, 1.0 - beta1)
        square.mul_(beta2).addcmul_(tensor.grad, tensor.grad, value=1.0 - beta2)
        eps = group["eps"]
        divisor = (square + eps).sqrt_() if self._eps_inside_sqrt else square.sqrt().add_(eps)
        return torch.div(mean, divisor, out=divisor).add_(tensor, alpha=group["weight_decay"])

    def _rate(self, group: dict[str, Any], tensor: torch.Tensor) -> float:
        rate, (beta1, beta2) = float(group["lr"]), group["betas"]
        if not group["bias_correction"]:
            return rate
        taken = float(self.state[tensor]["step"])
        return float(rate * (1.0 - beta2**taken) ** 0.5 / (1.0 - beta1**taken))

    def _ratios(
        self, directions: dict[torch.Tensor, torch.Tensor]
    ) -> list[list[tuple[Segment | None, torch.Tensor]]]:
        """Return the segments of each tensor with their ratios of norms.

        The segment is None for a whole parameter. A ratio is not finite if one of its norms is 0.
        """
        if self._division is None:
            return [
                [(None, _ratio(_squared(tensor), _squared(direction)))]
                for tensor, direction in directions.items()
            ]
        division = self._division
        device = next(iter(division.segments)).device
        squares = torch.zeros(2, division.parameters, dtype=torch.float64, device=device)
        for tensor, direction in directions.items():
            for number, offset, numel in division.segments[tensor]:
                squares[0, number] += _squared(tensor.narrow(0, offset, numel))
                squares[1, number] += _squared(direction.narrow(0, offset, numel))
        division.sum_over_ranks(squares)
        return [
            [
                (segment, _ratio(squares[0, segment.parameter], squares[1, segment.parameter]))
                for segment in division.segments[tensor]
            ]
            for tensor in directions
        ]


def _squared(tensor: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(tensor, dtype=torch.float64).square()


def _ratio(of_parameter: torch.Tensor, of_step: torch.Tensor) -> torch.Tensor:
    ratio = (of_parameter / of_step).sqrt()
    return torch.where(of_parameter == 0, torch.full_like(ratio, float("nan")), ratio)

"""1-bit Adam and 0/1 Adam, optimizers whose ranks exchange signs at stage 0. 1-bit Lamb is in ``one_bit_lamb.py``.

All of them freeze Adam's second moment v after some steps. From then on an update is linear in the gradients,
so that each rank can use its own gradients and send few bytes. Before values are sent, they are divided by
sqrt(v) + eps, which is equal on all ranks. The elements then have similar magnitudes, so that signs with one
scale represent them well. The residual is added the next time. Elements that had no gradient while v was
measured do not change.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from zero_runtime.errors import ConfigError
from zero_runtime.optimizers.optimizer_states import MomentOptimizer, check_hyperparameters

# A function that replaces each tensor by its mean over the ranks, in place. The names identify the tensors.
Mean = Callable[[Sequence[str], Sequence[torch.Tensor]], None]


def _alone(names: Sequence[str], values: Sequence[torch.Tensor]) -> None:
    """Leave ``values`` unchanged, because the mean over a single rank is the value itself."""


class OneBitOptimizer(MomentOptimizer, ABC):
    """The common base class of the 1-bit optimizers.

    Args:
        params: The tensors or param groups.
        lr: The learning rate.
        betas: The decay factors of the moments.
        eps: The number that is added to the root of v.
        weight_decay: The weight decay.
    """

    moments = ("exp_avg", "exp_avg_sq")

    def __init__(
        self, params: Any, lr: float, betas: tuple[float, float], eps: float, weight_decay: float
    ) -> None:
        check_hyperparameters(lr, betas, weight_decay)
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay})
        self._mean: Mean = _alone
        self._names: dict[torch.Tensor, str] = {}

    def connect(self, mean: Mean, names: Mapping[torch.Tensor, str]) -> None:
        """Use ``mean`` to compute means over the ranks. ``names`` are the names of the parameters."""
        self._mean = mean
        self._names = dict(names)

    def rename(self, copies: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """Transfer the names of parameters to their copies, because the optimizer updates the copies.

        Args:
            copies: The copy of each parameter.
        """
        for parameter, copy in copies.items():
            self._names[copy] = self._names.pop(parameter, "")

    def _mean_of(self, what: str, parameters: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
        """Replace each of ``values``, the ``what`` of the ``parameters``, by its mean over the ranks."""
        self._mean([f"{what} of {self._names.get(each, '')}" for each in parameters], values)

    @property
    def taken(self) -> int:
        """The number of steps taken so far."""
        return max((int(state.get("step", 0)) for state in self.state.values()), default=0)

    @abstractmethod
    def wants_mean(self) -> bool:
        """Return whether the next step needs gradients that are averaged over the ranks, uncompressed."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient. All ranks must call this method."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        mean_given, number = self.wants_mean(), self.taken + 1
        for _, tensors in self._groups():
            list(self.moments_of(tensors))
        if mean_given:
            self._measure()
            self._update()
        else:
            self._step_apart(number)
        for _, tensors in self._groups():
            for tensor in tensors:
                self.state[tensor]["step"] = number
        return loss

    @abstractmethod
    def _step_apart(self, number: int) -> None:
        """Take step ``number`` with the gradients of this rank."""

    def _groups(self) -> Iterator[tuple[dict[str, Any], list[torch.Tensor]]]:
        for group in self.param_groups:
            tensors = [each for each in group["params"] if each.grad is not None]
            if tensors:
                yield group, tensors

    def _measure(self) -> None:
        """Update both moments with gradients that are equal on all ranks."""
        for group, tensors in self._groups():
            means, squares = self.moments_of(tensors)
            beta1, beta2 = group["betas"]
            for tensor, mean, square in zip(tensors, means, squares, strict=True):
                assert tensor.grad is not None
                mean.lerp_(tensor.grad, 1.0 - beta1)
                square.mul_(beta2).addcmul_(tensor.grad, tensor.grad, value=1.0 - beta2)

    def _update(self) -> None:
        """Update every parameter with the moments."""
        for group, tensors in self._groups():
            rate, decay = float(group["lr"]), group["weight_decay"]
            means, squares = self.moments_of(tensors)
            for tensor, mean, square in zip(tensors, means, squares, strict=True):
                tensor.mul_(1.0 - rate * decay)
                tensor.addcdiv_(mean, square.sqrt().add_(group["eps"]), value=-rate)

    def _exchange(self, what: str, values: Sequence[torch.Tensor]) -> None:
        """Replace ``values`` by their means over the ranks, in place.

        There is one tensor for each parameter with a gradient.
        """
        parameters, divisors, moved = [], [], []
        for group, tensors in self._groups():
            for tensor in tensors:
                parameters.append(tensor)
                divisors.append(self._divisor(group, tensor))
                moved.append(self.state[tensor]["exp_avg_sq"] > 0)
        scaled = [value.div(each).mul_(on) for value, each, on in zip(values, divisors, moved, strict=True)]
        self._mean_of(what, parameters, scaled)
        for value, mean, each, on in zip(values, scaled, divisors, moved, strict=True):
            torch.mul(mean.mul_(on), each, out=value)

    def _divisor(self, group: dict[str, Any], tensor: torch.Tensor) -> torch.Tensor | float:
        """Return the divisor of the values of parameter ``tensor`` before they are sent."""
        return self.state[tensor]["exp_avg_sq"].sqrt().add_(group["eps"])


class OneBitAdam(OneBitOptimizer):
    """1-bit Adam of Tang et al. (arXiv:2102.02888), which is Adam at first and then exchanges signs of the momentum.

    Let m be the first moment of the gradient and v the second moment, without bias correction. The update is
    p <- (1 - lr weight_decay) p - lr m / (sqrt(v) + eps). After ``freeze_step`` steps v is frozen and
    gradients are not reduced. Each rank then updates m with its own gradient, before m is averaged over the
    ranks.

    Args:
        params: The tensors or param groups.
        lr: The learning rate.
        freeze_step: The number of steps with uncompressed gradients. It should be large enough for v to
            settle and for the warmup of the learning rate to end.
        betas: The decay factors of the moments.
        eps: The number that is added to the root of v.
        weight_decay: The decoupled weight decay.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        freeze_step: int = 100_000,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay)
        self._freeze_step = count("freeze_step", freeze_step)

    def wants_mean(self) -> bool:
        """Return whether v is still measured."""
        return self.taken < self._freeze_step

    def _step_apart(self, number: int) -> None:
        averages = []
        for group, tensors in self._groups():
            means, _ = self.moments_of(tensors)
            for tensor, mean in zip(tensors, means, strict=True):
                assert tensor.grad is not None
                averages.append(mean.lerp_(tensor.grad, 1.0 - group["betas"][0]))
        self._exchange("momentum", averages)
        self._update()


class ZeroOneAdam(OneBitOptimizer):
    """0/1 Adam of Lu et al. (arXiv:2202.06009), which measures v and synchronizes the ranks at growing intervals.

    Until ``var_freeze_step``, v is measured in steps that are 1, 2, 4, ... apart, ``var_update_scaler`` times
    for each distance. In the other steps the gradients are sent as signs.

    After ``var_freeze_step``, each rank takes a number of independent steps. Then the ranks send the signs of
    their changes, and all ranks continue from the mean. The number of independent steps is 1, 2, 4, ..., up
    to ``local_step_clipper``. Each number applies for ``local_step_scaler`` steps. Between two
    synchronizations the parameters of the ranks differ. :meth:`meet` synchronizes the ranks early.

    Args:
        params: The tensors or param groups.
        lr: The learning rate.
        betas: The decay factors of the moments.
        eps: The number that is added to the root of v.
        weight_decay: The decoupled weight decay. After ``var_freeze_step`` it is applied when the ranks
            synchronize.
        var_freeze_step: The number of steps after which v is frozen.
        var_update_scaler: The number of measurements of v with each distance.
        local_step_scaler: The number of steps with each number of independent steps.
        local_step_clipper: The largest number of independent steps.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        var_freeze_step: int = 100_000,
        var_update_scaler: int = 16,
        local_step_scaler: int = 32_678,
        local_step_clipper: int = 16,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay)
        self._freeze_step = count("var_freeze_step", var_freeze_step)
        self._measurements = count("var_update_scaler", var_update_scaler)
        self._steps_apart = count("local_step_scaler", local_step_scaler)
        self._most_apart = count("local_step_clipper", local_step_clipper)

    def wants_mean(self) -> bool:
        """Return whether v is measured in the next step."""
        number = self.taken + 1
        return number <= self._freeze_step and measures(number, self._measurements)

    def _step_apart(self, number: int) -> None:
        if number > self._freeze_step:
            self._step_alone()
            after = number - self._freeze_step
            if after % min(2 ** ((after - 1) // self._steps_apart), self._most_apart) == 0:
                self.meet()
            return
        gradients = [
            tensor.grad for _, tensors in self._groups() for tensor in tensors if tensor.grad is not None
        ]
        self._exchange("gradient", gradients)
        for group, tensors in self._groups():
            means, _ = self.moments_of(tensors)
            for tensor, mean in zip(tensors, means, strict=True):
                assert tensor.grad is not None
                mean.lerp_(tensor.grad, 1.0 - group["betas"][0])
        self._update()

    def _step_alone(self) -> None:
        for group, tensors in self._groups():
            rate, (beta, _) = float(group["lr"]), group["betas"]
            means, squares = self.moments_of(tensors)
            for tensor, mean, square in zip(tensors, means, squares, strict=True):
                assert tensor.grad is not None
                state = self.state[tensor]
                if not state.get("rates", 0.0):
                    state["rates"] = 0.0
                    state["anchor"] = tensor.detach().clone()
                mean.lerp_(tensor.grad, 1.0 - beta)
                tensor.addcdiv_(mean * (square > 0), square.sqrt().add_(group["eps"]), value=-rate)
                state["rates"] += rate

    @torch.no_grad()
    def meet(self) -> None:
        """Synchronize the parameters of all ranks, if they differ. All ranks must call this method."""
        apart = [
            (group, tensor)
            for group in self.param_groups
            for tensor in group["params"]
            if self.state.get(tensor, {}).get("rates", 0.0)
        ]
        if not apart:
            return
        # The changes are not divided before they are sent, because they are already divided by sqrt(v) + eps.
        ways = [self.state[tensor]["anchor"] - tensor for _, tensor in apart]
        self._mean_of("distance", [tensor for _, tensor in apart], ways)
        for (group, tensor), way in zip(apart, ways, strict=True):
            state = self.state[tensor]
            square = state["exp_avg_sq"]
            way.mul_(square > 0)
            torch.mul(way / state["rates"], square.sqrt().add_(group["eps"]), out=state["exp_avg"])
            tensor.copy_(state["anchor"]).mul_(1.0 - state["rates"] * group["weight_decay"]).sub_(way)
            state["rates"] = 0.0


def measures(number: int, each: int) -> bool:
    """Return whether v is measured in step ``number``, counted from 1.

    The measuring steps are 1, 2, 4, ... apart, with ``each`` steps of every distance.
    """
    last, distance = 0, 1
    while True:
        first = (last // distance + 1) * distance
        last = first + (each - 1) * distance
        if number <= last:
            return number >= first and number % distance == 0
        distance *= 2


def count(name: str, value: int) -> int:
    """Return ``value`` as an int.

    Raises:
        ConfigError: ``value``, the optimizer's argument ``name``, is not a whole number of at least 1.
    """
    if isinstance(value, bool) or value != int(value) or value < 1:
        raise ConfigError(f"optimizer.params.{name} is {value!r}; expected a whole number of at least 1")
    return int(value)

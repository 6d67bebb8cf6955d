"""What a rank does to its own gradients before they are compressed: clipping, then momentum.

Both are those of Deep Gradient Compression (Lin et al., arXiv:1712.01887).

Error feedback sends an element of a gradient late, after several steps, in one sum. An optimizer that applies its momentum
to that sum applies the momentum of all these steps at once. With momentum correction each rank applies the momentum to its
own gradients instead: u = m u + g. The sums of u, residuals included, are compressed, and the optimizer takes its step by
them without momentum. Without compression the steps are those of SGD. Where topk has sent an element, its u becomes zero, so
that momentum from before does not push it on (momentum factor masking). Signs send all elements, and are not masked.

A residual that is added before clipping is cut with the gradient. So each rank clips before: the sum of n independent
gradients has sqrt(n) times the norm of each, hence the limit for each is that for the sum, divided by sqrt(n).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import sqrt
from weakref import WeakKeyDictionary

import torch
from torch.utils.hooks import RemovableHandle

from zero_runtime.errors import ConfigError
from zero_runtime.experimental.compression.residuals import OF_MOMENTUM, Residuals
from zero_runtime.gradient_reduction.clip import clip_factor
from zero_runtime.gradient_reduction.gradient_buckets import Entry


class LocalGradients:
    """Clips this rank's gradients, and applies the momentum to them.

    Args:
        limit: the norm to which the gradients of all parameters are clipped, as this rank's share of the sum; 0 clips
            nothing. A bucket with a part of the elements is clipped to the limit times the root of that part.
        numel: elements of all gradients.
        momentum: returns the factor now; None without momentum correction.
        velocities: where the momentum is stored.
        steps: optimizer steps taken so far.
    """

    def __init__(
        self,
        limit: float,
        numel: int,
        momentum: Callable[[], float] | None,
        velocities: Residuals | None,
        steps: Callable[[], int],
    ) -> None:
        self._limit = limit
        self._numel = numel
        self._momentum = momentum
        self._velocities = velocities
        self._steps = steps

    def prepare(self, values: torch.Tensor, entries: Sequence[Entry], scale: float) -> None:
        """Clip ``values``, the gradients of ``entries`` times ``scale``, and add the momentum. In place."""
        if self._limit:
            part = min(1.0, values.numel() / self._numel)
            norm = torch.linalg.vector_norm(values, dtype=torch.float32)
            values.mul_(clip_factor(norm, self._limit * sqrt(part) * scale))
        if self._momentum is not None and self._velocities is not None:
            self._add_momentum(values, entries, scale, self._momentum(), self._velocities)

    def _add_momentum(
        self,
        values: torch.Tensor,
        entries: Sequence[Entry],
        scale: float,
        momentum: float,
        velocities: Residuals,
    ) -> None:
        if not bool(torch.isfinite(values).all()):
            return  # the step is skipped, and they would stay in the momentum forever
        now = self._steps()
        ranges = velocities.ranges(values, _of_momentum(entries))
        for entry, (gradient, velocity) in zip(entries, ranges, strict=True):
            # The first micro-batch of a step brings the momentum along; each later one only adds its gradients.
            if velocities.step_of.get(entry.name) != now:
                velocity.mul_(momentum)
                carried = velocity * scale
                velocity.add_(gradient, alpha=1.0 / scale)
                gradient.add_(carried)
            else:
                velocity.add_(gradient, alpha=1.0 / scale)
            velocities.step_of[entry.name] = now

    def mask(self, sent: torch.Tensor, entries: Sequence[Entry]) -> None:
        """Forget the momentum of all elements that are not zero in ``sent``, the values of ``entries`` that are sent."""
        if self._momentum is None or self._velocities is None or not bool(torch.isfinite(sent).all()):
            return
        for part, velocity in self._velocities.ranges(sent, _of_momentum(entries)):
            velocity.masked_fill_(part != 0, 0.0)


def _of_momentum(entries: Sequence[Entry]) -> list[Entry]:
    return [replace(each, name=f"{OF_MOMENTUM}{each.name}") for each in entries]


_hooks: WeakKeyDictionary[torch.optim.Optimizer, tuple[RemovableHandle, ...]] = WeakKeyDictionary()


def take_momentum(optimizer: torch.optim.Optimizer) -> Callable[[], float]:
    """Make ``optimizer`` take its steps without momentum. Returns a function that returns the momentum of its param groups.

    The param groups keep their value between steps: schedules change it, and ``engine.get_mom`` returns it.

    Raises:
        ConfigError: it is not SGD with one momentum above 0 for all param groups.
    """
    used = {
        (each.get("momentum"), each.get("dampening"), each.get("nesterov")) for each in optimizer.param_groups
    }
    momentum, dampening, nesterov = next(iter(used)) if len(used) == 1 else (None, None, None)
    if type(optimizer) is not torch.optim.SGD or not momentum or dampening or nesterov:
        raise ConfigError(
            f"gradient_compression.momentum_correction applies the momentum of SGD on each rank, and the optimizer is "
            f"{type(optimizer).__name__} with (momentum, dampening, nesterov) {sorted(used, key=str)}; expected torch's SGD "
            "with one momentum above 0 for all param groups, dampening 0 and nesterov false; set it to false otherwise, and "
            "with Adam and AdamW set betas[0] to 0 (docs/compression.md)"
        )
    momenta: list[float] = []

    def lay_down(*_: object) -> None:
        momenta[:] = [each["momentum"] for each in optimizer.param_groups]
        for each in optimizer.param_groups:
            each["momentum"] = 0.0

    def take_up(*_: object) -> None:
        for each, value in zip(optimizer.param_groups, momenta, strict=True):
            each["momentum"] = value

    return_momentum(optimizer)
    _hooks[optimizer] = (
        optimizer.register_step_pre_hook(lay_down),
        optimizer.register_step_post_hook(take_up),
    )
    return lambda: float(optimizer.param_groups[0]["momentum"])


def return_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Undo :func:`take_momentum`: a script may give the same optimizer to ``initialize`` again, with another config."""
    for each in _hooks.pop(optimizer, ()):
        each.remove()

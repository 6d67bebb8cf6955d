"""Clipping and momentum, which each rank applies to its own gradients before they are compressed.

Both follow Deep Gradient Compression (Lin et al., arXiv:1712.01887).

Error feedback sends an element of a gradient late, after several steps, in one sum. An optimizer that applies
its momentum to this sum applies the momentum of all these steps at once. With momentum correction, each rank
instead applies the momentum to its own gradients: u = m u + g. The sum of u and the residual is compressed,
and the optimizer takes its step with the result, without momentum. Without compression the steps are equal to
those of SGD.

When topk has sent an element, u of this element becomes zero, so that earlier momentum does not change the
element further (momentum factor masking). The sign codecs send all elements, so their elements are not
masked.

Clipping a gradient after its residual is added would clip the residual too. So each rank clips before it adds
the residual. The norm of the sum of n independent gradients is sqrt(n) times the norm of one gradient. Hence
the limit for each rank is the limit for the sum, divided by sqrt(n).
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
    """The operations on this rank's gradients before compression: clipping and momentum.

    Args:
        limit: The norm to which this rank's gradients of all parameters together are clipped; 0 clips
            nothing. A bucket with a fraction of the elements is clipped to the limit times the square root of
            the fraction.
        numel: The number of elements of all gradients.
        momentum: A function that returns the current momentum factor; None without momentum correction.
        velocities: The residuals in which the momentum is stored.
        steps: A function that returns the number of optimizer steps taken so far.
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
        """Clip ``values`` and add the momentum, in place.

        ``values`` are the gradients of ``entries`` times ``scale``.
        """
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
            return  # The step is skipped, and values that are not finite would stay in the momentum forever.
        now = self._steps()
        ranges = velocities.ranges(values, _of_momentum(entries))
        for entry, (gradient, velocity) in zip(entries, ranges, strict=True):
            # The momentum of earlier steps is added with the first micro-batch of a step. Later micro-batches
            # of the step only add their gradients.
            if velocities.step_of.get(entry.name) != now:
                velocity.mul_(momentum)
                carried = velocity * scale
                velocity.add_(gradient, alpha=1.0 / scale)
                gradient.add_(carried)
            else:
                velocity.add_(gradient, alpha=1.0 / scale)
            velocities.step_of[entry.name] = now

    def mask(self, sent: torch.Tensor, entries: Sequence[Entry]) -> None:
        """Set the momentum to zero for all elements that were sent.

        Args:
            sent: The values of ``entries`` that are sent. An element that is not sent is zero.
            entries: The entries of the bucket.
        """
        if self._momentum is None or self._velocities is None or not bool(torch.isfinite(sent).all()):
            return
        for part, velocity in self._velocities.ranges(sent, _of_momentum(entries)):
            velocity.masked_fill_(part != 0, 0.0)


def _of_momentum(entries: Sequence[Entry]) -> list[Entry]:
    return [replace(each, name=f"{OF_MOMENTUM}{each.name}") for each in entries]


_hooks: WeakKeyDictionary[torch.optim.Optimizer, tuple[RemovableHandle, ...]] = WeakKeyDictionary()


def take_momentum(optimizer: torch.optim.Optimizer) -> Callable[[], float]:
    """Make ``optimizer`` take its steps without momentum, and return a function that returns its momentum.

    Between steps the param groups contain the momentum, because schedules change it and ``engine.get_mom``
    returns it.

    Raises:
        ConfigError: ``optimizer`` is not SGD with the same momentum above 0 in all param groups.
    """
    used = {
        (each.get("momentum"), each.get("dampening"), each.get("nesterov")) for each in optimizer.param_groups
    }
    momentum, dampening, nesterov = next(iter(used)) if len(used) == 1 else (None, None, None)
    if type(optimizer) is not torch.optim.SGD or not momentum or dampening or nesterov:
        raise ConfigError(
            f"gradient_compression.momentum_correction applies the momentum of SGD on each rank, and the optimizer is "
            f"{type(optimizer).__name__} with (momentum, dampening, nesterov) {sorted(used, key=str)}; expected torch's SGD "
            "with one momentum above 0 for all param groups, dampening 0 and nesterov false; use that, or set "
            "momentum_correction to false, and with Adam and AdamW betas[0] to 0 (docs/compression.md)"
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
    """Undo :func:`take_momentum`, so that ``optimizer`` applies its momentum again.

    This is necessary because a script may pass the same optimizer to ``initialize`` again, with a different
    configuration.
    """
    for each in _hooks.pop(optimizer, ()):
        each.remove()

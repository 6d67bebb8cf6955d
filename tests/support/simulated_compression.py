"""Simulates training with compressed gradients in one process, as a reference for the exchange on real ranks.

The module uses plain torch, follows docs/compression.md, and shares no code with zero_runtime. All workers use the same
model, because all replicas are equal. Values are flat vectors of all gradients in the order of the model. They form one
bucket, as at stage 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, sqrt

import torch

BLOCK = 2048  # the number of elements that share a magnitude


@dataclass(frozen=True)
class Rules:
    """The keys of ``gradient_compression``, and the momentum and the clipping of the configuration."""

    algorithm: str = "topk"
    topk_ratio: float = 0.01
    error_feedback: bool = True
    warmup_steps: int = 0
    two_phase: bool = False
    topk_warmup_ratio: float = 0.25
    topk_warmup_steps: int = 0
    momentum_correction: bool = False
    clip_before_residual: bool = False
    residual_decay: float = 1.0
    momentum: float = 0.0  # the momentum of SGD, if momentum_correction applies it
    gradient_clipping: float = 0.0


def largest(values: torch.Tensor, ratio: float) -> torch.Tensor:
    """Return ``values`` with zeros instead of all but the ceil(ratio n) elements of largest magnitude."""
    magnitudes = values.abs()
    least = magnitudes.topk(max(1, ceil(ratio * values.numel()))).values[-1]
    return torch.where(magnitudes >= least, values, 0.0)


def signs(values: torch.Tensor) -> torch.Tensor:
    """Return the sign of each element times the mean magnitude of its block. Zero counts as positive."""
    return torch.cat(
        [torch.where(block >= 0, 1.0, -1.0) * block.abs().mean() for block in values.split(BLOCK)]
    )


def two_magnitudes(values: torch.Tensor) -> torch.Tensor:
    """Return the sign of each element times one of two magnitudes of its block.

    One magnitude is the mean of all magnitudes above the mean of the block. The second magnitude is the mean of the
    remaining magnitudes. Zero counts as positive.
    """
    blocks = []
    for block in values.split(BLOCK):
        magnitudes = block.abs()
        above = magnitudes > magnitudes.mean()
        large, small = magnitudes[above], magnitudes[~above]
        levels = torch.where(above, large.sum() / max(1, len(large)), small.sum() / max(1, len(small)))
        blocks.append(torch.where(block >= 0, 1.0, -1.0) * levels)
    return torch.cat(blocks)


def clipped(values: torch.Tensor, limit: float) -> torch.Tensor:
    """Return ``values``, scaled down so that their norm is at most ``limit``."""
    return values * min(1.0, limit / (float(values.norm()) + 1e-6))


class Workers:
    """Data-parallel workers whose gradients are compressed.

    Args:
        model: The model that all workers share.
        optimizer: The optimizer of the model. Its momentum must be 0 if ``rules.momentum_correction`` applies
            ``rules.momentum``.
        rules: The rules by which gradients are compressed.
        count: The number of workers.
    """

    def __init__(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, rules: Rules, count: int
    ) -> None:
        self._parameters = list(model.parameters())
        self._optimizer = optimizer
        self._rules = rules
        self._steps = 0
        numel = sum(each.numel() for each in self._parameters)
        self.residuals = [torch.zeros(numel) for _ in range(count)]
        self.velocities = [torch.zeros(numel) for _ in range(count)]
        # The number of elements of the sum that each worker owns in the second phase.
        self._width = ceil(numel / (count * BLOCK)) * BLOCK
        self.of_shares = torch.zeros(count * self._width)

    def step(self, losses: Sequence[Callable[[], torch.Tensor]]) -> list[float]:
        """Run a step with one micro-batch for each worker, and return the losses.

        Args:
            losses: One function for each worker that computes the loss of its micro-batch.
        """
        found, vectors = [], []
        for compute in losses:
            self._optimizer.zero_grad()
            loss = compute()
            loss.backward()
            found.append(loss.item())
            vectors.append(torch.cat([each.grad.reshape(-1) for each in self._parameters]) / len(losses))
        total = self._sum(vectors)
        rules = self._rules
        if rules.gradient_clipping and not rules.clip_before_residual:
            total = clipped(total, rules.gradient_clipping)
        for parameter, part in zip(
            self._parameters, total.split([each.numel() for each in self._parameters]), strict=True
        ):
            parameter.grad = part.view_as(parameter)
        self._optimizer.step()
        self._steps += 1
        return found

    def ratio(self) -> float:
        """Return the fraction of the elements that topk sends in the next step."""
        rules = self._rules
        progress = self._steps - rules.warmup_steps
        if progress >= rules.topk_warmup_steps:
            return rules.topk_ratio
        share = progress / rules.topk_warmup_steps
        return rules.topk_warmup_ratio * (rules.topk_ratio / rules.topk_warmup_ratio) ** share

    def _encode(self, values: torch.Tensor) -> torch.Tensor:
        """Return ``values`` as a receiver decodes them after compression."""
        if self._rules.algorithm == "topk":
            return largest(values, self.ratio())
        return {"none": torch.clone, "1bit": signs, "2bit": two_magnitudes}[self._rules.algorithm](values)

    def _sum(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        rules, sent = self._rules, []
        for worker, gradient in enumerate(gradients):
            if rules.clip_before_residual:
                gradient = clipped(gradient, rules.gradient_clipping / sqrt(len(gradients)))
            if rules.momentum_correction:
                self.velocities[worker].mul_(rules.momentum).add_(gradient)
                gradient = self.velocities[worker].clone()
            if self._steps < rules.warmup_steps:
                sent.append(gradient)
                continue
            if rules.error_feedback:
                gradient = gradient + rules.residual_decay * self.residuals[worker]
            arrived = self._of_two_phases(gradient) if self._two_phase else self._encode(gradient)
            self.residuals[worker] = gradient - arrived
            if rules.momentum_correction and rules.algorithm == "topk":  # momentum factor masking
                self.velocities[worker][arrived != 0] = 0.0
            sent.append(arrived)
        total = torch.stack(sent).sum(0)
        if self._two_phase and self._steps >= rules.warmup_steps:
            total = self._second_phase(total)
        return total

    @property
    def _two_phase(self) -> bool:
        return self._rules.two_phase and len(self.residuals) > 2

    def _of_two_phases(self, values: torch.Tensor) -> torch.Tensor:
        """Return ``values`` after the first phase.

        The first phase compresses complete blocks, and pads the last block with zeros.
        """
        return self._encode(self._filled(values))[: values.numel()]

    def _second_phase(self, total: torch.Tensor) -> torch.Tensor:
        """Return the sum after the second phase.

        The owner of each part of the sum compresses this part again, with a separate residual.
        """
        values = self._filled(total)
        if self._rules.error_feedback:
            values[: total.numel()] += self._rules.residual_decay * self.of_shares[: total.numel()]
        arrived = self._encode(values)
        self.of_shares = values - arrived
        return arrived[: total.numel()]

    def _filled(self, values: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(values, (0, len(self.of_shares) - values.numel()))

"""Compare 1-bit Lamb on one rank with its formulas, written out element by element.

On one rank, nothing is rounded to signs.
"""

from __future__ import annotations

import math

import pytest
import torch

from zero_runtime.experimental.one_bit_lamb import OneBitLamb

OPTIONS = {
    "freeze_step": 4,
    "betas": (0.8, 0.9),
    "eps": 1e-6,
    "coeff_beta": 0.5,
    "max_coeff": 3.0,
    "min_coeff": 0.2,
}


def norm(values):
    return math.sqrt(sum(value * value for value in values))


def clamped(value, low, high):
    return min(max(value, low), high)


def by_hand(start, gradients, rate, decay, factor_max=4.0, factor_min=0.5, threshold=0.1):
    """Return one parameter after each step, as lists of floats."""
    (beta1, beta2), eps = OPTIONS["betas"], OPTIONS["eps"]
    p, m, v = list(start), [0.0] * len(start), [0.0] * len(start)
    fresh, kept, factor, seen = v, 0.0, 1.0, []
    for number, gradient in enumerate(gradients, 1):
        earlier = m
        m = [beta1 * a + (1 - beta1) * g for a, g in zip(m, gradient, strict=True)]
        if number <= OPTIONS["freeze_step"]:
            v = fresh = [beta2 * a + (1 - beta2) * g * g for a, g in zip(v, gradient, strict=True)]
        direction = [a / (math.sqrt(b) + eps) for a, b in zip(m, v, strict=True)]
        step = [a + decay * b for a, b in zip(direction, p, strict=True)]
        if number <= OPTIONS["freeze_step"]:
            ratio = clamped(norm(p) / norm(step), OPTIONS["min_coeff"], OPTIONS["max_coeff"])
            kept = OPTIONS["coeff_beta"] * kept + (1 - OPTIONS["coeff_beta"]) * ratio
        else:
            summed = [(a - beta1 * b) / (1 - beta1) for a, b in zip(m, earlier, strict=True)]
            fresh = [beta2 * a + (1 - beta2) * g * g for a, g in zip(fresh, summed, strict=True)]
            last = factor
            factor = max((math.sqrt(a) + eps) / (math.sqrt(b) + eps) for a, b in zip(v, fresh, strict=True))
            share = min(1.0, norm(direction) / norm(step))
            factor = factor * share + 1 - share
            factor = clamped(factor, factor_min, factor_max)
            factor = clamped(factor, last * (1 - threshold), last * (1 + threshold))
            ratio = kept * factor
        p = [a - rate * ratio * b for a, b in zip(p, step, strict=True)]
        seen.append(p)
    return seen


@pytest.mark.parametrize("decay", [0.0, 0.3])
@pytest.mark.parametrize("growth", [0.7, 1.0, 1.4])
def test_steps_are_those_of_the_formulas(growth, decay):
    generator = torch.Generator().manual_seed(3)
    starts = [torch.randn(size, generator=generator, dtype=torch.float64) for size in (5, 8)]
    slopes = [
        [torch.randn(each.shape, generator=generator, dtype=torch.float64) * growth**n for n in range(12)]
        for each in starts
    ]
    parameters = [torch.nn.Parameter(each.clone()) for each in starts]
    optimizer = OneBitLamb(parameters, lr=0.05, weight_decay=decay, **OPTIONS)
    expected = [
        by_hand(start.tolist(), [each.tolist() for each in of], 0.05, decay)
        for start, of in zip(starts, slopes, strict=True)
    ]
    for number in range(12):
        assert optimizer.wants_mean() == (number < OPTIONS["freeze_step"])
        for parameter, of in zip(parameters, slopes, strict=True):
            parameter.grad = of[number].clone()
        optimizer.step()
        for parameter, of in zip(parameters, expected, strict=True):
            assert parameter.tolist() == pytest.approx(of[number], rel=1e-9)


def test_what_travels_is_of_one_magnitude_and_zeros_stay_zeros():
    small, large, still = (torch.nn.Parameter(torch.ones(4)) for _ in range(3))
    optimizer = OneBitLamb([small, large, still], lr=0.01, freeze_step=2)
    sent = []

    def mean(names, values):
        sent.append([float(value.square().mean().sqrt()) for value in values])
        for value in values:
            value.copy_(value.sign() + (value == 0))  # Signs have no zero.

    optimizer.connect(mean, {})
    for _ in range(4):
        for parameter, slope in ((small, 1e-4), (large, 10.0), (still, 0.0)):
            parameter.grad = torch.full((4,), slope)
        optimizer.step()
    assert len(sent) == 2
    assert sent[0][0] == pytest.approx(sent[0][1], rel=1e-4) and sent[0][2] == 0.0
    assert torch.equal(still, torch.ones(4)) and not torch.equal(small, torch.ones(4))

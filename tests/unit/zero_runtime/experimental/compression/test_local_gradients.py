"""Test clipping and momentum of a rank's own gradients before compression.

The expected values are computed by hand.
"""

from __future__ import annotations

import pytest
import torch

from zero_runtime.errors import ConfigError
from zero_runtime.experimental.compression.local_gradients import (
    LocalGradients,
    return_momentum,
    take_momentum,
)
from zero_runtime.experimental.compression.residuals import Residuals
from zero_runtime.gradient_reduction.gradient_buckets import Entry


class Training:
    """A training with momentum 0.5 of two parameters: ``a`` with 2 elements and ``b`` with 1."""

    def __init__(self, momentum=0.5, limit=0.0, numel=3):
        self.step = 0
        self.velocities = Residuals(momentum=True)
        self.local = LocalGradients(limit, numel, lambda: momentum, self.velocities, lambda: self.step)

    def prepare(self, *gradients, scale=1.0, dtype=torch.float32):
        values = torch.tensor(gradients, dtype=dtype) * scale
        self.local.prepare(values, self.entries(), scale)
        return (values / scale).tolist()

    def entries(self):
        return [Entry("a", torch.zeros(2), ()), Entry("b", torch.zeros(1), ())]

    def momentum(self):
        stored = self.velocities.tensors
        return [*stored["corrected momentum of a"].tolist(), *stored["corrected momentum of b"].tolist()]


@pytest.mark.parametrize(
    ("scale", "dtype"), [(1.0, torch.float32), (1024.0, torch.float32), (8.0, torch.bfloat16)]
)
def test_momentum_is_added_once_a_step(scale, dtype):
    training = Training()
    assert training.prepare(1.0, -2.0, 4.0, scale=scale, dtype=dtype) == [1.0, -2.0, 4.0]
    training.step = 1
    assert training.prepare(1.0, 1.0, 0.0, scale=scale, dtype=dtype) == [1.5, 0.0, 2.0]
    # A second micro-batch of the step sends only its own gradients, but the momentum includes both
    # micro-batches.
    assert training.prepare(2.0, 0.0, 1.0, scale=scale, dtype=dtype) == [2.0, 0.0, 1.0]
    assert training.momentum() == [3.5, 0.0, 3.0]
    training.step = 2
    assert training.prepare(0.0, 0.0, 0.0, scale=scale, dtype=dtype) == [1.75, 0.0, 1.5]


def test_momentum_of_elements_that_were_sent_is_forgotten():
    training = Training()
    training.prepare(1.0, -2.0, 4.0)
    training.local.mask(torch.tensor([0.0, -2.0, 0.0]), training.entries())
    assert training.momentum() == [1.0, 0.0, 4.0]
    training.local.mask(torch.tensor([float("nan"), 1.0, 1.0]), training.entries())
    assert training.momentum() == [1.0, 0.0, 4.0]  # A skipped step sends nothing.


def test_gradients_that_overflow_stay_out_of_the_momentum():
    training = Training()
    training.prepare(1.0, -2.0, 4.0)
    training.step = 1
    values = training.prepare(float("inf"), 1.0, 1.0)
    assert values[0] == float("inf") and training.momentum() == [1.0, -2.0, 4.0]


def test_gradients_are_clipped_before_the_momentum_is_added():
    training = Training(limit=1.0)
    assert training.prepare(0.0, -3.0, 4.0) == pytest.approx([0.0, -0.6, 0.8], abs=1e-6)
    training.step = 1
    assert training.prepare(0.0, 0.5, 0.0) == pytest.approx([0.0, 0.2, 0.4], abs=1e-6)


def test_a_bucket_is_clipped_to_its_part_of_the_limit():
    # The bucket has a quarter of the elements, so the limit of its norm is half of the total limit.
    training = Training(momentum=0.0, limit=1.0, numel=12)
    assert training.prepare(0.0, -3.0, 4.0, scale=64.0) == pytest.approx([0.0, -0.3, 0.4], abs=1e-6)


def sgd(**options):
    return torch.optim.SGD([torch.nn.Parameter(torch.tensor([1.0]))], lr=0.5, **options)


def test_the_optimizer_steps_without_momentum_and_schedules_still_set_it():
    optimizer = sgd(momentum=0.9)
    momentum = take_momentum(optimizer)
    (weight,) = optimizer.param_groups[0]["params"]
    for expected in (0.5, 0.0, -0.5):  # With momentum, the values would be 0.5, -0.45, -1.8.
        weight.grad = torch.tensor([1.0])
        optimizer.step()
        assert weight.item() == pytest.approx(expected)
        assert optimizer.param_groups[0]["momentum"] == momentum() == 0.9
    optimizer.param_groups[0]["momentum"] = 0.8
    assert momentum() == 0.8


def test_an_optimizer_can_be_used_again_with_and_without_correction():
    optimizer = sgd(momentum=0.5)
    (weight,) = optimizer.param_groups[0]["params"]
    weight.grad = torch.tensor([1.0])
    take_momentum(optimizer)
    optimizer.load_state_dict(optimizer.state_dict())  # This call creates new param groups.
    take_momentum(optimizer)
    optimizer.step()
    optimizer.step()
    assert weight.item() == 0.0 and optimizer.param_groups[0]["momentum"] == 0.5
    return_momentum(optimizer)
    return_momentum(optimizer)
    optimizer.step()
    optimizer.step()
    assert weight.item() == -1.25


def test_the_step_after_a_load_brings_the_momentum_along():
    training = Training()
    training.prepare(1.0, -2.0, 4.0)
    training.step = 1
    saved = {name: each.clone() for name, each in training.velocities.stored().items()}
    expected = training.prepare(1.0, 1.0, 0.0)
    training.velocities.load(lambda rank: saved, 0, 1, 1, None, torch.device("cpu"))
    assert training.prepare(1.0, 1.0, 0.0) == expected  # The same step runs again in the same engine.


def of_two_momenta():
    groups = [{"params": [torch.nn.Parameter(torch.ones(1))], "momentum": each} for each in (0.5, 0.9)]
    return torch.optim.SGD(groups, lr=0.1)


@pytest.mark.parametrize(
    "make",
    [
        lambda: sgd(),
        lambda: sgd(momentum=0.9, nesterov=True),
        lambda: sgd(momentum=0.9, dampening=0.1),
        of_two_momenta,
        lambda: torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))]),
    ],
)
def test_other_optimizers_are_refused(make):
    optimizer = make()
    with pytest.raises(
        ConfigError, match=r"momentum_correction applies the momentum of SGD.*one momentum above 0"
    ) as error:
        take_momentum(optimizer)
    assert type(optimizer).__name__ in str(error.value) and "\n" not in str(error.value)

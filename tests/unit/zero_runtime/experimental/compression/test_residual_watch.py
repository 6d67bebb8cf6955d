"""Test the warning about growing residuals.

Rank 0 prints the warning once, and not while the residuals are still filling up.
"""

from __future__ import annotations

import pytest
import torch

from zero_runtime.experimental.compression.residual_watch import ResidualWatch
from zero_runtime.experimental.compression.residuals import Residuals


def warnings_of(norms, capsys, rank=0):
    """Return the warnings, and the norms that the watch measured, for residuals with these norms."""
    residuals = Residuals()
    watch = ResidualWatch(residuals, rank)
    assert watch.norm is None
    capsys.readouterr()
    found = []
    for step, norm in enumerate(norms, 1):
        residuals.tensors = {"a": torch.tensor([0.6 * norm]), "b": torch.tensor([0.0, -0.8 * norm]),
                             "corrected momentum of a": torch.tensor([99.0])}  # fmt: skip
        watch.see_step(step)
        found.append(watch.norm)
    assert found == pytest.approx(norms, rel=1e-5)
    return capsys.readouterr().err.splitlines()


def test_exponential_growth_is_said_once(capsys):
    said = warnings_of([1.2**step for step in range(100)], capsys)
    assert len(said) == 1
    assert "the norm of the residual of rank 0 grows" in said[0]


def test_other_ranks_say_nothing(capsys):
    assert warnings_of([1.2**step for step in range(100)], capsys, rank=1) == []


@pytest.mark.parametrize(
    "norms",
    [
        [float(step) for step in range(1, 400)],  # These residuals are filling up.
        [5.0] * 50 + [100.0] * 9 + [5.0] * 50,  # The burst is shorter than the required number of steps.
        [0.0] * 30,
    ],
)
def test_residuals_that_fill_up_or_jump_are_normal(norms, capsys):
    assert warnings_of(norms, capsys) == []


def test_a_training_without_residuals_has_no_norm():
    for residuals in (None, Residuals()):
        watch = ResidualWatch(residuals, 0)
        watch.see_step(1)
        assert watch.norm is None

"""Compare overflow detection and norms with plain arithmetic."""

from __future__ import annotations

import math

import pytest
import torch

from zero_runtime.gradient_reduction.clip import sum_of_squares
from zero_runtime.optimizer_step.dtypes import any_overflow

CPU = torch.device("cpu")
DTYPES = [torch.float16, torch.bfloat16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("position", [0, 2_000, 4_099])
def test_one_bad_element_is_an_overflow(dtype, value, position):
    good = torch.randn(4_100).to(dtype)
    bad = good.clone()
    bad[position] = value
    assert any_overflow([good, bad], CPU).item() == 1
    assert any_overflow([bad, good], CPU).item() == 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_numbers_are_no_overflow(dtype):
    largest = torch.tensor([torch.finfo(dtype).max, torch.finfo(dtype).min, 0.0], dtype=dtype)
    flag = any_overflow([largest, torch.zeros(0, dtype=dtype)], CPU)
    assert flag.item() == 0 and flag.dtype == torch.uint8 and flag.shape == (1,)
    assert any_overflow([], CPU).item() == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", [0, 1, 1_023, 1_024, 5_000, 1_000_003])
def test_squares_are_summed_as_in_fp64(dtype, numel):
    values = (torch.randn(numel, generator=torch.Generator().manual_seed(1)) * 1e-3).to(dtype)
    expected = values.double().square().sum().item()
    assert sum_of_squares(values).item() == pytest.approx(expected, rel=2e-7)
    if numel:
        values[-1] = math.nan
        assert math.isnan(sum_of_squares(values).item())

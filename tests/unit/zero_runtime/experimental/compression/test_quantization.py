"""Test the quantization to integers with a scale for each block."""

from __future__ import annotations

import pytest
import torch

from zero_runtime.experimental.compression.quantization import dequantized, quantized, quantized_bytes


def rows(count, numel):
    return torch.randn(count, numel, generator=torch.Generator().manual_seed(numel)) ** 3


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("numel", [1, 5, 255, 256, 257, 2000])
def test_no_number_is_off_by_more_than_half_a_scale(bits, numel):
    given = rows(3, numel)
    payloads = quantized(given, bits)
    assert payloads.dtype == torch.uint8
    assert payloads.shape == (3, quantized_bytes(numel, bits))
    assert quantized_bytes(numel, bits) == -(-numel * bits // 8) + 4 * -(-numel // 256)
    found = dequantized(payloads, numel, bits)
    for before, after in zip(given, found, strict=True):
        for block, same in zip(before.split(256), after.split(256), strict=True):
            half = block.abs().max() / (127 if bits == 8 else 7) / 2
            assert (block - same).abs().max() <= half * 1.0001


@pytest.mark.parametrize("bits", [4, 8])
def test_what_is_a_whole_number_of_scales_stays_as_it_is(bits):
    largest = 127 if bits == 8 else 7
    given = torch.arange(-largest, largest + 1, dtype=torch.bfloat16).view(1, -1)
    found = dequantized(quantized(given, bits), given.shape[1], bits)
    assert torch.equal(found, given.float())
    zeros = torch.zeros(2, 300)
    assert torch.equal(dequantized(quantized(zeros, bits), 300, bits), zeros)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_block_with_an_overflow_is_not_finite(bits, bad):
    given = rows(1, 600)
    given[0, 300] = bad
    found = dequantized(quantized(given, bits), 600, bits)
    assert torch.isfinite(found[0, :256]).all() and torch.isfinite(found[0, 512:]).all()
    assert not torch.isfinite(found[0, 256:512]).any()

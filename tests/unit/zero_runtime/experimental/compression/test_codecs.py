"""Test codecs: the number of bytes, the kept values, and that error feedback loses no values."""

from __future__ import annotations

import pytest
import torch

from zero_runtime.experimental.compression.bits import pack, packed_bytes, unpack
from zero_runtime.experimental.compression.codecs import OneBit, TopK, TwoBit
from zero_runtime.experimental.compression.entropy import coded, decoded
from zero_runtime.experimental.compression.residuals import Residuals
from zero_runtime.gradient_reduction.gradient_buckets import Entry

CODECS = {
    "topk": TopK(0.05),
    "topk bf16": TopK(0.05, torch.bfloat16),
    "all": TopK(1.0),
    "1bit": OneBit(),
    "2bit": TwoBit(),
}
LENGTHS = (1, 2, 7, 8, 2047, 2048, 2049, 10_000)


def numbers(count, seed=0):
    return torch.randn(count, generator=torch.Generator().manual_seed(seed)) ** 3


def restored(codec, values):
    total = torch.zeros_like(values)
    codec.add(codec.encode(values), total)
    return total


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("count", [1, 3, 8, 9, 100])
def test_packed_codes_come_back(width, count):
    codes = torch.randint(0, 2**width, (count,), dtype=torch.uint8)
    packed = pack(codes, width)
    assert packed.numel() == packed_bytes(count, width) == -(-count * width // 8)
    assert torch.equal(unpack(packed, count, width), codes)


def test_the_first_code_is_in_the_lowest_bits():
    assert pack(torch.tensor([1, 0, 0, 1, 1], dtype=torch.uint8), 1).tolist() == [0b11001]
    assert pack(torch.tensor([3, 0, 2], dtype=torch.uint8), 2).tolist() == [0b100011]


# The bytes that each codec sends for 1,000,000 numbers, computed by hand.
SIZES = {
    TopK(0.01): 10_000 * (4 + 4),
    TopK(0.01, torch.bfloat16): 10_000 * (2 + 4),
    OneBit(): 125_000 + 4 * 489,
    TwoBit(): 250_000 + 8 * 489,
}


@pytest.mark.parametrize("codec", SIZES, ids=str)
def test_bytes_of_a_million_numbers(codec):
    payload = codec.encode(numbers(1_000_000))
    assert payload.dtype == torch.uint8
    assert payload.numel() == SIZES[codec]


@pytest.mark.parametrize("count", LENGTHS)
@pytest.mark.parametrize("name", CODECS)
def test_a_payload_is_as_long_as_its_sections_and_nearer_than_nothing(name, count):
    codec, values = CODECS[name], numbers(count)
    assert codec.encode(values).numel() == sum(each.num_bytes for each in codec.sections(count))
    assert (values - restored(codec, values)).norm() < values.norm()


def test_topk_keeps_the_largest_and_nothing_else():
    values = numbers(1000)
    largest = sorted(range(1000), key=lambda place: -abs(values[place].item()))[:50]
    kept = restored(TopK(0.05), values)
    assert sorted(kept.nonzero().view(-1).tolist()) == sorted(largest)
    assert torch.equal(kept[largest], values[largest])
    assert torch.equal(restored(TopK(1.0), values), values)


def test_one_bit_keeps_signs_and_the_mean_of_each_block():
    values = numbers(5000)
    expected = torch.cat([part.sign() * part.abs().mean() for part in values.split(2048)])
    torch.testing.assert_close(restored(OneBit(), values), expected)


def test_two_bits_keep_signs_and_the_means_above_and_below_the_mean():
    values = numbers(3000)
    expected = values.sign()
    for part, result in zip(values.split(2048), expected.split(2048), strict=True):
        large = part.abs() > part.abs().mean()
        result[large] *= part[large].abs().mean()
        result[~large] *= part[~large].abs().mean()
    torch.testing.assert_close(restored(TwoBit(), values), expected)
    assert (values - restored(TwoBit(), values)).norm() < (values - restored(OneBit(), values)).norm()


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("name", CODECS)
def test_an_overflow_is_seen_by_those_who_decode(name, bad):
    values = numbers(5000)
    values[4321] = bad
    assert not torch.isfinite(restored(CODECS[name], values)).all()


@pytest.mark.parametrize("name", CODECS)
def test_what_is_left_over_is_sent_later(name):
    """The sum of the sent values and the residual is the sum of all gradients."""
    codec, residuals = CODECS[name], Residuals()
    entries = [Entry("a", torch.zeros(300), ()), Entry("b", torch.zeros(2200), ())]
    sent, wanted = torch.zeros(2500), torch.zeros(2500)
    for step, scale in enumerate((1.0, 1.0, 64.0, 2.0, 2.0)):
        gradient = numbers(2500, step)
        wanted += gradient
        values = gradient * scale
        residuals.add_to(values, entries, 0, scale)
        decoded_here = restored(codec, values)
        residuals.keep(values - decoded_here, entries, 0, scale)
        sent += decoded_here / scale
    left = torch.cat([residuals.tensors["a"], residuals.tensors["b"]])
    torch.testing.assert_close(sent + left, wanted, rtol=1e-4, atol=1e-4)


def test_an_overflow_leaves_what_is_left_over_as_it_was():
    residuals, entries = Residuals(), [Entry("a", torch.zeros(4), ())]
    residuals.keep(torch.tensor([1.0, 2.0, 3.0, 4.0]), entries, 0, 2.0)
    residuals.keep(torch.tensor([1.0, float("nan"), 3.0, 4.0]), entries, 0, 2.0)
    assert residuals.tensors["a"].tolist() == [0.5, 1.0, 1.5, 2.0]


def test_a_share_of_a_bucket_touches_its_own_elements_alone():
    residuals = Residuals()
    entries = [Entry("a", torch.zeros(3), ()), Entry("b", torch.zeros(4), ())]
    # These are the rest of a and the first element of b.
    residuals.keep(torch.tensor([1.0, 2.0, 3.0, 9.0]), entries, 2, 1.0)
    assert residuals.tensors["a"].tolist() == [0.0, 0.0, 1.0]
    assert residuals.tensors["b"].tolist() == [2.0, 3.0, 9.0, 0.0]
    padded = torch.zeros(4)
    residuals.add_to(padded, entries, 5, 10.0)
    assert padded.tolist() == [90.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("count", LENGTHS)
@pytest.mark.parametrize("name", CODECS)
def test_huffman_coding_loses_nothing(name, count):
    codec = CODECS[name]
    payload, sections = codec.encode(numbers(count)), codec.sections(count)
    message = coded(payload, sections)
    filled_up = torch.cat([message, torch.zeros(13, dtype=torch.uint8)])
    assert torch.equal(decoded(filled_up, sections), payload)


def test_huffman_coding_pays_for_indices_and_not_for_signs():
    values = numbers(500_000)
    shares = {}
    for name, codec in (("topk", TopK(0.01)), ("1bit", OneBit())):
        payload = codec.encode(values)
        shares[name] = coded(payload, codec.sections(len(values))).numel() / payload.numel()
    assert shares["topk"] < 0.65
    assert shares["1bit"] > 0.98

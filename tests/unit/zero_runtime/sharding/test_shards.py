"""Test how one parameter is partitioned, without any other rank."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from zero_runtime.sharding.shards import Shard, Status, shard_of, shards_of, slice_numel


def group(rank, world):
    return SimpleNamespace(rank=rank, world_size=world)


@pytest.mark.parametrize(
    ("numel", "world", "expected"), [(12, 3, 4), (13, 3, 5), (1, 4, 1), (0, 4, 0), (7, 1, 7)]
)
def test_slice_numel(numel, world, expected):
    assert slice_numel(numel, world) == expected


@pytest.mark.parametrize(
    ("world", "slices"),
    [
        (1, [[0, 1, 2, 3, 4]]),
        (2, [[0, 1, 2], [3, 4, 0]]),
        (4, [[0, 1], [2, 3], [4, 0], [0, 0]]),
    ],
)
def test_the_last_slices_are_padded_with_zeros(world, slices):
    found = [Shard(nn.Parameter(torch.arange(5.0)), group(rank, world)).own.tolist() for rank in range(world)]
    assert found == slices


def test_a_released_parameter_is_empty_and_says_what_it_was():
    parameter = nn.Parameter(torch.arange(6.0).view(3, 2).t())
    shard = Shard(parameter, group(0, 2))
    assert shard.own.tolist() == [0.0, 2.0, 4.0]  # These elements are in row order.
    shard.release()
    assert parameter.shape == (0,) and parameter.requires_grad
    assert (parameter.ds_shape, parameter.ds_numel, parameter.ds_status) == ((2, 3), 6, Status.NOT_AVAILABLE)
    assert parameter.ds_tensor is shard.own and parameter.ds_id == shard.number
    shard.fill(torch.arange(8.0))
    assert parameter.tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    assert parameter.ds_status is Status.AVAILABLE


def test_changes_are_kept_on_request():
    parameter = nn.Parameter(torch.zeros(3))
    shard = Shard(parameter, group(1, 2))
    parameter.data += 4
    assert shard.own.tolist() == [0.0, 0.0]
    shard.keep()
    assert shard.own.tolist() == [4.0, 0.0] and shard.changed


def test_the_slice_may_be_part_of_a_larger_buffer():
    parameter = nn.Parameter(torch.arange(4.0))
    shard = Shard(parameter, group(1, 2))
    buffer = torch.zeros(6)
    shard.move(buffer.narrow(0, 3, 2))
    assert buffer.tolist() == [0, 0, 0, 2, 3, 0]
    assert parameter.ds_tensor.data_ptr() == buffer[3:].data_ptr()


def test_casting_keeps_the_slice():
    parameter = nn.Parameter(torch.arange(4.0))
    shard = Shard(parameter, group(0, 2))
    shard.release()
    shard.cast(torch.bfloat16)
    assert shard.own.tolist() == [0.0, 1.0]
    assert {shard.own.dtype, shard.dtype, parameter.dtype, parameter.ds_tensor.dtype} == {torch.bfloat16}


def test_shards_are_found_once_each_in_the_order_of_their_making():
    first, second, plain = (nn.Parameter(torch.zeros(2)) for _ in range(3))
    made = [Shard(each, group(0, 2)) for each in (first, second)]
    assert shards_of([second, plain, first, second]) == made
    assert shard_of(plain) is None


def test_detached_parameters_are_ordinary():
    parameter = nn.Parameter(torch.zeros(2))
    Shard(parameter, group(0, 2)).detach()
    assert shard_of(parameter) is None
    assert not [name for name in vars(parameter) if name.startswith("ds_")]

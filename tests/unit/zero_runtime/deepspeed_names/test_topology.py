"""Test ranks as a grid, and configuration blocks as objects, under DeepSpeed's names."""

from __future__ import annotations

import pytest
import torch

import zero_runtime
from support.ranks import run_ranks
from zero_runtime.deepspeed_names.configs.block_configurations import (
    DeepSpeedZeroConfig,
    DeepSpeedZeroOffloadOptimizerConfig,
    DeepSpeedZeroOffloadParamConfig,
    get_bfloat16_config,
)
from zero_runtime.deepspeed_names.ranks import group_names
from zero_runtime.deepspeed_names.ranks.rank_topology import (
    PipeModelDataParallelTopology,
    ProcessTopology,
    prime_factors,
)
from zero_runtime.errors import ConfigError


def test_every_place_has_its_rank_and_back():
    grid = ProcessTopology(["a", "b", "c"], [2, 3, 4])
    for rank in range(24):
        place = grid.get_coord(rank)
        assert rank == place.a * 12 + place.b * 4 + place.c == grid.get_rank(**place._asdict())
    assert grid.get_axis_comm_lists("a") == [[rank, rank + 12] for rank in range(12)]
    assert sorted(rank for ranks in grid.get_axis_comm_lists("c") for rank in ranks) == list(range(24))
    assert grid.get_axis_comm_lists("d") == [] and grid.get_dim("d") == 0
    with pytest.raises(ConfigError, match="ranks"):
        grid.get_rank(a=0, b=0)
    with pytest.raises(ConfigError, match="2 x 3 x 4"):
        grid.get_rank(a=0, b=3, c=0)


def test_slices_are_next_to_each_other():
    grid = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=2)
    assert grid.get_axis_list("pipe", 1) == [4, 5, 6, 7]
    assert grid.get_axis_comm_lists("model") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert (
        grid.get_rank_repr(5) == "model_01"
        and grid.get_rank_repr(6, omit_axes=[]) == "pipe_01-data_01-model_00"
    )


def test_prime_factors():
    assert prime_factors(1) == [] and prime_factors(360) == [2, 2, 2, 3, 3, 5] and prime_factors(29) == [29]
    with pytest.raises(ValueError, match="positive"):
        prime_factors(0)


def test_blocks_have_their_keys_checked_and_the_rest_at_defaults():
    block = DeepSpeedZeroConfig(stage=3, stage3_prefetch_bucket_size=7, cpu_offload=True, offload_param={})
    assert block.prefetch_bucket_size == block.stage3_prefetch_bucket_size == 7 and block.overlap_comm
    assert isinstance(block.offload_optimizer, DeepSpeedZeroOffloadOptimizerConfig)
    assert isinstance(block.offload_param, DeepSpeedZeroOffloadParamConfig)
    assert DeepSpeedZeroConfig(stage=2).overlap_comm is False
    assert DeepSpeedZeroOffloadOptimizerConfig(pipeline_write=True).pipeline
    assert get_bfloat16_config({"bfloat16": {"enabled": True}}).enabled
    with pytest.raises(ConfigError, match="stag"):
        DeepSpeedZeroConfig(stag=3)


def test_groups_answer_for_all_ranks_before_a_training_is_made():
    assert (
        group_names.get_model_parallel_group() is None
        and group_names.get_tensor_model_parallel_world_size() == 1
    )
    assert (
        group_names.get_sequence_parallel_world_size() == 1 and group_names.get_sequence_parallel_rank() == 0
    )


def _groups(rank: int, world: int):
    zero_runtime.as_deepspeed()
    from deepspeed.sequence.layer import _SeqAllToAll
    from deepspeed.utils import groups

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    engine, *_ = zero_runtime.initialize(
        model=model,
        model_parameters=model.parameters(),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            "sequence_parallel_size": 2,
            "tp_size": 2,
            "tensor_parallel": {"plan": {"0": "column_gathered"}},
        },
    )
    assert engine.seq_parallel_group is groups._get_sequence_parallel_group()
    heads = torch.full((1, 2, 4, 1), float(rank))
    pieces = _SeqAllToAll.apply(groups._get_sequence_parallel_group(), heads, 2, 1, 0)
    return {
        "data": (groups.get_data_parallel_rank(), groups.get_data_parallel_world_size()),
        "sequence": (groups._get_sequence_parallel_rank(), groups._get_sequence_parallel_world_size()),
        "both": (groups._get_sequence_data_parallel_rank(), groups._get_sequence_data_parallel_world_size()),
        "model": (groups.get_model_parallel_rank(), groups.get_tensor_model_parallel_world_size()),
        "first": groups.get_tensor_model_parallel_src_rank(),
        "pieces": (tuple(pieces.shape), pieces.flatten().unique().tolist()),
    }


def test_groups_answer_for_the_training_that_was_made():
    for rank, found in enumerate(run_ranks(4, _groups)):
        sequence, model = divmod(rank, 2)
        assert found == {
            "data": (0, 1),
            "sequence": (sequence, 2),
            "both": (sequence, 2),
            "model": (model, 2),
            "first": 2 * sequence,
            "pieces": ((1, 4, 2, 1), [float(model), float(model + 2)]),
        }

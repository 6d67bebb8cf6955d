"""Test the configuration keys of stage 3."""

from __future__ import annotations

import pytest

from zero_runtime.config import RuntimeConfig
from zero_runtime.errors import ConfigError


def read(stage=3, world=2, top=None, **zero):
    given = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage, **zero},
        **(top or {}),
    }
    return RuntimeConfig.from_mapping(given, world)


def test_defaults_are_those_of_deepspeed():
    effective = read().effective()["zero_optimization"]
    assert effective["stage3_prefetch_bucket_size"] == 50_000_000
    assert effective["stage3_param_persistence_threshold"] == 100_000
    assert effective["stage3_max_live_parameters"] == effective["stage3_max_reuse_distance"] == 1_000_000_000
    assert effective["memory_efficient_linear"] and effective["overlap_comm"]
    assert effective["gradient_reduction"] == "reduce_scatter"


def test_a_key_may_do_without_its_prefix():
    plain, prefixed = read(max_live_parameters=7), read(stage3_max_live_parameters=7)
    assert plain.zero.sharding == prefixed.zero.sharding
    assert plain.zero.sharding.residency.max_live == 7
    with pytest.raises(ConfigError, match="two names of one key"):
        read(max_live_parameters=7, stage3_max_live_parameters=8)


@pytest.mark.parametrize(
    ("zero", "name"),
    [
        ({"reduce_scatter": False}, "all_reduce"),
        ({"reduce_scatter": False, "contiguous_gradients": False}, "reduce_scatter"),
        ({"contiguous_gradients": False}, "reduce_scatter"),
        ({"use_multi_rank_bucket_allreduce": False}, "reduce_scatter"),
        ({"gradient_reduction": "all_reduce"}, "all_reduce"),
    ],
)
def test_the_reduction(zero, name):
    assert read(**zero).zero.gradient_reduction == name


@pytest.mark.parametrize(
    ("top", "zero", "message"),
    [
        ({}, {"gradient_reduction": "multi_rank_all_reduce"}, "every rank owns a shard"),
        ({}, {"gradient_reduction": "reduce_to_owner"}, "every rank owns a shard"),
        ({"gradient_allreduce_op": "sum"}, {}, "set it to mean"),
        ({"gradient_predivide_factor": 4.0}, {}, "gradient_predivide_factor is 4.0"),
        ({"prescale_gradients": True}, {}, "prescale_gradients is True"),
        ({}, {"sub_group_size": -1}, "sub_group_size"),
    ],
)
def test_refused(top, zero, message):
    with pytest.raises(ConfigError, match=message):
        read(top=top, **zero)


@pytest.mark.parametrize(
    ("zero", "message"),
    [
        (
            {"zero_quantized_weights": True, "stage3_use_all_reduce_for_fetch_params": True},
            "adds parameters up",
        ),
        (
            {"zero_quantized_gradients": True, "gradient_reduction": "all_reduce"},
            "go to the ranks that own them",
        ),
    ],
)
def test_quantization_that_cannot_be_is_refused(zero, message):
    with pytest.raises(ConfigError, match=message):
        read(**zero)


def test_a_key_of_stage_3_says_so_at_stage_2():
    # DeepSpeed accepts these keys at stages 1 and 2, where they have no effect.
    (notice,) = read(stage=2, zero_hpz_partition_size=2).notices
    assert "zero_hpz_partition_size" in notice and "stage 3 only" in notice


def test_what_has_no_effect_at_stage_3_is_said():
    notices = " ".join(
        read(allgather_bucket_size=1000, compute_grad_norm=False, round_robin_gradients=True).notices
    )
    assert "no effect at stage 3" in notices
    assert all(
        name in notices for name in ("allgather_bucket_size", "compute_grad_norm", "round_robin_gradients")
    )
    (notice,) = read(reduce_scatter=False, contiguous_gradients=False).notices
    assert "reduce_scatter all the same" in notice


def test_gradients_are_divided_between_the_cast_and_the_sum():
    assert read(world=4).scaling(4) == (1.0, 4, 1.0, 1.0)
    predivided = read(world=4, top={"gradient_predivide_factor": 2.0}, reduce_scatter=False)
    assert predivided.scaling(4) == (1.0, 4, 0.5, 2.0)
    prescaled = read(world=4, top={"prescale_gradients": True}, reduce_scatter=False)
    assert prescaled.scaling(4) == (1.0, 4, 1.0, 1.0)


@pytest.mark.parametrize(
    ("zero", "message"),
    [
        ({"offload_param": {"device": "nvme"}}, "'nvme' without nvme_path"),
        ({"offload_param": {"device": "nvme", "nvme_path": "x", "buffer_count": 0}}, "buffer_count is 0"),
        ({"offload_param": {"device": "nvme", "nvme_path": "x", "buffer_size": 0}}, "buffer_size is 0"),
        ({"offload_param": {"device": "disk"}}, "offload_param.device is 'disk'"),
        ({"offload_param": {"devise": "cpu"}}, "did you mean 'zero_optimization.offload_param.device'"),
        ({"offload_params": {"devise": "cpu"}}, "did you mean 'zero_optimization.offload_param.device'"),
        ({"offload_params": {"device": "cpu"}, "offload_param": {"device": "none"}}, "two names of one key"),
        ({"cpu_offload_param": True, "offload_param": {"device": "none"}}, "cpu_offload_param is true"),
    ],
)
def test_refused_ways_to_keep_slices(zero, message):
    with pytest.raises(ConfigError, match=message):
        read(**zero)


def test_slices_in_files():
    given = {"device": "nvme", "nvme_path": "x", "buffer_size": 1e6, "max_in_cpu": 5e8}
    for name in ("offload_param", "offload_params"):
        config = read(**{name: given})
        offload = config.zero.sharding.residency.offload
        assert offload[:6] == ("nvme", "x", True, 5, 1_000_000, 500_000_000)
        assert config.effective()["zero_optimization"]["offload_param"]["max_in_cpu"] == 500_000_000
    assert any("read as offload_param" in notice for notice in config.notices)


def test_slices_stay_where_they_are_at_other_stages():
    """DeepSpeed accepts the key at these stages and ignores it."""
    (notice,) = read(stage=2, offload_param={"device": "nvme"}).notices
    assert "offload_param.device" in notice and "stage 3 only" in notice

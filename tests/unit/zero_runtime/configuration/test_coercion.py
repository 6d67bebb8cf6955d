"""Test values whose type differs from the type of their key.

zero_runtime reads them as DeepSpeed does and prints one line about it.
"""

from __future__ import annotations

import pytest

from zero_runtime.config import RuntimeConfig
from zero_runtime.errors import ConfigError


def make(**given):
    return RuntimeConfig.from_mapping({"train_micro_batch_size_per_gpu": 4, **given}, 2)


def test_auto_that_nobody_filled_in_is_the_default_where_deepspeed_drops_the_key():
    left = {
        "zero_optimization": {
            "stage": 2, "sub_group_size": "auto", "overlap_comm": "auto", "offload_optimizer": "auto",
        },
        "fp16": {"enabled": "auto", "loss_scale_window": "auto"},
        "bf16": {"enabled": "auto"},
    }  # fmt: skip
    found = make(**left)
    plain = make(zero_optimization={"stage": 2})
    assert found.effective() == plain.effective()
    assert found.notices == (
        "zero_optimization.sub_group_size, zero_optimization.overlap_comm, zero_optimization.offload_optimizer, "
        'fp16.enabled, fp16.loss_scale_window, bf16.enabled: nothing replaced "auto", so the default is used, as '
        "in DeepSpeed",
    )


def test_auto_that_is_a_value_stays_one():
    zero = make(
        zero_optimization={"stage": 2, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto"}
    ).zero
    assert (zero.open_sizes, zero.reduce_bucket_size) == (("reduce_bucket_size",), 500_000_000)
    for name in ("prefetch_bucket_size", "stage3_prefetch_bucket_size"):
        zero = make(zero_optimization={"stage": 3, name: "auto", "allgather_bucket_size": "auto"}).zero
        assert (zero.open_sizes, zero.sharding.residency.prefetch) == (
            ("stage3_prefetch_bucket_size",),
            50_000_000,
        )
    assert make(zero_optimization={"stage": 0, "reduce_bucket_size": "auto"}).zero.open_sizes == ()
    assert make(zero_optimization={"stage": 2, "gradient_reduction": "auto"}).notices == ()
    assert make(data_types={"keep_in_fp32_modules": "auto"}).notices == ()


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ({"stage": "2"}, {"stage": 2}),
        ({"stage": 2.0}, {"stage": 2}),
        ({"stage": 2, "reduce_bucket_size": "50000"}, {"stage": 2, "reduce_bucket_size": 50000}),
        ({"stage": 2, "reduce_bucket_size": " 1_000 "}, {"stage": 2, "reduce_bucket_size": 1000}),
        ({"stage": 2, "reduce_bucket_size": "1000.0"}, {"stage": 2, "reduce_bucket_size": 1000}),
        ({"stage": 2, "reduce_scatter": "False"}, {"stage": 2, "reduce_scatter": False}),
        ({"stage": 2, "overlap_comm": "on"}, {"stage": 2, "overlap_comm": True}),
        ({"stage": "3", "sub_group_size": 0}, {"stage": 3, "sub_group_size": 1}),
        ({"stage": 2, "allgather_bucket_size": "0"}, {"stage": 2}),
        ({"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": "no"}},
         {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": False}}),
    ],
)  # fmt: skip
def test_strings_numbers_and_booleans_are_converted_as_pydantic_does(written, read):
    assert make(zero_optimization=written).effective() == make(zero_optimization=read).effective()


def test_one_line_names_all_that_was_converted():
    found = make(zero_optimization={"stage": "1", "reduce_scatter": "true"}, gradient_clipping="0.5")
    assert found.notices == (
        "read as DeepSpeed does, and better written so: zero_optimization.stage '1' as 1, "
        "zero_optimization.reduce_scatter 'true' as true, gradient_clipping '0.5' as 0.5",
    )
    assert found.gradient_clipping == 0.5


@pytest.mark.parametrize("dtype", ["bfloat16", "bf16", "torch.bfloat16"])
def test_dtypes_of_autocast_by_every_name(dtype):
    given = {"enabled": True, "dtype": dtype}
    assert make(torch_autocast=given).precision.autocast_dtype == "bfloat16"


@pytest.mark.parametrize("dtype", ["float16", "fp16", "half", "torch.float16"])
def test_half_precision_of_autocast_scales_the_loss(dtype):
    found = make(torch_autocast={"enabled": True, "dtype": dtype})
    assert found.precision.autocast_dtype == "float16" and found.precision.loss_scale.dynamic


def test_comments_are_passed_over_where_deepspeed_does_not_look():
    noted = {
        "_comment": "why",
        "// note": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}, "_note": "x"},
    }
    plain = make(optimizer={"type": "AdamW", "params": {"lr": 1e-3}})
    assert make(**noted).effective() == plain.effective() and make(**noted).notices == ()


def test_nothing_where_a_value_may_be_left_out():
    assert make(gradient_clipping=None).gradient_clipping == 0.0
    assert make(gradient_clipping=float("inf")).gradient_clipping == float("inf")
    assert make(optimizer={"type": "AdamW", "params": None}).optimizer.params == {}


def test_true_is_no_loss_scale():
    with pytest.raises(ConfigError, match=r"fp16\.loss_scale is True; expected a number"):
        make(fp16={"enabled": True, "loss_scale": True})


def test_two_names_of_one_key_are_said_at_every_stage():
    both = {"stage": 2, "max_live_parameters": 7, "stage3_max_live_parameters": 7}
    assert any(
        "is given together with max_live_parameters" in line for line in make(zero_optimization=both).notices
    )

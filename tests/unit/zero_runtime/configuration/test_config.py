"""Test the configuration: derived values, refused values, and the messages of the refusals."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from zero_runtime import config as configuration
from zero_runtime.config import RuntimeConfig
from zero_runtime.configuration import all_keys
from zero_runtime.errors import ConfigError, UnsupportedError
from zero_runtime.gradient_reduction.gradient_buckets import Scaling


def make(world=2, zero=None, **top):
    given = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "AdamW", "params": {}}, **top}
    if zero is not None:
        given["zero_optimization"] = zero
    return RuntimeConfig.from_mapping(
        {name: value for name, value in given.items() if value is not ...}, world
    )


@pytest.mark.parametrize(
    ("given", "derived"),
    [
        ({"train_micro_batch_size_per_gpu": 4}, (4, 1, 12)),
        ({"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}, (4, 2, 24)),
        ({"train_batch_size": 24}, (8, 1, 24)),
        ({"train_batch_size": 24, "gradient_accumulation_steps": 2}, (4, 2, 24)),
        ({"train_batch_size": 24, "train_micro_batch_size_per_gpu": 4}, (4, 2, 24)),
        (
            {"train_batch_size": 24, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2},
            (4, 2, 24),
        ),
    ],
)
def test_batch_sizes_are_derived(given, derived):
    config = RuntimeConfig.from_mapping(given, 3)
    assert derived == (
        config.train_micro_batch_size_per_gpu,
        config.gradient_accumulation_steps,
        config.train_batch_size,
    )


def test_batch_sizes_that_do_not_multiply_are_all_named():
    with pytest.raises(ConfigError, match=r"train_batch_size 25 != .* 4 x .* 2 x world size 3 = 24"):
        RuntimeConfig.from_mapping({"train_batch_size": 25, "train_micro_batch_size_per_gpu": 4}, 3)
    with pytest.raises(ConfigError, match="neither train_batch_size nor"):
        RuntimeConfig.from_mapping({"gradient_accumulation_steps": 2}, 1)


@pytest.mark.parametrize(
    ("zero", "reduction"),
    [
        ({}, "multi_rank_all_reduce"),
        ({"use_multi_rank_bucket_allreduce": False}, "reduce_to_owner"),
        ({"reduce_scatter": False}, "all_reduce"),
        ({"reduce_scatter": False, "use_multi_rank_bucket_allreduce": False}, "all_reduce"),
        ({"contiguous_gradients": False, "use_multi_rank_bucket_allreduce": False}, "all_reduce"),
        ({"reduce_scatter": False, "gradient_reduction": "reduce_scatter"}, "reduce_scatter"),
        ({"contiguous_gradients": False, "gradient_reduction": "reduce_to_owner"}, "reduce_to_owner"),
    ],
)
@pytest.mark.parametrize("stage", [1, 2])
def test_the_gradient_reduction_follows_the_keys(stage, zero, reduction):
    assert make(zero={"stage": stage, **zero}).zero.gradient_reduction == reduction


def test_a_contradiction_is_said_in_one_line():
    told = make(zero={"stage": 2, "reduce_scatter": False, "gradient_reduction": "reduce_scatter"}).notices
    assert told == ("gradient_reduction reduce_scatter is used; reduce_scatter false would mean all_reduce",)
    told = make(zero={"stage": 2, "reduce_scatter": True, "contiguous_gradients": False}).notices
    assert len(told) == 1 and "contiguous_gradients false overrides reduce_scatter true" in told[0]
    assert make(zero={"stage": 2, "gradient_reduction": "reduce_scatter"}).notices == ()


@pytest.mark.parametrize(
    ("top", "zero", "scaling"),
    [
        ({}, {}, Scaling(bucket_divisor=4)),
        ({}, {"contiguous_gradients": False}, Scaling(divisor=4)),
        ({}, {"reduce_scatter": False}, Scaling(factor_after=0.25)),
        (
            {"gradient_predivide_factor": 2.0},
            {"reduce_scatter": False},
            Scaling(factor_before=0.5, factor_after=0.5),
        ),
        ({"prescale_gradients": True}, {"reduce_scatter": False}, Scaling(divisor=4)),
        ({"gradient_predivide_factor": 2.0}, {}, Scaling(bucket_divisor=4)),
        ({"gradient_allreduce_op": "sum"}, {}, Scaling()),
    ],
)
def test_when_gradients_are_divided(top, zero, scaling):
    assert make(4, {"stage": 1, **zero}, **top).scaling(4) == scaling


@pytest.mark.parametrize(
    ("top", "message"),
    [
        (
            {"zero_optimization": {"reduce_buket_size": 1}},
            "'zero_optimization.reduce_buket_size'; did you mean 'zero_optimization.reduce_bucket_size'",
        ),
        ({"reduce_bucket_size": 1}, "did you mean 'zero_optimization.reduce_bucket_size'"),
        ({"pipeline": {"stage": 2}}, "'pipeline.stage'; did you mean 'pipeline.stages'"),
        ({"gradient_cliping": 1.0}, "did you mean 'gradient_clipping'"),
        ({"xyz": 1}, "unknown key 'xyz': the top level has no key of a similar name; docs/config.md lists all keys"),
        ({"moe": {"enabled": True}}, "unknown key 'moe'; experts (MoE) are made by deepspeed.moe.layer.MoE in the model"),
        ({"replace_method": "auto"}, "it belongs to the configuration of deepspeed.init_inference"),
        ({"fp32_allreduce": True}, 'write "communication_data_type": "fp32"'),
        ({"zero_optimization": {"_comment": "why"}}, "takes comments at the top level, but not in this block"),
        ({"bf16": {"enabld": True}}, "did you mean 'bf16.enabled'"),
        ({"fp16": {"enabled": False, "los_scale": 0}}, "did you mean 'fp16.loss_scale'"),
        ({"aio": {"block_sise": 1}}, "did you mean 'aio.block_size'"),
        ({"optimizer": {"tipe": "Adam"}}, "did you mean 'optimizer.type'"),
        ({"zero_optimization": {"stage": 2, "reduce_bucket_size": 0}}, "is 0; expected a whole number of at least 1"),
        ({"train_micro_batch_size_per_gpu": "auto"}, "'auto' is filled in by some launchers"),
        ({"zero_optimization": {"stage": "two"}}, "stage is 'two'"),
        ({"zero_optimization": {"stage": 2, "reduce_bucket_size": "5e7"}}, "is '5e7'; expected a whole number"),
        (
            {"zero_optimization": {"stage": 2, "reduce_bucket_size": "AUTO"}},
            "is 'AUTO'; expected a whole number of at least 1, or 'auto'",
        ),
        ({"zero_optimization": {"stage": 2, "overlap_comm": 2}}, "is 2; expected true or false"),
        ({"zero_optimization": {"stage": 7}}, "stage is 7; expected 0, 1, 2 or 3"),
        ({"gradient_clipping": "all"}, "gradient_clipping is 'all'; expected a number"),
        ({"gradient_predivide_factor": float("inf")}, "expected a number"),
        ({"gradient_allreduce_op": "max"}, "Invalid gradient_allreduce_op: 'max'; expected mean or sum"),
        (
            {"gradient_allreduce_op": "sum", "zero_optimization": {"stage": 2, "zenflow": {}}},
            "gradient_allreduce_op is sum, which is not supported with ZenFlow",
        ),
        (
            {"zero_optimization": {"stage": 1, "max_live_parameters": 7, "stage3_max_live_parameters": 1_000_000_000}},
            "two names of one key; keep one",
        ),
        ({"bf16": True}, "bf16 is True; expected an object"),
        ({"zero_optimization": {"stage": 0, "gradient_reduction": "reduce_scatter"}}, "there are no owners"),
        ({"zero_optimization": {"stage": 1, "allgather_bucket_size": 1001}}, "is 1001; expected an even number"),
        ({"zero_optimization": {"stage": 2}, "prescale_gradients": True}, "prescale_gradients is True"),
        ({"zero_optimization": {"stage": 2}, "gradient_predivide_factor": 4.0}, "set zero_optimization.reduce_scatter"),
        (
            {
                "zero_optimization": {"stage": 2, "reduce_scatter": False, "gradient_reduction": "reduce_to_owner"},
                "prescale_gradients": True,
            },
            "prescale_gradients is True",
        ),
        ({"zero_optimization": {"stage": 1, "compute_grad_norm": False}}, "1.0 when the key is absent"),
        (
            {"zero_optimization": {"stage": 1, "overlap_comm": True}, "managed_gradient_accumulation": False},
            "overlap_comm at stage 2 only",
        ),
        ({"zero_optimization": {"stage": 1, "mics_shard_size": 2}}, "MiCS has been removed"),
        ({"zero_optimization": {"stage": 1, "legacy_stage1": True}}, "no longer exists"),
        ({"amp": {"enabled": True}}, "Apex AMP has been removed"),
        ({"data_types": {"grad_accum_dtype": "int8"}}, "is 'int8'; expected one of: fp32, fp16, bf16"),
        ({"data_types": {"param_dtype": "bf16"}}, "the model trains in fp32"),
        ({"bf16": {"enabled": True}, "bfloat16": {"enabled": True}}, "keep bf16"),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "both fp16 and bf16 are enabled"),
        ({"fp16": {"enabled": True, "min_loss_scale": 0}}, "fp16.min_loss_scale is 0; expected a number above 0"),
        ({"fp16": {"enabled": True, "loss_scale": True}}, "fp16.loss_scale is True; expected a number"),
        ({"fp16": {"enabled": True, "loss_scale_window": 0}}, "fp16.loss_scale_window is 0"),
        ({"fp16_override_modules": "LayerNorm"}, "expected a list of strings"),
        ({"bf16": {"enabled": True, "bf16_optimizer_states": True}}, "go together"),
    ],
)  # fmt: skip
def test_refused_with_the_reason(top, message):
    with pytest.raises(ConfigError) as refusal:
        make(**top)
    assert message in str(refusal.value) and "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "top",
    [
        {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "super_offload": True}}},
        {"aio": {"use_gds": True}},
        {"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}},
        {"flops_profiler": {"enabled": True}},
        {"autotuning": {"enabled": True}},
        {"compile": {"deepcompile": True}},
        {"tensor_parallel": {"autotp_size": 2, "tp_overlap_comm": True}},
    ],
)
def test_known_but_not_in_this_version(top):
    with pytest.raises(UnsupportedError, match="not in this version yet"):
        make(**top)


@pytest.mark.parametrize(
    "top",
    [
        {"fp16": {"enabled": False, "loss_scale": 0}},
        {"amp": {"enabled": False}},
        {"comms_logger": {"enabled": False}},
        {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "none"}, "cpu_offload": False}},
        {"zero_optimization": {"stage": 2, "stage3_prefetch_bucket_size": 5e7, "leaf_module": {"names": []}}},
        {"activation_checkpointing": {"partition_activations": False, "number_checkpoints": None}},
    ],
)
def test_what_is_off_is_accepted(top):
    make(**top)


@pytest.mark.parametrize(
    ("block", "name"), [(block, name) for block in all_keys.BLOCKS for name in all_keys.BLOCKS[block]]
)
def test_every_default_passes_its_own_check(block, name):
    key = all_keys.BLOCKS[block][name]
    if key.default not in (None, {}) and key.status != all_keys.Status.REFUSED:
        assert key.check(name, key.default) == key.default


def test_whole_numbers_may_be_written_as_floats_and_clipping_defaults_to_one():
    config = make(zero={"stage": 2, "reduce_bucket_size": 5e8})
    assert config.zero.reduce_bucket_size == 500_000_000 and config.gradient_clipping == 1.0
    json.dumps(config.effective())


def test_switches_may_be_written_as_numbers():
    config = make(zero={"stage": 2, "overlap_comm": 0}, zero_allow_untested_optimizer=1, bf16={"enabled": 1})
    assert config.zero_allow_untested_optimizer is True and config.zero.overlap_comm is False
    assert config.precision.bf16 is True


@pytest.mark.parametrize(
    "top",
    [
        {},
        {"zero_optimization": {"stage": 2, "overlap_comm": True}, "bf16": {"enabled": True}},
        {"zero_optimization": {"stage": 1, "gradient_reduction": "reduce_scatter"}, "gradient_clipping": 0},
        {"use_data_before_expert_parallelism": True},
        {
            "torch_autocast": {"enabled": True, "dtype": "bf16"},
            "scheduler": {"type": "WarmupLR", "params": {}},
        },
    ],
)
def test_the_effective_configuration_is_one_itself(top):
    effective = make(**top).effective()
    assert RuntimeConfig.from_mapping(json.loads(json.dumps(effective)), 2).effective() == effective


def test_a_configuration_comes_as_a_dict_a_path_or_in_args(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text('{"train_batch_size": 2}')
    for config, args in (
        ({"train_batch_size": 2}, None),
        (path, None),
        (str(path), SimpleNamespace(deepspeed_config=None)),
        (None, SimpleNamespace(deepspeed_config=str(path))),
    ):
        assert configuration.load(config, args) == {"train_batch_size": 2}
    for config, args, message in (
        (None, None, "no configuration"),
        (None, SimpleNamespace(), "no configuration"),
        (str(path), SimpleNamespace(deepspeed_config="other.json"), "two configurations"),
        (3, None, "config is a int"),
        (tmp_path / "none.json", None, "does not exist"),
        (tmp_path, None, "cannot be read"),
    ):
        with pytest.raises(ConfigError, match=message):
            configuration.load(config, args)


def test_modules_in_fp32_mean_nothing_in_fp32():
    told = make(fp16_override_modules=["LayerNorm"]).notices
    assert told == ("fp16_override_modules has no effect here: the whole model trains in fp32",)
    assert make(fp16_override_modules=["LayerNorm"], bf16={"enabled": True}).notices == ()


def test_the_fp16_block_as_it_is_used():
    """The reported values have the same meaning when they are used as input."""
    fixed = make(fp16={"enabled": True, "loss_scale": 128, "auto_cast": True})
    assert fixed.effective()["fp16"] == {"enabled": True, "auto_cast": True, "loss_scale": 128.0}
    dynamic = make(fp16={"enabled": True, "initial_scale_power": 8, "min_loss_scale": 1e-5, "hysteresis": 3})
    again = make(fp16=dynamic.effective()["fp16"])
    assert again.precision == dynamic.precision
    assert dynamic.precision.loss_scale[:2] == (256.0, True) and dynamic.precision.loss_scale.minimum == 1e-5


def test_an_infinite_number_of_steps_prints_never():
    config = make(steps_per_print=float("inf"))
    assert config.steps_per_print == float("inf") and 1000 % config.steps_per_print != 0
    with pytest.raises(ConfigError, match="steps_per_print is -inf"):
        make(steps_per_print=float("-inf"))

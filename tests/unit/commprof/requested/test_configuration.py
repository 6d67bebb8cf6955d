"""Test how the configuration keys that determine the traffic are read, and the sentences about what they request."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commprof.errors import CommprofError
from commprof.requested import (
    Parameter,
    RequestedError,
    UnsupportedError,
    describe,
    expected,
    micro_steps,
    requested_gradient_op,
)
from commprof.requested.configuration import read_configuration
from support.sample import examples

PARAMETERS = [Parameter("weight", 100), Parameter("bias", 10)]


def stage(number, **keys):
    return {"zero_optimization": {"stage": number, **keys}}


def test_an_empty_config_is_stage_0_with_deepspeeds_defaults():
    configuration = read_configuration({})
    assert configuration.stage == 0
    assert configuration.gradient_clipping == 1.0
    assert configuration.reduce_bucket_size == 500_000_000
    assert configuration.reduce_scatter and configuration.use_multi_rank_bucket_allreduce
    assert configuration.contiguous_gradients and not configuration.overlap_comm
    assert configuration.communication_dtype == "float32"


@pytest.mark.parametrize(
    ("config", "communication"),
    [
        ({}, "float32"),
        ({"bf16": {"enabled": True}}, "bfloat16"),
        ({"bfloat16": {"enabled": True}}, "bfloat16"),
        ({"fp16": {"enabled": True}}, "float16"),
        ({"fp16": {"enabled": False}, "bf16": {"enabled": False}}, "float32"),
        ({"bf16": {"enabled": True}, "communication_data_type": "fp32"}, "float32"),
        ({"communication_data_type": "FP16"}, "float16"),
    ],
)
def test_gradients_travel_in_the_training_dtype_unless_told_otherwise(config, communication):
    assert read_configuration(config).communication_dtype == communication


@pytest.mark.parametrize(
    ("keys", "reduction"),
    [
        ({}, "multi_rank_all_reduce"),
        ({"use_multi_rank_bucket_allreduce": False}, "reduce_to_owner"),
        ({"reduce_scatter": False}, "all_reduce"),
        ({"reduce_scatter": False, "use_multi_rank_bucket_allreduce": False}, "all_reduce"),
        ({"contiguous_gradients": False, "use_multi_rank_bucket_allreduce": False}, "all_reduce"),
        # CPU offload forces contiguous buffers, so the keys have an effect again.
        (
            {
                "contiguous_gradients": False,
                "use_multi_rank_bucket_allreduce": False,
                "offload_optimizer": {"device": "cpu"},
            },
            "reduce_to_owner",
        ),
        ({"gradient_reduction": "auto"}, "multi_rank_all_reduce"),
        ({"gradient_reduction": "reduce_scatter", "reduce_scatter": False}, "reduce_scatter"),
    ],
)
def test_two_keys_and_their_overrides_choose_the_reduction(keys, reduction):
    assert read_configuration(stage(1, **keys)).reduction == reduction
    assert read_configuration(stage(2, **keys)).reduction == reduction
    assert read_configuration(stage(0, **keys)).reduction == "all_reduce"


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        (stage("2", reduce_bucket_size="50_000"), stage(2, reduce_bucket_size=50_000)),
        (stage(2, reduce_bucket_size="auto", overlap_comm="auto"), stage(2)),
        (stage(2, offload_optimizer="auto", reduce_scatter="auto"), stage(2)),
        (stage(1, reduce_scatter="off", overlap_comm=1), stage(1, reduce_scatter=False, overlap_comm=True)),
        ({**stage(3), "bf16": {"enabled": "true"}}, {**stage(3), "bf16": {"enabled": True}}),
        ({**stage(3), "bf16": {"enabled": "auto"}}, stage(3)),
        ({**stage(2), "gradient_clipping": None}, {**stage(2), "gradient_clipping": 0.0}),
        ({**stage(2), "gradient_clipping": "0"}, {**stage(2), "gradient_clipping": 0.0}),
        ({**stage(2), "torch_autocast": {"enabled": "false"}}, stage(2)),
        (stage(2, allgather_bucket_size=0), stage(2)),
    ],
)
def test_values_of_other_types_are_read_as_deepspeed_reads_them(written, meant):
    assert read_configuration(written) == read_configuration(meant)
    assert expected(written, PARAMETERS, 2) == expected(meant, PARAMETERS, 2)


@pytest.mark.parametrize(
    ("config", "parts"),
    [
        (stage(7), ("zero_optimization.stage", "7", "0, 1, 2 or 3")),
        (stage(-1), ("zero_optimization.stage", "-1")),
        (stage("two"), ("zero_optimization.stage", "'two'")),
        (stage(2, reduce_scatter="what"), ("reduce_scatter", "'what'", "true or false")),
        (stage(2, reduce_scatter=2), ("reduce_scatter", "2", "true or false")),
        (stage(2, reduce_bucket_size="5 MB"), ("reduce_bucket_size", "'5 MB'", "whole number")),
        (stage(2, reduce_bucket_size=0), ("reduce_bucket_size", "0", "1 or more")),
        (stage(2, reduce_bucket_size=1.5), ("reduce_bucket_size", "1.5")),
        (stage(2, gradient_reduction="rs"), ("gradient_reduction", "'rs'", "reduce_to_owner")),
        (stage(2, reduce_scatter_impl="nccl"), ("reduce_scatter_impl", "'nccl'", "all_to_all")),
        (stage(2, offload_optimizer={"device": "disk"}), ("offload_optimizer.device", "'disk'", "nvme")),
        ([stage(2)], ("the config is [", "object with keys")),
        ({"zero_optimization": [2]}, ("zero_optimization", "[2]", "object")),
        ({"bf16": True}, ("bf16", "True", "object")),
        ({"communication_data_type": "int8"}, ("communication_data_type", "'int8'", "bf16")),
        ({"gradient_clipping": -1}, ("gradient_clipping", "-1")),
        ({"gradient_clipping": "most"}, ("gradient_clipping", "'most'")),
        ({"gradient_accumulation_steps": 0}, ("gradient_accumulation_steps", "0")),
    ],
)
def test_a_value_that_cannot_be_used_is_named_with_what_was_expected(config, parts):
    with pytest.raises(RequestedError) as caught:
        expected(config, PARAMETERS, 2)
    assert isinstance(caught.value, CommprofError)
    for part in parts:
        assert part in str(caught.value)
    assert requested_gradient_op(config) is None
    assert describe(config) == str(caught.value)


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (stage(3, zero_hpz_partition_size=3), "zero_optimization.zero_hpz_partition_size"),
        (
            stage(3, stage3_module_granularity_threshold=5),
            "zero_optimization.stage3_module_granularity_threshold",
        ),
        (stage(3) | {"optimizer": {"type": "Muon"}}, "optimizer.type"),
        (stage(3, mics_shard_size=2), "zero_optimization.mics_shard_size"),
        (stage(1) | {"optimizer": {"type": "OneBitAdam"}}, "optimizer.type"),
        (
            stage(2)
            | {"communication": {"topology": [2, 2], "calibration": {"world": "w", "axes": ["a", "b"]}}},
            "communication.calibration",
        ),
        (stage(2) | {"communication": {"topology": "auto"}}, "communication.topology"),
        (stage(1) | {"communication": {"bounded_delay": 2}}, "communication.bounded_delay"),
        (stage(0) | {"sparse_gradients": True}, "sparse_gradients"),
        (stage(2) | {"expert_parallel": {"enabled": True}}, "expert_parallel.enabled"),
        (stage(3, gradient_reduction="reduce_to_owner"), "zero_optimization.gradient_reduction"),
        (stage(2, zenflow={"topk_ratio": 0.1}), "zero_optimization.zenflow"),
        (stage(1) | {"torch_autocast": {"enabled": True}}, "torch_autocast.enabled"),
        (stage(1) | {"compile": {"deepcompile": True}}, "compile.deepcompile"),
        (stage(1) | {"sequence_parallel_size": 2}, "sequence_parallel_size"),
        (stage(0) | {"tensor_parallel": {"autotp_size": 2}}, "tensor_parallel.autotp_size"),
        (stage(1) | {"tensor_parallel": {"tp": {"tp_size": 4}}}, "tensor_parallel.tp.tp_size"),
        (stage(1) | {"pipeline": {"stages": 2}}, "pipeline.stages"),
        (stage(1) | {"pipeline_parallel": {"pp_size": 2}}, "pipeline_parallel.pp_size"),
        (stage(1) | {"fp16_override_modules": ["LayerNorm"]}, "fp16_override_modules"),
        (stage(1) | {"fp16": {"fp16_override_modules": ["norm"]}}, "fp16.fp16_override_modules"),
    ],
)
def test_a_feature_whose_rules_are_not_stated_is_refused_by_its_key(config, key):
    with pytest.raises(UnsupportedError) as caught:
        expected(config, PARAMETERS, 4)
    assert caught.value.key == key
    assert key in str(caught.value)


@pytest.mark.parametrize(
    "config",
    [
        stage(0) | {"torch_autocast": {"enabled": True}},
        stage(2) | {"torch_autocast": {"enabled": False}, "pipeline": {"stages": "auto"}, "compile": {}},
        stage(2, offload_optimizer={"device": "cpu"}, zenflow=None) | {"sequence_parallel_size": 1},
        stage(1, offload_param={"device": "cpu"}) | {"data_types": {"keep_in_fp32_modules": ["norm"]}},
        {"zero_optimization": True},
        {"zero_optimization": None, "fp16": None},
    ],
)
def test_what_changes_no_message_is_accepted(config):
    assert expected(config, PARAMETERS, 2)


@pytest.mark.parametrize(
    ("config", "asked"),
    [
        (None, None),
        ({}, "all_reduce"),
        (stage(0, reduce_scatter=True), "all_reduce"),
        (stage(1), "reduce_scatter"),
        (stage(2, use_multi_rank_bucket_allreduce=False), "reduce_scatter"),
        (stage(2, reduce_scatter=False), "all_reduce"),
        (stage(2, contiguous_gradients=False), "reduce_scatter"),
        (stage(2, gradient_reduction="reduce_to_owner"), "reduce"),
        (stage(2, gradient_reduction="multi_rank_all_reduce"), "all_reduce"),
        (stage(2, reduce_scatter=False, gradient_reduction="reduce_scatter"), "reduce_scatter"),
        (stage(3), "reduce_scatter"),
        (stage(3, reduce_scatter=False), "all_reduce"),
    ],
)
def test_the_words_of_the_config_name_an_operation(config, asked):
    assert requested_gradient_op(config) == asked


@pytest.mark.parametrize(
    ("config", "parts"),
    [
        (None, ("no config",)),
        ({}, ("stage 0", "one all_reduce")),
        (
            stage(2),
            (
                "reduce_scatter: true with use_multi_rank_bucket_allreduce: true",
                "requests a reduce_scatter",
                "one all_reduce per bucket in its place",
            ),
        ),
        (
            stage(2, use_multi_rank_bucket_allreduce=False),
            ("allreduce: false", "one reduce per bucket and owner"),
        ),
        (stage(1, reduce_scatter=False), ("reduce_scatter: false requests an all_reduce",)),
        (stage(1, contiguous_gradients=False), ("contiguous_gradients: false overrides",)),
        (
            stage(1, gradient_reduction="reduce_scatter"),
            ("gradient_reduction: reduce_scatter", "zero_runtime"),
        ),
        (stage(3), ("stage 3",)),
        (
            stage(1) | {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
            ("bf16 at stage 1", "one all_reduce", "ignored"),
        ),
    ],
)
def test_one_sentence_says_what_is_asked_for_and_what_is_sent(config, parts):
    sentence = describe(config)
    assert "\n" not in sentence
    for part in parts:
        assert part in sentence


@pytest.mark.parametrize(
    ("config", "world_size", "steps"),
    [
        ({}, 2, 1),
        ({"gradient_accumulation_steps": 4}, 2, 4),
        ({"train_batch_size": 24, "train_micro_batch_size_per_gpu": 4}, 2, 3),
        ({"train_batch_size": 24}, 2, 1),
        ({"gradient_accumulation_steps": 4, "managed_gradient_accumulation": False}, 2, 1),
    ],
)
def test_micro_batches_in_a_step_follow_from_the_batch_sizes(config, world_size, steps):
    assert micro_steps(config, world_size) == steps


def test_batch_sizes_that_do_not_multiply_are_named():
    with pytest.raises(RequestedError, match=r"train_batch_size 10 .* 4 x 2 ranks"):
        micro_steps({"train_batch_size": 10, "train_micro_batch_size_per_gpu": 4}, 2)


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 10)
    | st.floats()
    | st.sampled_from(["auto", "cpu", "bf16", "", "1"]),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["enabled", "device", "stages"]), inner)
    ),
    max_leaves=4,
)
TOP_KEYS = (
    "bf16", "fp16", "bfloat16", "data_types", "communication_data_type", "gradient_clipping", "train_batch_size",
    "gradient_accumulation_steps", "managed_gradient_accumulation", "disable_allgather", "tensor_parallel", "pipeline",
    "compile", "torch_autocast", "sequence_parallel_size", "zero_optimization",
)  # fmt: skip
ZERO_KEYS = (
    "stage", "reduce_scatter", "reduce_bucket_size", "overlap_comm", "gradient_reduction", "reduce_scatter_impl",
    "offload_optimizer", "cpu_offload", "zenflow", "allgather_bucket_size", "contiguous_gradients",
)  # fmt: skip


@settings(max_examples=examples(200), deadline=None)
@given(
    st.dictionaries(st.sampled_from(TOP_KEYS), VALUES, max_size=3),
    st.dictionaries(st.sampled_from(ZERO_KEYS), VALUES),
)
def test_whatever_stands_in_a_config_there_is_an_answer_or_an_error_for_people(config, zero):
    config.setdefault("zero_optimization", zero)
    assert describe(config)
    requested_gradient_op(config)
    try:
        assert expected(config, PARAMETERS, 2)
    except RequestedError as error:
        assert str(error)

"""Test that each value that DeepSpeed 0.19.8 accepts for a key is also accepted here, or is a stated exception.

tools/deepspeed_config_values.py recorded tests/golden/deepspeed_config_values.json with DeepSpeed itself.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest

from zero_runtime.config import RuntimeConfig
from zero_runtime.errors import ConfigError, UnsupportedError

ROOT = Path(__file__).parents[4]
sys.path.insert(0, str(ROOT / "tools"))

import deepspeed_config_values as tool  # noqa: E402

TAKEN = json.loads((ROOT / "tests/golden/deepspeed_config_values.json").read_text())
# These values are refused here. docs/deepspeed-differences.md states the reason for each.
CONTRADICTIONS = (
    "zero_optimization.allgather_bucket_size",  # 1: DeepSpeed later asserts that the value is even.
    "zero_optimization.compute_grad_norm",  # false with clipping: DeepSpeed fails in the first step.
    "bf16.bf16_master_weights_and_grads",  # Alone: DeepSpeed later asserts that the optimizer is offloaded.
    "bfloat16.bf16_master_weights_and_grads",
    # Without partition_activations: DeepSpeed later asserts.
    "activation_checkpointing.contiguous_memory_optimization",
    "tensor_parallel.autotp_size",  # More ranks than exist.
    "tensor_parallel.tp.",
    "tensor_parallel.tensor_parallel.",
    "data_parallel_size",
)
# These values are neither integers nor words for an integer. DeepSpeed accepts them because it does not check
# the key.
SIZES = (
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "steps_per_print",
    "pipeline.",
    "activation_checkpointing.number_checkpoints",
    "aio.",
    "sequence_parallel_size",
    "timers @",
    "data_types.buffer_dtype",
)
# DeepSpeed reads nothing in these blocks. They are parts that this version lacks, or blocks that exist only
# in this runtime.
UNREAD = (
    "autotuning.",
    "flops_profiler.",
    "data_efficiency.",
    "gradient_compression",
    "pipeline_parallel",
    "communication",
)


def cases():
    for case in tool.cases():
        marks = TAKEN.get(f"{case['key']} @ {case['stage']}")
        if marks is None:
            continue
        place = 0 if case["value"] == "a comment" else tool.index_of(case["value"])
        if marks[place] != ".":
            yield case, marks[place] == "1"


def of_key(key):
    return [(case, taken) for case, taken in cases() if case["key"] == key]


def refusal(case):
    try:
        RuntimeConfig.from_mapping(case["config"], 1)
    except ConfigError as error:
        return error
    return None


def is_odd(value):
    """Return whether ``value`` cannot be meant as a number."""
    return (
        isinstance(value, str | list | dict | bool)
        or value is None
        or value < 0
        or not float(value).is_integer()
    )


def test_what_deepspeed_takes_is_taken():
    wrong = []
    for case, taken in cases():
        error = refusal(case) if taken else None
        name = f"{case['key']} @ {case['stage']}"
        if error is None or isinstance(error, UnsupportedError) or "is not in this version" in str(error):
            continue
        if name.startswith((*CONTRADICTIONS, *UNREAD)) or (name.startswith(SIZES) and is_odd(case["value"])):
            continue
        wrong.append((name, case["value"], str(error)))
    assert not wrong


@pytest.mark.parametrize("block", ["zero_optimization", "fp16", "bf16", "hybrid_engine", "comms_logger"])
def test_what_pydantic_refuses_is_refused(block):
    """The test covers the blocks that DeepSpeed checks, except for keys that exist only in this runtime."""
    beyond = (
        "zero_optimization.offload_params", "zero_optimization.offload_optimizer.", "fp16.fp16_override_modules",
        "zero_optimization.allgather_bucket_size", "fp16.min_loss_scale", "fp16.loss_scale_window",
        "zero_optimization.zenflow",
    )  # fmt: skip
    wrong = [
        (case["key"], case["value"])
        for case, taken in cases()
        if not taken
        and case["key"].startswith(f"{block}.")
        and not case["key"].startswith(beyond)
        and refusal(case) is None
    ]
    assert not wrong


def test_auto_is_dropped_where_deepspeed_drops_it():
    dropped = {case["key"] for case, taken in cases() if taken and case["value"] == "auto"}
    assert {"zero_optimization.reduce_bucket_size", "fp16.enabled", "bf16.enabled", "csv_monitor"} <= dropped
    kept = {case["key"] for case, taken in cases() if not taken and case["value"] == "auto"}
    assert {"gradient_clipping", "train_micro_batch_size_per_gpu", "optimizer.params.lr (AdamW)"} <= kept
    for case, taken in of_key("zero_optimization.sub_group_size"):
        if case["value"] == "auto":
            assert (
                taken and RuntimeConfig.from_mapping(case["config"], 1).zero.sharding.sub_group_size == 10**9
            )


def test_the_fixture_is_of_many_keys_and_values():
    assert len(TAKEN) > 350 and sum(taken for _, taken in cases()) > 1500
    assert any(isinstance(case["value"], float) and math.isinf(case["value"]) for case, _ in cases())

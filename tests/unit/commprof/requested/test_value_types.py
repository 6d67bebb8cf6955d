"""Test values whose type differs from the type of their key.

``plan`` and zero_runtime read them as DeepSpeed 0.19.8 does with pydantic. The expected values were recorded
with DeepSpeed's own configuration class.
"""

from __future__ import annotations

import pytest

from commprof.requested import RequestedError, expected
from commprof.requested.configuration import read_configuration
from commprof.requested.parameters import Parameter
from zero_runtime.config import RuntimeConfig
from zero_runtime.errors import ConfigError

TRUE = (True, 1, 1.0, "true", "TRUE", "True", "t", "yes", "Yes", "y", "on", "1")
FALSE = (False, 0, 0.0, "false", "f", "no", "n", "off", "0")
NEITHER = (
    2,
    -1,
    0.5,
    "1.0",
    "0.0",
    "",
    " true",
    "true ",
    " 1",
    "enabled",
    "none",
    "2",
    "nan",
    None,
    [],
    {},
    [True],
)
WHOLE = [
    (2, 2), (2.0, 2), (5e8, 500_000_000), ("2", 2), (" 2 ", 2), ("2.0", 2), ("+2", 2), ("1_0", 10), (True, 1),
]  # fmt: skip
NOT_WHOLE = (
    2.5,
    "2.5",
    "2.",
    "2e1",
    "5e8",
    "0x2",
    "two",
    "",
    "true",
    "1__0",
    "_1",
    "\u0663",
    float("inf"),
    "inf",
    "nan",
    [2],
)


def both(config, of_plan, of_runtime):
    """Return the values that ``plan`` and zero_runtime read. A refused value is None."""
    try:
        plan = of_plan(read_configuration(config))
    except RequestedError:
        plan = None
    try:
        runtime = of_runtime(RuntimeConfig.from_mapping({"train_micro_batch_size_per_gpu": 1, **config}, 2))
    except ConfigError:
        runtime = None
    return plan, runtime


BOOLEANS = {
    "fp16.enabled": (lambda read: read.model_dtype == "float16", lambda read: read.precision.fp16),
    "bf16.enabled": (lambda read: read.model_dtype == "bfloat16", lambda read: read.precision.bf16),
    "zero_optimization.reduce_scatter": (
        lambda read: read.reduce_scatter,
        lambda read: read.zero.gradient_reduction != "all_reduce",
    ),
    "zero_optimization.overlap_comm": (lambda read: read.overlap_comm, lambda read: read.zero.overlap_comm),
    "zero_optimization.round_robin_gradients": (
        lambda read: read.round_robin_gradients,
        lambda read: read.zero.round_robin_gradients,
    ),
    # This key exists only in zero_runtime, in its own block.
    "gradient_compression.enabled": (
        lambda read: read.compression is not None,
        lambda read: read.gradient_compression is not None,
    ),
}


def config_of(key, value):
    block, name = key.split(".")
    config = {"zero_optimization": {"stage": 2}}
    config.setdefault(block, {})[name] = value
    return config


@pytest.mark.parametrize("key", BOOLEANS)
def test_booleans_are_read_as_deepspeed_reads_them(key):
    found = {repr(value): both(config_of(key, value), *BOOLEANS[key]) for value in (*TRUE, *FALSE, *NEITHER)}
    wanted = {**dict.fromkeys(map(repr, TRUE), True), **dict.fromkeys(map(repr, FALSE), False)}
    wanted |= dict.fromkeys(map(repr, NEITHER), None)
    if key.endswith("overlap_comm"):
        wanted["None"] = False  # The value may be null.
    assert found == {value: (read, read) for value, read in wanted.items()}


def test_whole_numbers_are_read_as_deepspeed_reads_them():
    def read(value):
        return both(
            config_of("zero_optimization.reduce_bucket_size", value),
            lambda read: read.reduce_bucket_size,
            lambda read: read.zero.reduce_bucket_size,
        )

    assert {repr(value): read(value) for value, _ in WHOLE} == {repr(value): (n, n) for value, n in WHOLE}
    assert {repr(value): read(value) for value in NOT_WHOLE} == {
        repr(value): (None, None) for value in NOT_WHOLE
    }


@pytest.mark.parametrize("value", ["false", "no", 0, 0.0, "", [], None, "0", False])
def test_a_boolean_that_deepspeed_does_not_check_is_false(value):
    assert both(
        {"managed_gradient_accumulation": value},
        lambda read: read.managed_accumulation,
        lambda read: read.managed_gradient_accumulation,
    ) == (False, False)


@pytest.mark.parametrize("value", ["true", "what", 2, 0.5, "1.0", [0], True])
def test_a_boolean_that_deepspeed_does_not_check_is_true(value):
    assert both(
        {"managed_gradient_accumulation": value},
        lambda read: read.managed_accumulation,
        lambda read: read.managed_gradient_accumulation,
    ) == (True, True)


def test_a_disabled_block_of_a_pipeline_may_be_written_as_a_number():
    config = {"zero_optimization": {"stage": 1}, "pipeline_parallel": {"enabled": 0, "pp_size": 2}}
    parameters = [Parameter("weight", 100)]
    assert expected(config, parameters, 2) == expected({"zero_optimization": {"stage": 1}}, parameters, 2)


def test_a_scale_beyond_all_numbers_is_an_error_with_its_key():
    with pytest.raises(ConfigError, match=r"fp16\.initial_scale_power is 5000; expected a whole number"):
        RuntimeConfig.from_mapping(
            {"train_micro_batch_size_per_gpu": 1, "fp16": {"enabled": True, "initial_scale_power": 5000}}, 1
        )

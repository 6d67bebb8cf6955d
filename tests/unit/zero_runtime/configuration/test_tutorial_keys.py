"""Test keys from tutorials that DeepSpeed does not have.

Each key works as its name implies, or is refused with the nearest key.
"""

from __future__ import annotations

import re

import pytest

from zero_runtime.config import RuntimeConfig
from zero_runtime.configuration import all_keys
from zero_runtime.configuration.reading.key_table import Status
from zero_runtime.errors import ConfigError

# Each key, and the paths at which it works.
WORK = {
    "gradient_compression": {"gradient_compression"},
    "algorithm": {"gradient_compression.algorithm"},
    "topk_ratio": {"gradient_compression.topk_ratio"},
    "huffman_coding": {"gradient_compression.huffman_coding"},
    "hierarchical_compress": {
        "gradient_compression.hierarchical_compress",
        "zero_optimization.hierarchical_compress",
    },
    "compress_communication": {"compress_communication"},
    "communication": {"communication"},
    "topology": {"communication.topology"},
    "slow_node_tolerance": {"communication.slow_node_tolerance"},
    "pipeline_parallel": {"pipeline_parallel"},
    "pp_size": {"pipeline_parallel.pp_size"},
    "micro_batches": {"pipeline_parallel.micro_batches"},
    "partition_methods": {
        "partition_methods",
        "pipeline.partition_methods",
        "pipeline_parallel.partition_methods",
    },
    "zero_allowed_param_types": {"zero_optimization.zero_allowed_param_types"},
    "zero_force_param_types": {"zero_optimization.zero_force_param_types"},
    "offload_params": {"zero_optimization.offload_params"},
    "fp16_override_modules": {"fp16_override_modules", "fp16.fp16_override_modules"},
}
BLOCKS = ("", "zero_optimization", "fp16", "pipeline", "communication", "gradient_compression")
BAD = {
    "an algorithm": {"gradient_compression": {"algorithm": "top-k"}},
    "a ratio of 0": {"gradient_compression": {"topk_ratio": 0}},
    "a ratio above 1": {"gradient_compression": {"topk_ratio": 1.5}},
    "a fraction of 0": {"communication": {"slow_node_tolerance": 0}},
    "a fraction above 1": {"communication": {"slow_node_tolerance": 1.5}},
    "axes": {"communication": {"topology": "2d"}},
    "axes that do not multiply": {"communication": {"topology": [3, 2]}},
    "a partition method": {"partition_methods": "best"},
    "a pattern": {"pipeline": {"partition_methods": "type:("}},
    "no stages": {"pipeline_parallel": {"pp_size": 0}},
    "types": {"zero_optimization": {"stage": 3, "zero_allowed_param_types": "Linear"}},
}


@pytest.mark.parametrize("name", BAD)
def test_a_value_that_it_cannot_have_is_one_error_that_names_it(name):
    ((key, value),) = BAD[name].items()
    if isinstance(value, dict):
        inner, value = list(value.items())[-1]
        key = f"{key}.{inner}"
    with pytest.raises(ConfigError) as refusal:
        RuntimeConfig.from_mapping({"train_batch_size": 2, **BAD[name]}, 2)
    assert str(refusal.value).startswith(f"{key} is {value!r}")


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("name", ["offload_param", "offload_params"])
def test_parameters_that_are_whole_anyway_are_not_offloaded_which_one_line_says(stage, name):
    zero = {"stage": stage, name: {"device": "cpu"}}
    config = RuntimeConfig.from_mapping({"train_batch_size": 2, "zero_optimization": zero}, 2)
    assert "offload_param.device has no effect here: it acts at stage 3 only" in " ".join(config.notices)


@pytest.mark.parametrize("name", WORK)
def test_it_works_where_it_belongs(name):
    for full in WORK[name]:
        block, _, key = full.rpartition(".")
        assert all_keys.BLOCKS[block][key].status is Status.USED


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("name", WORK)
def test_elsewhere_it_is_refused_with_where_it_works(name, block):
    full = f"{block}.{name}" if block else name
    if full in WORK[name]:
        return
    given = {"train_batch_size": 2, **({block: {name: 1}} if block else {name: 1})}
    with pytest.raises(ConfigError) as refusal:
        RuntimeConfig.from_mapping(given, 2)
    meant = re.fullmatch(rf"unknown key '{re.escape(full)}'; did you mean '([\w.]+)'\?", str(refusal.value))
    assert meant is not None and meant[1] in WORK[name]

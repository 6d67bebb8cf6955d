"""Keys of tutorials that DeepSpeed has not: each works as its name says, or is refused with the nearest key."""

from __future__ import annotations

import re

import pytest

from zero_runtime.config import RuntimeConfig
from zero_runtime.configuration import keys
from zero_runtime.configuration.key_table import Status
from zero_runtime.errors import ConfigError

# Key -> where it works.
WORK = {
    "gradient_compression": {"gradient_compression"},
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
    "zero_allowed_param_types": {"zero_optimization.zero_allowed_param_types"},
    "zero_force_param_types": {"zero_optimization.zero_force_param_types"},
    "offload_params": {"zero_optimization.offload_params"},
    "fp16_override_modules": {"fp16_override_modules", "fp16.fp16_override_modules"},
}
BLOCKS = ("", "zero_optimization", "fp16", "pipeline", "communication", "gradient_compression")


@pytest.mark.parametrize("name", WORK)
def test_it_works_where_it_belongs(name):
    for full in WORK[name]:
        block, _, key = full.rpartition(".")
        assert keys.BLOCKS[block][key].status is Status.USED


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

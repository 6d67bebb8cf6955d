"""Test the keys of offload: their combined meaning, and the combinations that are refused."""

from __future__ import annotations

import pytest

from zero_runtime.config import RuntimeConfig
from zero_runtime.configuration.blocks.offload_block import OptimizerOffload
from zero_runtime.errors import ConfigError
from zero_runtime.offload.tensor_files import AsynchronousIO


def made(zero, **top):
    given = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2, **zero}, **top}
    return RuntimeConfig.from_mapping(given, 2)


def optimizer(**keys):
    return made({"offload_optimizer": keys}).zero.offload_optimizer


def test_the_device_decides_and_the_old_key_means_cpu():
    assert optimizer(device="none", nvme_path="here") is None
    assert optimizer() is None
    assert optimizer(device="cpu", nvme_path="here") == OptimizerOffload(device="cpu")
    assert made({"cpu_offload": True}).zero.offload_optimizer == OptimizerOffload(device="cpu")
    assert made({"cpu_offload": False}).zero.offload_optimizer is None
    nvme = optimizer(device="nvme", nvme_path="here", buffer_count=2, ratio=0.25, fast_init=True)
    assert nvme == OptimizerOffload(
        device="nvme", nvme_path="here", buffer_count=2, ratio=0.25, fast_init=True
    )


@pytest.mark.parametrize(
    ("keys", "read", "write"),
    [
        ({}, True, True),
        ({"pipeline": False}, False, False),
        ({"pipeline": True}, True, True),
        ({"pipeline_read": False}, False, True),
        ({"pipeline": False, "pipeline_write": True}, False, True),
        ({"pipeline_read": True, "pipeline_write": False}, True, False),
    ],
)
def test_reading_ahead_and_writing_behind_are_on_unless_they_are_switched_off(keys, read, write):
    found = optimizer(device="nvme", nvme_path="here", **keys)
    assert (found.pipeline_read, found.pipeline_write) == (read, write)


@pytest.mark.parametrize(
    ("zero", "message"),
    [
        ({"offload_optimizer": {"device": "nvme"}}, "without nvme_path"),
        ({"offload_optimizer": {"device": "disk"}}, "expected one of: none, cpu, nvme"),
        ({"offload_optimizer": {"device": "cpu", "ratio": 1.5}}, "from 0 to 1"),
        ({"offload_optimizer": {"device": "nvme", "nvme_path": "x", "buffer_count": 0}}, "at least 1"),
        ({"cpu_offload": True, "offload_optimizer": {"device": "none"}}, "keep offload_optimizer"),
    ],
)
def test_what_cannot_be_is_refused_with_the_key(zero, message):
    with pytest.raises(ConfigError, match=message):
        made(zero)


def test_files_are_read_and_written_as_aio_says():
    assert made({}).aio == AsynchronousIO()
    assert made({}, aio={"thread_count": 3, "block_size": 4096}).aio == AsynchronousIO(4096, threads=3)
    assert made({}, aio={"intra_op_parallelism": 2, "thread_count": 2}).aio.threads == 2
    with pytest.raises(ConfigError, match="two names of one key"):
        made({}, aio={"intra_op_parallelism": 2, "thread_count": 3})
    with pytest.raises(ConfigError, match=r"aio.queue_depth is 0"):
        made({}, aio={"queue_depth": 0})


def test_gradients_share_a_buffer_at_stages_1_and_2_whatever_is_asked():
    keys = {"contiguous_gradients": False, "offload_optimizer": {"device": "cpu"}}
    found = made(keys)
    assert found.zero.contiguous_gradients and found.zero.gradient_reduction == "multi_rank_all_reduce"
    assert any("contiguous_gradients false has no effect with offload_optimizer" in n for n in found.notices)
    assert not made({**keys, "stage": 3}).zero.contiguous_gradients
    assert any("no effect at stage 0" in note for note in made({**keys, "stage": 0}).notices)


def test_a_bf16_model_in_host_memory_accumulates_in_fp32_like_any_other():
    top = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
    assert made({"stage": 1}, **top).accumulates_whole
    assert not made({"stage": 1, "offload_optimizer": {"device": "cpu"}}, **top).accumulates_whole


@pytest.mark.parametrize(
    "keys", [{}, {"offload_optimizer": {"device": "nvme", "nvme_path": "x", "ratio": 0.5}}]
)
def test_the_effective_configuration_is_one_itself(keys):
    first = made(keys, aio={"block_size": 4096})
    again = RuntimeConfig.from_mapping(first.effective(), 2)
    assert again.zero.offload_optimizer == first.zero.offload_optimizer and again.aio == first.aio

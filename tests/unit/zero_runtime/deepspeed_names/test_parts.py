"""Test the implementations of DeepSpeed's names.

These are optimizers, tiles, timers, the accelerator, numbers, messages and configurations.
"""

from __future__ import annotations

import argparse
import base64
import json
import logging
import time
from types import SimpleNamespace

import pytest
import torch

import zero_runtime
from zero_runtime import config as configuration
from zero_runtime.deepspeed_names.configs.block_configurations import DeepSpeedZeroConfig
from zero_runtime.deepspeed_names.configs.config_object import DeepSpeedConfig, ZeroStageEnum
from zero_runtime.deepspeed_names.configs.schedule_arguments import (
    add_tuning_arguments,
    get_config_from_args,
    get_lr_from_config,
)
from zero_runtime.deepspeed_names.devices import accelerator, timers
from zero_runtime.deepspeed_names.devices.device_context import OnDevice, instrument_w_nvtx
from zero_runtime.deepspeed_names.ranks import group_names, logging_names
from zero_runtime.deepspeed_names.training import numerics, optimizer_names
from zero_runtime.deepspeed_names.training.loss_scaler import DynamicLossScaler, LossScaler, make_loss_scaler
from zero_runtime.deepspeed_names.training.tiling import TiledLinear, TiledLinearReturnBias
from zero_runtime.deepspeed_names.training.zero_checks import (
    clone_tensors_for_torch_save,
    is_zero_param,
    is_zero_supported_optimizer,
    set_z3_leaf_modules_by_name,
    set_z3_leaf_modules_by_suffix,
)
from zero_runtime.errors import ConfigError, LossScaleError, UnsupportedError, UsageError
from zero_runtime.groups.comm_log import CommLog, Sample, bandwidths, shown_size, summarise, trimmed_mean
from zero_runtime.startup.script_arguments import add_core_arguments
from zero_runtime.training.throughput import ThroughputTimer


def parameters():
    return [torch.nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))]


@pytest.mark.parametrize(
    ("made", "plain"),
    [
        (
            lambda p: optimizer_names.FusedAdam(p, lr=0.1),
            lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.0),
        ),
        (
            lambda p: optimizer_names.DeepSpeedCPUAdam(p, lr=0.1, weight_decay=0.1, adamw_mode=False),
            lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.1),
        ),
        (lambda p: optimizer_names.DeepSpeedCPUAdagrad(p, lr=0.1), lambda p: torch.optim.Adagrad(p, lr=0.1)),
    ],
)
def test_optimizers_by_deepspeeds_names_step_as_torchs_do(made, plain):
    ours, theirs = parameters(), parameters()
    first, second = made(ours), plain(theirs)
    for step in range(3):
        for each in (*ours, *theirs):
            each.grad = torch.tensor([0.5, 1.0, -1.0]) * (step + 1)
        first.step()
        second.step()
    torch.testing.assert_close(ours[0], theirs[0])
    assert is_zero_supported_optimizer(first)


def test_names_of_optimizers_can_be_asked_for_and_refuse_what_they_cannot():
    assert isinstance(optimizer_names.FusedLion(parameters()), optimizer_names.DeepSpeedCPULion)
    assert isinstance(torch.optim.AdamW(parameters()), optimizer_names.FusedAdam)
    assert not isinstance(torch.optim.SGD(parameters(), lr=1.0), optimizer_names.FusedAdam)
    assert isinstance(optimizer_names.FusedLamb(parameters(), max_coeff=5.0), optimizer_names.FusedLamb)
    with pytest.raises(ConfigError, match="amsgrad"):
        optimizer_names.FusedAdam(parameters(), amsgrad=True)
    with pytest.raises(UnsupportedError, match="gradient_clipping"):
        optimizer_names.FusedLamb(parameters(), max_grad_norm=1.0)


@pytest.mark.parametrize(("in_splits", "out_splits", "bias"), [(1, 1, True), (2, 3, True), (5, 2, False)])
def test_tiles_compute_what_the_whole_layer_computes(in_splits, out_splits, bias):
    whole = torch.nn.Linear(5, 7, bias=bias)
    tiled = TiledLinear(5, 7, bias, in_splits, out_splits, init_linear=whole)
    given = torch.randn(2, 3, 5)
    torch.testing.assert_close(tiled(given), whole(given))
    assert sum(each.numel() for each in tiled.parameters()) == sum(
        each.numel() for each in whole.parameters()
    )
    parts = TiledLinear(5, 7, bias, in_splits, out_splits, combine_out_splits=False, init_linear=whole)(given)
    torch.testing.assert_close(torch.cat(parts, dim=-1), whole(given))


def test_tiles_of_layers_that_return_their_bias_and_wrong_tiles():
    class Apart(torch.nn.Linear):
        def forward(self, given):
            return torch.nn.functional.linear(given, self.weight), self.bias

    whole = torch.nn.Linear(4, 6)
    tiled = TiledLinearReturnBias(4, 6, in_splits=2, out_splits=2, linear_cls=Apart)
    tiled.copy_params_from(whole)
    output, bias = tiled(torch.ones(1, 4))
    torch.testing.assert_close(output + bias, whole(torch.ones(1, 4)))
    with pytest.raises(UsageError, match="in_splits is 5; expected a number from 1 to 4"):
        TiledLinear(4, 6, in_splits=5)
    with pytest.raises(UsageError, match="has a weight"):
        tiled.copy_params_from(torch.nn.Linear(6, 4))


def test_timers_add_up_and_throughput_counts_samples():
    named = timers.SynchronizedWallClockTimer()
    for _ in range(2):
        named("fwd").start()
        time.sleep(0.01)
        named("fwd").stop(record=True)
    assert 15 < named("fwd").elapsed(reset=False) < 2000 and named("fwd").mean() >= 9
    assert named.get_mean(["fwd", "absent"], reset=True).keys() == {"fwd"}
    with pytest.raises(UsageError, match="is not running"):
        named("fwd").stop()
    said = []
    speed = ThroughputTimer(batch_size=4, start_step=1, steps_per_output=2, logging_fn=said.append)
    for _ in range(4):
        speed.start()
        time.sleep(0.005)
        speed.stop(global_step=True)
    assert 0 < speed.avg_samples_per_sec() < 4 / 0.005 and len(said) == 2
    assert timers.trim_mean([1, 2, 3, 100], 0.25) == 2.5


def test_the_accelerator_of_a_cpu_answers_everything(monkeypatch):
    found = accelerator.get_accelerator()
    assert found is accelerator.get_accelerator() and found.is_available()
    if found.device_name() != "cpu":
        pytest.skip("there is a GPU")
    assert (found.device_name(3), found.current_device_name(), found.communication_backend_name()) == (
        "cpu",
        "cpu",
        "gloo",
    )
    assert torch.zeros(1).to(found.get_current_device()).device.type == "cpu"
    assert 0 < found.memory_allocated() <= found.total_memory() and found.available_memory() > 0
    assert torch.bfloat16 in found.supported_dtypes() and found.is_bf16_supported()
    with found.stream(found.Stream()), found.device(0):
        event = found.Event(enable_timing=True)
        event.record()
        end = found.current_stream().record_event()
        assert event.elapsed_time(end) >= 0 and end.query()
    assert found.LongTensor([1, 2]).dtype is torch.long and found.FloatTensor(2, 3).shape == (2, 3)
    found.manual_seed_all(3)
    first = torch.rand(1)
    found.manual_seed(3)
    assert torch.equal(first, torch.rand(1))
    for method in ("synchronize", "empty_cache", "reset_peak_memory_stats", "range_pop"):
        getattr(found, method)()
    with pytest.raises(UnsupportedError, match="kernel"):
        found.create_op_builder("CPUAdamBuilder")
    accelerator.get_accelerator.cache_clear()
    monkeypatch.setenv("DS_ACCELERATOR", "npu")
    with pytest.raises(ConfigError, match="npu"):
        accelerator.get_accelerator()
    accelerator.get_accelerator.cache_clear()


def test_log_lines_of_some_ranks(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert logging.getLogger("DeepSpeed") is logging_names.logger
    assert logging_names.get_dist_msg("hello", ranks=[0]) is None
    assert logging_names.get_dist_msg("hello", ranks=[1]) == "[Rank -1] hello"
    logging_names.print_dist("printed", ranks=[1])
    logging_names.print_dist("not printed", ranks=[0])
    assert capsys.readouterr().out == "[Rank -1] printed\n"
    before = logging_names.get_current_level()
    logging_names.set_log_level_from_string("error")
    assert not logging_names.should_log_le("info")
    logging_names.logger.setLevel(before)
    with pytest.raises(ConfigError, match="no log level"):
        logging_names.set_log_level_from_string("loud")


def test_numbers_and_partitions():
    tensors = [torch.tensor([3.0]), torch.tensor([4.0])]
    assert float(numerics.get_global_norm_of_tensors(tensors)) == 5.0
    assert numerics.get_global_norm([3.0, 4.0]) == 5.0
    numerics.clip_tensors_by_global_norm(tensors, max_norm=1.0)
    assert float(numerics.get_global_norm_of_tensors(tensors)) == pytest.approx(1.0, abs=1e-5)
    assert numerics.get_global_norm_of_tensors([torch.tensor([float("nan")])]) == -1
    assert numerics.partition_uniform(10, 4) == [0, 3, 6, 8, 10]
    assert numerics.partition_balanced([1, 1, 1, 9, 1, 1], 3) == [0, 3, 4, 6]
    # These are the results of DeepSpeed 0.19.8, which does not always minimize the heaviest part.
    assert numerics.partition_balanced([2, 3, 2], 2) == [0, 2, 3]
    assert numerics.partition_balanced([0, 2, 3, 5, 9, 2], 3) == [0, 3, 4, 6]
    moved = numerics.move_to_device({"a": [torch.ones(1), 3]}, "meta")
    assert moved["a"][0].device.type == "meta" and moved["a"][1] == 3
    assert numerics.required_torch_version(min_version=2.0) and not numerics.required_torch_version(
        max_version=1.9
    )
    assert numerics.call_to_str("load", 3, strict=True) == "load(3, strict=True)"
    model = torch.nn.Sequential(torch.nn.Linear(1, 1))
    numerics.recursive_setattr(model, "0.bias", None)
    assert numerics.recursive_getattr(model, "0").bias is None
    numerics.set_random_seed(5)
    first = torch.rand(1)
    numerics.set_random_seed(5)
    assert torch.equal(first, torch.rand(1))


def test_loss_scales_as_objects():
    assert make_loss_scaler(torch.bfloat16, 128.0, True, None).loss_scale == 1.0
    assert isinstance(make_loss_scaler(torch.half, 128.0, False, None), LossScaler)
    scale = make_loss_scaler(torch.half, 0, True, {"init_scale": 8.0, "scale_window": 2, "min_scale": 2.0})
    assert isinstance(scale, DynamicLossScaler)
    seen = []
    for overflow in (False, False, False, True, True, True):
        scale.update_scale(overflow)
        seen.append(scale.loss_scale)
    assert seen == [8.0, 8.0, 16.0, 8.0, 4.0, 2.0]
    with pytest.raises(LossScaleError, match="smallest loss scale"):
        scale.update_scale(True)
    parameter = torch.nn.Parameter(torch.ones(1))
    scale.backward(parameter.sum())
    assert parameter.grad.item() == 2.0 and not scale.has_overflow([parameter])


def test_modules_made_on_a_device_and_in_a_dtype():
    with OnDevice(dtype=torch.bfloat16, device="meta"):
        model = torch.nn.Linear(3, 3)
    assert model.weight.device.type == "meta" and model.weight.dtype is torch.bfloat16
    assert torch.nn.Linear(1, 1).weight.dtype is torch.float32
    with OnDevice(dtype=torch.bfloat16, enabled=False):
        assert torch.nn.Linear(1, 1).weight.device.type == "cpu"
    assert instrument_w_nvtx(lambda x: x + 1)(2) == 3


GIVEN = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}


def test_a_configuration_as_an_object_and_in_base64(tmp_path):
    encoded = base64.urlsafe_b64encode(json.dumps(GIVEN).encode()).decode()
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(GIVEN))
    for given in (GIVEN, encoded, str(path)):
        found = DeepSpeedConfig(given)
        assert (found.train_batch_size, found.zero_optimization_stage, found.zero_enabled) == (2, 2, True)
        assert found.bfloat16_config.enabled and not found.float16_config.enabled
        assert found.zero_config.stage == ZeroStageEnum.gradients
    assert configuration.load(None, argparse.Namespace(deepspeed_config=encoded)) == GIVEN
    assert DeepSpeedZeroConfig(stage=3).reduce_bucket_size == 500_000_000
    mpu = SimpleNamespace(get_data_parallel_world_size=lambda: 1)
    assert DeepSpeedConfig(GIVEN, mpu=mpu).world_size == 1
    with pytest.raises(ConfigError, match="does not exist"):
        configuration.load("no_such_file.json")
    with pytest.raises(ConfigError, match="in base64"):
        configuration.load(base64.urlsafe_b64encode(b'{"train_batch_size": }').decode())


def test_arguments_of_scripts():
    parser = add_core_arguments(argparse.ArgumentParser())
    parser.add_argument("--local_rank", type=int, default=-1)  # Scripts add this argument afterwards.
    given = parser.parse_args(["--deepspeed", "--deepspeed_config", "ds.json", "--local_rank", "1"])
    assert (given.deepspeed, given.deepspeed_config, given.local_rank) == (True, "ds.json", 1)
    old = add_core_arguments(argparse.ArgumentParser()).parse_args(["--deepscale_config", "no.json"])
    with pytest.raises(ConfigError, match=r"no\.json"):
        configuration.load(None, old)
    tuned = add_tuning_arguments(argparse.ArgumentParser()).parse_args(
        [
            "--lr_schedule",
            "WarmupLR",
            "--warmup_max_lr",
            "0.5",
            "--warmup_num_steps",
            "4",
            "--warmup_type",
            "linear",
        ]
    )
    block, why = get_config_from_args(tuned)
    assert why is None and block["params"]["warmup_max_lr"] == 0.5
    optimizer = torch.optim.SGD(parameters(), lr=1.0)
    schedule = zero_runtime.schedules.WarmupLR(optimizer, **block["params"])
    for _ in range(5):
        schedule.step()
    assert schedule.get_last_lr() == [0.5] and get_lr_from_config(block) == (0.5, "")
    assert get_config_from_args(argparse.Namespace(lr_schedule=None))[0] is None


def test_small_questions():
    model = torch.nn.ModuleDict({"mlp": torch.nn.Linear(1, 1), "attention": torch.nn.Linear(1, 1)})
    found, missing = set_z3_leaf_modules_by_name(model, ["mlp", "absent"], raise_if_not_found=False)
    assert (found, missing) == ([model["mlp"]], ["absent"]) and zero_runtime.zero.z3_leaf_module(model["mlp"])
    assert set_z3_leaf_modules_by_suffix(model, ["tention"])[0] == [model["attention"]]
    with pytest.raises(ConfigError, match="absent"):
        set_z3_leaf_modules_by_name(model, ["absent"])
    assert not is_zero_param(model["mlp"].weight)
    view = torch.zeros(1000)[:2]
    kept = clone_tensors_for_torch_save({"w": [view]})["w"][0]
    assert kept.untyped_storage().nbytes() == 8
    assert group_names.get_single_world_size() == 1
    with pytest.raises(UnsupportedError, match="ep_size=2"):
        group_names.initialize(ep_size=2)


def test_bandwidths_are_those_of_nccl_tests():
    # 1e9 bytes in 1 s are 8 Gbit/s.
    assert bandwidths("all_reduce", 4, 10**9, 1000.0) == pytest.approx((8.0, 12.0))
    assert bandwidths("all_gather", 4, 10**9, 1000.0) == pytest.approx((32.0, 24.0))
    assert bandwidths("reduce_scatter", 4, 10**9, 1000.0) == pytest.approx((8.0, 6.0))
    assert bandwidths("all_to_all", 4, 10**9, 1000.0) == pytest.approx((8.0, 6.0))
    assert bandwidths("broadcast", 4, 10**9, 1000.0) == pytest.approx((8.0, 8.0))
    assert bandwidths("barrier", 4, 0, 0.0) == (0.0, 0.0)
    found = summarise(10**9, [Sample("all_reduce", 4, 1000.0)] * 3)
    assert (found.calls, found.total_ms, found.average_ms) == (3, 3000.0, 1000.0)
    assert trimmed_mean([0.0, *([5.0] * 8), 1e9]) == 5.0 and trimmed_mean([]) == 0.0
    assert [shown_size(n) for n in (0, 1023, 1024, 5 * 2**20)] == ["0 B", "1023 B", "1.00 KB", "5.00 MB"]


def test_raw_series_of_the_log_stay_in_the_order_of_the_messages():
    log = CommLog()
    for milliseconds in (3.0, 1.0, 2.0):
        log.add("all_reduce", 1000, Sample("all_reduce", 4, milliseconds))
    calls, times, speeds, bus = log.get_raw_data()["all_reduce"][1000]
    assert (calls, times) == (3, [3.0, 1.0, 2.0])
    assert speeds == pytest.approx([0.008 / 3, 0.008, 0.004]) and bus == pytest.approx(
        [1.5 * each for each in speeds]
    )
    before = log.get_operation_summary("all_reduce")
    assert before[1000]["count"] == 3 and before[1000]["avg_latency_ms"] == 2.0
    assert log.get_operation_summary("broadcast") == {}
    log.comms_dict = {"broadcast": {8: [2, [2.0, 1.0], [5.0, 10.0], [50.0, 100.0]]}}
    assert log.comms_dict == {"broadcast": {8: [2, [2.0, 1.0], [5.0, 10.0], [50.0, 100.0]]}}
    assert log.get_operation_summary("broadcast")[8]["busbw_avg_gbps"] == 75.0
    log.add("broadcast", 8, Sample("broadcast", 2, 1.0))
    assert log.comms_dict["broadcast"][8][0] == 3


def test_parameters_of_the_backward_pass_under_way_are_counted():
    used, frozen, idle = (torch.nn.Parameter(torch.ones(2)) for _ in range(3))
    frozen.requires_grad_(False)
    counts = []

    def hook(gradient):
        with torch.no_grad():  # Hooks run in this mode.
            counts.append(numerics.count_used_parameters_in_backward([used, frozen, idle, used]))

    product = used * frozen
    product.register_hook(hook)
    product.sum().backward()
    (idle * used * product.detach()).sum().backward()
    assert counts == [1]
    with pytest.raises(RuntimeError, match="outside a backward pass; call it in a hook"):
        numerics.count_used_parameters_in_backward([used])


def test_messages_before_there_are_ranks():
    from zero_runtime.deepspeed_names.ranks import comm_functions

    with pytest.raises(
        UsageError, match=r"deepspeed.comm.all_reduce was called before.*deepspeed.init_distributed\(\)"
    ):
        comm_functions.all_reduce(torch.ones(3))

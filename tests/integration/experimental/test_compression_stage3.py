"""Quantized parameters and gradients at stage 3 (ZeRO++): bytes, equal ranks, exact shards, and convergence."""

from __future__ import annotations

import functools

import pytest
import torch

import zero_runtime
from support.process_group_log import logged
from support.ranks import run_ranks
from support.recorded_models import make_batch, make_model

pytestmark = pytest.mark.ranks

STEPS = 6
NOTHING_STAYS = {"stage3_param_persistence_threshold": 0, "reduce_bucket_size": 30_000}
SETTINGS = {
    "plain": {},
    "weights": {"zero_quantized_weights": True},
    "gradients": {"zero_quantized_gradients": True},
    "both": {"zero_quantized_weights": True, "zero_quantized_gradients": True},
    "one by one": {"zero_quantized_weights": True, "stage3_allgather_sequential": True},
    "native": {"zero_quantized_gradients": True, "reduce_scatter_impl": "native", "reduce_scatter": False},
    "frozen": {"zero_quantized_nontrainable_weights": True},
    "in bf16": {"zero_quantized_weights": True, "zero_quantized_gradients": True},
    # Few parameters stay gathered, so the backward pass gathers parameters again.
    "secondary": {
        "zero_quantized_weights": True,
        "zero_hpz_partition_size": 2,
        "stage3_max_reuse_distance": 0,
        "stage3_max_live_parameters": 20_000,
        "stage3_prefetch_bucket_size": 1_000,
    },
}


def train_all(rank, world, names):
    found = {}
    for name in names:
        model = make_model("gpt")
        if name == "frozen":
            for parameter in list(model.parameters())[:2]:
                parameter.requires_grad_(False)
        config = {
            "train_micro_batch_size_per_gpu": 4,
            "optimizer": {"type": "AdamW", "params": {"lr": 2e-3}},
            "bf16": {"enabled": name == "in bf16"},
            "zero_optimization": {"stage": 3, **NOTHING_STAYS, **SETTINGS[name]},
        }
        with logged() as log:
            engine, *_ = zero_runtime.initialize(model=model, config=config)
            losses = []
            for step in range(STEPS):
                features, targets = make_batch("gpt", step % 2, 0, rank)
                log.at("forward", step)
                loss = engine(features, targets)
                losses.append(loss.item())
                log.at("backward")
                engine.backward(loss)
                log.at("step")
                engine.step()
                log.at("between")
        asked = engine.zero_quantized_weights(), engine.zero_quantized_gradients()
        with zero_runtime.zero.GatheredParameters(list(model.parameters())):
            weights = torch.cat([each.detach().reshape(-1).float() for each in model.parameters()])
        numel, exact = weights.numel(), True
        for parameter in model.parameters():
            with zero_runtime.zero.GatheredParameters([parameter]):
                own = parameter.ds_tensor
                start = min(rank * own.numel(), parameter.numel())
                mine = parameter.detach().reshape(-1)[start : start + own.numel()]
                exact = exact and torch.equal(own[: mine.numel()], mine)
        bits = int(weights.view(torch.int32).long().sum())
        last = [call for call in log.calls if call.step == STEPS - 1 and call.phase != "between"]
        found[name] = (losses, bits, last, asked, numel, exact)
    return found


@functools.cache
def trained(world=2):
    names = tuple(SETTINGS) if world > 2 else tuple(name for name in SETTINGS if name != "secondary")
    return run_ranks(world, train_all, names if world == 2 else ("plain", "secondary"), timeout=280)


def bytes_in(calls, phase, method, dtype=None):
    size = {"uint8": 1, "bfloat16": 2, "float32": 4}
    return sum(
        call.numel_in * size[call.dtype]
        for call in calls
        if call.phase == phase and call.method == method and dtype in (None, call.dtype)
    )


@pytest.mark.long
@pytest.mark.sampled
@pytest.mark.parametrize("name", [name for name in SETTINGS if name != "secondary"])
def test_ranks_agree_and_the_loss_falls_alike(name):
    ranks = trained()
    assert len({found[name][1] for found in ranks}) == 1
    losses = [sum(each) / 2 for each in zip(*(found[name][0] for found in ranks), strict=True)]
    plain = [sum(each) / 2 for each in zip(*(found["plain"][0] for found in ranks), strict=True)]
    assert losses[-2] < plain[0] - 0.8 * (plain[0] - plain[-2])


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in SETTINGS if name != "secondary"])
def test_a_script_sees_the_slices_themselves(name):
    """A gather for a script is not quantized, because the script may change and keep the parameters."""
    assert all(found[name][5] for found in trained())


def test_the_engine_says_what_is_quantized():
    (found, _) = trained()
    assert found["plain"][3] == (False, False)
    assert found["weights"][3] == (True, False)
    assert found["gradients"][3] == (False, True)


@pytest.mark.parametrize("name", ["weights", "both", "one by one"])
def test_parameters_travel_in_a_quarter_of_the_bytes(name):
    for found in trained():
        plain, calls = found["plain"][2], found[name][2]
        before = bytes_in(plain, "forward", "all_gather_single")
        after = bytes_in(calls, "forward", "all_gather_single")
        assert 0.25 * before < after < 0.28 * before
        assert bytes_in(calls, "forward", "all_gather_single", "float32") == 0


@pytest.mark.parametrize("name", ["gradients", "both", "native"])
def test_gradients_travel_in_an_eighth_of_the_bytes(name):
    for found in trained():
        plain, calls = found["plain"][2], found[name][2]
        before = bytes_in(plain, "backward", "all_to_all_single")
        after = bytes_in(calls, "backward", "all_to_all_single")
        assert before == 4 * found["plain"][4]
        assert before / 8 < after < 1.15 * before / 8
        assert {call.dtype for call in calls if call.method == "all_to_all_single"} == {"uint8"}


def test_only_frozen_parameters_may_travel_quantized():
    for found in trained():
        dtypes = {call.dtype for call in found["frozen"][2] if call.method == "all_gather_single"}
        assert dtypes == {"uint8", "float32"}


@pytest.mark.long
def test_the_secondary_group_gathers_what_the_forward_pass_used():
    """The backward pass gathers parameters in the smaller group, as the forward pass left them.

    These gathers are not quantized again.
    """
    for rank, found in enumerate(trained(4)):
        calls = found["secondary"][2]
        gathered = {
            (call.phase, call.group, call.dtype) for call in calls if call.method == "all_gather_single"
        }
        mine = ("0-1", "2-3")[rank // 2]
        assert gathered >= {("forward", "0-1-2-3", "uint8"), ("backward", mine, "float32")}
        assert {each[1:] for each in gathered} == {("0-1-2-3", "uint8"), (mine, "float32")}
    assert len({found["secondary"][1] for found in trained(4)}) == 1

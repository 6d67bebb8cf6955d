"""Compressed gradients on real ranks: wire bytes, equal ranks, convergence, and checkpoints."""

from __future__ import annotations

import functools
import math
import os
from pathlib import Path

import pytest
import torch

import zero_runtime
from support.checkpoint_training import make_engine, train
from support.process_group_log import logged
from support.ranks import run_ranks
from support.recorded_models import make_batch, make_model
from support.standing_ranks import run_standing

pytestmark = pytest.mark.ranks

NUMEL = 113_504  # the number of parameters of the model "gpt"
STEPS = 6  # even, so that the last step but one has the batch of the first step
LIMIT = 30_000  # the size of a bucket in elements
CODECS = {
    "topk": {"algorithm": "topk", "topk_ratio": 0.05},
    "topk coded": {"algorithm": "topk", "topk_ratio": 0.05, "huffman_coding": True},
    "everything": {"algorithm": "topk", "topk_ratio": 1.0},
    "1bit": {"algorithm": "1bit"},
    "2bit": {"algorithm": "2bit"},
    "2bit, no feedback": {"algorithm": "2bit", "error_feedback": False},
    "late": {"algorithm": "1bit", "warmup_steps": STEPS - 1},
}
SETTINGS = {
    "plain": (2, None, {}),
    **{f"stage {stage}, {name}": (stage, keys, {}) for stage in (0, 1, 2) for name, keys in CODECS.items()},
    "stage 2, beside backward": (2, CODECS["topk"], {"overlap_comm": True}),
    "stage 1, to owners when not compressed": (
        1, CODECS["late"], {"use_multi_rank_bucket_allreduce": False},
    ),
}  # fmt: skip
PRECISIONS = {
    "bf16": {"bf16": {"enabled": True}},
    "bf16 summed up in fp32": {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
    "fp16": {"fp16": {"enabled": True}},
    "bf16 on the wire": {"communication_data_type": "bf16"},
}


def train_one(rank, stage, compression, zero, top):
    """Train one setting.

    Returns the losses, a sum over the bits of the weights, and the collectives in the backward pass of the
    last step.
    """
    model = make_model("gpt")
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 2e-3}},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": LIMIT, **zero},
        **({} if compression is None else {"gradient_compression": compression}),
        **top,
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
    weights = torch.cat([each.detach().view(-1).float() for each in model.parameters()])
    bits = int(weights.view(torch.int32).long().sum())
    return losses, bits, [call for call in log.calls if call.phase == "backward" and call.step == STEPS - 1]


def train_all(rank, world):
    found = {name: train_one(rank, *setting, {}) for name, setting in SETTINGS.items()}
    for name, top in PRECISIONS.items():
        found[name] = train_one(rank, 1, CODECS["topk"], {}, top)
    return found


@functools.cache
def trained(world=2):
    return run_standing(world, train_all, timeout=280)


@pytest.mark.parametrize("name", [*SETTINGS, *PRECISIONS])
def test_all_ranks_have_the_same_weights(name):
    assert len({found[name][1] for found in trained()}) == 1


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_everything_sent_is_as_good_as_uncompressed(stage):
    for found in trained():
        assert found[f"stage {stage}, everything"][0] == pytest.approx(found["plain"][0], rel=1e-5)


@pytest.mark.parametrize("name", [*SETTINGS, *PRECISIONS])
def test_the_loss_falls(name):
    losses = [sum(each) / len(each) for each in zip(*(found[name][0] for found in trained()), strict=True)]
    plain = trained()[0]["plain"][0]
    assert losses[-2] < losses[0] - 0.3 * (plain[0] - plain[-2])


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_huffman_coding_changes_no_number(stage):
    for found in trained():
        assert found[f"stage {stage}, topk coded"][:2] == found[f"stage {stage}, topk"][:2]


def payload(buckets, keys, item=4):
    """Return the bytes that a rank sends for buckets of these sizes, according to the description of each algorithm."""
    if keys["algorithm"] == "topk":
        return sum(math.ceil(keys["topk_ratio"] * numel) * (item + 4) for numel in buckets)
    if keys["algorithm"] == "1bit":
        return sum(math.ceil(numel / 8) + 4 * math.ceil(numel / 2048) for numel in buckets)
    return sum(math.ceil(numel / 4) + 8 * math.ceil(numel / 2048) for numel in buckets)


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("name", ["topk", "1bit", "2bit", "late"])
def test_bytes_of_a_step(stage, name):
    """The backward pass sends one message of bytes for each bucket, including indices and levels."""
    plain = [call.numel_in for call in trained()[0]["plain"][2]]
    assert sum(plain) == NUMEL
    for found in trained():
        calls = found[f"stage {stage}, {name}"][2]
        assert {(call.method, call.dtype) for call in calls} == {("all_gather_single", "uint8")}
        sent = sum(call.numel_in for call in calls)
        assert sum(call.numel_out for call in calls) == 2 * sent
        if stage == 0:
            assert sent == payload([NUMEL], CODECS[name])
        elif stage == 2:
            assert sent == payload(plain, CODECS[name])
        assert sent < 1.01 * payload([NUMEL], CODECS[name]) + 12 * len(calls)


def test_coded_messages_are_smaller_with_their_sizes():
    for found in trained():
        coded, plain = found["stage 2, topk coded"][2], found["stage 2, topk"][2]
        assert [call.dtype for call in coded] == ["int64", "uint8"] * len(plain)
        sent = sum(call.numel_in * (8 if call.dtype == "int64" else 1) for call in coded)
        assert sent < 0.75 * sum(call.numel_in for call in plain)


def test_the_first_steps_are_not_compressed():
    for found in trained():
        late, plain = found["stage 2, late"][0], found["plain"][0]
        # The last step is the first that compresses, and its loss was computed before its gradients were
        # sent.
        assert late == plain


def train_with_hosts(rank, world):
    import os

    os.environ["LOCAL_WORLD_SIZE"] = "2"
    keys = {"topk_ratio": 0.05, "hierarchical_compress": True}
    return {stage: train_one(rank, stage, keys, {}, {}) for stage in (0, 2)}


@pytest.mark.long
def test_only_what_goes_between_hosts_is_compressed():
    ranks = run_ranks(4, train_with_hosts, timeout=200)
    for stage in (0, 2):
        assert len({found[stage][1] for found in ranks}) == 1
        for rank, found in enumerate(ranks):
            inside, across = ("0-1", "2-3")[rank // 2], ("0-2", "1-3")[rank % 2]
            by_group = {}
            for call in found[stage][2]:
                by_group.setdefault(call.group, []).append(call)
            assert set(by_group) == {inside, across}
            assert {(call.method, call.dtype) for call in by_group[across]} == {
                ("all_gather_single", "uint8")
            }
            # Within the host, a reduce-scatter and an all_gather send the whole. Between hosts, 5 % of half
            # of it is sent with indices.
            assert sum(call.numel_in for call in by_group[inside]) == pytest.approx(1.5 * NUMEL, abs=16)
            sent = sum(call.numel_in for call in by_group[across])
            assert sent == pytest.approx(8 * 0.05 * NUMEL / 2, abs=8 * len(by_group[across]))


# Checkpoints.

SAVED = {
    "topk at stage 2": (2, {"topk_ratio": 0.1}, "fp32"),
    "1bit at stage 0": (0, {"algorithm": "1bit"}, "fp32"),
    "2bit at stage 1, fp16": (1, {"algorithm": "2bit"}, "fp16"),
    "1bit, still warming up": (2, {"algorithm": "1bit", "warmup_steps": 5}, "fp32"),
}


def save_and_resume(rank, world, root):
    found = {}
    for name, (stage, keys, precision) in SAVED.items():
        directory = Path(root) / name
        engine = make_engine(stage, precision, gradient_compression=keys)
        train(engine, rank, 0, 3, precision)
        engine.save_checkpoint(directory)
        left = {key: each.clone() for key, each in engine._residuals.tensors.items()}
        went_on = train(engine, rank, 3, 4, precision)
        again = make_engine(stage, precision, gradient_compression=keys)
        train(again, rank, 50, 1, precision)
        again.load_checkpoint(directory)
        same = left.keys() == again._residuals.tensors.keys() and all(
            torch.equal(left[key], each) for key, each in again._residuals.tensors.items()
        )
        found[name] = (went_on, train(again, rank, 3, 4, precision), same, left)
    plain = make_engine(2)
    plain.load_checkpoint(Path(root) / "topk at stage 2")
    return found, plain.global_steps


def load_alone(rank, world, root):
    engine = make_engine(2, gradient_compression={"topk_ratio": 0.1})
    engine.load_checkpoint(Path(root) / "topk at stage 2")
    whole = {name.removeprefix("pending "): each.clone() for name, each in engine._residuals.stored().items()}
    engine.load_checkpoint(Path(root) / "topk at stage 2", load_module_only=True)
    return whole, engine._residuals.stored()


@pytest.mark.long
def test_training_goes_on_from_a_checkpoint_bit_by_bit(tmp_path):
    ranks = run_standing(2, save_and_resume, str(tmp_path), timeout=200)
    for found, steps in ranks:
        assert steps == 3
        for name, (went_on, resumed, same, left) in found.items():
            assert resumed == went_on, name
            assert same
            assert bool(left) == ("warming" not in name)
    # A single rank loads the sum of the residuals of two ranks. With load_module_only no residual is loaded.
    ((whole, nothing),) = run_standing(1, load_alone, str(tmp_path))
    lefts = [found["topk at stage 2"][3] for found, _ in ranks]
    assert nothing == {} and whole.keys() == lefts[0].keys()
    for name, tensor in whole.items():
        torch.testing.assert_close(tensor, lefts[0][name] + lefts[1][name])


def refused(rank, world):
    import os

    os.environ["LOCAL_WORLD_SIZE"] = "3"
    try:
        make_engine(2, gradient_compression={"hierarchical_compress": True})
    except zero_runtime.errors.ConfigError as error:
        return str(error)
    return "nothing was refused"


def test_hosts_that_do_not_divide_the_ranks_are_refused():
    for said in run_ranks(2, refused):
        assert "LOCAL_WORLD_SIZE is 3, which does not divide the 2 ranks" in said


LEFT_OVER = {
    "by all": {"algorithm": "topk", "topk_ratio": 0.1},
    "in two phases": {"algorithm": "1bit", "two_phase": True},
    "between hosts": {"algorithm": "topk", "topk_ratio": 0.1, "hierarchical_compress": True},
}
EXACT = {"algorithm": "topk", "topk_ratio": 1.0}


def of_weights(keys, ranks_of_a_host):
    """Return an engine whose step changes 37 weights by the mean gradient.

    The size of the bucket is not divisible by any number of ranks.
    """
    os.environ["LOCAL_WORLD_SIZE"] = str(ranks_of_a_host)
    model = torch.nn.Linear(37, 1, bias=False)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "zero_optimization": {"stage": 1},
        "gradient_clipping": 0.0,
        "gradient_compression": keys,
    }
    return zero_runtime.initialize(model=model, config=config)[0]


def weights_step(engine, factor):
    before = engine.module.weight.detach().clone()
    engine.backward(factor * engine(torch.randn(1, 37)).sum())
    engine.step()
    return before - engine.module.weight.detach()


def leave_over(rank, world, root):
    """Return the residual of each way of compressing on this rank, and the result of steps without gradients.

    The steps without gradients load the residuals with other numbers of ranks per host.
    """
    torch.manual_seed(rank)
    left = {}
    for name, keys in LEFT_OVER.items():
        engine = of_weights(keys, 2)
        for _ in range(3):
            weights_step(engine, 1.0)
        engine.save_checkpoint(Path(root) / name)
        left[name] = sum(engine._residuals.tensors.values()).clone()
    return left, steps_without_gradients(world, root)


def steps_without_gradients(world, root):
    found = {}
    for name in LEFT_OVER:
        for local in range(world + 1):
            if local == 0 or world % local == 0:
                engine = of_weights({**EXACT, "hierarchical_compress": local > 0}, local or world)
                engine.load_checkpoint(Path(root) / name)
                found[name, local] = (weights_step(engine, 0.0), weights_step(engine, 0.0))
    return found


def test_the_weights_get_what_was_left_over_whatever_ranks_and_hosts_there_are(tmp_path):
    saved = run_ranks(4, leave_over, str(tmp_path), timeout=200)
    total = {name: sum(left[name] for left, _ in saved) for name in LEFT_OVER}
    assert all(bool(sums.abs().sum() > 0.1) for sums in total.values())
    every = [found for _, found in saved]
    for world in (1, 2):
        every += run_ranks(world, load_residuals, str(tmp_path), timeout=200)
    for found in every:
        for (name, local), (first, second) in found.items():
            torch.testing.assert_close(first.view(-1), total[name].view(-1), msg=f"{name}, {local}")
            torch.testing.assert_close(second, torch.zeros_like(second), rtol=0, atol=1e-5)


def load_residuals(rank, world, root):
    return steps_without_gradients(world, root)

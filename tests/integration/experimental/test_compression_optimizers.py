"""1-bit Adam, 1-bit Lamb and 0/1 Adam on real ranks: traffic, equal ranks, convergence, and checkpoints."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch

import zero_runtime
from support.checkpoint_training import make_engine, train
from support.process_group_log import logged
from support.recorded_models import make_batch, make_model
from support.standing_ranks import run_standing
from zero_runtime.errors import ConfigError
from zero_runtime.experimental.one_bit import measures

NUMEL = 113_504  # the number of parameters of the model "gpt"
STEPS = 14
SIGNS = NUMEL // 8 + 4 * -(-NUMEL // 2048)
KINDS = {
    "Adam": ("AdamW", {"betas": [0.8, 0.99]}),
    "1-bit": ("OneBitAdam", {"freeze_step": 6, "betas": [0.8, 0.99], "cuda_aware": False}),
    "1-bit, never": ("OneBitAdam", {"freeze_step": 100, "betas": [0.8, 0.99]}),
    "Lamb": ("OneBitLamb", {"freeze_step": 6, "betas": [0.8, 0.99], "lr": 1e-2, "weight_decay": 0.01}),
    "0/1": (
        "ZeroOneAdam",
        {"var_freeze_step": 8, "var_update_scaler": 3, "local_step_scaler": 2, "betas": [0.8, 0.99]},
    ),
}


def train_all(rank, world):
    found = {}
    for name, (kind, params) in KINDS.items():
        model = make_model("gpt")
        config = {
            "train_micro_batch_size_per_gpu": 4,
            "optimizer": {"type": kind, "params": {"lr": 1e-3, **params}},
            "gradient_clipping": 0.0,
        }
        with logged() as log:
            engine, *_ = zero_runtime.initialize(model=model, config=config)
            losses = []
            for step in range(STEPS):
                features, targets = make_batch("gpt", step % 2, 0, rank)
                log.at("training", step)
                loss = engine(features, targets)
                losses.append(loss.item())
                engine.backward(loss)
                engine.step()
        weights = torch.cat([each.detach().view(-1) for each in model.parameters()])
        calls = [
            [(call.method, call.dtype, call.numel_in) for call in log.calls if call.step == n]
            for n in range(STEPS)
        ]
        found[name] = (losses, int(weights.view(torch.int32).long().sum()), calls)
    return found


@functools.cache
def trained():
    return run_standing(2, train_all, timeout=200)


WHOLE, COMPRESSED = [("allreduce", "float32", NUMEL)], [("all_gather_single", "uint8", SIGNS)]


@pytest.mark.long
@pytest.mark.ranks
def test_one_bit_optimizers_send_signs_once_their_second_mean_is_frozen():
    for found in trained():
        assert found["1-bit"][2] == [WHOLE] * 6 + [COMPRESSED] * 8
        assert found["Lamb"][2] == [WHOLE] * 6 + [COMPRESSED] * 8
        assert found["1-bit, never"][2] == [WHOLE] * STEPS


@pytest.mark.long
@pytest.mark.ranks
def test_zero_one_adam_measures_and_meets_ever_more_rarely():
    # The variance is measured in steps 1, 2, 3, then 4, 6, 8. The ranks train apart for 1 step twice, for 2
    # steps once, and then for 4 steps at a time.
    steps = (
        [WHOLE] * 4
        + [COMPRESSED, WHOLE, COMPRESSED, WHOLE]
        + [COMPRESSED, COMPRESSED, [], COMPRESSED, [], []]
    )
    for found in trained():
        assert found["0/1"][2] == steps


@pytest.mark.ranks
@pytest.mark.parametrize("name", KINDS)
def test_the_loss_falls(name):
    losses = [sum(each) / 2 for each in zip(*(found[name][0] for found in trained()), strict=True)]
    adam = [sum(each) / 2 for each in zip(*(found["Adam"][0] for found in trained()), strict=True)]
    assert losses[-2] < adam[0] - 0.5 * (adam[0] - adam[-2])


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["1-bit", "1-bit, never", "Lamb"])
def test_ranks_agree(name):
    assert len({found[name][1] for found in trained()}) == 1


def test_distances_of_measurements():
    assert [number for number in range(1, 40) if measures(number, 3)] == [
        1,
        2,
        3,
        4,
        6,
        8,
        12,
        16,
        20,
        24,
        32,
    ]
    assert [number for number in range(1, 20) if measures(number, 1)] == [1, 2, 4, 8, 16]


def save_and_resume(rank, world, root):
    found = {}
    for kind, params in (
        ("OneBitAdam", {"freeze_step": 2}),
        ("OneBitLamb", {"freeze_step": 2, "weight_decay": 0.1}),
        ("ZeroOneAdam", {"var_freeze_step": 2, "local_step_scaler": 1}),
    ):
        optimizer = {"type": kind, "params": {"lr": 0.01, **params}}

        def engine_of(optimizer=optimizer):
            made = make_engine(0, schedule=False)
            given = {"train_micro_batch_size_per_gpu": 4, "steps_per_print": None, "optimizer": optimizer}
            engine, *_ = zero_runtime.initialize(model=made.module, config=given)
            return engine

        engine = engine_of()
        train(engine, rank, 0, 5)
        engine.save_checkpoint(Path(root) / kind)
        bits = [each.detach().double().sum().item() for each in engine.module.parameters()]
        went_on = train(engine, rank, 5, 4)
        again = engine_of()
        train(again, rank, 50, 4)
        again.load_checkpoint(Path(root) / kind)
        found[kind] = (went_on, train(again, rank, 5, 4), bits)
    return found


@pytest.mark.ranks
def test_training_goes_on_from_a_checkpoint(tmp_path):
    ranks = run_standing(2, save_and_resume, str(tmp_path))
    for found in ranks:
        for kind, (went_on, resumed, _) in found.items():
            assert resumed == went_on, kind
    for kind in ranks[0]:  # the ranks that trained apart synchronize for the checkpoint
        assert ranks[0][kind][2] == ranks[1][kind][2]


def read(kind="OneBitAdam", stage=0, **top):
    given = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": kind},
        "zero_optimization": {"stage": stage},
    }
    return zero_runtime.config.RuntimeConfig.from_mapping({**given, **top}, 2)


@pytest.mark.parametrize("kind", ["OneBitAdam", "OneBitLamb", "ZeroOneAdam"])
@pytest.mark.parametrize(
    ("top", "said"),
    [
        ({"stage": 1}, "does not go together with zero_optimization.stage 1; use stage 0"),
        (
            {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}},
            "masters in fp32",
        ),
        ({"compress_communication": True}, "gradient_compression; use one of the two"),
    ],
)
def test_what_they_do_not_go_together_with_is_refused(kind, top, said):
    with pytest.raises(ConfigError, match=said):
        read(kind, **top)


HALVES = {"bf16": {"bf16": {"enabled": True}}, "fp16": {"fp16": {"enabled": True, "initial_scale_power": 20}}}


def train_in_halves(rank, world, steps):
    """Return losses, weights and skipped steps of each 16-bit type and optimizer, with and without clipping."""
    found = {}
    for half, keys in HALVES.items():
        for name in ("1-bit", "Lamb", "0/1"):
            kind, params = KINDS[name]
            model = make_model("gpt")
            config = {
                "train_micro_batch_size_per_gpu": 4,
                "optimizer": {"type": kind, "params": {"lr": 1e-3, **params}},
                "gradient_clipping": 1.0 if half == "bf16" else 0.0,
                **keys,
            }
            engine, *_ = zero_runtime.initialize(model=model, config=config)
            losses = []
            for step in range(steps):
                features, targets = make_batch("gpt", step % 2, 0, rank)
                loss = engine(features, targets)
                losses.append(loss.item())
                engine.backward(loss)
                engine.step()
            engine.optimizer.settle()
            weights = torch.cat([each.detach().view(-1) for each in model.parameters()])
            found[half, name] = (losses, weights.view(torch.int16).long().sum().item(), engine.skipped_steps)
    return found


@pytest.mark.ranks
@pytest.mark.long
def test_they_train_models_of_16_bits_on_any_number_of_ranks():
    # Three ranks send signs in two phases. The initial loss scale of fp16 is so large that all ranks skip
    # steps.
    ranks = run_standing(3, train_in_halves, 20, timeout=300)
    for key, (_, weights, skipped) in ranks[0].items():
        assert {each[key][1:] for each in ranks} == {(weights, skipped)}, key
        assert bool(skipped) == (key[0] == "fp16")
        mean = [sum(step) / 3 for step in zip(*(each[key][0] for each in ranks), strict=True)]
        assert mean[-2] < mean[0] - 0.05, (key, mean)


def mean_of_noise(rank, world, rounds):
    """Return the numbers that the ranks send repeatedly, the sum of their two-phase means, and the residuals."""
    from zero_runtime.comm import DataParallelGroup
    from zero_runtime.experimental.compression.residuals import Residuals
    from zero_runtime.experimental.compression.signs import MeanOfSigns

    torch.manual_seed(rank)
    numbers = [torch.randn(5000), torch.randn(70, 30)]
    residuals = Residuals()
    mean = MeanOfSigns(DataParallelGroup(), residuals)
    total = [torch.zeros_like(each) for each in numbers]
    for _ in range(rounds):
        sent = [each.clone() for each in numbers]
        mean(["a", "b"], sent)
        for each, part in zip(total, sent, strict=True):
            each.add_(part)
    return numbers, total, residuals.tensors


@pytest.mark.ranks
@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.long), 4])
def test_nothing_is_lost_of_a_mean_in_one_phase_or_two(world):
    """The result and the residuals add up to the numbers that the ranks sent.

    The residuals are those of the mean and those that a rank has on behalf of all ranks.
    """
    rounds = 3
    found = run_standing(world, mean_of_noise, rounds)
    for number, name in enumerate("ab"):
        sent = sum(numbers[number].double() for numbers, _, _ in found).view(-1) * rounds / world
        arrived = found[0][1][number].double().view(-1)
        assert all(torch.equal(each[1][number], found[0][1][number]) for each in found)
        kept = sum(left[name].double() for _, _, left in found) / world
        shares = [left[f"share of {name}"].double() for _, _, left in found if f"share of {name}" in left]
        assert bool(shares) == (world > 2)
        kept = kept + sum(shares) / world
        assert torch.allclose(arrived + kept, sent, atol=1e-4)

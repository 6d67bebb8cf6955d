"""Quantized messages of stages 1 and 2: gradients in 4 bits, updated parameters in 8, on real gloo ranks."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import pytest

from commprof.ledger.verification import verify
from support.changed_runs import Changed
from support.recording import record
from support.standing_ranks import run_standing

pytestmark = pytest.mark.ranks

BOTH = {"zero_quantized_gradients": True, "zero_quantized_weights": True}
STEPS = 6
# Ranks, zero_optimization, and other keys of the configuration.
CASES = {
    "stage 2": (2, {"stage": 2, **BOTH}, {}),
    "plain": (2, {"stage": 2}, {}),
    "gradients": (2, {"stage": 2, "zero_quantized_gradients": True}, {}),
    "weights": (2, {"stage": 2, "zero_quantized_weights": True}, {}),
    "stage 1, three ranks": (3, {"stage": 1, **BOTH, "allgather_bucket_size": 1000}, {}),
    "fp16": (2, {"stage": 2, **BOTH}, {"fp16": {"enabled": True, "initial_scale_power": 4}}),
    "bf16, several micro-batches": (
        2,
        {"stage": 2, **BOTH, "reduce_bucket_size": 900},
        {"bf16": {"enabled": True}, "gradient_accumulation_steps": 2},
    ),
    "axes": (4, {"stage": 2, **BOTH}, {"communication": {"topology": 2}}),
    "offloaded": (2, {"stage": 2, **BOTH, "offload_optimizer": {"device": "cpu"}}, {}),
}
QUICK = "stage 2"


def train(rank, world, zero, others, steps=STEPS, load=None, save=None):
    """Return the losses of ``steps`` steps, and a sum of the weights at the end."""
    import torch

    import zero_runtime

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 63), torch.nn.Tanh(), torch.nn.Linear(63, 8))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": zero,
        **others,
    }
    engine, *_ = zero_runtime.initialize(model=model, model_parameters=model.parameters(), config=config)
    first = 0
    if load is not None:
        engine.load_checkpoint(load)
        first = engine.global_steps
    losses = []
    dtype = next(model.parameters()).dtype
    for step in range(first, steps):
        for micro in range(engine.gradient_accumulation_steps()):
            generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
            inputs = torch.randn(2, 64, generator=generator).to(dtype)
            loss = engine(inputs).float().square().mean()
            engine.backward(loss)
            engine.step()
        losses.append(loss.item())
    if save is not None:
        engine.save_checkpoint(save)
    mine = torch.cat([parameter.detach().float().reshape(-1) for parameter in model.parameters()])
    engine.destroy()
    return losses, (mine.double() * torch.arange(len(mine))).sum().item()


def load_weights(rank, world, zero):
    """Return how far weights are from the loaded weights after a step at a very small rate."""
    import torch

    import zero_runtime

    model = torch.nn.Sequential(torch.nn.Linear(64, 63), torch.nn.Linear(63, 8))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 1e-6}},
        "zero_optimization": zero,
    }
    engine, *_ = zero_runtime.initialize(model=model, model_parameters=model.parameters(), config=config)
    given = {name: torch.full_like(values, 0.5) for name, values in model.state_dict().items()}
    engine.load_module_state_dict(given)
    engine.backward(engine(torch.randn(2, 64)).square().mean())
    engine.step()
    apart = max(float((values - 0.5).abs().max()) for values in model.state_dict().values())
    engine.destroy()
    return apart


@functools.cache
def recorded(name):
    world, zero, others = CASES[name]
    run, outcomes = record(Path(tempfile.mkdtemp()) / "run", world, train, zero, others)
    return run, [each["result"] for each in outcomes]


QUICK_FIRST = [pytest.param(name, marks=[] if name == QUICK else pytest.mark.long) for name in CASES]


@pytest.mark.parametrize("name", QUICK_FIRST)
def test_every_byte_is_explained_and_all_ranks_have_the_same_weights(name):
    run, outcomes = recorded(name)
    verdict = verify(run)
    assert (str(verdict.state), verdict.unexplained) == ("closed", ()), verdict.sentences
    assert len({weights for _, weights in outcomes}) == 1


def test_a_longer_message_is_named():
    def longer(row):
        changed = row["purpose"] == "parameter_gather" and row["step"] == 2
        return [row | {"payload_bytes": row["payload_bytes"] + 8}] if changed else [row]

    verdict = verify(Changed(recorded(QUICK)[0], longer))
    assert str(verdict.state) == "mismatch"
    assert {(each.purpose, each.steps) for each in verdict.unexplained} == {("parameter_gather", "2")}


@pytest.mark.long
def test_bytes_fall_to_a_quarter_and_an_eighth_and_losses_stay():
    sent = {}
    for name in (QUICK, "plain", "gradients", "weights"):
        rows = [row for row in recorded(name)[0].table("collectives").to_pylist() if row["step"] == 2]
        sent[name] = {
            purpose: sum(row["payload_bytes"] for row in rows if row["purpose"] == purpose)
            for purpose in ("gradient_reduce", "parameter_gather")
        }
    plain, both = sent["plain"], sent[QUICK]
    assert 1 / 8 <= both["gradient_reduce"] / plain["gradient_reduce"] < 1 / 7
    assert 1 / 4 <= both["parameter_gather"] / plain["parameter_gather"] < 1 / 3.8
    assert sent["gradients"]["parameter_gather"] == plain["parameter_gather"]
    assert sent["weights"]["gradient_reduce"] == plain["gradient_reduce"]
    losses = recorded("plain")[1][0][0]
    for name in (QUICK, "gradients", "weights"):
        found = recorded(name)[1][0][0]
        assert found != losses and found == pytest.approx(losses, rel=0.1)


@pytest.mark.long
@pytest.mark.parametrize("name", [QUICK, "bf16, several micro-batches"])
def test_a_training_goes_on_from_a_checkpoint_as_if_it_had_not_stopped(tmp_path, name):
    world, zero, others = CASES[name]
    whole = run_standing(world, train, zero, others)
    run_standing(world, train, zero, others, 3, None, str(tmp_path))
    rest = run_standing(world, train, zero, others, STEPS, str(tmp_path))
    for (losses, _), (found, _) in zip(whole, rest, strict=True):
        assert found == losses[3:]


@pytest.mark.long
@pytest.mark.parametrize("zero", [BOTH, {"gradient_reduction": "reduce_scatter", "reduce_bucket_size": 900}])
def test_weights_that_a_script_loads_are_those_that_are_trained(zero):
    assert all(apart < 1e-2 for apart in run_standing(2, load_weights, {"stage": 2, **zero}))


@pytest.mark.parametrize(
    ("zero", "others", "named"),
    [
        ({"gradient_reduction": "all_reduce"}, {}, "gradient_reduction is all_reduce"),
        ({"allgather_partitions": False}, {}, "allgather_partitions"),
        ({"overlap_parameter_gather": True}, {}, "overlap_parameter_gather"),
        ({"zero_force_param_types": ["Linear"]}, {}, "zero_force_param_types"),
        ({}, {"torch_autocast": {"enabled": True}}, "torch_autocast"),
        ({}, {"compress_communication": True}, "zero_quantized_gradients"),
    ],
)
def test_what_does_not_go_together_is_refused(zero, others, named):
    from zero_runtime.config import RuntimeConfig
    from zero_runtime.errors import ConfigError

    given = {"train_batch_size": 2, "zero_optimization": {"stage": 2, **BOTH, **zero}, **others}
    with pytest.raises(ConfigError, match=named):
        RuntimeConfig.from_mapping(given, 2)

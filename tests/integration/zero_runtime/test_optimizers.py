"""Optimizers and schedules in training: equal at every stage and number of ranks, and training without an optimizer."""

from __future__ import annotations

import json

import pytest
import torch

import zero_runtime
from support.process_group_log import logged
from support.recorded_models import make_batch, make_model
from support.standing_ranks import run_standing
from zero_runtime import ConfigError, UsageError
from zero_runtime.sharding.gather_schedule.residency import residency_of
from zero_runtime.sharding.shards import shard_of

pytestmark = pytest.mark.ranks

OPTIMIZERS = {
    "Lamb": {"type": "Lamb", "params": {"lr": 0.01, "weight_decay": 0.1}},
    "Lion": {"type": "Lion", "params": {"lr": 1e-3, "weight_decay": 0.1}},
    "Adam without bias correction": {"type": "Adam", "params": {"lr": 1e-3, "bias_correction": False}},
    "Adagrad": {"type": "Adagrad", "params": {"lr": 1e-2}},
    "SGD with momentum": {"type": "SGD", "params": {"lr": 1e-2, "momentum": 0.9}},
    "RMSprop": {"type": "RMSprop", "params": {"lr": 1e-3}},
    "Muon": {"type": "Muon", "params": {"lr": 1e-2, "adam_lr": 1e-3, "weight_decay": 0.1, "eps": 1e-6}},
    "Muon, standard": {"type": "Muon", "params": {"lr": 1e-2, "ns_method": "standard", "eps": 1e-6}},
}
# The tolerances of elements. A sign changed by rounding costs Lion two steps. The standard iteration of Muon
# is in bf16.
TOLERANCES = {"Lion": 2.1e-3, "Muon, standard": 3e-3}
STEPS = 3
BATCHES = 6  # micro-batches per step, over all ranks


def config(stage, optimizer, steps=1, **top):
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": steps,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 20_000},
        **({} if optimizer is None else {"optimizer": optimizer}),
        **top,
    }


def train(rank, world, stage, optimizer, path=None, first=0, last=STEPS, **top):
    """Train from and to checkpoints.

    Every world size uses the same batch in a step. Returns the parameters after the steps, and the rates that
    the schedule set.
    """
    model = make_model("mlp")
    steps = BATCHES // world
    engine, *_ = zero_runtime.initialize(model=model, config=config(stage, optimizer, steps, **top))
    if first:
        engine.load_checkpoint(path)
    rates = []
    for step in range(first, last):
        for micro in range(steps):
            engine.backward(engine(*make_batch("mlp", step, 0, rank * steps + micro)))
            engine.step()
        rates.append((engine.get_lr(), engine.get_mom()))
    if path is not None and not first:
        engine.save_checkpoint(path)
    residency = residency_of(engine.module)
    if residency is not None:
        residency.gather(engine.module.parameters())
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}, rates


def train_all(rank, world, stages):
    return {
        (stage, name): train(rank, world, stage, optimizer)[0]
        for stage in stages
        for name, optimizer in OPTIMIZERS.items()
    }


@pytest.mark.long
def test_every_optimizer_trains_alike_at_every_stage_and_world_size():
    wanted = run_standing(1, train_all, [0])[0]
    for world, stages in ((2, [0, 1, 2, 3]), (3, [2, 3])):
        for found in run_standing(world, train_all, stages):
            for (stage, name), parameters in found.items():
                for parameter, value in parameters.items():
                    torch.testing.assert_close(
                        value,
                        wanted[0, name][parameter],
                        rtol=1e-5,
                        atol=TOLERANCES.get(name, 2e-5),
                        msg=lambda text, at=(world, stage, name, parameter): f"{at}: {text}",
                    )


@pytest.mark.long
@pytest.mark.sampled
@pytest.mark.parametrize("name", ["Lamb", "Muon"])
def test_a_checkpoint_goes_on_at_any_stage_and_world_size(name, tmp_path):
    optimizer = OPTIMIZERS[name]
    wanted = run_standing(2, train, 2, optimizer)[0][0]
    for saved_by, loaded_by in (((2, 2), (3, 1)), ((2, 3), (2, 2)), ((3, 1), (1, 0)), ((1, 0), (2, 3))):
        path = tmp_path / f"{saved_by}"
        run_standing(saved_by[0], train, saved_by[1], optimizer, str(path), 0, 2)
        for found, _ in run_standing(loaded_by[0], train, loaded_by[1], optimizer, str(path), 2):
            for parameter, value in found.items():
                torch.testing.assert_close(value, wanted[parameter], rtol=1e-5, atol=2e-5)


def muon_refused(rank, world, zero, top):
    given = config(2, OPTIMIZERS["Muon"], **top)
    given["zero_optimization"].update(zero)
    try:
        zero_runtime.initialize(model=make_model("mlp"), config=given)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("zero", "top", "words"),
    [
        ({"gradient_reduction": "reduce_scatter"}, {}, "whole gradients of matrices"),
        ({"use_multi_rank_bucket_allreduce": False}, {}, "reduce_to_owner leaves each rank its own shard"),
        ({}, {"communication_data_type": "bf16"}, "multi_rank_all_reduce in another dtype"),
        ({"reduce_scatter": False}, {"communication_data_type": "bf16"}, None),
    ],
)
def test_muon_needs_whole_gradients(zero, top, words):
    for said in run_standing(2, muon_refused, zero, top):
        assert (words is None and said == "") or words in said


def muon_marks(rank, world):
    model = torch.nn.ModuleDict(
        {
            "embedding": torch.nn.Embedding(6, 4),
            "inner": torch.nn.Linear(4, 4),
            "plain": torch.nn.Linear(4, 4, bias=False),
            "lm_head": torch.nn.Linear(4, 6),
        }
    )
    model["plain"].weight.use_muon = False
    engine, *_ = zero_runtime.initialize(model=model, config=config(0, OPTIMIZERS["Muon"]))
    names = {parameter: name for name, parameter in model.named_parameters()}
    return [
        (group["use_muon"], group["lr"], sorted(names[each] for each in group["params"]))
        for group in engine.optimizer.param_groups
    ]


def test_muon_trains_matrices_but_for_embeddings_heads_and_what_says_no():
    others = [
        "embedding.weight",
        "inner.bias",
        "lm_head.bias",
        "lm_head.weight",
        "plain.weight",
    ]
    assert run_standing(1, muon_marks)[0] == [(True, 1e-2, ["inner.weight"]), (False, 1e-3, others)]


def lamb_messages(rank, world, stage):
    with logged() as log:
        engine, *_ = zero_runtime.initialize(
            model=make_model("mlp"), config=config(stage, OPTIMIZERS["Lamb"])
        )
        engine.backward(engine(*make_batch("mlp", 0, 0, rank)))
        log.at("step", 0)
        engine.step()
        log.at("report")
    return [(call.method, call.numel_in, call.dtype) for call in log.calls if call.phase == "step"]


@pytest.mark.sampled
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_lamb_sends_two_numbers_for_each_parameter(stage):
    tensors = len(list(make_model("mlp").parameters()))
    for sent in run_standing(2, lamb_messages, stage):
        assert sent.count(("allreduce", 2 * tensors, "float64")) == 1


def schedule_rates(rank, world, stage):
    params = {"cycle_min_lr": 1e-3, "cycle_max_lr": 5e-3, "cycle_first_step_size": 2}
    optimizer = {"type": "AdamW", "params": {"lr": 1.0}}
    _, rates = train(rank, 2, stage, optimizer, scheduler={"type": "OneCycle", "params": params})
    return json.loads(json.dumps(rates))


@pytest.mark.sampled
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_schedule_drives_rate_and_momentum(stage):
    for rates in run_standing(2, schedule_rates, stage):
        assert rates == [
            [[pytest.approx(rate)], [[pytest.approx(momentum), 0.99]]]
            for rate, momentum in ((3e-3, 0.85), (5e-3, 0.8), (3e-3, 0.85))
        ]


def gradients_without_optimizer(rank, world, stage, accumulation):
    model = make_model("mlp")
    engine, optimizer, _, schedule = zero_runtime.initialize(
        model=model, config=config(stage, None, accumulation)
    )
    found = []
    with logged() as log:
        for step in range(2):
            for micro in range(accumulation):
                loss = engine(*make_batch("mlp", step, micro, rank))
                log.at("backward", step, micro)
                engine.backward(loss)
                log.at("report")
            found.append([_gradient(engine, number, each) for number, each in enumerate(model.parameters())])
    try:
        engine.step()
        said = ""
    except UsageError as error:
        said = str(error)
    sent = [
        call.method for call in log.calls if call.phase == "backward" and call.method.startswith("allred")
    ]
    return (
        found, said, sent, (optimizer, schedule, engine.get_lr(), engine.get_mom(), engine.global_steps),
    )  # fmt: skip


def _gradient(engine, number, parameter):
    if shard_of(parameter) is None:
        return parameter.grad.flatten().clone()
    pieces = engine._gradients.shards
    return torch.cat([piece.flatten() for piece in pieces]) if number == 0 else None


@pytest.mark.sampled
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_without_an_optimizer_every_rank_has_the_mean_gradients(stage, accumulation):
    wanted = []
    model = make_model("mlp")
    for step in range(2):
        model.zero_grad()
        for rank in range(2):
            for micro in range(accumulation):
                (model(*make_batch("mlp", step, micro, rank)) / (2 * accumulation)).backward()
        wanted.append([parameter.grad.flatten().clone() for parameter in model.parameters()])
    for found, said, sent, parts in run_standing(2, gradients_without_optimizer, stage, accumulation):
        for mine, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-7)
        assert "step needs an optimizer, and there is none" in said
        assert sent == ["allreduce"] * 2
        assert parts == (None, None, [], [], 2)


def test_without_an_optimizer_stage_3_keeps_slices_of_the_mean_gradients():
    model = make_model("mlp")
    for rank in range(2):
        (model(*make_batch("mlp", 1, 0, rank)) / 2).backward()
    whole = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    slices = []
    for found, said, *_ in run_standing(2, gradients_without_optimizer, 3, 1):
        slices.append(found[1][0])
        assert "in shards" in said
    # Padding is zero, and shards are ordered by parameter. The sum of squares does not depend on the order.
    torch.testing.assert_close(torch.cat(slices).square().sum(), whole.square().sum(), rtol=1e-5, atol=0.0)

"""The engine of a pipeline under each schedule: equal results, in the order of the schedule."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zero_runtime
from support.pipelines import (
    INTERLEAVED,
    MICRO_BATCHES,
    SCHEDULES,
    STEPS,
    WIDTH,
    batches,
    config,
    made,
    nested_layers,
    pipeline,
    plain_layers,
    reference,
    same,
    scheduled,
    tied,
    train,
)
from support.standing_ranks import run_standing

pytestmark = pytest.mark.ranks
# Each of these functions runs on two ranks.


def zero_bubble_is_1f1b_to_the_bit():
    variants = [
        (nested_layers, config(), {}),
        (tied, config(gradient_clipping=0.05, zero_optimization={"stage": 1}), {}),
        (tied, config(bf16={"enabled": True}, zero_optimization={"stage": 1},
                      data_types={"grad_accum_dtype": "fp32"}), {}),
        (plain_layers, config(fp16={"enabled": True, "initial_scale_power": 8}), {}),
    ]  # fmt: skip
    for layers, given, options in variants:
        found = []
        for name in ("1f1b", "zero_bubble"):
            engine = scheduled(layers(), SCHEDULES[name], given, **options)
            dtype = torch.half if "fp16" in given else torch.bfloat16 if "bf16" in given else torch.float
            losses = [
                float(
                    engine.train_batch((features.to(dtype), targets) for features, targets in batches(step))
                )
                for step in range(STEPS)
            ]
            weights = [each.detach().clone() for each in engine.module.parameters()]
            found.append((losses, weights))
        assert found[0][0] == found[1][0]
        assert all(map(torch.equal, found[0][1], found[1][1]))


class Counted(nn.Module):
    """Layers with random numbers that count how often they run."""

    runs = 0

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, values):
        Counted.runs += 1
        return self.second(torch.nn.functional.dropout(torch.tanh(self.first(values)), 0.25))


def zero_bubble_runs_checkpointed_layers_twice():
    """Run checkpointed layers under the zero-bubble schedule.

    A layer runs once in the forward pass and once for both halves of the backward pass, however many weights
    it has. The results are equal bit for bit.
    """
    layers = [zero_runtime.LayerSpec(Counted) for _ in range(4)] + [
        zero_runtime.LayerSpec(nn.Linear, WIDTH, 1)
    ]
    dropped = config(bf16={"enabled": True}, zero_optimization={"stage": 1}, gradient_clipping=0.05)
    autocast = config(torch_autocast={"enabled": True, "dtype": "bfloat16"})
    for given in (config(), dropped, autocast):
        found = []
        for name, interval in (("1f1b", 0), ("zero_bubble", 1), ("zero_bubble", 2)):
            engine = scheduled(
                layers, SCHEDULES[name], given | {"pipeline": {"activation_checkpoint_interval": interval}}
            )
            torch.manual_seed(5)
            Counted.runs = 0
            dtype = torch.bfloat16 if "bf16" in given else torch.float
            losses = [
                float(
                    engine.train_batch((features.to(dtype), targets) for features, targets in batches(step))
                )
                for step in range(STEPS)
            ]
            own = sum(isinstance(each, Counted) for each in engine.module.modules())
            assert Counted.runs == (2 if interval else 1) * own * STEPS * MICRO_BATCHES
            found.append((losses, [each.detach().clone() for each in engine.module.parameters()]))
        for losses, weights in found[1:]:
            assert losses == found[0][0]
            assert all(map(torch.equal, weights, found[0][1]))


def zero_bubble_of_changing_shapes():
    engine = scheduled(nested_layers(), SCHEDULES["zero_bubble"], dynamic_shape=True)
    same(engine, train(engine, changing=True), reference(nested_layers(), changing=True))
    assert engine.expected_bubble_fraction() == pytest.approx(1 / (3 * MICRO_BATCHES + 1))
    assert 0.0 < engine.bubble_fraction() < 1.0


def interleaved_layers():
    for chunks in (2, 3):
        engine = scheduled(plain_layers(), {"virtual_stages": chunks})
        assert engine.plan == ("interleaved", 2, chunks)
        assert len(engine.module.parts) == 2 * chunks + 1
        same(engine, train(engine), reference(plain_layers()))
        assert engine.expected_bubble_fraction() == 1 / (chunks * MICRO_BATCHES + 1)
    assert [engine.module.stage_owner(layer) for layer in range(8)] == [0, 0, 1, 1, 0, 1, 0, 1]


def interleaved_nested_values():
    engine = scheduled(nested_layers(), INTERLEAVED, dynamic_shape=True)
    same(engine, train(engine, changing=True), reference(nested_layers(), changing=True))


def interleaved_ties_with_clipping():
    """Train with tied layers that both ranks share, and that both parts of one rank share."""
    wanted = reference(tied(4), clip=0.05)
    for stage in (0, 1):
        given = config(gradient_clipping=0.05, zero_optimization={"stage": stage})
        engine = scheduled(tied(4), {"schedule": "interleaved"}, given)
        same(engine, train(engine), wanted)
        assert engine.unique_parameters == sum(value.numel() for value in wanted[2].values())


def interleaved_half_precision():
    given = config(fp16={"enabled": True, "initial_scale_power": 8}, zero_optimization={"stage": 1})
    found = []
    for schedule in (SCHEDULES["1f1b"], INTERLEAVED):
        engine = scheduled(plain_layers(), schedule, given)
        data = [[(features.half(), targets) for features, targets in batches(step)] for step in range(STEPS)]
        found.append([float(engine.train_batch(iter(each))) for each in data])
        endless = [(features * 1e4, targets * float("inf")) for features, targets in data[0]]
        engine.train_batch(iter(endless))
        assert engine.skipped_steps == 1
    assert found[0] == found[1]


def evaluation_over_virtual_stages():
    plain, interleaved = (scheduled(plain_layers(), each) for each in (SCHEDULES["1f1b"], INTERLEAVED))
    wanted = float(plain.eval_batch(batches(0)))
    assert float(interleaved.eval_batch(batches(0))) == wanted
    three = [each for number, each in enumerate(batches(0)) if number < 3]
    outputs = [engine.inference_batch(iter(three), num_micro_batches=3) for engine in (plain, interleaved)]
    assert torch.equal(*outputs) if plain.is_last_stage() else outputs == [None, None]


def random_numbers_of_layers_are_those_of_1f1b():
    layers = [*plain_layers(5)[:-2], zero_runtime.LayerSpec(nn.Dropout, 0.5), plain_layers()[-1]]
    found = [train(scheduled(layers, schedule)) for schedule in (SCHEDULES["1f1b"], INTERLEAVED)]
    assert found[0] == pytest.approx(found[1], rel=1e-6)


def checkpointed_layers():
    engine = scheduled(plain_layers(), INTERLEAVED, config(pipeline={"activation_checkpoint_interval": 1}))
    same(engine, train(engine), reference(plain_layers()))


def stages_that_are_dealt_out_already():
    model = pipeline(plain_layers(), virtual_stages=2, partition_method="uniform")
    assert model.parts == [0, 2, 4, 6, 8]
    engine, *_ = zero_runtime.initialize(model=model, config=config())
    assert engine.plan.name == "interleaved"
    same(engine, train(engine), reference(plain_layers()))
    again, *_ = zero_runtime.initialize(model=model, config=config(8))
    again.train_batch(batches(9, count=8))


def refused(message, schedule, given=None, layers=None, **options):
    block = {"pipeline_parallel": schedule}
    with pytest.raises(zero_runtime.ConfigError, match=message):
        made(layers or plain_layers(), {**(given or config()), **block}, **options)


def what_is_refused():
    refused(
        r"a step has 5 .*make that a multiple of 2", {"pp_size": 2, **INTERLEAVED}, config(5), stages=None
    )
    refused("need 18 layers or more, and the model has 8;", {"pp_size": 2, "virtual_stages": 9}, stages=None)
    refused(
        "schedule 1f1b supports only one",
        {"pp_size": 2, "schedule": "1f1b", "virtual_stages": 2},
        stages=None,
    )
    refused("is partitioned into 1 virtual stages", INTERLEAVED)
    refused("is partitioned into 1 virtual stages", {"schedule": "interleaved"})
    refused("is partitioned into 3 virtual stages", INTERLEAVED, virtual_stages=3)
    refused("expected '?1f1b|one of", {"schedule": "zigzag"})
    refused("activation_checkpoint_interval is 2", SCHEDULES["zero_bubble"],
            config(pipeline={"activation_checkpoint_interval": 2}),
            activation_checkpoint_func=lambda layers, values: layers(values))  # fmt: skip


PROGRAMS = (
    zero_bubble_is_1f1b_to_the_bit, zero_bubble_runs_checkpointed_layers_twice, zero_bubble_of_changing_shapes,
    interleaved_layers, interleaved_nested_values, interleaved_ties_with_clipping, interleaved_half_precision,
    evaluation_over_virtual_stages, random_numbers_of_layers_are_those_of_1f1b, checkpointed_layers,
    stages_that_are_dealt_out_already, what_is_refused,
)  # fmt: skip


def _two_stages(rank, world, programs):
    for program in programs:
        program()


@pytest.mark.long
def test_two_stages():
    run_standing(2, _two_stages, PROGRAMS, timeout=300.0)


def _three_stages(rank, world):
    layers = tied(8)
    wanted = reference(layers, count=6)
    for schedule in (SCHEDULES["zero_bubble"], INTERLEAVED):
        engine = scheduled(layers, schedule, config(6, zero_optimization={"stage": 1}), stages=3)
        same(engine, train(engine, count=6), wanted)


@pytest.mark.long
def test_three_stages():
    run_standing(3, _three_stages)


def _one_rank(rank, world):
    for schedule in (SCHEDULES["zero_bubble"], INTERLEAVED):
        engine = scheduled(tied(4), schedule, stages=1)
        same(engine, train(engine), reference(tied(4)))
        engine.inference_batch(batches(0))


def test_one_rank():
    """A single rank sends the inputs of its other part to itself."""
    run_standing(1, _one_rank)


def _replicas(rank, world):
    for schedule in (SCHEDULES["zero_bubble"], INTERLEAVED):
        engine = scheduled(tied(4), schedule, config(zero_optimization={"stage": 1}))
        same(engine, train(engine), reference(tied(4), replicas=2))


@pytest.mark.long
def test_replicas():
    run_standing(4, _replicas)

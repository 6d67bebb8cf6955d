"""The engine of a pipeline on real ranks: every result equals that of one process that runs all layers."""

from __future__ import annotations

import contextlib
import functools
import io
import re

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

import zero_runtime
from support.pipelines import (
    MICRO_BATCHES,
    STEPS,
    WIDTH,
    batch,
    batches,
    config,
    made,
    nested_layers,
    pipeline,
    plain_layers,
    reference,
    same,
    squared,
    tied,
    train,
)
from support.standing_ranks import run_standing

pytestmark = pytest.mark.ranks


# Each of these functions runs on two ranks.


def nested_values():
    engine = made(nested_layers())
    same(engine, train(engine), reference(nested_layers()))


def step_lines():
    """Check the step line: the mean loss, the time of a batch, and samples per second.

    Only rank 0 prints the line.
    """
    engine = made(plain_layers(), config(steps_per_print=2))
    assert engine.pipeline_parallelism
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors):
        losses = [float(engine.train_batch(batches(step))) for step in range(4)]
    lines = [line for line in errors.getvalue().splitlines() if "samples/sec" in line]
    if engine.global_rank:
        assert not errors.getvalue()
        return
    pattern = r"zero_runtime: steps: (\d) loss: ([\d.]+) iter time \(s\): ([\d.]+) samples/sec: ([\d.]+)"
    found = [re.fullmatch(pattern, line).groups() for line in lines]
    assert [(int(step), float(loss)) for step, loss, *_ in found] == [
        (2, pytest.approx(losses[1], abs=1e-4)),
        (4, pytest.approx(losses[3], abs=1e-4)),
    ]
    for _, _, seconds, rate in found:
        assert engine.train_batch_size() / float(rate) == pytest.approx(float(seconds), abs=6e-4)
    assert engine.tput_timer.global_step_count == 4 and engine.tput_timer.avg_samples_per_sec() > 0


def changing_shapes():
    engine = made(nested_layers(), dynamic_shape=True)
    same(engine, train(engine, changing=True), reference(nested_layers(), changing=True))


def shapes_changed_rarely():
    engine = made(plain_layers())
    first = float(engine.eval_batch(batches(0)))
    engine.reset_activation_shape()
    larger = [batch(0, number, samples=5) for number in range(MICRO_BATCHES)]
    second = float(engine.eval_batch(iter(larger)))
    assert first != second


def gpipe():
    engine = made(plain_layers(), config(pipeline_parallel={"schedule": "gpipe"}))
    same(engine, train(engine), reference(plain_layers()))


def tied_layers_with_clipping():
    wanted = reference(tied(), clip=0.05)
    for stage in (0, 1):
        given = config(gradient_clipping=0.05, zero_optimization={"stage": stage})
        engine = made(tied(), given, partition_method="uniform")
        same(engine, train(engine), wanted)
        if stage:
            assert float(engine.get_global_grad_norm()) == pytest.approx(wanted[1][-1], rel=1e-4)
        assert engine.unique_parameters == sum(value.numel() for value in wanted[2].values())
        assert engine.total_parameters > engine.unique_parameters


def frozen_layers():
    frozen = [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)]
    for number, layer in enumerate(frozen):
        torch.manual_seed(number)
        layer.reset_parameters()
        layer.weight.requires_grad_(False)
    engine = made([zero_runtime.LayerSpec(nn.Linear, WIDTH, WIDTH), *frozen], partition_method="uniform")
    before = {name: each.detach().clone() for name, each in engine.module.named_parameters()}
    train(engine)
    for name, parameter in engine.module.named_parameters():
        assert torch.equal(parameter, before[name]) == (not parameter.requires_grad)


def whole_tensors():
    engine = made(plain_layers())
    found = []
    for step in range(STEPS):
        features, targets = (torch.cat(each) for each in zip(*batches(step), strict=True))
        found.append(float(engine.train_batch(data=features, targets=targets)))
    same(engine, found, reference(plain_layers()))
    outputs = engine.inference_batch(data=features)
    assert (outputs is None) == (not engine.is_last_stage())
    mean = engine.eval_batch(data=features, targets=targets)
    if engine.is_last_stage():
        assert outputs.shape == targets.shape
        assert float(mean) == pytest.approx(float(squared(outputs, targets)), rel=1e-5)
        kept = engine.eval_batch(data=features, targets=targets, reduce_output=None)
        assert len(kept) == MICRO_BATCHES
    else:
        assert engine.eval_batch(data=features, targets=targets, reduce_output=None) is None
    with pytest.raises(zero_runtime.UsageError, match="cannot be divided into"):
        engine.train_batch(data=features[:3], targets=targets[:3])


def stages_from_the_configuration():
    for block in ({"pipeline_parallel": {"enabled": True, "pp_size": 2}}, {"pipeline": {"stages": 2}}):
        model = pipeline(plain_layers(), stages=None)
        assert not list(model.parameters()) and not model.is_dealt
        given = config(**block, partition_methods="uniform")
        engine, *_ = zero_runtime.initialize(model=model, model_parameters=model.parameters(), config=given)
        assert model.parts == [0, 4, 8]
        same(engine, train(engine), reference(plain_layers()))


def another_number_of_micro_batches():
    model = pipeline(plain_layers())
    given = config(None, pipeline_parallel={"pp_size": 2, "micro_batches": 2})
    del given["gradient_accumulation_steps"]
    first, *_ = zero_runtime.initialize(model=model, config=given)
    assert first.micro_batches == 2
    train(first, count=2)
    before = [each.detach().clone() for each in model.parameters()]
    given["pipeline_parallel"]["micro_batches"] = 8
    second, *_ = zero_runtime.initialize(model=model, config=given)
    assert second.micro_batches == 8 and second.train_batch_size() == 16
    assert all(map(torch.equal, before, model.parameters()))
    second.train_batch(batches(9, count=8))
    assert not any(map(torch.equal, before, model.parameters()))


def overflow_on_one_stage():
    for stage in (0, 1):
        given = config(
            fp16={"enabled": True, "initial_scale_power": 8},
            zero_optimization={"stage": stage},
            gradient_clipping=1.0,
        )
        engine = made(plain_layers(), given)
        before = [each.detach().clone() for each in engine.module.parameters()]
        endless = ((features.half() * 1e4, targets * float("inf")) for features, targets in batches(0))
        engine.train_batch(endless)
        assert engine.skipped_steps == 1 and not engine.was_step_applied()
        assert all(map(torch.equal, before, engine.module.parameters()))
        while not engine.was_step_applied():
            engine.train_batch((features.half(), targets) for features, targets in batches(1))
        assert engine.skipped_steps < 6


def brain_floats():
    losses = []
    for stage in (0, 1):
        given = config(bf16={"enabled": True}, zero_optimization={"stage": stage})
        engine = made(tied(), given, partition_method="uniform")
        losses.append(
            [
                float(
                    engine.train_batch((features.bfloat16(), targets) for features, targets in batches(step))
                )
                for step in range(STEPS)
            ]
        )
    assert losses[0] == pytest.approx(losses[1], rel=2e-2)
    wide = config(
        bf16={"enabled": True}, zero_optimization={"stage": 1}, data_types={"grad_accum_dtype": "fp32"}
    )
    engine = made(tied(), wide, partition_method="uniform")
    engine.train_batch((features.bfloat16(), targets) for features, targets in batches(0))
    mine = engine.module.tied_modules["shared"].weight.detach().float()
    everybody = [torch.empty_like(mine) for _ in range(2)]
    torch.distributed.all_gather(everybody, mine)
    assert torch.equal(*everybody)


def idle_shares():
    engine = made(plain_layers())
    train(engine)
    assert engine.expected_bubble_fraction() == 1 / (MICRO_BATCHES + 1)
    assert 0.0 < engine.bubble_fraction() < 1.0


def measured_layers():
    sample = torch.randn(2, WIDTH)
    engine = made(plain_layers(), partition_method="profile", sample_input=sample)
    assert engine.module.parts[0] == 0 and engine.module.parts[-1] == 8
    assert 0 < engine.module.parts[1] < 8
    same(engine, train(engine), reference(plain_layers()))
    model = pipeline(plain_layers(), partition_method="profile")
    assert not model.is_dealt
    data = [batch(0, number) for number in range(40)]
    data = [(features[0], targets[0]) for features, targets in data]
    engine, _, loader, _ = zero_runtime.initialize(model=model, training_data=data, config=config())
    assert loader is engine.training_dataloader and model.is_dealt
    engine.train_batch()


def layers_that_are_modules():
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
    every = list(layers.parameters())
    model = zero_runtime.PipelineModule(layers, loss_fn=squared)
    assert len(list(model.parameters())) == 4
    engine, *_ = zero_runtime.initialize(
        model=model, model_parameters=every, config=config(pipeline_parallel={"pp_size": 2})
    )
    assert len(list(model.parameters())) == 2
    engine.train_batch(batches(0))


def output_is_the_loss():
    layers = [*plain_layers(), zero_runtime.LayerSpec(Mean)]
    model = zero_runtime.PipelineModule(layers, num_stages=2)
    engine, *_ = zero_runtime.initialize(model=model, config=config())
    inputs = (features for features, _ in batches(0))
    assert float(engine.train_batch(inputs)) > 0


def evaluations_between_steps():
    """Evaluate between steps.

    The batches passed to eval_batch and inference_batch are for that call alone. Training continues with its
    own batches.
    """
    engine = made(plain_layers())
    training = (one for step in range(STEPS) for one in batches(step))
    found = [float(engine.train_batch(training))]
    for step in range(1, STEPS):
        engine.eval_batch(batches(70 + step))
        engine.inference_batch(batches(80 + step))
        found.append(float(engine.train_batch()))
    same(engine, found, reference(plain_layers()))


class Scaled(nn.Module):
    """A layer with two tensors as a tuple, as in DeepSpeed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs):
        assert type(inputs) is tuple
        features, factors = inputs
        return self.linear(features) * factors


def several_inputs_and_labels():
    """Train with several inputs and labels.

    torch's DataLoader turns the tuples of a dataset into lists.
    """

    def loss(outputs, labels):
        assert type(labels) is tuple
        return squared(outputs, labels[0]) + squared(outputs, labels[1])

    samples = [batch(0, number, samples=1) for number in range(16)]
    data = [
        ((features[0], features[0, :1] + 2.0), (target[0], target[0] + 1.0)) for features, target in samples
    ]
    layers = [zero_runtime.LayerSpec(Scaled), zero_runtime.LayerSpec(nn.Linear, WIDTH, 1)]
    model = zero_runtime.PipelineModule(layers, num_stages=2, loss_fn=loss)
    engine, *_ = zero_runtime.initialize(model=model, training_data=data, config=config())
    assert float(engine.train_batch()) > 0


class Doubled(nn.Module):
    """A layer whose output is a tuple, and whose input may be a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs):
        hidden = self.linear(sum(inputs) if isinstance(inputs, tuple) else inputs)
        return hidden, torch.tanh(hidden)


class Summed(nn.Linear):
    def forward(self, inputs):
        return super().forward(sum(inputs))


def checkpoints_of_torch():
    """Use torch's reentrant checkpoint function, which only detects arguments that require gradients."""
    layers = [*(zero_runtime.LayerSpec(Doubled) for _ in range(4)), zero_runtime.LayerSpec(Summed, WIDTH, 1)]
    reentrant = functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=True)
    engine = made(layers, activation_checkpoint_interval=1, activation_checkpoint_func=reentrant)
    same(engine, train(engine), reference(layers))


class Mean(nn.Module):
    def forward(self, values):
        return values.square().mean()


def calls_that_are_refused():
    engine = made(plain_layers())
    for call in (engine.forward, engine.backward, engine.step, engine):
        with pytest.raises(zero_runtime.UsageError, match="train_batch"):
            call(torch.zeros(2, WIDTH))
    with torch.no_grad(), pytest.raises(zero_runtime.UsageError, match="eval_batch"):
        engine.train_batch(batches(0))
    with pytest.raises(zero_runtime.UsageError, match="expected an iterator"):
        engine.train_batch([batch(0, 0)])
    with pytest.raises(zero_runtime.UsageError, match="give one of the two"):
        engine.train_batch(batches(0), data=torch.zeros(8, WIDTH))


def refused(message, layers=None, given=None, kind=zero_runtime.ConfigError, **options):
    with pytest.raises(kind, match=message):
        made(layers or plain_layers(), given or config(), **options)


def configurations_that_are_refused():
    refused("3 pipeline stages do not divide 2 ranks", stages=3)
    refused("1 layers cannot be assigned to 2 stages", plain_layers(0)[1:])
    for stage in (2, 3):
        refused("use stage 0 or 1", given=config(zero_optimization={"stage": stage}))
    refused(
        "micro_batches is 2 and gradient_accumulation_steps is 4",
        given=config(pipeline_parallel={"micro_batches": 2}),
    )
    refused("batch sizes do not multiply", given=config(train_batch_size=9))
    refused("made for|partitioned into 2 stages", given=config(pipeline_parallel={"pp_size": 1}))
    refused("pipeline.stages 2 and pipeline_parallel.pp_size 1 differ",
            given=config(pipeline={"stages": 2}, pipeline_parallel={"pp_size": 1}))  # fmt: skip
    refused("neither PipelineModule", stages=None)
    refused("partition_method is 'best'", partition_method="best")
    refused("matches no layer; the layers are Linear, tanh", partition_method="type:block")
    refused("no regular expression", partition_method="type:(")
    refused("sample_input", partition_method="profile")
    refused("keep one of them", given=config(partition_methods="uniform"), partition_method="parameters")
    refused("is no parameter of Linear",
            [zero_runtime.TiedLayerSpec("k", nn.Linear, WIDTH, WIDTH, tied_weight_attr="wait")] * 2)  # fmt: skip
    refused("managed_gradient_accumulation", given=config(managed_gradient_accumulation=False))
    refused("layer 0 of the pipeline is a int; expected a module", [3])
    refused("layers of a PipelineModule are a Linear; expected a list", nn.Linear(2, 2))
    refused("num_stages of a PipelineModule is '2'; expected a whole number", stages="2")
    refused("num_stages of a PipelineModule is 0; expected a whole number", stages=0)
    refused("partition_method is 3; expected uniform", partition_method=3)
    refused("activation_checkpoint_interval is -1; expected", activation_checkpoint_interval=-1)
    ends = [zero_runtime.TiedLayerSpec("ends", nn.Linear, WIDTH, width) for width in (WIDTH, 3)]
    refused(
        r"the tied layers 'ends' share 'weight', which is .*make them equal", [ends[0], nn.Tanh(), ends[1]]
    )
    with pytest.raises(
        zero_runtime.ConfigError, match="loss_fn of a PipelineModule is 3; expected a function"
    ):
        zero_runtime.PipelineModule(plain_layers(), loss_fn=3)
    with pytest.raises(zero_runtime.ConfigError, match="expected a subclass of torch"):
        zero_runtime.LayerSpec(len, 3)
    with pytest.raises(zero_runtime.ConfigError, match="the model is a Linear; give it as"):
        zero_runtime.initialize(model=nn.Linear(2, 2), config=config(pipeline_parallel={"pp_size": 2}))


PROGRAMS = (
    nested_values, step_lines, changing_shapes, shapes_changed_rarely, gpipe, tied_layers_with_clipping, frozen_layers,
    whole_tensors, evaluations_between_steps, several_inputs_and_labels, checkpoints_of_torch,
    stages_from_the_configuration, another_number_of_micro_batches, overflow_on_one_stage, brain_floats, idle_shares,
    measured_layers, layers_that_are_modules, output_is_the_loss, calls_that_are_refused, configurations_that_are_refused,
)  # fmt: skip


@pytest.mark.sampled
@pytest.mark.parametrize("third", range(3))
def test_two_stages(third):
    run_standing(2, _in_turn, PROGRAMS[third::3], timeout=300.0)


def _in_turn(rank, world, programs):
    for program in programs:
        program()


def _replicas(rank, world):
    for stage, layers in ((0, plain_layers), (1, tied)):
        given = config(zero_optimization={"stage": stage})
        engine = made(layers(), given, partition_method="uniform")
        same(engine, train(engine), reference(layers(), replicas=2))
        assert (engine.stage_id, engine.get_data_parallel_rank()) == divmod(rank, 2)
        assert engine.get_model_parallel_rank() == engine.stage_id
    whole = [torch.cat([batch(0, n, replica)[i] for replica in range(2) for n in range(4)]) for i in range(2)]
    found = engine.eval_batch(data=whole[0], targets=whole[1])
    assert float(found) == pytest.approx(
        float(engine.eval_batch(batches(0, engine.parallelism.replica))), rel=1e-5
    )


def test_stages_and_replicas():
    run_standing(4, _replicas)


def _one_stage(rank, world):
    engine = made(plain_layers(), stages=1)
    same(engine, train(engine), reference(plain_layers()))


def test_one_stage():
    run_standing(1, _one_stage)

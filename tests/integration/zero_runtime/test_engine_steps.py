"""Whole steps: train_batch and eval_batch, coalesced reductions, batch sizes, and data loaders."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

import zero_runtime
from support.process_group_log import logged
from support.recorded_models import Perceptron, make_batch, make_model
from support.standing_ranks import run_standing
from zero_runtime import ConfigError, UsageError
from zero_runtime.training.data_loading import RepeatingLoader

pytestmark = pytest.mark.ranks

SAMPLES, FEATURES = 22, 37


def config(stage=2, steps=2, **top):
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": steps,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 20_000},
        **top,
    }


def made(stage=2, steps=2, model=None, **arguments):
    top = arguments.pop("top", {})
    engine, *_ = zero_runtime.initialize(
        model=model or make_model("mlp"), config=config(stage, steps, **top), **arguments
    )
    return engine


def batches(rank, first=0):
    step = first
    while True:
        yield make_batch("mlp", step, 0, rank)
        step += 1


class Split(Perceptron):
    """The model with a separate loss, as pipelines require."""

    def forward(self, features):
        for layer in self.layers[:-1]:
            features = F.relu(layer(features))
        return self.layers[-1](features)

    @staticmethod
    def loss_fn(outputs, targets):
        return F.cross_entropy(outputs.float(), targets)


class Answering(Perceptron):
    """The model in the style of many libraries: keyword arguments, and an object that contains the loss."""

    def forward(self, features, targets):
        return SimpleNamespace(loss=super().forward(features, targets), logits=None)


def same_weights(kind):
    torch.manual_seed(0)
    return kind()


def by_hand(rank, stage, steps=2):
    engine, feed, means = made(stage, steps), batches(rank), []
    for _ in range(3):
        losses = []
        for _ in range(steps):
            loss = engine(*next(feed))
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach())
        mean = torch.stack(losses).mean()
        torch.distributed.all_reduce(mean)
        means.append(mean.item() / torch.distributed.get_world_size())
    return means


def whole_steps(rank, world):
    found = {}
    for stage in range(4):
        engine, feed = made(stage), batches(rank)
        found[stage] = by_hand(rank, stage), [engine.train_batch(feed).item() for _ in range(3)]
    engine, feed = made(model=same_weights(Split)), batches(rank)
    found["split"] = [engine.train_batch(feed).item() for _ in range(3)]
    engine = made(model=same_weights(Answering))
    named = ({"features": features, "targets": targets} for features, targets in batches(rank))
    found["named"] = [engine.train_batch(named).item() for _ in range(3)]
    engine = made()
    before = [parameter.clone() for parameter in engine.module.parameters()]
    evaluated = engine.eval_batch(batches(rank)).item()
    unchanged = all(torch.equal(*pair) for pair in zip(before, engine.module.parameters(), strict=True))
    found["eval"] = evaluated, unchanged, engine.training, engine.global_steps
    found["counts"] = engine.train_batch(batches(rank)).shape, engine.global_steps, engine.global_samples
    errors = []
    for wrong in (
        lambda: engine.train_batch(iter([make_batch("mlp", 0, 0, rank)])),
        lambda: made().train_batch(),
        lambda: made(model=same_weights(Split)).train_batch(iter([(torch.zeros(4, FEATURES), 1, 2)])),
        lambda: engine.train_batch([make_batch("mlp", 0, 0, rank)]),
        lambda: engine.eval_batch([]),
        lambda: made().eval().train_batch(batches(rank)),
    ):
        try:
            wrong()
        except (UsageError, TypeError) as error:
            errors.append(str(error))
    return found, errors


def test_train_batch_is_forward_backward_and_step_of_each_micro_batch():
    ranks = run_standing(2, whole_steps)
    for found, errors in ranks:
        for stage in range(4):
            assert found[stage][1] == pytest.approx(found[stage][0], rel=1e-6), stage
        assert found["split"] == found["named"] == pytest.approx(found[2][0], rel=1e-6)
        evaluated, unchanged, training, steps = found["eval"]
        assert (unchanged, training, steps) == (True, True, 0)
        assert evaluated == pytest.approx(found[2][0][0], rel=1e-6)
        assert found["counts"] == ((), 1, 16)
        assert "ended in the middle of a step of 2 micro-batches" in errors[0]
        assert "there is no training data" in errors[1]
        assert all("a list; expected an iterator of batches" in error for error in errors[-3:-1])
        assert "eval mode" in errors[-1]
    assert ranks[0][0]["eval"] == ranks[1][0]["eval"]  # each rank has the mean of all ranks


def coalesced(rank, world):
    """Train with two micro-batches per step, in one coalesced block with one step().

    The step counter continues after the block.
    """
    found = {}
    for stage in (1, 2, 3):
        plain, engine = made(stage), made(stage)
        for step in range(2):
            for micro in range(2):
                plain.backward(plain(*make_batch("mlp", step, micro, rank)))
                plain.step()
            with logged() as log, engine.coalesce_grad_reduction():
                log.at("inside")
                for micro in range(2):
                    engine.backward(engine(*make_batch("mlp", step, micro, rank)))
            inside = [call.method for call in log.calls if call.phase == "inside"]
            engine.step()
        norms = float(plain.get_global_grad_norm()), float(engine.get_global_grad_norm())
        # An ordinary window of two micro-batches follows.
        taken = []
        for micro in range(2):
            engine.backward(engine(*make_batch("mlp", 2, micro, rank)))
            engine.step()
            taken.append(engine.was_step_applied())
        found[stage] = engine.global_steps, norms, taken, inside
    return found


def test_a_coalesced_block_is_one_step_that_is_reduced_once():
    for found in run_standing(2, coalesced):
        for stage, (steps, norms, taken, inside) in found.items():
            assert steps == 3 and taken == [False, True]
            assert norms[0] == pytest.approx(norms[1], rel=1e-5), stage
            reductions = [
                method for method in inside if method.startswith(("allreduce", "reduce", "alltoall"))
            ]
            assert len(reductions) <= 4, stage  # 56,934 elements in buckets of 20,000, reduced once


def misuse_of_blocks(rank, world):
    errors = []
    for stage, wrong in (
        (0, lambda engine: engine.coalesce_grad_reduction().__enter__()),
        (1, lambda engine: _nested(engine.no_sync, engine.coalesce_grad_reduction)),
        (1, lambda engine: _nested(engine.coalesce_grad_reduction, engine.step)),
        (2, lambda engine: engine.no_sync().__enter__()),
    ):
        try:
            wrong(made(stage))
        except UsageError as error:
            errors.append(str(error))
    return errors


def _nested(outer, inner):
    with outer():
        found = inner()
        if found is not None:
            found.__enter__()


def test_blocks_that_hold_gradients_back_are_not_mixed():
    (errors,) = run_standing(1, misuse_of_blocks)
    for error, expected in zip(
        errors,
        ("works at stages 1 to 3", "inside another block", "step was called inside", "no_sync has no effect"),
        strict=True,
    ):
        assert expected in error


def loaders(rank, world):
    features = torch.arange(SAMPLES * FEATURES, dtype=torch.float32).reshape(SAMPLES, FEATURES) / 1000
    dataset = torch.utils.data.TensorDataset(features, torch.arange(SAMPLES) % 11)
    engine = made(training_data=dataset)
    loader = engine.training_dataloader
    passes = [[batch[1].tolist() for batch in loader] for _ in range(2)]
    loader.set_epoch(1)
    passes.append([batch[1].tolist() for batch in loader])
    losses = [engine.train_batch().item() for _ in range(3)]  # 6 batches from a loader with 3
    whole = engine.deepspeed_io(dataset, batch_size=5, route="eval")
    in_order = [batch[1].tolist() for batch in whole]
    full = [
        len(batch[1])
        for batch in made(training_data=dataset, top={"dataloader_drop_last": True}).training_dataloader
    ]
    again = RepeatingLoader(loader)
    refused = None
    try:
        engine.deepspeed_io(3)
    except ConfigError as error:
        refused = str(error)
    return passes, len(losses), in_order, full, len([next(again) for _ in range(7)]), refused


def test_loaders_give_each_rank_its_share_again_and_again():
    ranks = run_standing(2, loaders)
    for passes, count, in_order, full, again, refused in ranks:
        assert [len(batch) for batch in passes[0]] == [4, 4, 3]
        # As in DeepSpeed, only set_epoch changes the shuffling.
        assert passes[0] == passes[1] != passes[2]
        assert (count, again, full) == (3, 7, [4, 4])
        assert [len(batch) for batch in in_order] == [5, 5, 1]
        assert "training_data is a int" in refused
    seen = [target for found in ranks for batch in found[0][0] for target in batch]
    assert sorted(seen) == sorted(number % 11 for number in range(SAMPLES))
    assert ranks[0][2][0] == [0, 2, 4, 6, 8]


def batch_sizes(rank, world):
    engine = made()
    sizes = [engine.get_batch_info()]
    engine.set_train_batch_size(24)
    sizes.append(engine.get_batch_info())
    feed = batches(rank)
    for _ in range(3):
        engine.backward(engine(*next(feed)))
        engine.step()
    taken = engine.global_steps
    engine.set_train_micro_batch_size(2)
    sizes.append(engine.get_batch_info())
    try:
        engine.set_train_batch_size(10)
    except ConfigError as error:
        return sizes, taken, str(error)
    return None


def test_the_batch_size_can_change_between_steps():
    for sizes, taken, refused in run_standing(2, batch_sizes):
        assert sizes == [(16, 4, 2), (24, 4, 3), (12, 2, 3)]
        assert taken == 1
        assert (
            "train_batch_size 10 is not a multiple of 4, the samples of one micro-batch of 2 ranks" in refused
        )


def answers(rank, world):
    engine = made(3)
    return {
        name: getattr(engine, name)()
        for name in (
            "zero_optimization_stage",
            "zero_optimization_partition_gradients",
            "zero_optimization_partition_weights",
            "zero_reduce_bucket_size",
            "zero_prefetch_bucket_size",
            "zero_param_persistence_threshold",
            "optimizer_name",
            "scheduler_name",
            "steps_per_print",
            "wall_clock_breakdown",
            "postscale_gradients",
            "torch_autocast_dtype",
            "get_wall_clock_timers",
            "get_mom",
        )
    }


def test_the_engine_answers_for_its_configuration():
    (found,) = run_standing(1, answers)
    assert list(found.values()) == [
        3,
        True,
        True,
        20_000,
        50_000_000,
        100_000,
        "AdamW",
        None,
        None,
        False,
        True,
        None,
        {},
        [(0.9, 0.999)],
    ]


def state_of_slices(rank, world):
    engine = made(3, 1, top={"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}})
    with pytest.raises(UsageError, match=r"is sharded between its uses .*GatheredParameters"):
        engine.module_state_dict()
    with pytest.raises(UsageError, match="is sharded between its uses"):
        engine.state_dict()
    return True


def test_a_state_of_empty_parameters_is_refused():
    assert all(run_standing(2, state_of_slices))


def loaded_weights(rank, world):
    torch.manual_seed(1)
    other = {name: torch.randn_like(value) / 10 for name, value in make_model("mlp").state_dict().items()}
    found = {}
    for stage, top in ((0, {}), (0, {"bf16": {"enabled": True}}), (1, {}), (2, {}), (3, {})):
        engine = made(stage, 1, top={**top, "optimizer": {"type": "SGD", "params": {"lr": 0.0}}})
        engine.load_module_state_dict(other)
        features, targets = make_batch("mlp", 0, 0, rank)
        engine.backward(engine(features.to(next(engine.module.parameters()).dtype), targets))
        engine.step()  # The update is 0, so the model gets the values of the optimizer's masters.
        with zero_runtime.zero.GatheredParameters(list(engine.module.parameters())):
            state = {name: value.float() for name, value in engine.module_state_dict().items()}
            found[stage, bool(top)] = max(
                float((state[name] - value).abs().max()) for name, value in other.items()
            )
    return found


def test_loaded_weights_are_what_the_optimizer_goes_on_from():
    for found in run_standing(2, loaded_weights):
        assert found.pop((0, True)) < 4e-3  # bf16
        assert set(found.values()) == {0.0}

"""Stage 0 with ``gradient_reduction: all_reduce`` and ``overlap_comm: true``: buckets during the backward pass."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import zero_runtime
from commprof.ledger.verification import verify
from commprof.requested import Parameter, expected_in_step
from commprof.requested.errors import UnsupportedError
from support.process_group_log import logged
from support.recorded_models import make_batch, make_model
from support.standing_ranks import record_standing, run_standing
from zero_runtime import ConfigError, UsageError
from zero_runtime.config import RuntimeConfig

pytestmark = pytest.mark.ranks

BUCKETS = {"gradient_reduction": "all_reduce", "overlap_comm": True, "reduce_bucket_size": 20_000}
CASES = {
    "fp32": {},
    "clipped": {"gradient_clipping": 0.01},
    "accumulated": {"gradient_accumulation_steps": 3},
    "predivided": {"gradient_predivide_factor": 2.0},
    "bf16": {"bf16": {"enabled": True}},
    "fp16 that overflows": {"fp16": {"enabled": True, "initial_scale_power": 24, "hysteresis": 1}},
    "bf16 messages": {"communication_data_type": "bf16"},
}


def config(zero, top=None):
    return {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": 0, **zero},
        **(top or {}),
    }


def train(rank, settings, steps=3, model=None):
    """Return the losses, the all_reduces of gradients of each backward pass, and the parameters after training."""
    model = model or make_model("mlp")
    engine, *_ = zero_runtime.initialize(model=model, config=settings)
    dtype = next(model.parameters()).dtype
    losses, sent = [], []
    for step in range(steps):
        for micro in range(engine.gradient_accumulation_steps()):
            inputs, targets = make_batch("mlp", step, micro, rank)
            with logged() as log:
                loss = engine(inputs.to(dtype), targets)
                engine.backward(loss)
            sent.append([call.numel_in for call in log.calls if call.method == "allreduce"])
            engine.step()
            losses.append(loss.item())
    engine.destroy()
    return losses, sent, [parameter.detach().float() for parameter in model.parameters()]


def both_ways(rank, world, top):
    return train(rank, config({}, top)), train(rank, config(BUCKETS, top))


@pytest.mark.sampled("fp32", "accumulated", "fp16 that overflows")
@pytest.mark.parametrize("name", CASES)
def test_buckets_train_as_one_message_does(name):
    (losses, whole, weights), (own, sent, own_weights) = run_standing(2, both_ways, CASES[name])[0]
    assert own == pytest.approx(losses, rel=1e-5)
    for one, other in zip(weights, own_weights, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-6)
    assert [len(each) for each in whole if each] == [1] * 3
    assert all(len(each) > 1 for each in sent if each)
    assert [sum(each) for each in sent] == [sum(each) for each in whole]
    largest = max(parameter.numel() for parameter in weights)
    assert all(numel <= max(20_000, largest) for each in sent for numel in each)


class Choosing(nn.Module):
    """A model in which each rank uses different layers than other ranks, in a different order."""

    def __init__(self, order):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(5))
        self.order = order

    def forward(self, x):
        for number in self.order:
            x = self.layers[number](x).tanh()
        return x.square().mean()


def choose(rank, world, zero):
    engine, *_ = zero_runtime.initialize(
        model=Choosing([(0, 1, 2), (3, 1, 0)][rank]), config=config(zero, {"gradient_clipping": 0.0})
    )
    for _ in range(3):
        engine.backward(engine(torch.ones(4, 16) * (rank + 1)))
        engine.step()
    return [parameter.detach() for parameter in engine.module.parameters()]


def test_ranks_that_use_other_parameters_in_another_order_sum_the_same_gradients():
    expected = run_standing(2, choose, {})
    ranks = run_standing(2, choose, BUCKETS | {"reduce_bucket_size": 300})
    for each in ranks:
        for one, other in zip(each, expected[0], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


def recorded(rank, world, top):
    train(rank, config(BUCKETS, top))


@pytest.mark.parametrize("top", [{}, {"bf16": {"enabled": True}, "gradient_accumulation_steps": 2}], ids=str)
def test_verify_closes_and_the_rules_state_every_bucket(tmp_path, top):
    run, _ = record_standing(tmp_path / "run", 2, recorded, top)
    verdict = verify(run)
    assert verdict.exit_code == 0, str(verdict)
    parameters = [
        Parameter(name, p.numel(), "float32", 0, True, index)
        for index, (name, p) in enumerate(make_model("mlp").named_parameters())
    ]
    row = next(
        each
        for each in expected_in_step(config(BUCKETS, top), parameters, 2, 1)
        if each.purpose == "gradient_reduce"
    )
    sent = [
        each["input_bytes"]
        for each in run.table("collectives").to_pylist()
        if (each["rank"], each["step"], each["purpose"]) == (0, 1, "gradient_reduce")
    ]
    assert len(sent) == row.count > 1
    assert sum(sent) == row.payload_bytes


class Twice(nn.Module):
    """A layer in two regions of reentrant activation checkpointing, so that its gradient arrives in two parts."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(16, 16)
        self.shared = nn.Linear(16, 16)

    def forward(self, x):
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(self.shared, x, use_reentrant=True)
        return x.square().mean()


def train_twice(rank, world):
    engine, *_ = zero_runtime.initialize(model=Twice(), config=config(BUCKETS | {"reduce_bucket_size": 280}))
    loss = engine(torch.ones(4, 16) * (rank + 1))
    with pytest.raises(UsageError, match=r"shared\.\w+ got a second gradient in one backward pass"):
        engine.backward(loss)
    return True


def test_a_gradient_that_arrives_in_two_parts_is_refused():
    assert run_standing(2, train_twice) == [True, True]


def train_again(rank, world):
    """Return the all_reduces of a model that was given to initialize twice."""
    model = make_model("mlp")
    zero_runtime.initialize(model=model, config=config(BUCKETS))
    return train(rank, config(BUCKETS), model=model)[1]


def test_a_second_engine_of_a_model_sends_each_bucket_once():
    again = run_standing(2, train_again)[0]
    assert again == run_standing(2, both_ways, {})[0][1][1]


@pytest.mark.parametrize(
    ("top", "named"),
    [
        ({"gradient_compression": {"algorithm": "topk"}}, "gradient_compression"),
        ({"communication": {"bounded_delay": 1}}, "communication.bounded_delay"),
        ({"managed_gradient_accumulation": False}, "overlap_comm"),
    ],
    ids=str,
)
def test_what_buckets_do_not_go_together_with(top, named):
    with pytest.raises(ConfigError, match=named):
        RuntimeConfig.from_mapping(config(BUCKETS, top), 2)
    # plan and predict therefore do not offer these settings.
    with pytest.raises(
        UnsupportedError, match="zero_runtime refuses it beside gradient_reduction all_reduce"
    ):
        expected_in_step(config(BUCKETS, top), [Parameter("a", 10, "float32", 0, True, 0)], 2, 1)


@pytest.mark.parametrize("zero", [{"overlap_comm": True}, {"gradient_reduction": "all_reduce"}], ids=str)
def test_either_key_alone_leaves_one_message(zero):
    parameters = [Parameter(name, 10_000, "float32", 0, True, index) for index, name in enumerate("abcd")]
    rows = expected_in_step(config({"reduce_bucket_size": 10_000, **zero}), parameters, 2, 1)
    assert [each.count for each in rows if each.purpose == "gradient_reduce"] == [1]
    both = expected_in_step(config(BUCKETS | {"reduce_bucket_size": 10_000}), parameters, 2, 1)
    assert [each.count for each in both if each.purpose == "gradient_reduce"] == [4]

"""Compare learning-rate schedules with numbers measured with DeepSpeed 0.19.8, and test refused arguments."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from zero_runtime import schedules
from zero_runtime.configuration.config_values import SchedulerConfig
from zero_runtime.errors import ConfigError, UsageError

MEASURED = json.loads(
    (Path(__file__).resolve().parents[2] / "golden" / "deepspeed_schedules.json").read_text()
)["cases"]


def optimizer(kind=torch.optim.Adam, **options):
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in (0.003, 0.006)]
    return kind(groups, lr=0.003, **options)


def make(name, params, over=None):
    return schedules.schedule(SchedulerConfig(type=name, params=params), None, over or optimizer())


def rates(over):
    return [float(group["lr"]) for group in over.param_groups]


def case_id(case):
    return f"{case['type']}-{len(case['params'])}"


@pytest.mark.parametrize("case", MEASURED, ids=case_id)
def test_values_are_deepspeeds(case):
    over = optimizer()
    made = make(case["type"], case["params"], over)
    found, betas = [rates(over)], [[list(group["betas"]) for group in over.param_groups]]
    for _ in case["lr"][1:]:
        made.step()
        found.append(rates(over))
        betas.append([list(group["betas"]) for group in over.param_groups])
        assert made.get_last_lr() == made.get_lr() == found[-1]
    assert found == [pytest.approx(each, rel=1e-12) for each in case["lr"]]
    if "betas" in case:
        assert betas == [[pytest.approx(pair, rel=1e-12) for pair in each] for each in case["betas"]]


@pytest.mark.parametrize(
    "case", [case for case in MEASURED if "last_batch_iteration" not in case["params"]], ids=case_id
)
def test_goes_on_from_a_saved_state(case):
    over, again = optimizer(), optimizer()
    first, second = make(case["type"], case["params"], over), make(case["type"], case["params"], again)
    for _ in range(3):
        first.step()
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert rates(again) == rates(over)
    for _ in range(4):
        first.step()
        second.step()
        assert rates(again) == rates(over)


def test_step_takes_the_number_of_the_step():
    over, jumped = optimizer(), optimizer()
    first = make("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 1.0, "cycle_first_step_size": 4}, over)
    second = make("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 1.0, "cycle_first_step_size": 4}, jumped)
    for _ in range(6):
        first.step()
    second.step(5)
    assert rates(over) == rates(jumped)
    assert first.get_mom() == second.get_mom()


def test_momentum_is_left_alone_without_betas():
    over = optimizer(torch.optim.SGD, momentum=0.7)
    made = make("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 1.0, "cycle_first_step_size": 4}, over)
    made.step()
    assert made.get_mom() is None
    assert over.param_groups[0]["momentum"] == 0.7


def test_a_rate_that_is_a_tensor_stays_one():
    over = optimizer()
    for group in over.param_groups:
        group["lr"] = torch.tensor(0.5)
    make("WarmupLR", {"warmup_max_lr": 0.25, "warmup_num_steps": 2}, over).step(5)
    assert all(isinstance(group["lr"], torch.Tensor) for group in over.param_groups)
    assert rates(over) == [0.25, 0.25]


def test_schedules_of_torch_by_name():
    over = optimizer()
    made = make("ExponentialLR", {"gamma": 0.5}, over)
    assert isinstance(made, torch.optim.lr_scheduler.ExponentialLR)


def test_a_client_schedule_wins():
    over = optimizer()
    config = SchedulerConfig(type="WarmupLR", params={})
    made = torch.optim.lr_scheduler.ConstantLR(over)
    assert schedules.schedule(config, made, over) is made
    called = schedules.schedule(config, lambda given: torch.optim.lr_scheduler.ConstantLR(given), over)
    assert called.optimizer is over
    with pytest.raises(ConfigError, match="lr_scheduler is a str"):
        schedules.schedule(None, "WarmupLR", over)


def test_a_class_as_client_schedule():
    over = optimizer()
    assert schedules.schedule(None, torch.optim.lr_scheduler.ConstantLR, over).optimizer is over
    with pytest.raises(
        ConfigError, match=r"StepLR, which cannot .*: missing a required argument: 'step_size'"
    ):
        schedules.schedule(None, torch.optim.lr_scheduler.StepLR, over)
    with pytest.raises(ConfigError, match="too many positional arguments"):
        schedules.schedule(None, lambda: None, over)


def test_a_schedule_that_counts_samples():
    """Megatron-LM's schedule needs the number of new samples in each step.

    DeepSpeed passes the number of samples of a training step.
    """
    seen = []

    class Counting:
        def step(self, increment):
            seen.append(increment)

    schedules.advance(Counting(), {}, 32)
    schedules.advance(Counting(), {"increment": 5}, 32)
    over = optimizer()
    halving = torch.optim.lr_scheduler.ExponentialLR(over, 0.5)
    over.step()
    schedules.advance(halving, {}, 32)
    assert seen == [32, 5] and rates(over) == [0.0015, 0.003]
    with pytest.raises(UsageError, match="needs a metric"):
        schedules.advance(torch.optim.lr_scheduler.ReduceLROnPlateau(over), {}, 32)


def test_steps_with_an_exponent():
    """The number 1e5 is a float in JSON, and DeepSpeed computes with it."""
    over = [optimizer() for _ in range(2)]
    for total, each in zip((1e2, 100), over, strict=True):
        made = make("WarmupDecayLR", {"total_num_steps": total, "warmup_num_steps": 4}, each)
        for _ in range(8):
            made.step()
    assert rates(over[0]) == rates(over[1])


@pytest.mark.parametrize(("second", "share"), [(None, 0.5), (0, 1.0), (300, 0.25)])
def test_the_share_of_a_cycle_that_rises(second, share):
    params = {"cycle_min_lr": 0.1, "cycle_max_lr": 1.0, "cycle_first_step_size": 100}
    assert make("OneCycle", {**params, "cycle_second_step_size": second}).step_ratio == share


@pytest.mark.parametrize(
    ("name", "params", "words"),
    [
        ("WarmupLr", {}, "did you mean 'WarmupLR'"),
        ("WarmupLR", {"warmup_steps": 5}, "warmup_steps = 5 .* did you mean 'warmup_num_steps'"),
        ("WarmupLR", {"warmup_num_steps": 0}, "warmup_num_steps is 0; expected a whole number from 1"),
        ("WarmupLR", {"warmup_num_steps": 2.5}, "warmup_num_steps is 2.5"),
        ("WarmupLR", {"warmup_type": "cubic"}, "'cubic'; expected one of: log, linear"),
        ("WarmupLR", {"warmup_min_lr": "auto"}, "warmup_min_lr is 'auto'; WarmupLR expects a number"),
        ("WarmupLR", {"warmup_max_lr": [1.0, 2.0, 3.0]}, "3 values for 2 param groups"),
        ("WarmupDecayLR", {}, "lacks 'total_num_steps'"),
        ("OneCycle", {"cycle_min_lr": 0.1}, "lacks 'cycle_max_lr'"),
        ("OneCycle", {"cycle_min_lr": 0, "cycle_max_lr": 1, "cycle_first_step_size": 0}, "number above 0"),
        ("LRRangeTest", {"lr_range_test_step_size": 0}, "whole number from 1"),
        ("LRRangeTest", {"lr_range_test_staircase": 2}, "expects true or false"),
        ("StepLR", {}, "lacks 'step_size'"),
    ],
)
def test_refused(name, params, words):
    over = optimizer()
    with pytest.raises(ConfigError, match=words):
        make(name, params, over)
    assert rates(over) == [0.003, 0.006]

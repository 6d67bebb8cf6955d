"""Sharded parameters in models that use them in unusual ways: loss and gradients equal those of the whole model."""

from __future__ import annotations

import functools

import pytest
import torch

from support import unusual_models as models
from support.ranks import run_ranks
from zero_runtime import zero
from zero_runtime.comm import DataParallelGroup
from zero_runtime.sharding.gather_schedule.policy import ResidencyPolicy
from zero_runtime.sharding.gather_schedule.residency import Residency, residency_of

pytestmark = pytest.mark.ranks

STEPS = 5  # the order of modules is recorded, followed, departed from, and recorded again
POLICIES = {
    "nothing_persistent": ResidencyPolicy(persistence=0),
    "tight": ResidencyPolicy(persistence=0, prefetch=20, reuse_distance=0, max_live=40),
    "some_persistent": ResidencyPolicy(persistence=6, prefetch=50, reuse_distance=30),
    "sequential": ResidencyPolicy(persistence=0, sequential=True),
    "by_all_reduce": ResidencyPolicy(persistence=0, by_all_reduce=True, reuse_distance=0),
}


OFTEN = ("nothing_persistent", "tight")
RUNS = [
    (name, policy)
    for name in models.MODELS
    for policy in POLICIES
    if policy in OFTEN or name in ("Tied", "Sizes", "Borrowed")
]


@functools.cache
def outcomes(world, cases):
    return run_ranks(world, train_all, cases, timeout=200)


def train_all(rank, world, cases):
    return {
        (name, policy): train(name, POLICIES[policy], rank)
        for name, policy in RUNS
        if f"{name}-{policy}" in cases
    }


def train(name, policy, rank):
    """Return the losses and gradients of the sharded and of the whole model, step by step.

    The weights never change.
    """
    try:
        return _train(name, policy, rank)
    except Exception as error:  # an error in one model must not end the ranks that run other models
        return f"{type(error).__name__}: {error}"


def _train(name, policy, rank):
    whole, module = models.make(name), models.make(name)
    if name == "Hidden":
        zero.register_external_parameter(module, module.first.weight)
    if name == "Experts":
        zero.set_z3_leaf_modules(module, [models.Experts.Mixture])
    residency = Residency(module, DataParallelGroup(), policy)
    residency.shard()
    residency.install()
    for step in range(STEPS):
        for micro in range(2):
            batches = [
                models.batch(10 * step + micro + at, rank) for at in range(getattr(module, "passes", 1))
            ]
            expected = sum(whole(each) for each in batches)
            expected.backward()
            loss = sum(module(each) for each in batches)
            loss.backward()
            residency.finish_backward()
            assert loss.item() == pytest.approx(expected.item(), rel=1e-6), f"step {step}"
        for (label, mine), theirs in zip(module.named_parameters(), whole.parameters(), strict=True):
            assert (mine.grad is None) == (theirs.grad is None), f"{label}, step {step}"
            if mine.grad is not None:
                torch.testing.assert_close(mine.grad, theirs.grad, msg=f"{label}, step {step}")
            # The parameters that a module returns stay gathered until the step.
            assert mine.numel() == 0 or mine.ds_persist or (name, label) == ("Returned", "child.bias")
            mine.grad = theirs.grad = None
        residency.release_all()
        assert all(each.numel() == 0 for each in module.parameters())
        residency.parameters_changed()
        assert all(
            (each.numel() == 0) is not each.ds_persist for each in module.parameters() if each.ds_numel
        )
    residency.shut_down()
    assert residency_of(module) is None
    for mine, theirs in zip(module.parameters(), whole.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    return "as the whole model"


@pytest.mark.sampled
@pytest.mark.parametrize(("name", "policy"), RUNS)
def test_training(cases_that_run, name, policy):
    for each in outcomes(2, cases_that_run):
        assert each[name, policy] == "as the whole model"

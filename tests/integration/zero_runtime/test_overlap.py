"""Overlap: operations that do not wait for a slow peer, operations that do, and unchanged results.

Waiting is observed by cause and effect and not by the clock. A peer sends its part only after the other rank
has reached a certain point. If that rank needed the part to get there, neither rank would continue. The peer
then gives up after a while and reports this.
"""

from __future__ import annotations

import copy
import functools
import io
import time
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import zero_runtime
from support.process_group_log import logged
from support.recorded_models import make_batch, make_model
from support.standing_ranks import run_standing

pytestmark = pytest.mark.ranks

WIDTH = 32
REDUCTIONS = ("all_reduce", "multi_rank_all_reduce", "reduce_to_owner", "reduce_scatter")
PATIENCE = 1.5  # in seconds, for a signal that is not expected
LONG_PATIENCE = 60.0


class Chain(nn.Module):
    """Three equal layers. ``reached`` is called when the backward pass reaches the first layer."""

    def __init__(self, reached):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.reached = reached

    def forward(self, x):
        x = self.layers[0](x)
        x.register_hook(self.reached)
        for layer in self.layers[1:]:
            x = layer(x.tanh())
        return x.square().mean()


def config(stage=2, **zero):
    return {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": WIDTH * WIDTH, **zero},
    }


def came(path, patience):
    """Return whether the file ``path`` exists before ``patience`` seconds have passed."""
    deadline = time.monotonic() + patience
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def backward_of_a_late_peer(rank, world, folder, zero, patience):
    """Begin the backward pass of rank 1 when that of rank 0 is in the first layer.

    Returns on rank 1 whether rank 0 got there.
    """
    signal = Path(folder, "reached")
    engine, *_ = zero_runtime.initialize(
        model=Chain(lambda gradient: signal.touch() if rank == 0 else None), config=config(**zero)
    )
    loss = engine(torch.ones(4, WIDTH) * (rank + 1))
    seen = came(signal, patience) if rank == 1 else None
    engine.backward(loss)
    engine.step()
    return seen


@pytest.mark.sampled
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_backward_does_not_wait_for_a_late_peer(tmp_path, stage, reduction):
    zero = {"stage": stage, "gradient_reduction": reduction, "overlap_comm": True}
    assert run_standing(2, backward_of_a_late_peer, str(tmp_path), zero, LONG_PATIENCE)[1]


def test_backward_of_stage_0_in_buckets_does_not_wait_for_a_late_peer(tmp_path):
    zero = {"stage": 0, "gradient_reduction": "all_reduce", "overlap_comm": True}
    assert run_standing(2, backward_of_a_late_peer, str(tmp_path), zero, LONG_PATIENCE)[1]


@pytest.mark.sampled
@pytest.mark.parametrize("reduction", ["multi_rank_all_reduce", "reduce_scatter"])
def test_without_overlap_backward_waits_for_a_late_peer(tmp_path, reduction):
    zero = {"gradient_reduction": reduction, "overlap_comm": False}
    assert not run_standing(2, backward_of_a_late_peer, str(tmp_path), zero, PATIENCE)[1]


@pytest.mark.parametrize(("reduction", "overlaps"), [("auto", False), ("reduce_scatter", True)])
def test_overlap_is_the_default_of_reduce_scatter_only(tmp_path, reduction, overlaps):
    patience = LONG_PATIENCE if overlaps else PATIENCE
    zero = {"gradient_reduction": reduction}
    assert run_standing(2, backward_of_a_late_peer, str(tmp_path), zero, patience)[1] is overlaps


SETTINGS = [
    {"stage": stage, "gradient_reduction": reduction, **changes}
    for stage, reduction, changes in product(
        (1, 2), REDUCTIONS, ({}, {"contiguous_gradients": False}, {"reduce_bucket_size": 1_000_000})
    )
] + [
    {"stage": 2, "gradient_reduction": "reduce_scatter", "reduce_scatter_impl": "native"},
    {"stage": 3},
    {"stage": 3, "gradient_reduction": "all_reduce"},
]


def train(model_name, zero, rank, steps=2, accumulation=2):
    """Return the losses, and the collectives without those of initialization."""
    settings = config(**{"reduce_bucket_size": 20_000, **zero}) | {
        "gradient_accumulation_steps": accumulation
    }
    with logged() as log:
        engine, *_ = zero_runtime.initialize(model=make_model(model_name), config=settings)
        losses = []
        for step in range(steps):
            for micro in range(accumulation):
                log.at("training", step, micro)
                loss = engine(*make_batch(model_name, step, micro, rank))
                losses.append(loss.item())
                engine.backward(loss)
                engine.step()
    return losses, [call for call in log.calls if call.phase == "training"]


def train_both_ways(rank, world):
    return [
        [train("mlp", zero | {"overlap_comm": overlap}, rank) for overlap in (False, True)]
        for zero in SETTINGS
    ]


@functools.cache
def trained(world):
    return run_standing(world, train_both_ways, timeout=300)


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.long)])
@pytest.mark.parametrize("number", range(len(SETTINGS)), ids=[str(each) for each in SETTINGS])
def test_overlap_changes_neither_losses_nor_messages(world, number):
    for outcomes in trained(world):
        (losses, calls), (overlapped_losses, overlapped_calls) = outcomes[number]
        if SETTINGS[number]["stage"] == 1:
            # At stage 1 overlap moves the reduction into the backward pass, so gradients are reduced in a
            # different order.
            assert overlapped_losses == pytest.approx(losses, rel=1e-6)
        else:
            assert overlapped_losses == losses
            assert overlapped_calls == calls


class Branches(nn.Module):
    """A model whose passes run one of two branches.

    In the last micro-batch of a step one branch gets no gradient.
    """

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.branches = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x, branch):
        return self.branches[branch](self.first(x).tanh()).square().mean()


def train_branches(rank, world, reduction, overlap):
    settings = config(1, gradient_reduction=reduction, overlap_comm=overlap, reduce_bucket_size=500)
    engine, *_ = zero_runtime.initialize(
        model=Branches(),
        config=settings
        | {"gradient_accumulation_steps": 2, "optimizer": {"type": "SGD", "params": {"lr": 1.0}}},
    )
    losses, norms = [], []
    for step in range(3):
        for micro in range(2):
            generator = torch.Generator().manual_seed(10 * step + 2 * micro + rank)
            loss = engine(torch.randn(4, WIDTH, generator=generator), (step + micro) % 2)
            losses.append(loss.item())
            engine.backward(loss)
            engine.step()
        norms.append(float(engine.get_global_grad_norm()))
    return losses, norms


def train_branches_every_way(rank, world):
    return [
        train_branches(rank, world, reduction, overlap)
        for reduction in REDUCTIONS
        for overlap in (False, True)
    ]


def test_gradients_of_earlier_micro_batches_are_reduced_too():
    for outcomes in run_standing(2, train_branches_every_way):
        for losses, norms in outcomes[1:]:
            assert losses == pytest.approx(outcomes[0][0], rel=1e-6)
            assert norms == pytest.approx(outcomes[0][1], rel=1e-6)


def step_of_a_late_peer(rank, world, folder, overlap, patience):
    """Begin the gather of rank 1 after the step of rank 0.

    Returns on rank 1 whether that step completed, and then the weights.
    """
    signal = Path(folder, "over")
    engine, *_ = zero_runtime.initialize(
        model=Chain(lambda gradient: None), config=config(overlap_parameter_gather=overlap)
    )
    share, seen = engine.optimizer._parameters.share, None

    def late():
        nonlocal seen
        seen = came(signal, patience)
        share()

    if rank == 1:
        engine.optimizer._parameters.share = late
    engine.backward(engine(torch.ones(4, WIDTH)))
    engine.step()
    if rank == 0:
        signal.touch()
    return seen, {name: value.tolist() for name, value in engine.module_state_dict().items()}


@pytest.mark.sampled
@pytest.mark.parametrize("overlap", [False, True])
def test_a_step_waits_for_the_others_parameters_unless_they_may_come_later(tmp_path, overlap):
    patience = LONG_PATIENCE if overlap else PATIENCE
    first, second = run_standing(2, step_of_a_late_peer, str(tmp_path), overlap, patience)
    assert second[0] is overlap
    assert first[1] == second[1]


class Tied(nn.Module):
    """A model that reads parameters in every way that modules do.

    It reads them by name, in another module, from a list, and in a function.
    """

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.token = nn.Embedding(20, 16)
        self.recurrent = nn.LSTM(16, 16, batch_first=True)
        self.norm = nn.LayerNorm(16)
        self.bias = nn.Parameter(torch.zeros(20))
        self.frozen = nn.Linear(16, 16)
        self.frozen.requires_grad_(False)
        self.unused = nn.Linear(3, 3)

    def forward(self, x, y):
        hidden, _ = self.recurrent(self.token(x))
        scores = F.linear(self.norm(self.frozen(hidden)), self.token.weight, self.bias)
        return F.cross_entropy(scores.flatten(0, 1), y.flatten())


def read_by(way, module):
    """Return the parameters of ``module``, read in one way."""
    if way == "state_dict":
        return dict(module.state_dict())
    if way == "named_parameters":
        return dict(module.named_parameters())
    if way == "attributes":
        return {name: functools.reduce(getattr, name.split("."), module) for name in names_of(module)}
    if way == "get_parameter":
        return {name: module.get_parameter(name) for name in names_of(module)}
    if way == "deepcopy":
        return dict(copy.deepcopy(module).named_parameters())
    written = io.BytesIO()
    torch.save(module, written)
    return dict(torch.load(io.BytesIO(written.getvalue()), weights_only=False).named_parameters())


def names_of(module):
    return [
        f"{prefix}.{name}" if prefix else name
        for prefix, owner in module.named_modules()
        for name in owner._parameters
    ]


WAYS = ["state_dict", "named_parameters", "attributes", "get_parameter", "deepcopy", "file"]
GATHERS = [
    {},
    {"gradient_reduction": "reduce_scatter", "reduce_bucket_size": 500},
    {"allgather_bucket_size": 200, "stage": 1},
]


def train_tied(rank, zero, late, way=None):
    """Return the losses of three steps, and the parameters that ``way`` reads directly after each step.

    With ``late`` rank 1 begins to gather late.
    """
    engine, *_ = zero_runtime.initialize(model=Tied(), config=config(**zero))
    share = engine.optimizer._parameters.share

    def slow():
        time.sleep(0.05)
        share()

    if late and rank == 1:
        engine.optimizer._parameters.share = slow
    losses, seen = [], []
    for step in range(3):
        torch.manual_seed(10 * step + rank)
        batch = torch.randint(0, 20, (2, 2, 5))
        loss = engine(batch[0], batch[1])
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
        if way is not None:
            seen.append({name: value.tolist() for name, value in read_by(way, engine.module).items()})
    assert all(type(owner._parameters) is dict for owner in engine.module.modules()) or way is None
    return losses, seen


def train_tied_all(rank, world, zero):
    ahead = zero | {"overlap_parameter_gather": True}
    return [
        train_tied(rank, zero, False, "state_dict"),
        train_tied(rank, ahead, True),
        *(train_tied(rank, ahead, True, way) for way in WAYS),
    ]


@pytest.mark.sampled
@pytest.mark.parametrize("zero", GATHERS, ids=["whole", "chunks", "parts"])
def test_parameters_that_come_late_are_waited_for_wherever_they_are_read(zero):
    for plain, unread, *read in run_standing(2, train_tied_all, zero):
        assert unread[0] == plain[0]
        for losses, seen in read:
            assert losses == plain[0]
            assert seen == plain[1]


def initialise_twice(rank, world):
    model = Tied()
    for ahead in (True, False):
        engine, *_ = zero_runtime.initialize(
            model=model, config=config(overlap_parameter_gather=ahead, gradient_reduction="reduce_scatter")
        )
        engine.backward(engine(torch.ones(2, 5, dtype=torch.long), torch.zeros(2, 5, dtype=torch.long)))
        engine.step()
    engine.destroy()
    return (
        [len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules()],
        {name: value.tolist() for name, value in model.state_dict().items()},
    )


def test_a_second_engine_leaves_nothing_of_the_first():
    first, second = run_standing(2, initialise_twice)
    assert set(first[0]) == {0}
    assert first[1] == second[1]


class Reentrant(nn.Module):
    """A model that gives a parameter two gradients in one backward pass, one in each recomputation."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.inner, self.outer = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        x = self.outer(x)
        for _ in range(2):
            x = checkpoint(lambda y: self.inner(y).tanh(), x, use_reentrant=True)
        return x.square().sum()


def train_reentrant(rank, world):
    outcomes = []
    for zero in ({"stage": 0}, {"gradient_reduction": "reduce_scatter", "reduce_bucket_size": 50}):
        engine, *_ = zero_runtime.initialize(model=Reentrant(), config=config(**zero))
        losses = []
        for _ in range(3):
            loss = engine(torch.ones(2, 8) * (rank + 1))
            losses.append(loss.item())
            engine.backward(loss)
            engine.step()
        outcomes.append(losses)
    return outcomes


def test_a_parameter_may_get_several_gradients_in_one_backward_pass():
    for plain, chunked in run_standing(2, train_reentrant):
        assert chunked == pytest.approx(plain, rel=1e-5)


def train_after_an_error(rank, world):
    """Train after a backward pass that fails in the first layer on all ranks.

    The gradients of the failed pass are dropped.
    """
    broken = True

    def reached(gradient):
        if broken:
            raise ValueError("broken off")

    outcomes = []
    for fails in (False, True):
        broken = fails
        engine, *_ = zero_runtime.initialize(
            model=Chain(reached), config=config(gradient_reduction="reduce_scatter")
        )
        if fails:
            with pytest.raises(ValueError, match="broken off"):
                engine.backward(engine(torch.ones(4, WIDTH)))
            engine.zero_grad()
            broken = False
        loss = engine(torch.ones(4, WIDTH))
        engine.backward(loss)
        engine.step()
        outcomes.append(engine(torch.ones(4, WIDTH)).item())
    return outcomes


def test_a_backward_pass_that_broke_off_leaves_nothing():
    for whole, after in run_standing(2, train_after_an_error):
        assert after == whole

"""zero.Init, GatheredParameters and other uses of sharded parameters in scripts, on two and four ranks."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

import zero_runtime
from support.process_group_log import logged
from support.ranks import run_ranks
from support.standing_ranks import run_standing
from zero_runtime import errors, zero
from zero_runtime.comm import DataParallelGroup
from zero_runtime.sharding.gather_schedule.policy import ResidencyPolicy
from zero_runtime.sharding.gather_schedule.residency import Residency, make_whole
from zero_runtime.sharding.shards import shard_of

pytestmark = pytest.mark.ranks

ALWAYS_CUT = ResidencyPolicy(persistence=0, reuse_distance=0, prefetch=0)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.second = nn.Linear(5, 7)
        self.scale = nn.Parameter(torch.full((7,), 2.0))
        self.tied = nn.Linear(3, 5)
        self.tied.weight = self.first.weight

    def forward(self, batch):
        return (
            (self.second(torch.tanh(self.first(batch))) * self.scale + self.tied(batch).sum()).square().mean()
        )


def whole_model():
    torch.manual_seed(1)
    return Model()


def sharded(module):
    return [name for name, each in module.named_parameters() if each.numel() == 0 and each.ds_numel > 0]


# The functions that each rank runs. They contain the assertions, and the tests below only call them.


def construct(rank, world):
    torch.manual_seed(1 + rank)  # the values of rank 0 are used
    with zero.Init(), zero.Init():
        made = Model()

        class Later(nn.Linear):
            def __init__(self):
                super().__init__(4, 4)
                with torch.no_grad():
                    # still whole, because it is sharded when the outermost __init__ returns
                    self.weight.fill_(3.0)

        later = Later()
    assert len(sharded(made)) == 6
    assert later.weight.ds_tensor.tolist() == [3.0] * 8
    assert made.first.weight.ds_shape == (5, 3) and made.first.weight.ds_tensor.numel() == 8
    assert "__init__" not in vars(Later) or not sharded(nn.Linear(2, 2))
    make_whole(made.parameters())
    for mine, theirs in zip(made.parameters(), whole_model().parameters(), strict=True):
        assert torch.equal(mine, theirs)
        assert not hasattr(mine, "ds_id")


def construct_disabled(rank, world):
    for keywords in ({"enabled": False}, {"config_dict_or_path": {"zero_optimization": {"stage": 2}}}):
        with zero.Init(**keywords):
            assert not hasattr(Model().first.weight, "ds_id")


def construct_in_16_bits(rank, world):
    with zero.Init(config_dict_or_path={"bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}):
        made = Model()
        made.register_buffer("steps", torch.zeros(3, dtype=torch.int64))
    assert {each.ds_tensor.dtype for each in made.parameters()} == {torch.bfloat16}
    assert made.steps.dtype == torch.int64
    assert torch.zeros(1).dtype == torch.float32
    with zero.Init(dtype=torch.float16):
        assert nn.Linear(2, 2).weight.ds_tensor.dtype == torch.float16


def construct_with_apply(rank, world):
    def fill(module):
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 1.0 + rank)

    with zero.Init():
        made = Model().apply(fill)
    assert made.second.weight.numel() == 0
    with zero.GatheredParameters(made.parameters()):
        assert set(made.second.weight.flatten().tolist()) == {1.0}
        assert set(made.scale.tolist()) == {2.0}


def construct_empty(rank, world):
    with zero.Init():
        made = nn.utils.skip_init(nn.Linear, 4, 4)
        lazy = nn.LazyLinear(3)
    assert made.weight.ds_numel == 16 and made.weight.numel() == 0
    assert not hasattr(lazy.weight, "ds_id")


def convert(rank, world):
    made = whole_model()
    zero.Init(module=made)
    assert len(sharded(made)) == 6


def look(rank, world):
    made, whole = whole_model(), whole_model()
    zero.Init(module=made)
    plain = nn.Parameter(torch.ones(2))
    with zero.GatheredParameters([made.first.weight, plain, made.scale]):
        assert torch.equal(made.first.weight, whole.first.weight)
        assert made.first.weight.ds_status is zero.ZeroParamStatus.AVAILABLE
        assert made.second.weight.numel() == 0
        with zero.GatheredParameters(made.parameters()):
            assert torch.equal(made.second.weight, whole.second.weight)
            with zero.GatheredParameters(made.second.weight, enabled=False):
                pass
            assert made.second.weight.numel() == 35
        assert made.second.weight.numel() == 0 and made.first.weight.numel() == 15
        made.scale.data.zero_()
    assert len(sharded(made)) == 6
    with zero.GatheredParameters(made.scale):
        assert made.scale.tolist() == [2.0] * 7  # without modifier_rank the changes are discarded


def change(rank, world):
    made = whole_model()
    zero.Init(module=made)
    with zero.GatheredParameters(list(made.first.parameters()), modifier_rank=1):
        if rank == 1:
            made.first.weight.data.fill_(5.0)
            made.first.bias.data.copy_(torch.arange(5.0))
    assert shard_of(made.first.weight).changed and not shard_of(made.scale).changed
    own = made.first.bias.ds_tensor.tolist()
    assert own == ([0.0, 1.0, 2.0], [3.0, 4.0, 0.0])[rank]  # the padding remains 0
    with pytest.raises(errors.UsageError, match="modifier_rank is 2; expected a rank from 0 to 1"):
        zero.GatheredParameters(made.scale, modifier_rank=2)
    with pytest.raises(ZeroDivisionError), zero.GatheredParameters(made.scale, modifier_rank=0):
        made.scale.data.zero_()
        raise ZeroDivisionError
    with zero.GatheredParameters(made.scale):
        assert made.scale.tolist() == [2.0] * 7


def installed(made, policy=ALWAYS_CUT):
    residency = Residency(made, DataParallelGroup(), policy)
    residency.shard()
    residency.install()
    return residency


def run_while_gathered(rank, world):
    made, whole = whole_model(), whole_model()
    installed(made)
    batch = torch.ones(2, 3)
    with zero.GatheredParameters(made.parameters()):
        with torch.no_grad():
            assert made(batch).item() == pytest.approx(whole(batch).item())
        # the module that used it did not release it
        assert torch.equal(made.second.weight, whole.second.weight)
    assert len(sharded(made)) == 6


def evaluate_then_train(rank, world):
    made, whole = whole_model(), whole_model()
    residency = installed(made)
    batch = torch.ones(2, 3)
    with torch.inference_mode():
        first = made(batch).item()
    for _ in range(3):
        made(batch).backward()
        residency.finish_backward()
        residency.release_all()
        residency.parameters_changed()
    whole(batch).backward()
    assert first == pytest.approx(whole(batch).item())
    torch.testing.assert_close(made.second.weight.grad, 3 * whole.second.weight.grad)


def fail_and_go_on(rank, world):
    made, whole = whole_model(), whole_model()
    residency = installed(made)
    with pytest.raises(RuntimeError):
        made(torch.ones(2, 4))
    for _ in range(3):
        made(torch.ones(2, 3)).backward()
        residency.finish_backward()
    whole(torch.ones(2, 3)).backward()
    torch.testing.assert_close(made.first.weight.grad, 3 * whole.first.weight.grad)


def grow(rank, world):
    made = whole_model()
    installed(made)
    made.second.late = nn.Parameter(torch.ones(2))
    made.later = nn.Linear(7, 1)
    with torch.no_grad():
        made(torch.ones(2, 3))
        assert made.later(torch.ones(1, 7)).numel() == 1
    assert made.second.late.numel() == 2


def two_models(rank, world):
    one, other, whole = whole_model(), whole_model(), whole_model()
    residencies = [installed(one), installed(other, ResidencyPolicy())]
    batch = torch.ones(2, 3)
    for _ in range(3):
        loss = one(batch) + other(batch) * one(2 * batch)
        loss.backward()
        for each in residencies:
            each.finish_backward()
    expected = whole(batch) + whole(batch).detach() * whole(2 * batch)
    expected.backward()
    torch.testing.assert_close(one.second.weight.grad, 3 * whole.second.weight.grad)


def borrow_from_another_model(rank, world):
    owner, whole = whole_model(), whole_model()
    residencies = [installed(owner, ResidencyPolicy(persistence=10, reuse_distance=0))]

    class Borrower(nn.Module):
        def __init__(self, lender):
            super().__init__()
            self.lender = [lender]
            self.own = nn.Parameter(torch.ones(3))

        def forward(self, batch):
            first = self.lender[0].first
            return nn.functional.linear(batch * self.own, first.weight, first.bias).square().mean()

    borrower, expected = Borrower(owner), Borrower(whole)
    residencies.append(installed(borrower, ResidencyPolicy(persistence=10, reuse_distance=0)))
    batch = torch.arange(6.0).view(2, 3)
    for _ in range(4):
        (borrower(batch) + owner(batch)).backward()
        (expected(batch) + whole(batch)).backward()
        for each in residencies:
            each.finish_backward()
        for each in residencies:
            each.parameters_changed()
        for mine, theirs in zip(owner.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad)
        torch.testing.assert_close(borrower.own.grad, expected.own.grad)


def change_between_steps(rank, world):
    for dtype in (torch.float32, torch.bfloat16):
        made = whole_model()
        engine, *_ = zero_runtime.initialize(
            model=made,
            model_parameters=made.parameters(),
            config={
                "train_micro_batch_size_per_gpu": 2,
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-6, "torch_adam": True}},
                "bf16": {"enabled": dtype is torch.bfloat16},
                "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 7},
            },
        )
        for step in range(4):
            engine.backward(engine(torch.ones(2, 3, dtype=dtype)))
            if step == 2:  # between backward and step, and also for a persistent parameter
                with zero.GatheredParameters([made.second.weight, made.scale], modifier_rank=1):
                    if rank == 1:
                        made.second.weight.data.fill_(5.0)
                        made.scale.data.fill_(7.0)
            engine.step()
        with zero.GatheredParameters(made.parameters()):
            assert made.second.weight.mean().item() == pytest.approx(5.0, abs=1e-4)
            assert made.scale.mean().item() == pytest.approx(7.0, abs=1e-4)


def initialize_what_was_made_in_slices(rank, world):
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    }
    losses = []
    for context in (zero.Init(config_dict_or_path=config), zero.Init(enabled=False)):
        with context:
            made = whole_model()
        engine, *_ = zero_runtime.initialize(model=made, model_parameters=made.parameters(), config=config)
        losses.append([])
        for step in range(3):
            loss = engine(torch.full((2, 3), step + rank + 1.0))
            engine.backward(loss)
            engine.step()
            losses[-1].append(loss.item())
    assert losses[0] == losses[1]


def little_is_whole_at_a_time(rank, world):
    made = nn.Sequential(*(nn.Linear(20, 20) for _ in range(8)))
    residency = installed(made)
    seen = []

    def look(*_):
        seen.append(sum(each.numel() for each in made.parameters()))

    for layer in made:
        layer.register_forward_pre_hook(look)
    for _ in range(3):
        hidden = torch.randn(2, 20)
        for layer in made:
            hidden = layer(hidden)
            hidden.register_hook(look)
        hidden.sum().backward()
        residency.finish_backward()
    # Only the running module is gathered. The gradient of an output arrives after its module was gathered for
    # it.
    assert max(seen) == 420 and len(seen) == 3 * 16
    assert sum(each.ds_tensor.numel() for each in made.parameters()) == 8 * 210


def shard_again(rank, world):
    made, whole = whole_model(), whole_model()
    flagged: list[nn.Module] = []
    for policy in (ALWAYS_CUT, ResidencyPolicy(leaf_names=("second",), granularity=100), ALWAYS_CUT):
        residency = installed(made, policy)
        assert made(torch.ones(2, 3)).item() == pytest.approx(whole(torch.ones(2, 3)).item())
        residency.shut_down()
        # A module that was made a leaf remains one, as in DeepSpeed.
        flagged = [made.second] if policy.leaf_names or flagged else []
        assert zero.get_z3_leaf_modules(made) == flagged
        made(torch.ones(2, 3)).backward()
    for mine, theirs in zip(made.parameters(), whole.parameters(), strict=True):
        assert torch.equal(mine, theirs) and not hasattr(mine, "ds_tensor")


def cast_after_cutting(rank, world):
    made = whole_model()
    zero.Init(module=made)
    made.to(torch.bfloat16)
    installed(made)
    assert made.scale.ds_tensor.dtype == torch.bfloat16
    assert made(torch.ones(2, 3, dtype=torch.bfloat16)).dtype == torch.bfloat16


def refuse_lazy(rank, world):
    with pytest.raises(errors.ConfigError, match=r"0\.weight has no shape yet"):
        installed(nn.Sequential(nn.LazyLinear(3)))


STORIES = (
    construct,
    construct_disabled,
    construct_in_16_bits,
    construct_with_apply,
    construct_empty,
    convert,
    look,
    change,
    run_while_gathered,
    evaluate_then_train,
    fail_and_go_on,
    grow,
    two_models,
    little_is_whole_at_a_time,
    change_between_steps,
    initialize_what_was_made_in_slices,
    borrow_from_another_model,
    shard_again,
    cast_after_cutting,
    refuse_lazy,
)


@functools.cache
def outcomes():
    return run_standing(2, tell_all, timeout=120)


def tell_all(rank, world):
    found = {}
    for story in STORIES:
        try:
            story(rank, world)
            found[story.__name__] = None
        except BaseException as error:
            import traceback

            found[story.__name__] = "".join(traceback.format_exception(error))
    return found


@pytest.mark.parametrize("story", [each.__name__ for each in STORIES])
def test_two_ranks(story):
    for each in outcomes():
        assert each[story] is None, each[story]


def secondary(rank, world):
    made = whole_model()
    policy = ALWAYS_CUT._replace(secondary_size=2)
    with logged() as log:
        residency = installed(made, policy)
        for step in range(2):
            log.at("forward", step)
            loss = made(torch.ones(2, 3))
            log.at("backward")
            loss.backward()
            residency.finish_backward()
            log.at("step")
            residency.release_all()
            residency.parameters_changed()
        log.at("check")
        residency.shut_down()
    for mine, theirs in zip(made.parameters(), whole_model().parameters(), strict=True):
        assert torch.equal(mine, theirs)
    return [call for call in log.calls if call.method == "all_gather_single"]


def test_secondary_slices():
    """Secondary shards limit gathers to a pair of ranks.

    After a step the first gather uses all ranks. Until the next step, gathers use the ranks of the pair.
    """
    for rank, calls in enumerate(run_standing(4, secondary, timeout=100)):
        pair = ("0-1", "0-1", "2-3", "2-3")[rank]
        groups = {
            (step, phase): {call.group for call in calls if (call.step, call.phase) == (step, phase)}
            for step in (0, 1)
            for phase in ("forward", "backward")
        }
        assert groups[0, "backward"] == groups[1, "backward"] == {pair}
        assert "0-1-2-3" in groups[1, "forward"]
        first = next(call for call in calls if call.step == 1)
        # The model's own parameter has 7 elements, in shards of 2 with 1 element of padding.
        assert (first.group, first.numel_in, first.numel_out) == ("0-1-2-3", 2, 8)


def test_secondary_slices_that_do_not_fit():
    def ask(rank, world):
        with pytest.raises(errors.ConfigError, match="is 2, which does not divide the 3 ranks"):
            installed(whole_model(), ResidencyPolicy(secondary_size=2))

    run_ranks(3, ask, timeout=60)

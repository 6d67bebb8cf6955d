"""Stage 3 compared with stage 0 on the same data: parameters are sharded, and nothing else differs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zero_runtime
from commprof.ledger.verification import verify
from support import recorded_models, unusual_models
from support.process_group_log import logged
from support.ranks import run_ranks
from support.recording import record
from zero_runtime.sharding.shards import shard_of

pytestmark = pytest.mark.ranks

WIDTH = 10
STEPS = 3


class Chain(nn.Module):
    """A model with special cases of parameters.

    It has odd sizes, an embedding, a parameter without elements, one that is used twice, and one of the root
    module itself.
    """

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, WIDTH)
        self.first = nn.Linear(WIDTH, 2 * WIDTH + 1)
        self.second = nn.Linear(2 * WIDTH + 1, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.scale = nn.Parameter(torch.ones(3))
        self.nothing = nn.Parameter(torch.zeros(0))

    def forward(self, tokens):
        hidden = self.table(tokens)
        for _ in range(2):
            hidden = self.norm(self.second(torch.tanh(self.first(hidden)))) * self.scale.sum()
        return (hidden.square().mean(dim=-1) - tokens).square().mean() + self.nothing.sum()


def make(kind: type[nn.Module] = Chain, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return kind()


def batch(step: int, micro: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
    return torch.randint(0, 7, (4, 3), generator=generator)


def config(stage: int, gas: int = 1, **zero) -> dict:
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": gas,
        # Adam is not used, because it takes a full step for a gradient that is only rounding noise.
        "optimizer": {"type": "SGD", "params": {"lr": 0.02, "momentum": 0.9}},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage, **(small() if stage == 3 else {}), **zero},
    }


def small() -> dict:
    """Return sizes with which a tiny model is gathered, released and reduced in several messages."""
    return {
        "reduce_bucket_size": 150,
        "stage3_param_persistence_threshold": 12,
        "stage3_prefetch_bucket_size": 60,
        "stage3_max_live_parameters": 300,
        "stage3_max_reuse_distance": 100,
    }


def start(stage_or_config, model, **arguments):
    settings = stage_or_config if isinstance(stage_or_config, dict) else config(stage_or_config)
    arguments.setdefault("model_parameters", model.parameters())
    return zero_runtime.initialize(model=model, config=settings, **arguments)[0]


def train(engine, rank: int, steps=range(STEPS), data=batch) -> list[float]:
    losses = []
    for step in steps:
        for micro in range(engine.gradient_accumulation_steps()):
            loss = engine(data(step, micro, rank))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    return losses


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    with zero_runtime.zero.GatheredParameters(list(model.parameters())):
        return {name: p.detach().clone() for name, p in model.named_parameters()}


def same(one, other, tolerance: float = 1e-5) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(
            value, other[name], rtol=tolerance, atol=tolerance, msg=lambda text, n=name: f"{n}: {text}"
        )


def compare(rank: int, settings: dict, kind=Chain, data=batch, reference: dict | None = None) -> None:
    gas = settings.get("gradient_accumulation_steps", 1)
    plain, sliced = make(kind), make(kind)
    wanted = train(start(reference or config(0, gas), plain), rank, data=data)
    engine = start(settings, sliced)
    assert train(engine, rank, data=data) == pytest.approx(wanted, rel=1e-5, abs=1e-6)
    same(state(sliced), state(plain))


# Each of these functions runs on every rank of one set.


def settings_change_no_result(rank: int, world: int) -> None:
    for zero in (
        {},
        {"reduce_scatter_impl": "native"},
        {"reduce_scatter": False},
        {"reduce_scatter": False, "contiguous_gradients": False},
        {"gradient_reduction": "all_reduce"},
        {"overlap_comm": False, "sub_group_size": 40},
        {"memory_efficient_linear": False, "enable_sanity_checks": True},
    ):
        compare(rank, config(3, 2, **zero))


def predivision_by_the_number_of_ranks(rank: int, world: int) -> None:
    for factor in (float(world), 4.0):
        for contiguous in (True, False):
            settings = config(3, reduce_scatter=False, contiguous_gradients=contiguous)
            compare(rank, {**settings, "gradient_predivide_factor": factor})
    compare(rank, {**config(3, reduce_scatter=False), "prescale_gradients": True})


def unusual(rank: int, world: int) -> None:
    def data(step, micro, rank):
        generator = torch.Generator().manual_seed(10 * step + rank)
        return torch.randn(4, unusual_models.WIDTH, generator=generator)

    for name in unusual_models.MODELS:
        if name == "Hidden":  # the use of its weight cannot be detected, so the model is refused
            continue
        compare(rank, config(3), lambda name=name: unusual_models.make(name), data)


def several_param_groups(rank: int, world: int) -> None:
    def groups(model):
        model.table.weight.requires_grad_(False)
        return [
            {
                "params": [p for p in model.parameters() if p.dim() > 1 and p.requires_grad],
                "weight_decay": 0.1,
            },
            {"params": [model.table.weight]},
            {"params": [p for p in model.parameters() if p.dim() <= 1], "lr": 0.05},
        ]

    settings = {
        **config(3, sub_group_size=30),
        "optimizer": {"type": "SGD", "params": {"lr": 0.02, "momentum": 0.9}},
    }
    plain, sliced = make(), make()
    reference = {**settings, "zero_optimization": {"stage": 0}}
    wanted = train(start(reference, plain, model_parameters=groups(plain)), rank)
    engine = start(settings, sliced, model_parameters=groups(sliced))
    assert train(engine, rank) == pytest.approx(wanted, rel=1e-5)
    assert len(engine.optimizer.param_groups) == 3 and engine.get_lr() == [0.02, 0.02, 0.05]
    same(state(sliced), state(plain))


def stage_after_stage(rank: int, world: int) -> None:
    model, plain = make(), make()
    step, earlier = 0, None
    for stage, gas in ((2, 1), (3, 1), (3, 2), (1, 1), (3, 1), (0, 2)):
        for each, settings in ((plain, config(0, gas)), (model, config(stage, gas))):
            engine = start(settings, each)
            train(engine, rank, range(step, step + 2))
            earlier = engine if stage == 3 and each is model else earlier
        same(state(model), state(plain))
        step += 2
    with pytest.raises(zero_runtime.UsageError, match="passed to initialize again"):
        earlier.backward(earlier(batch(0, 0, rank)))
    assert all(shard_of(parameter) is None for parameter in model.parameters())
    assert all(parameter.numel() or name == "nothing" for name, parameter in model.named_parameters())


def two_models_in_turn(rank: int, world: int) -> None:
    losses = {}
    for stage in (0, 3):
        engines = [start(config(stage, gas), make(seed=gas)) for gas in (1, 2)]
        losses[stage] = [
            train(engine, rank, range(step, step + 1)) for step in range(STEPS) for engine in engines
        ]
    assert losses[3] == [pytest.approx(each, rel=1e-5) for each in losses[0]]


def without_an_optimizer(rank: int, world: int) -> None:
    settings = config(3)
    del settings["optimizer"]
    model = make()
    engine = start(settings, model)
    assert engine.optimizer is None
    loss = engine(batch(0, 0, rank))
    engine.backward(loss)
    with pytest.raises(zero_runtime.UsageError, match="optimizer"):
        engine.step()
    assert engine(batch(0, 0, rank)).item() == loss.item()


def unused_parameters_stand_still(rank: int, world: int) -> None:
    class Choice(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 3)
            self.second = False

        def forward(self, batch):
            return (self.two if self.second else self.one)(batch).square().mean()

    settings = {**config(3), "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    model = make(Choice)
    engine = start(settings, model)
    data = torch.ones(2, WIDTH)
    for second in (False, True):
        model.second = second
        before = state(model)
        engine.backward(engine(data))
        engine.step()
        after = state(model)
        moved = {name for name in after if not torch.equal(before[name], after[name])}
        assert moved == ({"two.weight", "two.bias"} if second else {"one.weight", "one.bias"})


def a_rank_sends_what_verification_expects(rank: int, world: int) -> None:
    model = make()
    engine = start(config(3, reduce_scatter_impl="native"), model)
    train(engine, rank, range(2))
    with logged() as log:
        train(engine, rank, range(2, 3))
    norms = [call for call in log.calls if call.dtype == "float64"]
    assert [call.numel_in for call in norms] == [1]
    numel = sum(-(-p.numel() // world) * world for p in state(model).values())
    reduced = [call for call in log.calls if call.method == "reduce_scatter_single"]
    assert sum(call.numel_in for call in reduced) == numel and len(reduced) > 1


def parameters_that_come_late(rank: int, world: int) -> None:
    """Train a frozen layer from some step on, and also a layer that is added to the model only then."""

    def story(stage: int) -> tuple[list[float], dict[str, torch.Tensor]]:
        model = make()
        model.second.requires_grad_(False)
        trained = [p for p in model.parameters() if p.requires_grad]
        engine = start(config(stage), model, model_parameters=trained)
        losses = train(engine, rank)
        torch.manual_seed(5 if rank == 0 or stage == 0 else 6)
        model.norm = nn.Sequential(model.norm, nn.Linear(WIDTH, WIDTH))
        model.second.requires_grad_(True)
        late = [*model.second.parameters(), *model.norm[1].parameters()]
        if stage == 3:
            engine.optimizer.add_param_group({"params": late, "lr": 0.01})
            with pytest.raises(zero_runtime.ConfigError, match="already in a param group"):
                engine.optimizer.add_param_group({"params": late})
        else:
            # The same by hand: the momentum of trained parameters is kept.
            kept = dict(engine.basic_optimizer.state)
            engine = start(
                config(stage), model, model_parameters=[{"params": trained}, {"params": late, "lr": 0.01}]
            )
            engine.basic_optimizer.state.update(kept)
        losses += train(engine, rank, range(STEPS, 2 * STEPS))
        return losses, state(model)

    wanted, mine = story(0), story(3)
    assert mine[0] == pytest.approx(wanted[0], rel=1e-5)
    same(mine[1], wanted[1])


STORIES = (
    parameters_that_come_late,
    settings_change_no_result,
    predivision_by_the_number_of_ranks,
    unusual,
    several_param_groups,
    stage_after_stage,
    two_models_in_turn,
    without_an_optimizer,
    unused_parameters_stand_still,
    a_rank_sends_what_verification_expects,
)


@pytest.mark.sampled
@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
def test_two_ranks(story):
    run_ranks(2, lambda rank, world: story(rank, world), timeout=60)


TIGHT = {
    "stage3_max_reuse_distance": 0,
    "stage3_max_live_parameters": 20_000,
    "stage3_prefetch_bucket_size": 1_000,
}
# Measured on DeepSpeed 0.19.8 with 4 ranks: messages and input bytes of gathers in the forward pass, of
# gathers in the backward pass, and of reductions.
MEASURED = (
    ("gpt", {}, (1, 113_504), (0, 0), (8, 454_016)),
    ("mlp", {}, (1, 56_948), (0, 0), (3, 227_792)),
    ("gpt", TIGHT, (14, 129_888), (11, 90_752), (8, 454_016)),
    ("gpt", {**TIGHT, "zero_hpz_partition_size": 2}, (15, 146_272), (11, 181_504), (8, 454_016)),
)


def four_ranks(rank: int, world: int) -> list[tuple[tuple[int, int], ...]]:
    found = []
    for model, zero, *_ in MEASURED:
        settings = config(3, **zero)
        settings["zero_optimization"] = {
            "stage": 3,
            "reduce_bucket_size": 20_000,
            "stage3_param_persistence_threshold": 0,
            "reduce_scatter_impl": "native",
            **zero,
        }
        engine = start(settings, recorded_models.make_model(model))
        for step in range(3):
            with logged() as log:
                log.at("forward")
                loss = engine(*recorded_models.make_batch(model, step, 0, rank))
                log.at("backward")
                engine.backward(loss)
                log.at("step")
                engine.step()
        calls = {
            key: [4 * call.numel_in for call in log.calls if (call.phase, call.method) == key]
            for key in (
                ("forward", "all_gather_single"),
                ("backward", "all_gather_single"),
                ("backward", "reduce_scatter_single"),
            )
        }
        found.append(tuple((len(sizes), sum(sizes)) for sizes in calls.values()))
    return found


@pytest.mark.long
def test_four_ranks_send_what_was_measured():
    wanted = [tuple(each[2:]) for each in MEASURED]
    assert run_ranks(4, four_ranks, timeout=120) == [wanted] * 4


@pytest.mark.parametrize("world", [1, 3])
def test_other_numbers_of_ranks(world):
    run_ranks(world, lambda rank, world: compare(rank, config(3, 2)), timeout=60)


class Adapted(nn.Module):
    """A layer with an adapter that reads one of the adapter's own parameters to call it, like the layers of PEFT."""

    def __init__(self):
        super().__init__()
        self.layer, self.down, self.up = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2), nn.Linear(2, WIDTH)
        self.layer.requires_grad_(False)
        self.dropout = nn.Identity()

    def forward(self, inputs):
        return self.layer(inputs) + self.up(self.down(self.dropout(inputs.to(self.down.weight.dtype))))


class Attention(nn.Module):
    """Two adapted layers side by side, and one layer whose output both read."""

    def __init__(self):
        super().__init__()
        self.before, self.query, self.value = nn.Linear(WIDTH, WIDTH), Adapted(), Adapted()

    def forward(self, inputs):
        hidden = self.before(inputs)
        return self.query(hidden) * torch.sigmoid(self.value(hidden))


def adapted(rank, world):
    """Train four steps at stage 3, in which no parameter stays gathered."""
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    }
    engine, *_ = zero_runtime.initialize(model=Attention(), config=config)
    for _ in range(4):
        engine.backward(engine(torch.ones(2, WIDTH)).square().mean())
        engine.step()


@pytest.mark.long
def test_a_module_that_reads_a_parameter_of_its_child_does_not_change_the_order_of_modules(tmp_path):
    run, _ = record(tmp_path / "run", 2, adapted)
    # Step 0 records the order, and step 1 compares it among the ranks.
    assert {
        row["step"] for row in run.table("collectives").to_pylist() if row["purpose"] == "trace_check"
    } == {0, 1}
    verdict = verify(run)
    assert (str(verdict.state), verdict.unexplained) == ("closed", ()), verdict

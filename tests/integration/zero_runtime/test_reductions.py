"""The four gradient reductions train identically, and send the bytes in their table."""

from __future__ import annotations

import functools
from itertools import product

import pytest

import zero_runtime
from support.process_group_log import logged
from support.recorded_models import make_batch, make_model
from support.standing_ranks import run_standing

pytestmark = pytest.mark.ranks

REDUCTIONS = ("all_reduce", "multi_rank_all_reduce", "reduce_to_owner", "reduce_scatter")
STEPS, ACCUMULATION = 2, 2
NUMEL = {"gpt": 113_504, "mlp": 56_936}
PIECE = {(model, world): -(-NUMEL[model] // (2 * world)) * 2 for model in NUMEL for world in (1, 2, 3, 4)}
MODEL_OF = {1: "mlp", 2: "gpt", 3: "mlp", 4: "mlp"}


def settings():
    """Return pairs (stage, changes to zero_optimization) to train with."""
    for stage, name in product((1, 2), REDUCTIONS):
        yield stage, {"gradient_reduction": name}
        if name == "reduce_scatter":
            yield stage, {"gradient_reduction": name, "reduce_scatter_impl": "native"}
            yield stage, {"gradient_reduction": name, "reduce_bucket_size": 1_000_000}
            yield (
                stage,
                {
                    "gradient_reduction": name,
                    "reduce_scatter_impl": "native",
                    "reduce_bucket_size": 1_000_000,
                },
            )
        yield (
            stage,
            {"gradient_reduction": name, "contiguous_gradients": False, "round_robin_gradients": True},
        )
    yield 1, {"gradient_reduction": "reduce_scatter", "overlap_comm": True}
    yield 1, {"gradient_reduction": "reduce_scatter", "overlap_comm": True, "reduce_scatter_impl": "native"}
    yield 1, {"gradient_reduction": "reduce_scatter", "reduce_bucket_size": 1_009}


SETTINGS = list(settings())
IDS = [f"{stage}-" + "-".join(f"{value}" for value in changes.values()) for stage, changes in SETTINGS]


def train_all(rank, world, model_name, dtype, numbers):
    """Train with stage 0 and each numbered setting.

    Returns the losses of this rank, and its calls in the backward pass of the last step.
    """
    outcomes = []
    for stage, changes in [(0, {}), *(SETTINGS[number] for number in numbers)]:
        zero = {"stage": stage, "reduce_bucket_size": 20_000, **changes}
        config = {
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": ACCUMULATION,
            "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
            "gradient_clipping": 0.1,
            "bf16": {"enabled": dtype == "bf16"},
            "zero_optimization": zero,
        }
        model = make_model(model_name)
        with logged() as log:
            engine, *_ = zero_runtime.initialize(model=model, config=config)
            losses = []
            for step in range(STEPS):
                for micro in range(ACCUMULATION):
                    features, targets = make_batch(model_name, step, micro, rank)
                    if dtype == "bf16" and features.is_floating_point():
                        features = features.bfloat16()
                    log.at("forward", step, micro)
                    loss = engine(features, targets)
                    losses.append(loss.item())
                    log.at("backward")
                    engine.backward(loss)
                    log.at("step")
                    engine.step()
        outcomes.append(
            (losses, [call for call in log.calls if call.phase == "backward" and call.step == STEPS - 1])
        )
    return outcomes


# One set of ranks trains every setting. With three ranks no tensor is evenly divisible.
LONG = pytest.mark.long
WORLDS = [pytest.param(2, marks=LONG), 3, pytest.param(4, marks=LONG)]


EVERY = range(len(SETTINGS))


@functools.cache
def trained(world, dtype="fp32", numbers=EVERY):
    return run_standing(world, train_all, MODEL_OF[world], dtype, numbers, timeout=200)


@pytest.mark.parametrize("world", [pytest.param(1, marks=LONG), *WORLDS])
@pytest.mark.parametrize("number", range(len(SETTINGS)), ids=IDS)
def test_losses_agree(world, number):
    for outcomes in trained(world):
        assert outcomes[1 + number][0] == pytest.approx(outcomes[0][0], rel=1e-6)


@pytest.mark.sampled
@pytest.mark.parametrize("number", range(len(SETTINGS)), ids=IDS)
def test_losses_agree_in_bf16(cases_that_run, number):
    numbers = tuple(IDS.index(name) for name in cases_that_run)
    for outcomes in trained(3, "bf16", numbers):
        assert outcomes[1 + numbers.index(number)][0] == pytest.approx(outcomes[0][0], rel=1e-2)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("number", range(len(SETTINGS)), ids=IDS)
def test_bytes_of_a_step(world, number):
    stage, changes = SETTINGS[number]
    name, numel = changes["gradient_reduction"], NUMEL[MODEL_OF[world]]
    passes = ACCUMULATION if stage == 2 else 1
    ranks = [outcomes[1 + number][1] for outcomes in trained(world)]
    assert len({len(calls) for calls in ranks}) == 1
    sent = sum(call.numel_in for call in ranks[0])
    methods = {call.method for call in ranks[0]}
    if name != "reduce_scatter":
        assert methods == {"reduce" if name == "reduce_to_owner" else "allreduce"}
        assert sent == numel * passes
    elif changes.get("reduce_scatter_impl") == "native":
        assert methods <= {"reduce_scatter", "reduce_scatter_single"}
        assert numel * passes <= sent <= numel * passes * (1 + 1 / 16)
        if changes.get("reduce_bucket_size") == 1_000_000:
            assert methods == {"reduce_scatter_single"} and len(ranks[0]) == passes
    else:
        assert methods == {"all_to_all_single"}
        assert sent == numel * passes
        # Each owner gets its shard from every rank, so (n - 1)/n of the received elements come from other
        # ranks.
        received = sum(call.numel_out for calls in ranks for call in calls)
        assert received == numel * passes * world


@pytest.mark.parametrize("world", WORLDS)
def test_every_owner_gets_as_much_of_every_message_of_a_reduce_scatter(world):
    for number, (_, changes) in enumerate(SETTINGS):
        if changes["gradient_reduction"] != "reduce_scatter" or "reduce_scatter_impl" in changes:
            continue
        rows = [[call.numel_out // world for call in outcomes[1 + number][1]] for outcomes in trained(world)]
        messages = list(zip(*rows, strict=True))
        chunks = sorted({max(row) for row in messages})
        assert len(chunks) == 1
        # Only the last chunk of the flat buffer has padding, which is not sent.
        uneven = [row for row in messages if max(row) != min(row)]
        assert len(uneven) <= ACCUMULATION
        padding = 2 * world * len(messages)
        assert all(max(row) - min(row) < padding for row in uneven)

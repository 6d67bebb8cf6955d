"""``gradient_accumulation_reduce``: gradients that wait for the last micro-batch of a step."""

from __future__ import annotations

import re

import pytest
import torch

import zero_runtime
from commprof.ledger.verification import verify
from commprof.requested import Parameter, expected_in_step
from support.process_group_log import logged
from support.ranks import run_ranks
from support.recorded_models import make_batch, make_model
from support.standing_ranks import record_standing, run_standing
from zero_runtime import ConfigError, UsageError

pytestmark = pytest.mark.ranks

STEPS, MICRO = 3, 3
BF16 = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
CASES = {
    "stage 2": ({"stage": 2}, {}),
    "stage 2, overlapped": ({"stage": 2, "overlap_comm": True}, {}),
    "stage 2, to owners, clipped": (
        {"stage": 2, "use_multi_rank_bucket_allreduce": False},
        {"gradient_clipping": 0.01},
    ),
    "stage 2, reduce_scatter": ({"stage": 2, "gradient_reduction": "reduce_scatter"}, {}),
    "stage 2, all_reduce, Muon": (
        {"stage": 2, "gradient_reduction": "all_reduce"},
        {"optimizer": {"type": "Muon", "params": {"lr": 1e-3}}},
    ),
    "stage 2, bf16, fp32 gradients": ({"stage": 2}, BF16),
    "stage 2, fp16, offloaded": (
        {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        {"fp16": {"enabled": True}},
    ),
    "stage 3": ({"stage": 3}, {}),
    "stage 3, blocks": ({"stage": 3, "stage3_gather_unit": "block"}, {}),
    "stage 3, bf16, fp32 gradients": ({"stage": 3, "stage3_param_persistence_threshold": 0}, BF16),
    "stage 3, offloaded": (
        {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
        {},
    ),
}
SUMS = ("allreduce", "reduce", "all_to_all_single", "reduce_scatter", "reduce_scatter_single")


def config(zero, top, reduce, micro=MICRO):
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": micro,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {
            "reduce_bucket_size": 20_000,
            "gradient_accumulation_reduce": reduce,
            **zero,
        },
        **top,
    }


def groups(model):
    """Return two param groups: matrices and vectors."""
    return [
        {"params": [p for p in model.parameters() if p.dim() > 1]},
        {"params": [p for p in model.parameters() if p.dim() == 1]},
    ]


def train(rank, settings, two_groups=False, steps=STEPS):
    """Train and return three results.

    They are the losses, the number of reductions that each micro-batch of the last step sent, and the
    gradients kept before the last micro-batch of this step.
    """
    model = make_model("mlp")
    arguments = {"model_parameters": groups(model)} if two_groups else {}
    engine, *_ = zero_runtime.initialize(model=model, config=settings, **arguments)
    losses, kept = [], 0
    dtype = torch.float32
    for name, kind in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        dtype = kind if name in settings else dtype
    for step in range(steps):
        sums = []
        for micro in range(engine.gradient_accumulation_steps()):
            inputs, targets = make_batch("mlp", step, micro, rank)
            with logged() as log:
                loss = engine(inputs.to(dtype), targets)
                engine.backward(loss)
            sums.append(sum(call.method in SUMS for call in log.calls))
            if micro == engine.gradient_accumulation_steps() - 2:
                kept = sum(
                    p.grad.numel() * p.grad.element_size() for p in model.parameters() if p.grad is not None
                )
            engine.step()
            losses.append(loss.item())
    reduce = engine._config.effective()["zero_optimization"]["gradient_accumulation_reduce"]
    engine.destroy()
    return losses, sums, kept, reduce


def each_and_boundary(rank, world, name):
    zero, top = CASES[name]
    return [
        train(rank, config(zero, top, reduce), two_groups="Muon" not in name)
        for reduce in ("each", "boundary")
    ]


@pytest.mark.sampled("reduce_scatter", "stage 3")
@pytest.mark.parametrize("name", CASES)
def test_boundary_sends_once_and_has_the_losses_of_each(name):
    (losses, sums, kept, _), (waiting_losses, waiting_sums, waiting_kept, _) = run_standing(
        2, each_and_boundary, name
    )[0]
    exact = "bf16" not in name and "fp16" not in name
    assert waiting_losses == pytest.approx(losses, rel=1e-5 if exact else 3e-3)
    assert sums[0] == sums[1] == sums[2] > 0
    assert waiting_sums == [0, 0, sums[2]]
    assert kept == 0
    numel = sum(p.numel() for p in make_model("mlp").parameters())
    assert waiting_kept == numel * (2 if "fp16" in name else 4)


def by_limit(rank, world):
    found = {}
    for name, settings in {
        "fits": config({"stage": 2, "gradient_accumulation_limit": 300_000}, {}, "auto"),
        "too small": config({"stage": 2, "gradient_accumulation_limit": 100}, {}, "auto"),
        "free memory": config({"stage": 3}, {}, "auto"),
        # The settings of the ranks differ, but the ranks must decide identically.
        "one rank": config({"stage": 2, "gradient_accumulation_limit": 100 if rank else 300_000}, {}, "auto"),
        "nothing to gain": config({"stage": 2}, {}, "auto", micro=1),
        "stage 1": config({"stage": 1}, {}, "auto"),
    }.items():
        found[name] = train(rank, settings, steps=1)[3]
    engine, *_ = zero_runtime.initialize(model=make_model("mlp"), config=config({"stage": 2}, {}, "boundary"))
    with engine.no_sync():
        engine.backward(engine(*make_batch("mlp", 0, 0, rank)))
    engine.step()
    return found


def test_auto_is_boundary_where_whole_gradients_fit_on_every_rank(capfd):
    found = run_ranks(2, by_limit)
    assert found[0] == found[1]
    assert found[0] == {
        "fits": "boundary",
        "too small": "each",
        "free memory": "boundary",
        "one rank": "each",
        "nothing to gain": "each",
        "stage 1": "each",
    }
    printed = capfd.readouterr().err
    price = "is boundary: each rank keeps 227,744 bytes of whole gradients until the last of 3 micro-batches"
    assert printed.count(price) == 3, printed
    assert "is each: boundary would keep 227,744 bytes of whole gradients on each rank, more than" in printed
    assert "has no effect at stage 1, which always reduces once a step" in printed


def test_what_boundary_does_not_go_together_with():
    from zero_runtime.config import RuntimeConfig

    settings = config({"stage": 2}, {"managed_gradient_accumulation": False}, "boundary")
    with pytest.raises(
        ConfigError, match="gradient_accumulation_reduce is boundary, and with managed_gradient"
    ):
        RuntimeConfig.from_mapping(settings, 2)
    with pytest.raises(ConfigError, match="expected one of: each, boundary, auto"):
        RuntimeConfig.from_mapping(config({"stage": 2}, {}, "never"), 2)


def skips(rank, world):
    """Skip a step whose gradients overflow, and check that no gradient remains."""
    top = {"fp16": {"enabled": True, "initial_scale_power": 24, "hysteresis": 1}}
    engine, *_ = zero_runtime.initialize(
        model=make_model("mlp"), config=config({"stage": 2}, top, "boundary")
    )
    for step in range(2):
        for micro in range(MICRO):
            inputs, targets = make_batch("mlp", step, micro, rank)
            engine.backward(engine(inputs.half(), targets))
            engine.step()
    left = [p.grad for p in engine.module.parameters() if p.grad is not None]
    return engine.skipped_steps, len(left)


def test_an_overflow_skips_the_step_and_drops_the_kept_gradients():
    assert run_standing(2, skips) == [(2, 0), (2, 0)]


def recorded(rank, world, zero):
    train(rank, config(zero, {}, "auto"))


@pytest.mark.parametrize(
    "zero", [{"stage": 2}, {"stage": 3}, {"stage": 3, "stage3_gather_unit": "block"}], ids=str
)
def test_verify_closes_a_run_that_decided_for_boundary(tmp_path, zero):
    run, _ = record_standing(tmp_path / "run", 2, recorded, zero)
    verdict = verify(run)
    assert verdict.exit_code == 0, str(verdict)


@pytest.mark.parametrize("stage", [2, 3])
def test_the_rules_expect_the_reduction_once_a_step(stage):
    parameters = [
        Parameter(name, p.numel(), "float32", 0, True, index)
        for index, (name, p) in enumerate(make_model("mlp").named_parameters())
    ]
    reduced = {
        reduce: next(
            row
            for row in expected_in_step(config({"stage": stage}, {}, reduce), parameters, 2, 4)
            if row.purpose == "gradient_reduce"
        )
        for reduce in ("each", "boundary", "auto")
    }
    assert reduced["each"].count == MICRO * reduced["boundary"].count
    assert reduced["each"].payload_bytes == MICRO * reduced["boundary"].payload_bytes
    assert reduced["auto"] == reduced["each"]  # the amount of free memory is not known before a run
    limited = config({"stage": stage, "gradient_accumulation_limit": 227_744}, {}, "auto")
    rows = expected_in_step(limited, parameters, 2, 4)
    assert next(row for row in rows if row.purpose == "gradient_reduce") == reduced["boundary"]


def not_paused(rank, world):
    engine, *_ = zero_runtime.initialize(model=make_model("mlp"), config=config({"stage": 2}, {}, "each"))
    with pytest.raises(UsageError) as error, engine.no_sync():
        pass
    return str(error.value)


def test_no_sync_at_stage_2_names_the_key():
    assert re.search("gradient_accumulation_reduce boundary", run_standing(2, not_paused)[0])

"""safe_get_* and safe_set_*: values, gradient and state of a parameter are equal at every stage, and can be changed."""

from __future__ import annotations

import pytest
import torch

from support.recording import record
from support.standing_ranks import run_standing

LR = 0.1
STEPS = 2


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3))


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * step + rank))


def config(stage: int, **zero) -> dict:
    return {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "Adam", "params": {"lr": LR, "betas": [0.9, 0.99], "weight_decay": 0.0}},
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, **zero},
    }


def expected(world: int) -> dict[str, torch.Tensor]:
    """Return the values of plain torch after STEPS steps and one more backward pass.

    The batches are those of all ranks.
    """
    plain = model()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=LR, betas=(0.9, 0.99), weight_decay=0.0)
    for step in range(STEPS + 1):
        optimizer.zero_grad()
        loss = sum(plain(batch(rank, step)).pow(2).mean() for rank in range(world)) / world
        loss.backward()
        if step < STEPS:
            optimizer.step()
    found = {}
    for name, parameter in plain.named_parameters():
        found[f"{name} value"] = parameter.detach().clone()
        found[f"{name} gradient"] = parameter.grad.clone()
        found[f"{name} exp_avg"] = optimizer.state[parameter]["exp_avg"].clone()
    return found


def read(rank, world, settings):
    import zero_runtime
    from zero_runtime import tensor_access

    engine, *_ = zero_runtime.initialize(model=model(), config=settings)
    for step in range(STEPS):
        engine.backward(engine(batch(rank, step)).pow(2).mean())
        engine.step()
    engine.backward(engine(batch(rank, STEPS)).pow(2).mean())
    found = {}
    for name, parameter in engine.module.named_parameters():
        found[f"{name} value"] = tensor_access.safe_get_full_fp32_param(parameter)
        found[f"{name} gradient"] = tensor_access.safe_get_full_grad(parameter).clone()
        found[f"{name} exp_avg"] = tensor_access.safe_get_full_optimizer_state(parameter, "exp_avg")
        assert tensor_access.safe_get_full_optimizer_state(parameter, "no_such_state") is None
        local = tensor_access.safe_get_local_fp32_param(parameter)
        assert local is None or local.dim() == 1
    return {name: tensor.tolist() for name, tensor in found.items()}


@pytest.mark.parametrize(
    "settings",
    [
        config(0),
        config(1),
        config(2),
        config(1, gradient_reduction="reduce_scatter"),
        config(2, gradient_reduction="reduce_scatter"),
        config(2, gradient_accumulation_reduce="boundary"),
        config(3, stage3_param_persistence_threshold=0),
        config(3, stage3_gather_unit="block"),
    ],
    ids=["0", "1", "2", "1-chunks", "2-chunks", "2-boundary", "3", "3-blocks"],
)
def test_full_values_gradients_and_states_are_those_of_plain_torch(settings):
    wanted = expected(2)
    for found in run_standing(2, read, settings):
        assert found.keys() == wanted.keys()
        for name, values in found.items():
            torch.testing.assert_close(torch.tensor(values), wanted[name], rtol=1e-4, atol=1e-6, msg=name)


def change(rank, world, settings):
    import zero_runtime
    from zero_runtime import tensor_access

    engine, *_ = zero_runtime.initialize(model=model(), config=settings)
    engine.backward(engine(batch(rank, 0)).pow(2).mean())
    engine.step()
    first = next(engine.module.parameters())
    tensor_access.safe_set_full_fp32_param(first, torch.full((7, 5), 0.5))
    tensor_access.safe_set_full_optimizer_state(first, torch.zeros(7, 5), "exp_avg")
    tensor_access.safe_set_full_optimizer_state(first, torch.ones(7, 5), "exp_avg_sq")
    engine.backward(engine(batch(rank, 1)).pow(2).mean())
    tensor_access.safe_update_full_grad_vectorized(
        list(engine.module.parameters()), lambda gradient, parameter: torch.zeros_like(gradient)
    )
    engine.step()
    state = tensor_access.safe_get_full_optimizer_state(first, "exp_avg_sq")
    local = tensor_access.safe_get_local_fp32_param(first)
    if local is not None:
        tensor_access.safe_set_local_fp32_param(first, torch.full_like(local, 0.25))
    with zero_runtime.zero.GatheredParameters([first]):
        used = first.detach().float().clone()
    return used.tolist(), state.tolist(), tensor_access.safe_get_full_fp32_param(first).tolist()


@pytest.mark.parametrize(
    ("stage", "zero"),
    [
        (1, {}),
        (1, {"gradient_reduction": "reduce_scatter"}),
        (2, {}),
        (3, {"stage3_param_persistence_threshold": 0}),
    ],
)
def test_what_is_set_is_what_the_next_step_and_the_model_use(stage, zero):
    settings = config(stage, **zero)
    for used, state, master in run_standing(2, change, settings):
        # Gradients are zero, and there is no momentum and no decay, so the step leaves 0.5 unchanged.
        if stage == 3:
            assert torch.equal(torch.tensor(used), torch.full((7, 5), 0.25))
        torch.testing.assert_close(torch.tensor(state), torch.full((7, 5), 0.99))
        assert torch.equal(torch.tensor(master), torch.full((7, 5), 0.25))


def refuse(rank, world):
    from zero_runtime import tensor_access
    from zero_runtime.errors import UsageError

    parameter = torch.nn.Parameter(torch.zeros(3))
    assert tensor_access.safe_get_full_fp32_param(parameter) is None
    assert tensor_access.safe_get_full_grad(parameter) is None
    with pytest.raises(UsageError, match="trained by no engine"):
        tensor_access.safe_set_full_fp32_param(parameter, torch.zeros(3))
    return True


def test_a_parameter_that_nothing_trains_has_none_of_them():
    assert all(run_standing(2, refuse))


def clamp_gradients(rank, world, settings):
    """Return the norm before and after a script clamps its shard of each gradient.

    Also returns the norm that the step reports.
    """
    import zero_runtime
    from zero_runtime import tensor_access

    engine, *_ = zero_runtime.initialize(model=model(), config=settings)
    engine.backward(engine(batch(rank, 0)).pow(2).sum())
    before = torch.stack(engine.optimizer._get_norm_groups()).norm().item()
    for parameter in engine.module.parameters():
        tensor_access.safe_set_local_grad(
            parameter, tensor_access.safe_get_local_grad(parameter).clamp(-0.01, 0.01)
        )
    after = torch.stack(engine.optimizer._get_norm_groups()).norm().item()
    engine.step()
    return before, after, float(engine.optimizer._global_grad_norm)


@pytest.mark.parametrize("device", ["none", "cpu"])
def test_norms_of_gradients_that_a_script_has_clamped(device):
    settings = config(3, offload_optimizer={"device": device}) | {"gradient_clipping": 1.0}
    for before, after, reported in run_standing(2, clamp_gradients, settings):
        # There are 66 elements, each at most 0.01.
        assert before > 0.1 > 0.01 * 66**0.5 >= after > 0
        assert reported == pytest.approx(after)


@pytest.mark.parametrize("stage", [1, 3])
def test_what_is_read_is_recorded_as_an_access(tmp_path, stage):
    run, _ = record(tmp_path / "run", 2, read, config(stage))
    rows = [row for row in run.table("collectives").to_pylist() if row["rank"] == 0]
    accesses = [(row["op"], row["numel"]) for row in rows if row["purpose"] == "parameter_access"]
    # The values, gradient and exp_avg of each parameter, and a state that the parameter lacks. One additional
    # element shows whether a rank has the state.
    assert sorted(accesses) == sorted(("all_reduce", numel + 1) for numel in (35, 7, 21, 3) for _ in range(4))

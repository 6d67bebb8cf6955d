"""Training with experts: losses that do not depend on the division of experts, checkpoints at another ep_size, records.

tests/integration/zero_runtime/test_experts_recorded.py compares losses and messages with DeepSpeed's.
"""

from __future__ import annotations

import functools

import pytest
import torch
from safetensors.torch import load_file

import zero_runtime
from support.standing_ranks import run_standing
from zero_runtime.checkpoint import consolidated_state_dict
from zero_runtime.errors import ConfigError, UnsupportedError, UsageError
from zero_runtime.experts.layer import MoE
from zero_runtime.tensor_access import safe_get_full_fp32_param, safe_get_full_grad

pytestmark = pytest.mark.ranks

HIDDEN, EXPERTS, STEPS = 8, 4, 3


class Model(torch.nn.Module):
    def __init__(self, ep_size: int, **arguments) -> None:
        super().__init__()
        self.first = torch.nn.Linear(HIDDEN, HIDDEN)
        expert = torch.nn.Sequential(
            torch.nn.Linear(HIDDEN, 12), torch.nn.ReLU(), torch.nn.Linear(12, HIDDEN)
        )
        self.mixture = MoE(HIDDEN, expert, EXPERTS, ep_size, use_rts=False, **arguments)
        self.last = torch.nn.Linear(HIDDEN, 1)

    def forward(self, tokens):
        output, loss, _ = self.mixture(torch.relu(self.first(tokens)))
        return self.last(output).square().mean() + 0.1 * loss


def make_engine(rank, ep_size, stage, config=None, **arguments):
    torch.manual_seed(3)
    model = Model(ep_size, **arguments)
    local = EXPERTS // ep_size
    for number, expert in enumerate(model.mixture.deepspeed_moe.experts.deepspeed_experts):
        generator = torch.Generator().manual_seed(100 + rank % ep_size * local + number)
        with torch.no_grad():
            for parameter in expert.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    document = {
        "train_micro_batch_size_per_gpu": 16,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 200},
        "steps_per_print": 10**6,
        **(config or {}),
    }
    engine, *_ = zero_runtime.initialize(
        model=model, model_parameters=list(model.parameters()), config=document
    )
    return engine


def train(engine, rank, first=0, steps=STEPS):
    losses = []
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(1000 * step + rank)
        loss = engine(torch.randn(16, HIDDEN, generator=generator))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def losses_of(rank, world, ep_size, stage, config=None):
    return train(make_engine(rank, ep_size, stage, config), rank)


@functools.cache
def plain_losses():
    """Return the losses of four ranks that all have all experts, at stage 0."""
    return run_standing(4, losses_of, 1, 0)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("ep_size", "stage", "zero"),
    [
        (2, 0, {}),
        (4, 1, {}),
        (2, 2, {}),
        (2, 2, {"gradient_reduction": "reduce_scatter"}),
        (4, 2, {"overlap_comm": True, "overlap_parameter_gather": True}),
        (2, 1, {"offload_optimizer": {"device": "cpu"}}),
    ],
)
def test_losses_do_not_depend_on_how_experts_are_divided(ep_size, stage, zero):
    config = {"zero_optimization": {"stage": stage, "reduce_bucket_size": 200, **zero}}
    for mine, plain in zip(run_standing(4, losses_of, ep_size, stage, config), plain_losses(), strict=True):
        assert mine == pytest.approx(plain, rel=1e-5)


def interrupted(rank, world, directory, saved, loaded):
    """Train, save, and continue in another engine, which may have another stage, ep_size and order of ranks."""
    engine = make_engine(rank, *saved)
    train(engine, rank)
    engine.save_checkpoint(directory)
    continued = train(engine, rank, STEPS)
    other = make_engine(rank, *loaded)
    for parameter in other.module.parameters():
        parameter.data.zero_()
    other.load_checkpoint(directory)
    return continued, train(other, rank, STEPS)


@pytest.mark.sampled(
    "saved1-loaded1", "saved2-loaded2"
)  # from stage 2 and from stage 0, both to another ep_size
@pytest.mark.parametrize(
    ("saved", "loaded"),
    [((2, 2), (2, 2)), ((2, 2), (4, 1)), ((4, 0), (2, 2)), ((1, 1), (4, 2)), ((4, 2), (1, 0))],
)
def test_training_goes_on_at_another_ep_size_and_stage(tmp_path, saved, loaded):
    for continued, resumed in run_standing(4, interrupted, str(tmp_path), saved, loaded):
        assert resumed == pytest.approx(continued, rel=1e-5)


def test_a_consolidated_checkpoint_has_all_experts(tmp_path):
    run_standing(4, interrupted, str(tmp_path), (4, 2), (4, 2))
    state = consolidated_state_dict(tmp_path)
    torch.manual_seed(0)
    model = Model(1)
    assert set(state) == set(model.state_dict())
    model.load_state_dict(state)
    weights = [
        state[f"mixture.deepspeed_moe.experts.deepspeed_experts.{number}.0.weight"]
        for number in range(EXPERTS)
    ]
    assert all(not torch.equal(weights[0], other) for other in weights[1:])


def weights_saved(rank, world, directory, *setting):
    engine = make_engine(rank, *setting)
    train(engine, rank)
    engine.save_checkpoint(directory / "checkpoint")
    return engine.save_16bit_model(directory, "model.safetensors") and engine.save_16bit_model(directory)


@pytest.mark.parametrize("setting", [(2, 1), (4, 0)])
def test_the_weights_of_all_experts_are_saved_in_one_file(tmp_path, setting):
    assert all(run_standing(4, weights_saved, tmp_path, *setting))
    expected = consolidated_state_dict(tmp_path / "checkpoint")
    for state in (load_file(tmp_path / "model.safetensors"), torch.load(tmp_path / "pytorch_model.bin")):
        assert set(state) == set(Model(1).state_dict()) == set(expected)
        assert all(torch.equal(value, expected[name]) for name, value in state.items())
    experts = [value for name, value in state.items() if name.endswith(".0.weight")]
    assert len(experts) == EXPERTS and not any(torch.equal(experts[0], other) for other in experts[1:])


def saved(rank, world, directory, *setting):
    engine = make_engine(rank, *setting)
    train(engine, rank)
    engine.save_checkpoint(directory)


def saved_again(rank, world, directory, again, *setting):
    engine = make_engine(rank, *setting)
    engine.load_checkpoint(directory)
    engine.save_checkpoint(again)


def test_a_checkpoint_passes_through_another_number_of_ranks(tmp_path):
    run_standing(4, saved, str(tmp_path / "four"), 2, 2)
    run_standing(2, saved_again, str(tmp_path / "four"), str(tmp_path / "two"), 2, 0)
    before, after = consolidated_state_dict(tmp_path / "four"), consolidated_state_dict(tmp_path / "two")
    assert set(before) == set(after)
    assert all(torch.equal(value, after[name]) for name, value in before.items())


def refusals(rank, world, directory):
    messages = {}

    def refused(name, error, action):
        try:
            action()
        except error as refusal:
            messages[name] = str(refusal)

    for name, error, config in (
        ("stage 3", ConfigError, {"zero_optimization": {"stage": 3}}),
        ("all_reduce", ConfigError, {"zero_optimization": {"stage": 2, "reduce_scatter": False}}),
        ("Lamb", UnsupportedError, {"optimizer": {"type": "Lamb", "params": {"lr": 0.01}}}),
        ("compression", UnsupportedError, {"gradient_compression": {"algorithm": "1bit"}}),
    ):
        refused(name, error, lambda config=config: make_engine(rank, 2, 1, config))
    refused("ep_size", ConfigError, lambda: make_engine(rank, 4, 1))
    engine = make_engine(rank, 2, 1)
    engine.module.mixture.deepspeed_moe.experts.deepspeed_experts[0].register_buffer("mean", torch.zeros(2))
    refused("save", UsageError, lambda: engine.save_16bit_model(directory))
    return messages


def test_what_does_not_go_together_is_refused_with_what_to_do(tmp_path):
    for messages in run_standing(2, refusals, str(tmp_path)):
        for name, words in {
            "stage 3": "experts (mixture.deepspeed_moe), and zero_optimization.stage is 3; use stage 0, 1 or 2",
            "all_reduce": "set both to true",
            "Lamb": "use an elementwise one",
            "compression": "do not go together with gradient_compression",
            "ep_size": "ep_size is 4, and there are 2 data-parallel ranks; expected a divisor of 2",
            "save": "have buffers (deepspeed_experts.0.mean), which differ between ranks; use save_checkpoint",
        }.items():
            assert words in messages[name]


def full_values(rank, world):
    engine = make_engine(rank, 2, 2)
    engine.backward(engine(torch.randn(16, HIDDEN, generator=torch.Generator().manual_seed(rank))))
    weight = engine.module.mixture.deepspeed_moe.experts.deepspeed_experts[1][0].weight
    gradient = safe_get_full_grad(weight)
    value = safe_get_full_fp32_param(weight)
    engine.step()
    return gradient.tolist(), torch.equal(value, value.new_tensor(value.tolist())), value.tolist()


def test_values_of_an_expert_are_those_of_the_ranks_that_have_it():
    ranks = run_standing(4, full_values)
    assert ranks[0] == ranks[2] and ranks[1] == ranks[3]
    assert ranks[0][2] != ranks[1][2] and ranks[0][0] != ranks[1][0]


def experts_alone(rank, world, config, frozen):
    """Train only the experts, or everything except the experts.

    ``initialize`` gets only the parameters that are trained.
    """
    torch.manual_seed(3)
    model = Model(2)
    for parameter in model.parameters():
        parameter.requires_grad_(getattr(parameter, "allreduce", True) is not frozen)
    document = {
        "train_micro_batch_size_per_gpu": 16,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "gradient_clipping": 1.0,
        **config,
    }
    trained = [each for each in model.parameters() if each.requires_grad]
    engine, *_ = zero_runtime.initialize(model=model, model_parameters=trained, config=document)
    before = [each.detach().clone() for each in trained]
    tokens = torch.randn(16, HIDDEN, generator=torch.Generator().manual_seed(rank))
    loss = engine(tokens.to(trained[0].dtype))
    engine.backward(loss)
    engine.step()
    changed = [not torch.equal(each, old) for each, old in zip(trained, before, strict=True)]
    return any(changed), float(engine.get_global_grad_norm()), loss.item()


@pytest.mark.parametrize(
    "config",
    [
        {"bf16": {"enabled": True}, "zero_optimization": {"stage": 0}},
        {
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": 1},
            "data_types": {"grad_accum_dtype": "fp32"},
        },
        {"bf16": {"enabled": True}, "zero_optimization": {"stage": 2}},
    ],
)
def test_experts_are_trained_with_everything_else_frozen(config):
    trained = run_standing(2, experts_alone, config, True)
    assert any(changed for changed, _, _ in trained)  # on one rank, possibly no token chooses its experts
    assert 0 < trained[0][1] == pytest.approx(trained[1][1])


def frozen_and_passed(rank, world):
    torch.manual_seed(3)
    model = Model(2)
    for parameter in model.mixture.deepspeed_moe.experts.parameters():
        parameter.requires_grad_(False)
    config = {
        "train_micro_batch_size_per_gpu": 16,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": 1},
    }
    with pytest.raises(ConfigError, match="pass only parameters that require gradients"):
        zero_runtime.initialize(model=model, model_parameters=model.parameters(), config=config)


def test_frozen_experts_that_are_passed_are_refused_with_what_to_do():
    run_standing(2, frozen_and_passed)
    config = {"zero_optimization": {"stage": 1}}
    assert all(changed for changed, _, _ in run_standing(2, experts_alone, config, False))


def evaluated(rank, world):
    engine = make_engine(rank, 2, 1, eval_capacity_factor=2.0, capacity_factor=0.5)
    engine.eval()
    with torch.no_grad():
        loss = engine(torch.randn(16, HIDDEN, generator=torch.Generator().manual_seed(rank)))
    return loss.item(), engine.has_moe_layers, engine.num_experts


def test_evaluation_and_queries():
    for loss, has_experts, count in run_standing(2, evaluated):
        assert loss > 0 and has_experts and count == [EXPERTS]

"""Test optimizers that are created from a configuration.

The tests cover the class, the arguments, the arithmetic, and refused settings.
"""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from zero_runtime.configuration.config_values import OptimizerConfig
from zero_runtime.errors import ConfigError, UnsupportedError
from zero_runtime.optimizer_step.torch_optimizer import torch_optimizer
from zero_runtime.optimizers import Lamb, Lion, UncorrectedAdam
from zero_runtime.optimizers.lamb import Division, Segment
from zero_runtime.optimizers.newton_schulz import orthogonalized

SHAPES = ((3, 4), (5,), (2, 2))


def parameters(dtype=torch.float64):
    generator = torch.Generator().manual_seed(3)
    return [
        torch.nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype))
        for shape in SHAPES
    ]


def gradients(step):
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]


def make(kind, given=None, **params):
    config = OptimizerConfig(type=kind, params=params)
    return torch_optimizer(config, None, parameters() if given is None else given)


def trained(kind, steps=3, **params):
    given = parameters()
    optimizer = make(kind, given, **params)
    for step in range(steps):
        for parameter, gradient in zip(given, gradients(step), strict=True):
            parameter.grad = gradient.to(parameter.dtype)
        optimizer.step()
    return [parameter.detach() for parameter in given]


def by_elements(update, steps=3):
    """Return the parameters after ``steps`` calls of update(p, g, state, t) for each element, in Python numbers."""
    found = []
    for index, parameter in enumerate(parameters()):
        values = parameter.detach().flatten().tolist()
        states = [{} for _ in values]
        for step in range(steps):
            slopes = gradients(step)[index].flatten().tolist()
            values = [
                update(p, g, state, step + 1) for p, g, state in zip(values, slopes, states, strict=True)
            ]
        found.append(torch.tensor(values, dtype=torch.float64).view(parameter.shape))
    return found


def assert_equal(found, wanted):
    for mine, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize(
    ("kind", "params", "wanted", "decay"),
    [
        ("Adam", {}, torch.optim.AdamW, 0.0),
        ("adamw", {}, torch.optim.AdamW, 0.0),
        ("Adam", {"adam_w_mode": False}, torch.optim.Adam, 0.0),
        ("AdamW", {"adam_w_mode": False}, torch.optim.AdamW, 0.0),
        ("AdamW", {"torch_adam": True}, torch.optim.AdamW, 0.01),
        ("Adam", {"torch_adam": True, "adam_w_mode": False}, torch.optim.Adam, 0.0),
        ("Adam", {"fp32_optimizer_states": True, "set_grad_none": True}, torch.optim.AdamW, 0.0),
        ("Adam", {"bias_correction": False, "weight_decay": 0.1}, UncorrectedAdam, 0.1),
        ("Adagrad", {}, torch.optim.Adagrad, 0.0),
        ("SGD", {"lr": 0.1, "weight_decay": 0.2}, torch.optim.SGD, 0.2),
        ("LAMB", {}, Lamb, 0.0),
        ("Lion", {"set_grad_none": True}, Lion, 0.0),
        ("RMSprop", {}, torch.optim.RMSprop, 0),
    ],
)
def test_the_class_that_a_name_means(kind, params, wanted, decay):
    optimizer = make(kind, **params)
    assert type(optimizer) is wanted
    assert optimizer.param_groups[0]["weight_decay"] == decay


@pytest.mark.parametrize(
    ("params", "fused"),
    [({}, True), ({"foreach": True}, None), ({"fused": False}, False), ({"differentiable": True}, None)],
)
def test_torchs_fused_implementation_unless_another_is_chosen(params, fused):
    assert make("AdamW", torch_adam=True, **params).param_groups[0]["fused"] is fused


@pytest.mark.parametrize("kind", ["Adam", "AdamW", "NAdam", "OneBitAdam"])
def test_betas_may_be_integers_as_in_json(kind):
    assert tuple(make(kind, betas=[0, 0.99]).defaults["betas"]) == (0.0, 0.99)


def test_not_fused_where_memory_is_not_in_order():
    turned = [torch.nn.Parameter(torch.zeros(3, 4).T)]
    assert make("SGD", turned, lr=0.1).param_groups[0]["fused"] is None


def test_groups_may_be_generators():
    groups = [{"params": (p for p in parameters()), "lr": 0.5}]
    assert [len(group["params"]) for group in make("AdamW", groups).param_groups] == [len(SHAPES)]


def test_lion():
    rate, beta1, beta2, decay = 0.01, 0.8, 0.97, 0.3

    def update(p, g, state, step):
        momentum = state.get("m", 0.0)
        state["m"] = beta2 * momentum + (1 - beta2) * g
        return p * (1 - rate * decay) - rate * math.copysign(1.0, beta1 * momentum + (1 - beta1) * g)

    found = trained("Lion", lr=rate, betas=[beta1, beta2], weight_decay=decay)
    assert_equal(found, by_elements(update))


@pytest.mark.parametrize("decoupled", [True, False])
def test_adam_without_bias_correction(decoupled):
    rate, beta1, beta2, eps, decay = 0.02, 0.8, 0.9, 1e-3, 0.3

    def update(p, g, state, step):
        if not decoupled:
            g += decay * p
        state["m"] = beta1 * state.get("m", 0.0) + (1 - beta1) * g
        state["v"] = beta2 * state.get("v", 0.0) + (1 - beta2) * g * g
        decayed = p * (1 - rate * decay) if decoupled else p
        return decayed - rate * state["m"] / (math.sqrt(state["v"]) + eps)

    options = {"lr": rate, "betas": [beta1, beta2], "eps": eps, "weight_decay": decay}
    found = trained("Adam", bias_correction=False, adam_w_mode=decoupled, **options)
    assert_equal(found, by_elements(update))


def lamb_by_hand(steps, correct, inside, low, high, rate=0.02, betas=(0.8, 0.9), eps=1e-3, decay=0.3):
    found = []
    for index, parameter in enumerate(parameters()):
        p = parameter.detach().clone()
        m, v = torch.zeros_like(p), torch.zeros_like(p)
        for step in range(1, steps + 1):
            g = gradients(step - 1)[index]
            m = betas[0] * m + (1 - betas[0]) * g
            v = betas[1] * v + (1 - betas[1]) * g * g
            u = m / ((v + eps).sqrt() if inside else v.sqrt() + eps) + decay * p
            ratio = min(max(float(p.norm() / u.norm()), low), high)
            size = rate * math.sqrt(1 - betas[1] ** step) / (1 - betas[0] ** step) if correct else rate
            p = p - size * ratio * u
        found.append(p)
    return found


@pytest.mark.parametrize("correct", [True, False])
@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize(("low", "high"), [(0.01, 10.0), (0.9, 1.1)])
def test_lamb(correct, inside, low, high):
    found = trained(
        "Lamb",
        lr=0.02,
        betas=[0.8, 0.9],
        eps=1e-3,
        weight_decay=0.3,
        bias_correction=correct,
        eps_inside_sqrt=inside,
        min_coeff=low,
        max_coeff=high,
    )
    assert_equal(found, lamb_by_hand(3, correct, inside, low, high))


def test_lamb_takes_an_unscaled_step_from_zero():
    zero = [torch.nn.Parameter(torch.zeros(4, dtype=torch.float64))]
    optimizer = make("Lamb", zero, lr=0.5, bias_correction=False)
    zero[0].grad = torch.ones(4, dtype=torch.float64)
    optimizer.step()
    step = 0.1 / (math.sqrt(0.001) + 1e-8)
    torch.testing.assert_close(zero[0].detach(), torch.full((4,), -0.5 * step, dtype=torch.float64))


def keep(seen, sums):
    seen.append(sums.clone())


def replace(seen, sums):
    sums.copy_(sum(seen))


def test_lamb_on_pieces_is_lamb_on_parameters():
    """Two ranks own 12 + 5 + 4 elements in shards of 11. The contributions of the ranks are added by hand."""
    whole = trained("Lamb", steps=2, lr=0.1)
    flat = torch.cat([each.detach().flatten() for each in parameters()] + [torch.zeros(1)])
    pieces = [torch.nn.Parameter(piece.clone()) for piece in flat.chunk(2)]
    layouts = [[Segment(0, 0, 11)], [Segment(0, 0, 1), Segment(1, 1, 5), Segment(2, 6, 4)]]
    ranks = [make("Lamb", [piece], lr=0.1) for piece in pieces]
    seen: list[torch.Tensor] = []
    for step in range(2):
        slopes = torch.cat([each.flatten() for each in gradients(step)] + [torch.zeros(1)]).chunk(2)
        for recording in (True, False):
            seen = [] if recording else seen
            for rank, (optimizer, piece) in enumerate(zip(ranks, pieces, strict=True)):
                before = (
                    piece.detach().clone(),
                    {
                        name: value.clone() if torch.is_tensor(value) else value
                        for name, value in optimizer.state[piece].items()
                    },
                )
                given = {piece: layouts[rank]}
                add = partial(keep if recording else replace, seen)
                optimizer.divide(Division(given, len(SHAPES), add))
                piece.grad = slopes[rank].clone()
                optimizer.step()
                if recording:
                    piece.data.copy_(before[0])
                    optimizer.state[piece] = before[1]
    found = torch.cat([piece.detach() for piece in pieces])[:21].split([12, 5, 4])
    assert_equal(found, [each.flatten() for each in whole])


@pytest.mark.parametrize(
    ("kind", "params", "words"),
    [
        ("AdamV", {}, "did you mean"),
        ("sgd", {}, "did you mean 'SGD'"),
        ("Adam", {"learning_rate": 1}, "learning_rate = 1 is not an argument of AdamW.* AdamW takes .*lr"),
        ("Adam", {"weight_decey": 1}, "did you mean 'weight_decay'"),
        ("Adam", {"lr": "auto"}, "optimizer.params.lr is 'auto'; AdamW expects a number"),
        ("Adam", {"betas": [0.9]}, "betas is .0.9.; AdamW expects 2 numbers"),
        ("Adam", {"betas": [0.9, 2.0]}, "AdamW does not accept .*beta"),
        ("Adam", {"torch_adam": "yes"}, "torch_adam is 'yes'; expected true or false"),
        ("Adam", {"max_grad_norm": 1.0}, "use gradient_clipping"),
        ("Lamb", {"amsgrad": True}, "amsgrad is true"),
        ("Lamb", {"min_coeff": 2.0, "max_coeff": 1.0}, "min_coeff <= max_coeff"),
        ("Lion", {"betas": [0.9, 1.5]}, "betas are .0.9, 1.5."),
        ("Lion", {"lr": -1.0}, "lr is -1.0; expected a number from 0"),
        ("OneBitAdam", {"freeze_step": 0}, "freeze_step is 0; expected a whole number of at least 1"),
        ("ZeroOneAdam", {"local_step_clipper": 1.5}, "local_step_clipper is 1.5"),
        ("OneBitAdam", {"bias_correction": True}, "corrects no bias"),
        ("OneBitLamb", {"amsgrad": True}, "amsgrad is true"),
        ("OneBitLamb", {"factor_min": 2.0, "factor_max": 1.0}, "factor_min is 2.0"),
        ("OneBitLamb", {"coeff_beta": 1.0}, "coeff_beta is 1.0; expected a number from 0 and below 1"),
        ("LBFGS", {}, "computes the loss several times"),
        ("SparseAdam", {}, "sparse gradients"),
    ],
)
def test_refused(kind, params, words):
    with pytest.raises(ConfigError, match=words):
        make(kind, **params)


@pytest.mark.parametrize(
    ("kind", "params"),
    [("MuAdam", {}), ("MuSGD", {"lr": 1}), ("Adam", {"fp32_optimizer_states": False})],
)
def test_not_in_this_version(kind, params):
    with pytest.raises(UnsupportedError, match="not in this version"):
        make(kind, **params)


def test_what_is_no_optimizer_is_refused():
    with pytest.raises(ConfigError, match="optimizer is a int"):
        torch_optimizer(None, 5, parameters())
    with pytest.raises(ConfigError, match="made a list"):
        torch_optimizer(None, list, parameters())


@pytest.mark.parametrize("method", ["gram", "standard"])
@pytest.mark.parametrize("shape", [(12, 30), (30, 12), (16, 16), (3, 8, 20)])
def test_muon_steps_are_nearly_orthogonal_with_the_singular_vectors_of_the_gradient(shape, method):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(5))
    found = orthogonalized(matrix, method).float()
    assert found.shape == matrix.shape
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    inner = left.mT @ found @ right.mT
    values = inner.diagonal(dim1=-2, dim2=-1)
    assert values.min() > 0.4 and values.max() < 1.4
    torch.testing.assert_close(inner, torch.diag_embed(values), rtol=0, atol=0.05)

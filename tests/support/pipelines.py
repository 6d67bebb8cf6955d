"""Small pipelines, and the reference results of one process that has all layers and trains on the same samples."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zero_runtime

WIDTH, MICRO_BATCHES, STEPS = 12, 4, 3
INTERLEAVED = {"schedule": "interleaved", "virtual_stages": 2}
SCHEDULES = {
    "1f1b": {"schedule": "1f1b"},
    "gpipe": {"schedule": "gpipe"},
    "zero_bubble": {"schedule": "zero_bubble"},
    "interleaved": INTERLEAVED,
}
SGD = {"type": "SGD", "params": {"lr": 0.1}}


def config(micro_batches=MICRO_BATCHES, **keys):
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": micro_batches,
        "optimizer": SGD,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        **keys,
    }


class Residual(nn.Module):
    """A layer that passes nested values of several dtypes to the next stage, some of them without a gradient."""

    def __init__(self, in_place: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.in_place = in_place

    def forward(self, state):
        hidden, extra = state["hidden"], state["extra"]
        if self.in_place:
            hidden.mul_(1.0)
        hidden = hidden + torch.tanh(self.linear(hidden)) * state["factor"]
        hidden = hidden.masked_fill(extra[0][:, None], 0.0) + extra[1][1].float().mean()
        return {**state, "hidden": hidden, "extra": (extra[0], [extra[1][0] + 1, hidden.to(torch.bfloat16)])}


class Begin(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, features):
        hidden = self.linear(features)
        masked = torch.arange(len(features)) % 3 == 2
        counts = torch.arange(len(features))
        unused = torch.zeros(2)
        return {
            "hidden": hidden,
            "extra": (masked, [counts, hidden.half()]),
            "factor": 0.5,
            "name": None,
            "unused": unused,
        }


class End(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 1)

    def forward(self, state):
        return self.linear(state["hidden"]) + state["extra"][1][0][:, None] * 0.01


def squared(outputs, targets):
    return (outputs.float() - targets).square().mean()


def nested_layers():
    return [zero_runtime.LayerSpec(Begin), zero_runtime.LayerSpec(Residual), zero_runtime.LayerSpec(Residual, in_place=True),
            zero_runtime.LayerSpec(End)]  # fmt: skip


def plain_layers(count=6):
    return [zero_runtime.LayerSpec(nn.Linear, WIDTH, WIDTH) for _ in range(count)] + [torch.tanh] + [
        zero_runtime.LayerSpec(nn.Linear, WIDTH, 1)
    ]  # fmt: skip


def tied(layers_between=1):
    first = zero_runtime.TiedLayerSpec("shared", nn.Linear, WIDTH, WIDTH, tied_weight_attr=["weight", "bias"])
    between = [zero_runtime.LayerSpec(nn.Linear, WIDTH, WIDTH) for _ in range(layers_between)]
    return [first, *between, first, zero_runtime.LayerSpec(nn.Linear, WIDTH, 1)]


def pipeline(layers, stages=2, **options):
    return zero_runtime.PipelineModule(
        layers, num_stages=stages, loss_fn=squared, seed_layers=True, seed_fn=torch.manual_seed, **options
    )


def sizes(step, number):
    """Return the number of samples of a micro-batch in tests in which this number changes."""
    return 2 + (step + number) % 3


def batch(step, number, replica=0, samples=2):
    generator = torch.Generator().manual_seed(10_000 * step + 100 * number + replica)
    features = torch.randn(samples, WIDTH, generator=generator)
    return features, features.sum(1, keepdim=True)


def batches(step, replica=0, changing=False, count=MICRO_BATCHES):
    return (batch(step, n, replica, sizes(step, n) if changing else 2) for n in range(count))


def reference(layers, replicas=1, changing=False, clip=None, count=MICRO_BATCHES):
    """Train all layers in one process.

    Returns:
        The losses and the gradient norms of all steps, and the values of the parameters by the names that a pipeline
        uses.
    """
    modules, named, functions = {}, {}, []
    for number, spec in enumerate(layers):
        torch.manual_seed(1234 + number)
        if isinstance(spec, zero_runtime.LayerSpec):
            key = f"tied_modules.{spec.key}" if isinstance(spec, zero_runtime.TiedLayerSpec) else str(number)
            if key not in modules:
                modules[key] = spec.build()
                named |= {f"{key}.{name}": each for name, each in modules[key].named_parameters()}
            functions.append(modules[key])
        else:
            functions.append(spec)
    optimizer = torch.optim.SGD(named.values(), lr=0.1)
    losses, norms = [], []
    for step in range(STEPS):
        total = 0.0
        for replica in range(replicas):
            for features, targets in batches(step, replica, changing, count):
                values = features
                for function in functions:
                    values = function(values)
                loss = squared(values, targets) / (count * replicas)
                loss.backward()
                total += loss.item()
        norms.append(torch.nn.utils.clip_grad_norm_(named.values(), clip or 1e9).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, norms, {name: each.detach() for name, each in named.items()}


def same(engine, found, wanted):
    """Assert that the losses and the parameters of this stage equal the results of ``reference``."""
    losses, _, values = wanted
    assert found == pytest.approx(losses, rel=1e-5)
    for name, parameter in engine.module.named_parameters():
        torch.testing.assert_close(parameter.detach(), values[name], rtol=1e-4, atol=1e-6)


def train(engine, changing=False, count=MICRO_BATCHES):
    replica = engine.mpu.get_data_parallel_rank()
    return [float(engine.train_batch(batches(step, replica, changing, count))) for step in range(STEPS)]


def made(layers, given=None, **options):
    model = pipeline(layers, **options)
    return zero_runtime.initialize(model=model, config=given or config())[0]


def scheduled(layers, schedule, given=None, **options):
    """Return an engine whose layers are divided evenly over the stages when ``initialize`` reads the configuration."""
    block = {"pp_size": options.pop("stages", 2), **schedule}
    given = {**(given or config()), "pipeline_parallel": block, "partition_methods": "uniform"}
    return made(layers, given, stages=None, **options)

"""Test which modules and buffers of a 16-bit model stay in fp32, and the conversions at their borders."""

from __future__ import annotations

from collections import namedtuple

import pytest
import torch
from torch import nn

from zero_runtime.config import RuntimeConfig
from zero_runtime.errors import ConfigError
from zero_runtime.optimizer_step.dtypes import cast_module
from zero_runtime.optimizer_step.fp32_modules import cast_floating, fp32_buffers, keep_in_fp32


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_1 = nn.LayerNorm(4)
        self.mlp = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
        self.register_buffer("bias_correction", torch.zeros(4))

    def forward(self, x, *, scale):
        return {"hidden": x + self.mlp(self.norm_1(x)) * scale, "count": torch.tensor(3)}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(4, 10)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, scale=torch.ones((), dtype=x.dtype))["hidden"]
        return self.head(x)


def prepared(*patterns, dtype="fp16", **top):
    return cast(Model(), **{dtype: {"enabled": True}, "fp16_override_modules": list(patterns), **top})


def cast(model, **given):
    cast_module(model, RuntimeConfig.from_mapping({"train_batch_size": 1, **given}, 1).precision)
    return model


def wide(model):
    return {name for name, parameter in model.named_parameters() if parameter.dtype == torch.float32}


NORMS = {f"blocks.{n}.norm_1.{what}" for n in (0, 1) for what in ("weight", "bias")}
FIRST = {name for name, _ in Model().named_parameters() if name.startswith("blocks.0.")}


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        ((), set()),
        (("LayerNorm",), NORMS),
        (("norm_*",), NORMS),
        (("blocks.*.norm_1",), NORMS),
        (("re:norm",), NORMS),
        (("blocks.0",), FIRST),
        (("re:^blocks\\.0",), FIRST),
        (("blocks.0", "LayerNorm", "blocks.0.mlp"), FIRST | NORMS),
        (("blocks",), {name for name, _ in Model().named_parameters() if name.startswith("blocks.")}),
        (("head", "Embedding"), {"head.weight", "head.bias", "embed.weight"}),
        (("*",), {name for name, _ in Model().named_parameters()}),
    ],
)
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_patterns_and_borders(patterns, expected, dtype):
    model = prepared(*patterns, dtype=dtype)
    assert wide(model) == expected
    seen = {}
    for name, child in model.named_modules():
        if isinstance(child, nn.Linear | nn.LayerNorm):
            child.register_forward_pre_hook(lambda _, inputs, name=name: seen.update({name: inputs[0].dtype}))
    output = model(torch.arange(6).view(2, 3))
    assert output.dtype == {"fp16": torch.float16, "bf16": torch.bfloat16}[dtype]
    for name, found in seen.items():
        assert (found == torch.float32) == (f"{name}.weight" in expected), name
    output.float().sum().backward()
    assert all(p.grad.dtype == p.dtype for p in model.parameters())


def test_prepared_again_without_patterns_the_borders_are_gone():
    model = prepared("LayerNorm")
    cast(model, fp16={"enabled": True})
    assert wide(model) == set()
    assert model(torch.arange(3)).dtype == torch.float16


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (["LayerNorn"], "did you mean 'LayerNorm'"),
        (["re:("], "is not a regular expression"),
        (["blocks.7"], "matches no module"),
    ],
)
def test_patterns_that_mean_nothing(patterns, message):
    with pytest.raises(ConfigError, match="fp16_override_modules") as refusal:
        keep_in_fp32(Model(), patterns, torch.float16)
    assert message in str(refusal.value)


def test_a_shared_parameter_is_kept_in_all_its_modules_or_in_none():
    model = Model()
    model.head.weight = model.embed.weight
    with pytest.raises(ConfigError, match="'weight' of 'head', which is not in the list; list both modules"):
        keep_in_fp32(model, ["embed"], torch.float16)
    assert keep_in_fp32(model, ["embed", "head"], torch.float16) == {model.embed.weight, model.head.bias}


Pair = namedtuple("Pair", "x y")


def test_casting_reaches_into_nested_values_and_leaves_the_rest():
    whole = torch.arange(3)
    flag = torch.tensor([True])
    values = {
        "a": [torch.ones(2), (torch.ones(1, dtype=torch.float64), whole)],
        "b": Pair(flag, "text"),
        "c": None,
    }
    found = cast_floating(values, torch.float16)
    assert found["a"][0].dtype == found["a"][1][0].dtype == torch.float16
    assert (
        found["a"][1][1] is whole and found["b"].x is flag and found["b"].y == "text" and found["c"] is None
    )
    assert isinstance(found["b"], Pair) and values["a"][0].dtype == torch.float32


class Gate(nn.Module):
    _keep_in_fp32_modules_strict = ("score_*_bias",)
    _keep_in_fp32_modules = ("rotary",)

    def __init__(self):
        super().__init__()
        for name in ("score_correction_bias", "rotary", "other"):
            self.register_buffer(name, torch.ones(2))


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.rotary = nn.Module()
        self.rotary.register_buffer("angle", torch.ones(2))
        self.gate = Gate()


def buffers(patterns, dtype):
    model = Gated()
    kept = fp32_buffers(model, patterns, dtype)
    return {name for name, buffer in model.named_buffers() if any(buffer is each for each in kept)}


@pytest.mark.parametrize(
    ("patterns", "dtype", "expected"),
    [
        (None, torch.float16, {"gate.score_correction_bias", "gate.rotary"}),
        (None, torch.bfloat16, {"gate.score_correction_bias"}),
        (None, torch.float32, set()),
        ([], torch.float16, set()),
        (["rotary"], torch.bfloat16, {"gate.rotary", "rotary.angle"}),
        (["gate*other"], torch.float16, {"gate.other"}),
    ],
)
def test_buffers_that_stay(patterns, dtype, expected):
    assert buffers(patterns, dtype) == expected


def test_buffers_that_stay_are_widened_and_not_cast():
    model = Gated()
    model.gate.other.data = model.gate.other.data.half()
    types = {"buffer_dtype": "bf16", "keep_in_fp32_modules": ["gate"]}
    cast(model, fp16={"enabled": True}, data_types=types)
    found = {name: buffer.dtype for name, buffer in model.named_buffers()}
    assert found.pop("rotary.angle") == torch.bfloat16
    assert set(found.values()) == {torch.float32}

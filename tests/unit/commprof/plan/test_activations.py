"""Test the activations of a plan against hand-computed sums, and the cases that cannot be counted."""

from __future__ import annotations

import json
import sys

import pytest

from commprof.cli import execute
from commprof.plan.memory.activations import activations_of
from commprof.plan.models import read_model, sized_model
from commprof.requested.parallel.axes import axes_of_config

SOURCE = """
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

TOKENS, WIDTH = 64, 32

class Layers(nn.Module):
    def __init__(self, recompute):
        super().__init__()
        self.recompute = recompute
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.Tanh(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(4)
        )

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
        return x.sum()

def layers(micro_batch, sequence=TOKENS):
    return Layers(False), torch.randn(micro_batch, sequence, WIDTH)

def recomputed(micro_batch):
    return Layers(True), (torch.randn(micro_batch, TOKENS, WIDTH),)

def tokens():
    return nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 10))

def by_values():
    class Branch(nn.Linear):
        def forward(self, x):
            return super().forward(x) if x.sum() > 0 else x
    return Branch(4, 4), torch.randn(2, 4)

def leaves():
    class Leaves(nn.Linear):
        def forward(self, x):
            raise SystemExit("usage")
    return Leaves(4, 4), torch.randn(2, 4)

def of_a_length(sequence):
    return nn.Embedding(sequence, 4)
"""
ONE = {"train_micro_batch_size_per_gpu": 1}


@pytest.fixture
def source(tmp_path, monkeypatch):
    (tmp_path / "planned_passes.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "planned_passes", raising=False)
    return tmp_path


def found(function, config=ONE, sequence=None):
    model = read_model(f"py:planned_passes:{function}", sequence=sequence)
    return activations_of(config, model, axes_of_config(config, 1), sequence)


def layer_bytes(item, tokens=64, width=32):
    """Return the activation bytes of one layer.

    A layer keeps its input and the output of tanh. tanh keeps its output and not its input.
    """
    return tokens * width * (1 + 4) * item


def test_what_a_pass_keeps_by_hand(source):
    activations, reason = found("layers")
    assert reason == ""
    spans = {each.parameter: each.most for each in activations.spans}
    # All four layers are alive, with the last output, its gradient and that of the last tanh, the gradient of
    # the bias, and two sums.
    output, inner, bias, sums = 64 * 32 * 4, 64 * 4 * 32 * 4, 32 * 4, 2 * 4
    assert spans["layers.3.2.bias"] == 4 * layer_bytes(4) + 2 * output + inner + bias + sums
    assert list(spans)[:4] == [f"layers.3.{name}" for name in ("2.bias", "2.weight", "0.bias", "0.weight")]
    # When the gradient of the first weight is complete, the gradient of the first layer's output has already
    # been used.
    assert spans["layers.0.0.weight"] < 2 * layer_bytes(4)


@pytest.mark.parametrize(
    ("config", "factor"),
    [
        ({"train_micro_batch_size_per_gpu": 3}, 3),
        ({"train_batch_size": 8, "gradient_accumulation_steps": 4}, 2),
        ({**ONE, "bf16": {"enabled": True}}, 0.5),
    ],
)
def test_micro_batch_and_element_type_of_the_config(source, config, factor):
    assert found("layers", config)[0].most_bytes == pytest.approx(
        factor * found("layers")[0].most_bytes, rel=0.03
    )


def test_a_model_that_checkpoints_keeps_the_inputs_of_its_layers(source):
    kept, recomputed = found("layers")[0], found("recomputed")[0]
    # While one layer is recomputed, the three other layers keep no output of their tanh.
    assert kept.most_bytes - recomputed.most_bytes == 3 * 64 * 4 * 32 * 4


def test_token_ids_are_the_input_where_a_sequence_is_given(source):
    activations, _ = found("tokens", sequence=16)
    assert activations.most_bytes > 16 * (8 + 10) * 4
    assert found("tokens") == (
        None,
        "give --sequence if its input is token ids, or let the function return (model, inputs)",
    )


def test_a_model_of_transformers_needs_a_sequence_and_no_function(source):
    # Models of the form hf: have this flag.
    model = read_model("py:planned_passes:tokens")._replace(from_sequence=True)
    assert activations_of(ONE, model, axes_of_config(ONE, 1), None) == (None, "give --sequence")


def test_what_cannot_be_counted_says_why(source):
    assert found("by_values")[1].startswith("Branch raised DataDependentOutputException: ")
    assert found("layers", {})[1] == "the config sets no train_micro_batch_size_per_gpu"
    model = sized_model(10**6, None)
    assert activations_of(ONE, model, axes_of_config(ONE, 1), None) == (None, "give --sequence")


def test_a_forward_pass_that_exits_does_not_end_the_command(source):
    activations, reason = found("leaves")
    assert activations is None and reason.startswith("Leaves raised SystemExit: usage")


def test_the_formula_of_a_known_model():
    """The paper's model of 22e9 parameters has 48 layers of width 6144, 2048 tokens and micro-batch 4."""
    model = sized_model(48 * 12 * 6144**2, 48)
    config = {"train_micro_batch_size_per_gpu": 4, "bf16": {"enabled": True}}
    whole = 48 * 34 * 2048 * 4 * 6144
    activations, _ = activations_of(config, model, axes_of_config(config, 8), 2048)
    assert activations.most_bytes == pytest.approx(whole, rel=1e-6)
    shared = {**config, "tp_size": 8}
    activations, _ = activations_of(shared, model, axes_of_config(shared, 8), 2048)
    assert activations.most_bytes == pytest.approx(whole * (10 + 24 / 8) / 34, rel=1e-6)
    # The first of 8 stages keeps 8 micro-batches of 6 layers, which equals one micro-batch of 48 layers.
    piped = {**config, "pipeline": {"stages": 8}}
    activations, _ = activations_of(piped, model, axes_of_config(piped, 8), 2048)
    assert activations.most_bytes == pytest.approx(whole, rel=1e-6)
    assert len(activations.spans) == 6 * 4 + 1


def test_they_are_a_part_of_the_memory(source, tmp_path, capsys):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(ONE))
    words = ["plan", str(path), "--model", "py:planned_passes:layers", "--device-memory", "1GiB"]
    assert execute(words) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert (
        "activations 224 KiB" in shown and "of one traced pass" in shown and "before activations" not in shown
    )
    assert execute([*words, "--json"]) == 0
    memory = json.loads(capsys.readouterr().out)["settings"][0]["memory_bytes_per_rank"]
    assert memory["parts"]["activations"]["device"] == found("layers")[0].most_bytes
    # 33,408 parameters, two states of Adam, the gradients, and the buffer from which the gradients are sent.
    assert memory["peak"] == {"device": 33_408 * 4 * 5, "phase": "gradient reduction"}
    assert execute([*words[:2], "--model", "params:1e6", "--set", "zero_optimization.stage=1,2"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "Activations are not counted: give --sequence." in shown and "before activations" in shown
    assert execute([*words[:2], "--model", "py:planned_passes:of_a_length"]) == 2
    assert "of_a_length() has a parameter sequence; give --sequence" in capsys.readouterr().err

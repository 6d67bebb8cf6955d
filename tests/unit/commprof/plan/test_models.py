"""Test the sources of the parameters of a planned model, and the models that are refused."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import multiprocessing
import sys
import traceback

import pytest
import torch  # noqa: F401 # once, for all forks

from commprof.errors import CommprofError, UsageError
from commprof.plan import models
from commprof.plan.memory.activations import activations_of
from commprof.plan.models import read_model
from commprof.requested.parallel.axes import axes_of_config

SOURCE = """
from torch import nn

not_a_function = 3

def model():
    tied = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 8), nn.Linear(8, 10))
    tied[2].weight = tied[0].weight
    tied[1].bias.requires_grad_(False)
    return tied

def fails():
    raise ValueError("no data\\nset")

def exits():
    raise SystemExit("usage")

def number():
    return 3

def prints():
    print("building")
    return nn.Linear(2, 2)

def lazy():
    return nn.LazyLinear(8)

def empty():
    return nn.ReLU()

class Embedding(nn.Embedding):
    pass

def namesake():
    replaced = nn.Embedding(4, 2)
    replaced.forward = lambda places: replaced.weight[places]
    return nn.Sequential(Embedding(4, 2), nn.Embedding(4, 2), replaced)
"""


@pytest.fixture
def source(tmp_path, monkeypatch):
    (tmp_path / "planned_source.py").write_text(SOURCE)
    (tmp_path / "planned_broken.py").write_text("import no_such_package_here\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("planned_source", "planned_broken"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def test_a_function_is_called_on_the_meta_device(source):
    found = read_model("py:planned_source:model")
    assert [(each.name, each.shape, each.requires_grad, each.owner_types) for each in found.parameters] == [
        ("0.weight", "10x8", True, "Embedding;Linear"),
        ("1.weight", "8x8", True, "Linear"),
        ("1.bias", "8", False, "Linear"),
        ("2.bias", "10", True, "Linear"),
    ]
    assert found.numel == 162 and found.layers is None
    assert "4 tensors of 3 modules, 8 of them frozen" in found.source


def test_what_shares_its_name_with_a_class_of_torch_is_told_apart(source):
    found = read_model("py:planned_source:namesake")
    assert [each.owner_types for each in found.parameters] == [
        "Embedding,planned_source.Embedding",
        "Embedding",
        "Embedding,torch.nn.modules.sparse.Embedding",
    ]


def test_what_a_function_prints_is_not_part_of_the_answer(source, capsys):
    assert read_model("py:planned_source:prints").numel == 6
    shown = capsys.readouterr()
    assert shown.out == "" and "building" in shown.err


def test_a_size_alone_gives_equal_layers():
    found = read_model("params:1.2M", 4)
    assert (found.numel, found.layers, len(found.parameters)) == (1_200_000, 4, 16)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("7e9", "--model is '7e9'; expected params:175e9, py:module:function, hf:CONFIG_DIR or run:RUN"),
        ("onnx:x", "expected params:175e9"),
        ("py:", "expected params:175e9"),
        ("params:many", "--model params:N is 'many'"),
        ("py:planned_source", "expected py:module:function"),
        ("py:planned_absent:model", "there is no module 'planned_absent'"),
        ("py:planned_broken:model", "importing planned_broken raised ModuleNotFoundError"),
        ("py:planned_source:gone", "has no such name"),
        ("py:planned_source:not_a_function", "has a int of that name"),
        (
            "py:planned_source:fails",
            r"fails\(\) raised ValueError: no data set; a model is built on the meta",
        ),
        ("py:planned_source:exits", "raised SystemExit: usage"),
        ("py:planned_source:number", "returned an object of type int; expected a torch.nn.Module"),
        ("py:planned_source:empty", "ReLU has no parameters"),
        (
            "py:planned_source:lazy",
            "reading the parameters raised .*; give all sizes when the model is built",
        ),
        ("py:builtins:dict", "returned an object of type dict; expected a torch.nn.Module"),
        ("hf:absent", "absent is not a directory"),
        ("run:", "expected params:175e9"),
        ("hf:.", "has no config.json"),
    ],
)
def test_refused_in_one_line(source, text, message):
    with pytest.raises(UsageError, match=message) as caught:
        read_model(text)
    assert "\n" not in str(caught.value)


def test_layers_belong_to_a_size(source):
    with pytest.raises(UsageError, match="--layers 3 is for --model params:N"):
        read_model("py:planned_source:model", 3)


def test_without_transformers_it_says_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setattr(models.os, "environ", {})
    with pytest.raises(CommprofError, match="transformers is not installed; install it with pip"):
        read_model(f"hf:{tmp_path}")


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            {
                "model_type": "gpt2",
                "n_layer": 2,
                "n_embd": 64,
                "n_head": 4,
                "vocab_size": 100,
                "n_positions": 32,
            },
            # The tensors are two embeddings, two blocks of 12 tensors, and the last norm. lm_head is tied to
            # the embedding.
            (
                "GPT2LMHeadModel, 108,544 parameters in 28 tensors",
                "parameter='transformer.wte.weight'",
                "None give --sequence\n",
            ),
        ),
        (
            {
                "model_type": "vit",
                "hidden_size": 32,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "intermediate_size": 64,
            },
            ("ViTModel, ", "None ViTModel raised AttributeError: "),
        ),
        ({"model_type": "no_such_type"}, ("transformers raised ValueError",)),
    ],
)
def test_a_transformers_config_needs_no_weights(tmp_path, config, words):
    """The config is read in a fork that has already imported torch.

    transformers takes seconds to import and changes the environment.
    """
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    (tmp_path / "config.json").write_text(json.dumps(config))
    child = multiprocessing.get_context("fork").Process(target=_say_activations, args=(tmp_path,))
    child.start()
    child.join(120)
    child.kill()  # This ends a child that hangs.
    said = (tmp_path / "said").read_text()
    assert all(each in said for each in words), said


def _say_activations(path):
    """Write the source and the activations of the config in ``path`` to the file ``said``.

    If there are no activations, the reason is written.
    """
    with (
        (path / "said").open("w") as said,
        contextlib.redirect_stdout(said),
        contextlib.redirect_stderr(said),
    ):
        try:
            model = read_model(f"hf:{path}")
            print(model.source)
            config = {"train_micro_batch_size_per_gpu": 2}
            print(*activations_of(config, model, axes_of_config(config, 1), 16))
            print(*activations_of(config, model, axes_of_config(config, 1), None))
        except Exception:
            traceback.print_exc()

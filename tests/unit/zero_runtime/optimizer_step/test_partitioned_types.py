"""Test which parameters are never partitioned because of the classes of their modules."""

from __future__ import annotations

import pytest
import torch

from zero_runtime.config import RuntimeConfig
from zero_runtime.errors import ConfigError
from zero_runtime.optimizer_step.partitioned_types import PartitionedTypes, whole_parameters


class Mine(torch.nn.Linear):
    """A user-defined class that derives from a known class."""


class Model(torch.nn.Module):
    """A model with its own parameter, two kinds of layers, and tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(1))
        self.embedding = torch.nn.Embedding(4, 3)
        self.norm = torch.nn.LayerNorm(3)
        self.linear = torch.nn.Linear(3, 3)
        self.mine = Mine(3, 3, bias=False)
        self.head = torch.nn.Linear(3, 4, bias=False)
        self.head.weight = self.embedding.weight


def whole(**types):
    model = Model()
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {names[parameter] for parameter in whole_parameters(model, PartitionedTypes(**types))}


@pytest.mark.parametrize(
    ("types", "names"),
    [
        ({}, set()),
        ({"whole": ("LayerNorm",)}, {"norm.weight", "norm.bias"}),
        ({"whole": ("Mine",)}, {"mine.weight"}),
        ({"whole": ("Linear",)}, {"linear.weight", "linear.bias", "mine.weight", "embedding.weight"}),
        ({"allowed": ("Linear",)}, {"scale", "norm.weight", "norm.bias"}),
        ({"allowed": ("Linear",), "whole": ("Embedding",)}, {"scale", "norm.weight", "norm.bias", "embedding.weight"}),
        ({"allowed": ("Mine", "Model")}, {"linear.weight", "linear.bias", "norm.weight", "norm.bias", "embedding.weight"}),
    ],
)  # fmt: skip
def test_classes_and_those_that_derive_from_them(types, names):
    assert whole(**types) == names


def test_nothing_is_partitioned_where_no_class_is_allowed():
    assert len(whole(allowed=())) == len(list(Model().parameters()))


@pytest.mark.parametrize("key", ["allowed", "whole"])
def test_a_class_that_the_model_has_not_is_an_error_that_names_the_nearest(key):
    with pytest.raises(
        ConfigError, match=r"'LayerNrom'.*did you mean 'LayerNorm'\?.*Embedding, LayerNorm, Linear"
    ):
        whole(**{key: ("LayerNrom",)})


def test_a_class_in_both_keys_is_an_error():
    zero = {"stage": 3, "zero_allowed_param_types": ["Linear"], "zero_force_param_types": ["Linear"]}
    with pytest.raises(ConfigError, match=r"Linear is in zero_optimization\.zero_allowed"):
        RuntimeConfig.from_mapping({"train_batch_size": 2, "zero_optimization": zero}, 2)


def test_stage_0_says_that_it_partitions_nothing():
    zero = {"stage": 0, "zero_force_param_types": ["Linear"]}
    config = RuntimeConfig.from_mapping({"train_batch_size": 2, "zero_optimization": zero}, 2)
    assert any("no effect at stage 0" in notice for notice in config.notices)

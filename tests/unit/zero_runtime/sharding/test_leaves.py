"""Test which modules stage 3 gathers as one unit."""

from __future__ import annotations

import pytest
from torch import nn

from zero_runtime.errors import ConfigError
from zero_runtime.sharding.gather_schedule.leaves import (
    flag_configured,
    flag_fine,
    get_z3_leaf_modules,
    is_leaf,
    set_z3_leaf_module,
    set_z3_leaf_modules,
    unset_z3_leaf_modules,
)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(2), Block(4)])
        self.head = nn.Linear(40, 40)


def names(model):
    return [name for name, module in model.named_modules() if is_leaf(module)]


@pytest.mark.parametrize("wanted", [Block, "Block", f"{Block.__module__}.Block"])
def test_classes_by_type_and_by_name(wanted):
    model = Model()
    assert set_z3_leaf_modules(model, [wanted]) == list(model.blocks)
    assert get_z3_leaf_modules(model) == list(model.blocks)
    assert unset_z3_leaf_modules(model, [wanted]) == list(model.blocks)
    assert names(model) == []


def test_class_that_is_not_there():
    with pytest.raises(ConfigError, match="no module of class Absent in the model"):
        set_z3_leaf_modules(Model(), ["Absent"])
    assert set_z3_leaf_modules(Model(), ["Absent"], raise_if_not_found=False) == []


def test_neither_class_nor_name():
    with pytest.raises(ConfigError, match="expected classes, or names of classes"):
        set_z3_leaf_modules(Model(), [3])


def test_one_module():
    model = Model()
    set_z3_leaf_module(model.blocks[1], True)
    assert names(model) == ["blocks.1"]


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        ({"classes": ["Block", "transformers.Absent"]}, ["blocks.0", "blocks.1"]),
        ({"names": ["blocks.1", "absent"]}, ["blocks.1"]),
        ({"suffixes": ["s.0", "head"]}, ["blocks.0", "head"]),
        ({}, []),
    ],
)
def test_configured(block, expected):
    model = Model()
    flag_configured(model, block.get("classes", ()), block.get("names", ()), block.get("suffixes", ()))
    assert names(model) == expected


@pytest.mark.parametrize(
    ("granularity", "expected"),
    [
        # The elements per layer: the blocks have 2 x 6 / 3 and 2 x 20 / 3, and the model has (12 + 40 + 1640)
        # / 8.
        (3, []),
        (4, ["blocks.0"]),
        (13, ["blocks.0", "blocks.1"]),
        (211, [""]),
        (210, ["blocks.0", "blocks.1"]),
    ],
)
def test_granularity(granularity, expected):
    model = Model()
    flag_fine(model, granularity)
    assert names(model) == expected

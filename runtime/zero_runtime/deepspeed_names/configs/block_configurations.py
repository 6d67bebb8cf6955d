"""Blocks of the configuration as objects: ``deepspeed.runtime.zero.config``, ``offload_config``, ``leaf_module_config``
and ``precision_config``.

Each class takes the keys of its block as arguments, checks them in the same way as the whole configuration, and
sets all other keys to their defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, Final

from zero_runtime.configuration import all_keys
from zero_runtime.sharding.gather_schedule.leaves import DEFAULT_CLASSES

_PREFIX: Final = "stage3_"
_OLD_GATHER: Final = "stage3_gather_fp16_weights_on_model_save"


def namespace(block: Mapping[str, Any]) -> SimpleNamespace:
    """Return an object that has the keys of a block, and of the blocks within it, as attributes."""
    return SimpleNamespace(**_attributes(block))


def _attributes(block: Mapping[str, Any]) -> dict[str, Any]:
    return {name: namespace(value) if isinstance(value, Mapping) else value for name, value in block.items()}


class DeepSpeedZeroOffloadParamConfig(SimpleNamespace):
    """The block ``zero_optimization.offload_param``."""

    def __init__(self, **values: Any) -> None:
        super().__init__(**_offload("offload_param", values))


class DeepSpeedZeroOffloadOptimizerConfig(SimpleNamespace):
    """The block ``zero_optimization.offload_optimizer``.

    Attributes:
        pipeline: Whether reads or writes overlap the update of the optimizer.
    """

    def __init__(self, **values: Any) -> None:
        super().__init__(**_offload("offload_optimizer", values))
        self.pipeline = bool(self.pipeline_read or self.pipeline_write)


class DeepSpeedZeroLeafModuleConfig(SimpleNamespace):
    """The block ``zero_optimization.leaf_module``, which consists of lists of names."""

    def __init__(self, **values: Any) -> None:
        read = all_keys.read({"zero_optimization": {"stage": 3, "leaf_module": values}})
        block = read["zero_optimization"]["leaf_module"]
        super().__init__(**{name: list(value) for name, value in block.items()})
        if "classes" not in values:
            self.classes = list(DEFAULT_CLASSES)


class DeepSpeedZeroConfig(SimpleNamespace):
    """The block ``zero_optimization``. A key with the prefix ``stage3_`` is also an attribute without the prefix.

    Raises:
        ConfigError: A key does not exist, or a value cannot be used.
    """

    def __init__(self, **block: Any) -> None:
        values = all_keys.read({"zero_optimization": block})["zero_optimization"]
        if _OLD_GATHER in block:
            values[f"{_PREFIX}gather_16bit_weights_on_model_save"] = block[_OLD_GATHER]
        for name in [name for name in values if name.startswith(_PREFIX)]:
            short = name.removeprefix(_PREFIX)
            if short in values:
                values[name] = values[short] = values[short] if short in block else values[name]
        if values["overlap_comm"] is None:
            values["overlap_comm"] = values["stage"] == 3
        super().__init__(**_attributes(values))
        optimizer, parameters = block.get("offload_optimizer"), block.get("offload_param")
        if optimizer is None and block.get("cpu_offload"):
            optimizer = {"device": "cpu"}
        if parameters is None and block.get("cpu_offload_param"):
            parameters = {"device": "cpu"}
        self.offload_optimizer = (
            None if optimizer is None else DeepSpeedZeroOffloadOptimizerConfig(**optimizer)
        )
        self.offload_param = None if parameters is None else DeepSpeedZeroOffloadParamConfig(**parameters)
        self.leaf_module = DeepSpeedZeroLeafModuleConfig(**(block.get("leaf_module") or {}))


class DeepSpeedFP16Config(SimpleNamespace):
    """The block ``fp16``."""

    def __init__(self, **values: Any) -> None:
        super().__init__(**_attributes(all_keys.read({"fp16": values})["fp16"]))


class DeepSpeedBF16Config(SimpleNamespace):
    """The block ``bf16``."""

    def __init__(self, **values: Any) -> None:
        super().__init__(**_attributes(all_keys.read({"bf16": values})["bf16"]))


def get_zero_config(param_dict: Mapping[str, Any]) -> DeepSpeedZeroConfig:
    """Return the block ``zero_optimization`` of a whole configuration."""
    return DeepSpeedZeroConfig(**param_dict.get("zero_optimization", {}))


def get_float16_config(param_dict: Mapping[str, Any]) -> DeepSpeedFP16Config:
    """Return the block ``fp16`` of a whole configuration."""
    return DeepSpeedFP16Config(**param_dict.get("fp16", {}))


def get_bfloat16_config(param_dict: Mapping[str, Any]) -> DeepSpeedBF16Config:
    """Return the block ``bf16`` of a whole configuration. ``bfloat16`` is another name of this block."""
    return DeepSpeedBF16Config(**param_dict.get("bf16", param_dict.get("bfloat16", {})))


def _offload(name: str, values: Mapping[str, Any]) -> dict[str, Any]:
    read = all_keys.read({"zero_optimization": {"stage": 3, name: {"device": "none", **values}}})
    return _attributes(read["zero_optimization"][name])


DEFAULT_LEAF_MODULE_CLASSES: Final = list(DEFAULT_CLASSES)
DEFAULT_LEAF_MODULE_NAMES: Final[list[str]] = []
DEFAULT_LEAF_MODULE_NAME_SUFFIXES: Final[list[str]] = []

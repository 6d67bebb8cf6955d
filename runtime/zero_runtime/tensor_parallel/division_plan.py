"""Plans of tensor parallelism, which define which modules of a model are partitioned, and how."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any, Final, NamedTuple

from zero_runtime.configuration.blocks.parallel_block import ParallelConfig
from zero_runtime.errors import ConfigError

_PLAN: Final = "tensor_parallel.plan"
_PARTITION: Final = "tensor_parallel.partition_config"


class How(StrEnum):
    """The ways in which a module is partitioned."""

    COLUMN = "column"
    GATHERED = "column_gathered"
    ROW = "row"
    VOCABULARY = "vocabulary"
    LOSS = "loss"
    SEQUENCE = "sequence"
    SPLIT = "split"
    WHOLE = "whole"


class Rule(NamedTuple):
    """The partition of the modules that match a pattern.

    Attributes:
        pattern: The pattern, which matches qualified names of modules.
        how: The way in which these modules are partitioned.
        sections: For a column-parallel layer, the number of equal layers that are joined in it, or the number
            of outputs of each of these layers.
        pattern_text: The pattern as written in the configuration.
        of_parameter: Whether the pattern also matches the name of the module's weight.
    """

    pattern: re.Pattern[str]
    how: How
    sections: int | tuple[int, ...] = 1
    pattern_text: str = ""
    of_parameter: bool = False

    def names(self, module: str) -> bool:
        """Return whether the rule applies to the module with the name ``module``."""
        if self.of_parameter:
            return any(self.pattern.match(name) for name in (f"{module}.weight", module))
        return self.pattern.fullmatch(module) is not None


Plan = tuple[Rule, ...]


def plan_of(patterns: Mapping[str, Any]) -> Plan:
    """Return the plan of patterns such as ``{"blocks.*.qkv": "column:3", "blocks.*.projection": "row"}``.

    Args:
        patterns: Shell patterns of module names, each with a value of ``How``. In a pattern, * matches
            anything. "column:3" is a layer in which three equal layers are joined, and "column:64,16,16" a
            layer in which layers with these numbers of outputs are joined. The first pattern that matches is
            used.

    Raises:
        ConfigError: A value has none of these forms.
    """
    rules = []
    for pattern, entry in patterns.items():
        how, _, sections = str(entry).partition(":")
        if how not in set(How) or (sections and how not in (How.COLUMN, How.GATHERED)):
            raise ConfigError(
                f"{_PLAN}[{pattern!r}] is {entry!r}; expected one of {', '.join(How)}, where column may be followed by the "
                'layers that are joined in one: "column:3" or "column:64,16,16"'
            )
        compiled = re.compile(fnmatch.translate(pattern))
        rules.append(Rule(compiled, How(how), _sections(pattern, sections), pattern))
    return tuple(rules)


def _sections(pattern: str, text: str) -> int | tuple[int, ...]:
    if not text:
        return 1
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", text):
        raise ConfigError(
            f"{_PLAN}[{pattern!r}] ends with {text!r}; expected a number of equal sections, or their sizes: 64,16,16"
        )
    numbers = tuple(map(int, text.split(",")))
    return numbers[0] if len(numbers) == 1 else numbers


def plan_of_specifications(specifications: Mapping[str, Any]) -> Plan:
    """Return the plan of DeepSpeed's ``partition_config``.

    Its layer_specs contain patterns, partition_type, shape and gather_output.

    Args:
        specifications: The block. Its patterns are regular expressions that match the start of parameter names.

    Raises:
        ConfigError: A key, a type or a shape is unknown.
    """
    unknown = set(specifications) - {"layer_specs", "use_default_specs", "strict_mode", "tp_size"}
    if unknown:
        raise ConfigError(
            f"{_PARTITION} has {', '.join(sorted(unknown))}; expected layer_specs and use_default_specs, or use {_PLAN}"
        )
    rules: list[Rule] = []
    for number, spec in enumerate(specifications.get("layer_specs") or ()):
        where = f"{_PARTITION}.layer_specs[{number}]"
        strange = set(spec) - {"patterns", "partition_type", "shape", "partition_dim", "gather_output"}
        if strange:
            raise ConfigError(
                f"{where} has {', '.join(sorted(strange))}; expected patterns, partition_type, shape, partition_dim and "
                "gather_output"
            )
        kinds = {"column": How.COLUMN, "row": How.ROW, "skip": How.WHOLE}
        kind = str(spec.get("partition_type", "column")).lower()
        if kind not in kinds:
            raise ConfigError(f"{where}.partition_type is {kind!r}; expected column, row or skip")
        how = How.GATHERED if kind == "column" and spec.get("gather_output") else kinds[kind]
        if spec.get("partition_dim") not in (None, 1 if how is How.ROW else 0):
            raise ConfigError(
                f"{where}.partition_dim is {spec['partition_dim']}; a {kind} layer is partitioned along "
                f"{1 if how is How.ROW else 0}"
            )
        for pattern in spec.get("patterns", ()):
            try:
                compiled = re.compile(pattern)
            except re.error as error:
                raise ConfigError(f"{where}: {pattern!r} is no regular expression: {error}") from None
            rules.append(Rule(compiled, how, _shape(where, how, spec.get("shape")), pattern, True))
    return tuple(rules)


def _shape(where: str, how: How, shape: Any) -> int | tuple[int, ...]:
    if shape is None:
        return 1
    first = shape[0] if isinstance(shape, list | tuple) and len(shape) == 2 and shape[1] == -1 else None
    if how is How.ROW or not isinstance(first, int | list | tuple) or first == -1:
        raise ConfigError(
            f"{where}.shape is {shape!r}; expected [n, -1] or [[outputs, outputs, ...], -1], for a column layer that "
            "joins several layers"
        )
    return first if isinstance(first, int) else tuple(map(int, first))


# The last parts of the names of linear layers in common models.
_ROWS: Final = (
    "o_proj", "out_proj", "down_proj", "c_proj", "proj", "projection", "contract", "fc2", "fc_out", "w2", "wo", "linear2",
    "lin2", "dense_4h_to_h", "self_attention.dense", "attention.dense", "attention.output.dense", "output.dense", "dense_2",
)  # fmt: skip
_COLUMNS: Final = (
    "q_proj", "k_proj", "v_proj", "up_proj", "gate_proj", "fc1", "fc_in", "c_fc", "expand", "w1", "w3", "wi", "wi_0", "wi_1",
    "wq", "wk", "wv", "query", "key", "value", "linear1", "lin1", "dense_h_to_4h", "intermediate.dense", "query_key_value",
    "dense_1",
)  # fmt: skip
_JOINED: Final = {"qkv": 3, "qkv_proj": 3, "c_attn": 3, "in_proj": 3, "Wqkv": 3, "gate_up_proj": 2}


def automatic_plan() -> Plan:
    """Return the plan for common names of layers, which partitions only linear layers."""
    rules = [(name, How.ROW, 1) for name in _ROWS] + [(name, How.COLUMN, 1) for name in _COLUMNS]
    rules += [(name, How.COLUMN, sections) for name, sections in _JOINED.items()]
    return tuple(
        Rule(re.compile(rf"(?:.*\.)?{re.escape(name)}"), how, sections, name) for name, how, sections in rules
    )


def configured_plan(config: ParallelConfig, own: Mapping[str, Any] | None) -> tuple[Plan, bool]:
    """Return the plan for a model, and whether modules that it cannot partition are skipped without an error.

    The plan of the configuration has priority over the model's own plan, and this over the automatic plan.

    Args:
        config: The parallel keys.
        own: The model's own plan.
    """
    if config.plan:
        return plan_of(config.plan), False
    if config.partition_config:
        plan = plan_of_specifications(config.partition_config)
        if config.partition_config.get("use_default_specs", True):
            return (*plan, *automatic_plan()), True
        return plan, False
    return (plan_of(own), False) if own else (automatic_plan(), True)


def first_rule(plan: Iterable[Rule], module: str) -> Rule | None:
    """Return the first rule that applies to ``module``, or None if no rule applies."""
    return next((rule for rule in plan if rule.names(module)), None)


def unused(plan: Sequence[Rule], modules: Iterable[str]) -> list[str]:
    """Return the patterns that are not the first matching pattern of any module."""
    used = {first_rule(plan, name) for name in modules}
    return [rule.pattern_text for rule in plan if rule not in used]

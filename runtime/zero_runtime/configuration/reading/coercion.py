"""Conversion of values to the types of their keys, as in DeepSpeed 0.19.8.

DeepSpeed reads most blocks with pydantic. This step drops keys whose value is ``"auto"``, and converts strings,
numbers and booleans into each other. DeepSpeed reads the top level and the blocks of :data:`UNCHECKED` without
checks. There, it ignores unknown keys and uses Python's truth value for booleans. This runtime differs only for
strings: ``"false"`` is false.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from zero_runtime.configuration.reading.checks import COMMENTS, boolean
from zero_runtime.configuration.reading.key_table import Table

AUTO: Final = "auto"
# Blocks whose names and types DeepSpeed does not check.
UNCHECKED: Final = frozenset(
    {
        "",
        "optimizer",
        "scheduler",
        "data_types",
        "torch_autocast",
        "checkpoint",
        "checkpoint.parallel_write",
        "flops_profiler",
        "activation_checkpointing",
        "pipeline",
        "aio",
        "autotuning",
        "data_efficiency",
        "timers",
    }
)
# Blocks that DeepSpeed does not have. Values are converted as in DeepSpeed's blocks, and "auto" is never dropped.
_OWN: Final = ("gradient_compression", "pipeline_parallel", "communication")
# Blocks whose values DeepSpeed uses only if the feature is enabled, so that "auto" and null have no effect.
_UNUSED: Final = frozenset(
    {
        "flops_profiler",
        "activation_checkpointing",
        "pipeline",
        "aio",
        "autotuning",
        "data_efficiency",
        "checkpoint",
    }
)
_AUTO_AT_TOP: Final = frozenset({"csv_monitor", "tensorboard", "wandb", "comet", "timers"})
_NULL_AT_TOP: Final = frozenset({"bf16", "seq_parallel_communication_data_type"})


def is_comment(block: str, name: str) -> bool:
    """Return whether an unknown key is a comment. DeepSpeed ignores comments in the blocks that it does not check."""
    return (block in UNCHECKED or block.startswith(_OWN)) and name.lower().startswith(COMMENTS)


def coerced(
    document: Mapping[str, Any], blocks: Mapping[str, Table], notices: list[str] | None = None
) -> dict[str, Any]:
    """Return ``document`` with values converted to the types of their keys, and without comments.

    Values that are ``"auto"`` are also dropped, unless their keys accept ``"auto"`` or DeepSpeed keeps them.

    Args:
        document: A complete configuration.
        blocks: The tables of all blocks, by the full name of the block. The name of the top level is ``""``.
        notices: A list to which one line about dropped values and one line about converted values are added.
    """
    dropped: list[str] = []
    converted: list[str] = []
    values = _coerced("", document, blocks, dropped, converted)
    if notices is not None and dropped:
        notices.append(
            f'{", ".join(dropped)}: nothing replaced "auto", so the default is used, as in DeepSpeed'
        )
    if notices is not None and converted:
        notices.append(f"read as DeepSpeed does, and better written so: {', '.join(converted)}")
    return values


def _coerced(
    block: str,
    block_values: Mapping[str, Any],
    blocks: Mapping[str, Table],
    dropped: list[str],
    converted: list[str],
) -> dict[str, Any]:
    table, values = blocks[block], {}
    for name, value in block_values.items():
        full = f"{block}.{name}" if block else name
        if name not in table:
            if not is_comment(block, name):
                values[name] = value
            continue
        check = table[name].check
        if isinstance(value, Mapping) and full in blocks:
            values[name] = _coerced(full, value, blocks, dropped, converted)
        elif block in UNCHECKED and check is boolean:
            values[name] = _truth(check.coerce(value))
            if values[name] is not value and not isinstance(value, int | None):
                converted.append(f"{full} {value!r} as {_written(values[name])}")
        elif (
            value == AUTO
            and AUTO not in check.expected
            and not block.startswith(_OWN)
            and (block not in UNCHECKED or _may_be_auto(block, name))
        ):
            dropped.append(full)
        elif value is None and "null" not in check.expected and (block in _UNUSED or full in _NULL_AT_TOP):
            continue
        else:
            values[name] = check.coerce(value)
            if isinstance(value, str) and values[name] is not value:
                converted.append(f"{full} {value!r} as {_written(values[name])}")
    return values


def _may_be_auto(block: str, name: str) -> bool:
    return block in _UNUSED or (not block and name in _AUTO_AT_TOP)


def _truth(value: Any) -> bool:
    return value if isinstance(value, bool) else bool(value)


def _written(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)

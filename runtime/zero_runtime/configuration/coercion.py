"""Values of another type than their key has, read as DeepSpeed 0.19.8 reads them.

DeepSpeed reads most blocks with pydantic, which drops keys whose value is ``"auto"`` and converts strings, numbers and
booleans into each other. It reads the top level and the blocks of :data:`UNCHECKED` without a check: unknown keys are
ignored, and a boolean is whatever Python takes for true. There only words are read otherwise here: ``"false"`` is false.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from zero_runtime.configuration.checks import COMMENTS, boolean
from zero_runtime.configuration.key_table import Table

AUTO: Final = "auto"
# Blocks of which DeepSpeed checks neither names nor types.
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
# Blocks that DeepSpeed does not have: they are taken as they are, but for comments.
_OWN: Final = ("gradient_compression", "pipeline_parallel", "communication")
# Of these it uses a value only where the part is switched on, so that "auto" and null do no harm.
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
    """Whether a key that is in no table is a comment, which DeepSpeed ignores in the blocks that it does not check."""
    return (block in UNCHECKED or block.startswith(_OWN)) and name.lower().startswith(COMMENTS)


def coerced(
    document: Mapping[str, Any], blocks: Mapping[str, Table], notices: list[str] | None = None
) -> dict[str, Any]:
    """``document`` with each value of the type that its key has, without comments and without what ``"auto"`` leaves open.

    Args:
        document: a whole configuration.
        blocks: the tables of all blocks by their full names; the top level is ``""``.
        notices: one line is added for what was left out, and one for what was converted.
    """
    dropped: list[str] = []
    converted: list[str] = []
    values = _coerced("", document, blocks, dropped, converted)
    if notices is not None and dropped:
        notices.append(
            f'{", ".join(dropped)}: "auto" was filled in by nobody, so the default is used, as in DeepSpeed'
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
        elif block.startswith(_OWN):
            values[name] = value
        elif block in UNCHECKED and check is boolean:
            values[name] = _truth(check.coerce(value))
            if values[name] is not value and not isinstance(value, int | None):
                converted.append(f"{full} {value!r} as {_written(values[name])}")
        elif (
            value == AUTO
            and AUTO not in check.expected
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

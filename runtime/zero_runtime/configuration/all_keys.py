"""All keys of the DeepSpeed 0.19.8 configuration, and how this version treats them. docs/config.md is generated
from them.

``USED`` keys have an effect. ``INERT`` keys have no effect at stages 0 to 3, here and in DeepSpeed, and only
their values are checked. ``LATER`` keys belong to features that this version does not have, and values that
enable such a feature are refused. ``WAITING`` keys are other keys of these features, and their values are
checked. ``REFUSED`` keys are refused with a reason, mostly as in DeepSpeed. At every level, a key that is in no
table raises an error that names the most similar key.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Final

from zero_runtime.configuration.feature_keys import FEATURES
from zero_runtime.configuration.precision_keys import BF16, DATA_TYPES, DTYPES, FP16, TORCH_AUTOCAST
from zero_runtime.configuration.reading import key_table
from zero_runtime.configuration.reading.checks import (
    Check,
    anything,
    boolean,
    choice,
    choice_of_any_case,
    coerced_number,
    integer,
    mapping,
    number,
    optional,
    strings,
    text,
    unknown_key,
    unlimited,
)
from zero_runtime.configuration.reading.coercion import coerced
from zero_runtime.configuration.reading.key_table import Key, Status, Table, inert, inside, refused, used
from zero_runtime.configuration.zero_keys import ZERO
from zero_runtime.errors import ConfigError

__all__ = ["BLOCKS", "Key", "Status", "Table", "inert_keys", "read", "stage_3_only"]


def _sum_or_mean(name: str, value: Any) -> str:
    lowered = value.lower() if isinstance(value, str) else value
    if lowered not in ("mean", "sum"):
        raise ConfigError(f"Invalid {name}: {value!r}; expected mean or sum")
    return str(lowered)


_CLIPPING: Final = Check(
    "number >= 0 or null",
    lambda name, value: 0.0 if value is None else number(0.0, math.inf)(name, value),
    coerce=coerced_number,
)
_SUM_OR_MEAN: Final = Check("`mean` or `sum`", _sum_or_mean)
_ARGUMENTS: Final = Check("object or null", lambda name, value: {} if value is None else mapping(name, value))

OPTIMIZER: Final[Table] = {
    "type": used(
        text,
        None,
        "the optimizer: Adam, AdamW, Adagrad, Lamb, Lion, Muon, OneBitAdam, OneBitLamb, ZeroOneAdam, or "
        "the name of a class in torch.optim",
    ),
    "params": used(_ARGUMENTS, {}, "the arguments of the optimizer, described in docs/optimizers.md"),
    "legacy_fusion": inert(
        boolean, False, "how a fused Lamb optimizer is wrapped", "Lamb is wrapped in one way only"
    ),
}

SCHEDULER: Final[Table] = {
    "type": used(
        text,
        None,
        "the name of a DeepSpeed schedule or of a class in torch.optim.lr_scheduler",
    ),
    "params": used(mapping, {}, "the arguments of the schedule"),
}

TOP: Final[Table] = {
    "train_batch_size": used(
        optional(integer(1)),
        None,
        "the number of samples in a training step, over all ranks. It is the product of the next two keys "
        "and the number of data-parallel ranks",
    ),
    "train_micro_batch_size_per_gpu": used(
        optional(integer(1)), None, "the number of samples in a micro-batch on one rank"
    ),
    "gradient_accumulation_steps": used(
        optional(integer(1)), None, "the number of micro-batches in a training step"
    ),
    "managed_gradient_accumulation": used(
        boolean,
        True,
        "count micro-batches, so that step() updates the parameters once per training step. If false, "
        "every call of step() updates the parameters",
    ),
    "optimizer": used(
        optional(inside(OPTIMIZER)), None, "the optimizer to use if initialize receives no optimizer"
    ),
    "scheduler": used(
        optional(inside(SCHEDULER)),
        None,
        "the learning-rate schedule to use if initialize receives no schedule",
    ),
    "zero_optimization": used(
        inside(ZERO),
        {},
        "what is sharded, and how. The value true, instead of an object, is an old form of stage 1",
    ),
    "fp16": used(inside(FP16), {}, "train in fp16"),
    "fp16_override_modules": used(
        optional(strings),
        None,
        "patterns for the names or classes of modules. The modules that match stay in fp32. Not a key of "
        "DeepSpeed",
    ),
    "bf16": used(inside(BF16), {}, "train in bf16"),
    "bfloat16": used(inside(BF16), {}, "the old name of bf16"),
    "data_types": used(inside(DATA_TYPES), {}, "the dtypes of parameters, buffers and accumulated gradients"),
    "torch_autocast": used(inside(TORCH_AUTOCAST), {}, "train under torch.autocast"),
    "zero_allow_untested_optimizer": used(
        boolean, False, "allow sharding with optimizers that DeepSpeed has not tested"
    ),
    "gradient_clipping": used(
        _CLIPPING, 1.0, "the largest allowed norm of the gradients. The value 0 or null disables clipping"
    ),
    "prescale_gradients": used(
        boolean, False, "divide gradients by the number of ranks before they are summed"
    ),
    "gradient_predivide_factor": used(
        number(),
        1.0,
        "divide gradients by this number before they are summed, and multiply the sum by this number. The "
        "division by the number of ranks is separate",
    ),
    "gradient_allreduce_op": used(
        _SUM_OR_MEAN, "mean", "whether gradients are averaged or summed over the ranks"
    ),
    "communication_data_type": used(
        optional(choice_of_any_case(*DTYPES)),
        None,
        "the dtype in which gradients are sent. With null, it is the dtype of the model",
    ),
    "disable_allgather": used(
        boolean,
        False,
        "stages 1 and 2: each rank broadcasts its shard of the updated parameters, instead of an all_gather",
    ),
    "steps_per_print": used(
        optional(unlimited(integer(1))),
        None,
        "the number of steps between two printed lines. With inf, no lines are printed",
    ),
    "dataloader_drop_last": used(boolean, False, "drop the last batch of the data if it is not full"),
    "wall_clock_breakdown": used(boolean, False, "print the time of each part of a step"),
    "memory_breakdown": used(boolean, False, "print the memory in use at each part of a step"),
    "dump_state": used(boolean, False, "print the effective configuration"),
    "disable_python_gc": used(
        boolean, False, "disable Python's automatic garbage collection during the training"
    ),
    "traffic_contract": used(
        choice("off", "warn", "stop"),
        "off",
        "compare the messages of all ranks during the run. At the first difference, `warn` prints a warning, "
        "and `stop` stops the training. Not a key of DeepSpeed",
    ),
    **FEATURES,
    "zero_force_ds_cpu_optimizer": inert(
        boolean,
        True,
        "require DeepSpeed's own Adam for optimizer state in host memory",
        "torch's own optimizers update offloaded state",
    ),
    "seq_parallel_communication_data_type": used(
        choice_of_any_case(*DTYPES),
        "fp32",
        "the dtype in which gradients are sent if sequence_parallel_size is above 1",
    ),
    "log_level": inert(
        anything,
        None,
        "the level of DeepSpeed's logger",
        "the variable ZERO_RUNTIME_LOG_LEVEL sets the level",
    ),
    "vocabulary_size": inert(
        anything, None, "the size of the model's vocabulary", "the runtime does not use this size"
    ),
    "nebula": refused(
        "Nebula checkpoints have been removed from DeepSpeed; remove the block", "Nebula checkpoints"
    ),
    "compression_training": refused(
        "the compression library has been removed from DeepSpeed; remove the block", "the compression library"
    ),
    "amp": refused("Apex AMP has been removed from DeepSpeed; use bf16 or torch_autocast", "Apex AMP"),
    "quantize_training": refused(
        "quantized training has been removed from DeepSpeed; remove the block", "quantized training"
    ),
    "sparse_gradients": refused(
        "sparse gradients have been removed from DeepSpeed; remove the key", "sparse gradients"
    ),
    "eigenvalue": refused("the eigenvalue block has been removed from DeepSpeed; remove it", "eigenvalues"),
    "sparse_attention": refused(
        "sparse attention has been removed from DeepSpeed; remove the block", "sparse attention"
    ),
    "elasticity": refused(
        "elastic training has been removed from DeepSpeed; set the batch sizes directly", "elastic training"
    ),
    "graph_harvesting": refused(
        "graph harvesting has been removed from DeepSpeed; remove the key", "graph harvesting"
    ),
    "curriculum_learning": refused(
        "the old curriculum block has been removed from DeepSpeed; remove it", "curriculum learning"
    ),
    "progressive_layer_drop": refused(
        "progressive layer drop has been removed from DeepSpeed; remove it", "progressive layer drop"
    ),
}


def _full(block: str, name: str) -> str:
    return f"{block}.{name}" if block else name


def _blocks(name: str, table: Table) -> Iterator[tuple[str, Table]]:
    yield name, table
    for each, key in table.items():
        if key.check.table is not None:
            yield from _blocks(_full(name, each), key.check.table)


BLOCKS: Final[Mapping[str, Table]] = dict(_blocks("", TOP))


def read(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the complete configuration: checked values, and in every block defaults for absent keys.

    Raises:
        ConfigError: A key is unknown or refused, or a value has the wrong type.
        UnsupportedError: A value enables a feature that this version does not have.
    """
    document = as_deepspeed_reads(document)
    _refuse_unknown("", document)
    _refuse_sums(document)
    return key_table.read(TOP, "", document)


def as_deepspeed_reads(document: Mapping[str, Any], notices: list[str] | None = None) -> dict[str, Any]:
    """Return ``document`` with values converted to the types of their keys, by :func:`.coercion.coerced`."""
    return coerced(document, BLOCKS, notices)


def _refuse_unknown(block: str, block_values: Mapping[str, Any]) -> None:
    table = BLOCKS[block]
    for name, value in block_values.items():
        full = _full(block, name)
        if name not in table:
            raise ConfigError(unknown_key(full, name, table, block, _elsewhere(block)))
        if full in BLOCKS and isinstance(value, Mapping):
            _refuse_unknown(full, value)


def _refuse_sums(document: Mapping[str, Any]) -> None:
    """Refuse gradient_allreduce_op sum together with a feature that this version does not have.

    The error message names both.
    """
    zero, compiled = document.get("zero_optimization"), document.get("compile")
    for feature, enabled in (
        ("ZenFlow", isinstance(zero, Mapping) and zero.get("zenflow") is not None),
        ("DeepCompile", isinstance(compiled, Mapping) and bool(compiled.get("deepcompile"))),
    ):
        if enabled and str(document.get("gradient_allreduce_op")).lower() == "sum":
            raise ConfigError(
                f"gradient_allreduce_op is sum, which is not supported with {feature}, and {feature} is not in this "
                "version; "
                "remove both"
            )


def _elsewhere(block: str) -> dict[str, str]:
    """Return the full names of the keys of all other blocks, by key.

    If several blocks have the key, the full name is that of the first key that has an effect.
    """
    full_names: dict[str, str] = {}
    for acts in (True, False):
        for other, table in BLOCKS.items():
            if other != block:
                for name, key in table.items():
                    if (key.status is Status.USED) is acts:
                        full_names.setdefault(name, _full(other, name))
    return full_names


def inert_keys(document: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return each key that has no effect but is set to a value other than its default, with the reason."""
    return [
        (full, key.note)
        for full, key, value in _set_keys(document)
        if key.status is Status.INERT and value not in (key.default, None) and not key_table.is_off(value)
    ]


def stage_3_only(document: Mapping[str, Any]) -> list[str]:
    """Return each key that has an effect only at stage 3 and is set to a value other than its default."""
    return [
        full
        for full, key, value in _set_keys(document)
        if key.stage_3_only and key.check.table is None and value not in (key.default, None)
    ]


def _set_keys(block_values: Mapping[str, Any], block: str = "") -> Iterator[tuple[str, Key, Any]]:
    """Yield the full name, the row in the table and the value of every key that is set, in every block."""
    for name, value in block_values.items():
        key = BLOCKS[block][name]
        full = _full(block, name)
        yield full, key, value
        if key.check.table is not None and isinstance(value, Mapping) and not key_table.is_off(value):
            yield from _set_keys(value, full)

"""The keys about dtypes: the blocks fp16, bf16, data_types and torch_autocast."""

from __future__ import annotations

from typing import Any, Final

from zero_runtime.configuration.reading.checks import (
    Check,
    boolean,
    choice,
    either,
    integer,
    not_boolean,
    number,
    optional,
    positive,
    strings,
)
from zero_runtime.configuration.reading.key_table import Table, inert, later, used
from zero_runtime.errors import ConfigError

DTYPES: Final = ("fp32", "fp16", "bf16")
_FURTHER_NAMES: Final = {  # DeepSpeed also accepts these names in the block data_types
    "float32": "fp32", "float": "fp32", "float16": "fp16", "half": "fp16", "bfloat16": "bf16",
}  # fmt: skip
_AUTOCAST: Final = {"bf16": "bfloat16", "fp16": "float16"}


def _dtype(name: str, value: Any) -> str:
    dtype_name = str(value).removeprefix("torch.")  # the value is a torch dtype, or the name of a dtype
    return str(choice(*DTYPES)(name, _FURTHER_NAMES.get(dtype_name, value)))


def _autocast_dtype(name: str, value: Any) -> str:
    dtype_name = _FURTHER_NAMES.get(str(value).removeprefix("torch."), str(value).removeprefix("torch."))
    if dtype_name not in _AUTOCAST:
        raise ConfigError(f"{name} is {value!r}; expected bfloat16, bf16, float16, fp16 or half")
    return _AUTOCAST[dtype_name]


dtype: Final = Check(choice(*DTYPES).expected, _dtype)
autocast_dtype: Final = Check(choice("bfloat16", "bf16", "float16", "fp16", "half").expected, _autocast_dtype)

FP16: Final[Table] = {
    "enabled": used(boolean, False, "use fp16 for parameters and gradients, and fp32 for master weights"),
    "auto_cast": used(boolean, False, "cast the floating-point inputs of the model to fp16"),
    "loss_scale": used(
        not_boolean(number(0.0)),
        0.0,
        "the factor by which the loss is multiplied. With 0, the factor is dynamic, and the next five keys "
        "control it",
    ),
    "initial_scale_power": used(
        integer(-1000, 1000), 16, "the initial loss scale is 2 to the power of this number"
    ),
    "loss_scale_window": used(
        not_boolean(integer(1)),
        1000,
        "the number of steps without an overflow after which the loss scale doubles",
    ),
    "hysteresis": used(
        integer(-1000),
        2,
        "the loss scale is halved after this many overflows. With a value below 1, it is never halved",
    ),
    "consecutive_hysteresis": used(
        boolean, False, "each step without an overflow resets the hysteresis to its full value"
    ),
    "min_loss_scale": used(
        not_boolean(positive),
        1.0,
        "the smallest loss scale. An overflow at this scale stops the training with an error",
    ),
    "fp16_override_modules": used(
        optional(strings), None, "the same as the key fp16_override_modules at the top level"
    ),
    "fp16_master_weights_and_grads": later(
        boolean,
        False,
        "keep master weights in fp16",
        "fp16 master weights with fp32 optimizer state",
        "master weights are fp32 in this version",
    ),
}  # fmt: skip

BF16: Final[Table] = {
    "enabled": used(boolean, False, "use bf16 for parameters and gradients, and fp32 for master weights"),
    "check_grad_overflow": used(
        boolean, True, "before each step, the ranks check together whether any gradient is infinite or NaN"
    ),
    "immediate_grad_update": inert(
        boolean,
        False,
        "add gradients to fp32 gradients during the backward pass",
        "both values give the same gradients",
    ),
    "bf16_master_weights_and_grads": used(
        boolean, False, "keep master weights in bf16. Set this key together with bf16_optimizer_states"
    ),
    "bf16_optimizer_states": used(
        boolean,
        False,
        "keep optimizer state in bf16. Set this key together with bf16_master_weights_and_grads",
    ),
}

DATA_TYPES: Final[Table] = {
    "grad_accum_dtype": used(
        optional(dtype), None, "the dtype of accumulated gradients. With null, it is the dtype of the model"
    ),
    "param_dtype": used(
        optional(dtype), None, "the dtype of the parameters. It must agree with the blocks fp16 and bf16"
    ),
    "buffer_dtype": used(
        optional(dtype), None, "the dtype of the model's buffers. With null, the buffers keep their dtypes"
    ),
    "keep_in_fp32_modules": used(
        either("auto", strings),
        "auto",
        "the buffers that stay in fp32. With auto, the list comes from the model",
    ),
}  # fmt: skip

TORCH_AUTOCAST: Final[Table] = {
    "enabled": used(boolean, False, "run the forward pass under torch.autocast. The parameters stay in fp32"),
    "dtype": used(autocast_dtype, "bfloat16", "the dtype of the lower-precision operations"),
    "lower_precision_safe_modules": used(
        optional(strings),
        None,
        "classes of modules whose gradients are sent in the lower-precision dtype. With null, these are "
        "linear and convolution layers",
    ),
}  # fmt: skip

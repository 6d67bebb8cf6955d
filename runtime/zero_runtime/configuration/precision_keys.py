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
_FURTHER_NAMES: Final = {  # DeepSpeed also accepts these, in the block data_types
    "float32": "fp32", "float": "fp32", "float16": "fp16", "half": "fp16", "bfloat16": "bf16",
}  # fmt: skip
_AUTOCAST: Final = {"bf16": "bfloat16", "fp16": "float16"}


def _dtype(name: str, value: Any) -> str:
    dtype_name = str(value).removeprefix("torch.")  # a torch dtype, or its name
    return str(choice(*DTYPES)(name, _FURTHER_NAMES.get(dtype_name, value)))


def _autocast_dtype(name: str, value: Any) -> str:
    dtype_name = _FURTHER_NAMES.get(str(value).removeprefix("torch."), str(value).removeprefix("torch."))
    if dtype_name not in _AUTOCAST:
        raise ConfigError(f"{name} is {value!r}; expected bfloat16, bf16, float16, fp16 or half")
    return _AUTOCAST[dtype_name]


dtype: Final = Check(choice(*DTYPES).expected, _dtype)
autocast_dtype: Final = Check(choice("bfloat16", "bf16", "float16", "fp16", "half").expected, _autocast_dtype)

FP16: Final[Table] = {
    "enabled": used(boolean, False, "parameters and gradients in fp16, with fp32 master weights"),
    "auto_cast": used(boolean, False, "cast floating-point inputs to fp16"),
    "loss_scale": used(not_boolean(number(0.0)), 0.0, "factor of the loss; 0: the next five keys set the factor"),
    "initial_scale_power": used(integer(-1000, 1000), 16, "the initial loss scale is 2 to this power"),
    "loss_scale_window": used(not_boolean(integer(1)), 1000, "steps without overflow before the loss scale doubles"),
    "hysteresis": used(integer(-1000), 2, "the loss scale is halved after this many overflows; below 1: never halved"),
    "consecutive_hysteresis": used(boolean, False, "a step without overflow resets the hysteresis to its full value"),
    "min_loss_scale": used(not_boolean(positive), 1.0, "an overflow at this scale ends the training"),
    "fp16_override_modules": used(optional(strings), None, "another place for fp16_override_modules"),
    "fp16_master_weights_and_grads": later(
        boolean, False, "master weights in fp16", "16-bit masters with fp32 state", "masters are fp32"
    ),
}  # fmt: skip

BF16: Final[Table] = {
    "enabled": used(boolean, False, "parameters and gradients in bf16, with fp32 master weights"),
    "check_grad_overflow": used(
        boolean, True, "before each step, the ranks agree whether any gradient is infinite"
    ),
    "immediate_grad_update": inert(
        boolean,
        False,
        "add gradients to fp32 ones in the backward pass",
        "the gradients are the same",
    ),
    "bf16_master_weights_and_grads": used(
        boolean, False, "master weights in bf16; set together with bf16_optimizer_states"
    ),
    "bf16_optimizer_states": used(
        boolean,
        False,
        "optimizer state in bf16; set together with bf16_master_weights_and_grads",
    ),
}

DATA_TYPES: Final[Table] = {
    "grad_accum_dtype": used(optional(dtype), None, "dtype of accumulated gradients; null: the dtype of the model"),
    "param_dtype": used(optional(dtype), None, "dtype of the parameters; must agree with fp16 and bf16"),
    "buffer_dtype": used(optional(dtype), None, "dtype of the model's buffers; null is the model's"),
    "keep_in_fp32_modules": used(
        either("auto", strings), "auto", "buffers that stay in fp32; auto asks the model for its own list"
    ),
}  # fmt: skip

TORCH_AUTOCAST: Final[Table] = {
    "enabled": used(boolean, False, "run the forward pass under torch.autocast; parameters stay fp32"),
    "dtype": used(autocast_dtype, "bfloat16", "dtype of the lower-precision operations"),
    "lower_precision_safe_modules": used(
        optional(strings), None, "classes whose gradients are sent in this dtype; null: linear and convolution layers"
    ),
}  # fmt: skip

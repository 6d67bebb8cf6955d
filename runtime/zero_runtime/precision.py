"""Which dtype is used for what, and what is done to the model for it."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import Final, NamedTuple

import torch

from commprof import hooks
from zero_runtime.comm import DataParallelGroup, ReduceOp
from zero_runtime.config import PrecisionConfig
from zero_runtime.errors import ConfigError

DTYPES: Final = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
# What torch.autocast runs in the lower precision by default, as DeepSpeed lists it.
_AUTOCAST_MODULES: Final = (torch.nn.Linear, torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)
_OVERFLOW: Final = hooks.tag("overflow_check")


class Precision(NamedTuple):
    """The dtypes of one training.

    Attributes:
        model: parameters and gradients; None leaves them as the model has them.
        communication: gradient messages.
        accumulation: where reduced gradients are accumulated; None for the gradients' own.
        check_overflow: whether the ranks agree before each step that no gradient is infinite or NaN.
        autocast: the dtype of torch.autocast; None without it.
    """

    model: torch.dtype | None
    communication: torch.dtype
    accumulation: torch.dtype | None
    check_overflow: bool
    autocast: torch.dtype | None


def precision(config: PrecisionConfig) -> Precision:
    """The dtypes that ``config`` means. Gradient messages travel in the training dtype unless it says otherwise."""
    model = torch.bfloat16 if config.bf16 else None
    named = config.communication_data_type
    return Precision(
        model=model,
        communication=DTYPES[named] if named else model or torch.float32,
        accumulation=DTYPES[config.grad_accum_dtype] if config.grad_accum_dtype else None,
        check_overflow=config.check_grad_overflow,
        autocast=DTYPES[config.autocast_dtype] if config.autocast_dtype else None,
    )


def cast_module(module: torch.nn.Module, config: PrecisionConfig) -> None:
    """Bring floating-point parameters to the model dtype, and buffers to ``buffer_dtype`` where one is given."""
    if config.bf16:
        for parameter in module.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(torch.bfloat16)
    if config.buffer_dtype:
        for buffer in module.buffers():
            if buffer.is_floating_point():
                buffer.data = buffer.data.to(DTYPES[config.buffer_dtype])


def autocast(dtype: torch.dtype | None, device: torch.device) -> AbstractContextManager[object]:
    """The context of a forward pass."""
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)


def communication_dtypes(
    module: torch.nn.Module, kinds: Precision, names: tuple[str, ...] | None
) -> dict[torch.nn.Parameter, torch.dtype]:
    """The dtype in which each parameter's gradient travels.

    With torch_autocast, parameters of modules that run in the lower precision travel in it, the others as they are.

    Args:
        module: the model.
        kinds: the dtypes.
        names: qualified names of such module classes; None for Linear and the convolutions.
    """
    if kinds.autocast is None:
        return dict.fromkeys(module.parameters(), kinds.communication)
    classes = _AUTOCAST_MODULES if names is None else tuple(_module_class(name) for name in names)
    dtypes = {parameter: parameter.dtype for parameter in module.parameters()}
    for child in module.modules():
        if type(child) in classes:
            dtypes.update(dict.fromkeys(child.parameters(recurse=False), kinds.autocast))
    return dtypes


def _module_class(name: str) -> type:
    package, _, attribute = name.rpartition(".")
    try:
        found = getattr(import_module(package), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"torch_autocast.lower_precision_safe_modules names {name!r}, which cannot be imported ({error}); "
            "expected qualified class names such as torch.nn.modules.linear.Linear"
        ) from None
    return found  # type: ignore[no-any-return]


def any_overflow(gradients: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
    """A uint8 tensor of one element: 1 where any element of ``gradients`` is infinite or NaN."""
    flag = torch.zeros(1, dtype=torch.uint8, device=device)
    for gradient in gradients:
        flag |= (~torch.isfinite(gradient).all()).to(torch.uint8)
    return flag


def agree_on_overflow(flag: torch.Tensor, group: DataParallelGroup) -> bool:
    """Whether any rank of ``group`` has seen an overflow: one all_reduce MAX of one byte."""
    group.all_reduce(flag, op=ReduceOp.MAX, why=_OVERFLOW)
    return bool(flag.item())

"""The dtypes of a training job, and the casts of the model to these dtypes."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import Final, NamedTuple

import torch

from commprof import hooks
from zero_runtime.comm import DataParallelGroup, ReduceOp
from zero_runtime.configuration.blocks.precision_block import PrecisionConfig
from zero_runtime.errors import ConfigError
from zero_runtime.optimizer_step.fp32_modules import fp32_buffers, keep_in_fp32

DTYPES: Final = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
# The modules that torch.autocast runs in the lower precision by default, as DeepSpeed lists them.
_AUTOCAST_MODULES: Final = (torch.nn.Linear, torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)
_CHUNK: Final = 2**20  # The number of elements.
_OVERFLOW: Final = hooks.tag("overflow_check")


class Precision(NamedTuple):
    """The dtypes of a training job.

    Attributes:
        model: The dtype of parameters and gradients. None does not cast them.
        communication: The dtype in which gradients are communicated.
        fp32_communication: The communication dtype for gradients of parameters that stay in fp32 in a 16-bit
            model.
        accumulation: The dtype of accumulated gradients. None for the gradients' own dtype.
        masters: The dtype of the copies of 16-bit parameters that the optimizer updates.
        check_overflow: Whether the ranks agree before each step that no gradient is infinite or NaN.
        autocast: The dtype of torch.autocast. None if autocast is not used.
        inputs: The dtype to which floating-point inputs of the model are cast. None does not cast them.
    """

    model: torch.dtype | None
    communication: torch.dtype
    fp32_communication: torch.dtype
    accumulation: torch.dtype | None
    masters: torch.dtype
    check_overflow: bool
    autocast: torch.dtype | None
    inputs: torch.dtype | None


def precision(config: PrecisionConfig) -> Precision:
    """Return the dtypes of ``config``. The communication dtype is the training dtype by default."""
    model = DTYPES[config.model] if config.model != "fp32" else None
    named = DTYPES[config.communication_data_type] if config.communication_data_type else None
    return Precision(
        model=model,
        communication=named or model or torch.float32,
        fp32_communication=named or torch.float32,
        accumulation=DTYPES[config.grad_accum_dtype] if config.grad_accum_dtype else None,
        masters=torch.bfloat16 if config.bf16_masters else torch.float32,
        check_overflow=config.check_grad_overflow,
        autocast=DTYPES[config.autocast_dtype] if config.autocast_dtype else None,
        inputs=torch.float16 if config.auto_cast else None,
    )


def cast_module(module: torch.nn.Module, config: PrecisionConfig) -> None:
    """Cast floating-point parameters to the model dtype. Cast buffers to ``buffer_dtype`` if that key is set.

    Modules in ``fp16_override_modules`` and buffers in ``data_types.keep_in_fp32_modules`` are cast to fp32
    instead.
    """
    dtype = DTYPES[config.model]
    patterns = config.fp32_modules if config.model != "fp32" else ()
    fp32_parameters = keep_in_fp32(module, patterns, dtype)
    if config.model != "fp32":
        cast_tensors(fp32_parameters, torch.float32)
        cast_tensors(module.parameters(), dtype, fp32_parameters)
    buffers = fp32_buffers(module, config.fp32_buffers, dtype)
    for buffer in buffers:
        buffer.data = buffer.data.float()
    if config.buffer_dtype:
        cast_tensors(module.buffers(), DTYPES[config.buffer_dtype], frozenset(buffers))
    accumulate_in(module.parameters(), None)


def cast_tensors(
    tensors: Iterable[torch.Tensor], dtype: torch.dtype, excluded: Collection[torch.Tensor] = frozenset()
) -> None:
    """Cast floating-point tensors to ``dtype`` in place, except those in ``excluded``."""
    for tensor in tensors:
        if tensor.is_floating_point() and tensor not in excluded:
            tensor.data = tensor.data.to(dtype)


def accumulate_in(parameters: Iterable[torch.Tensor], dtype: torch.dtype | None) -> None:
    """Make autograd accumulate the gradients of ``parameters`` in ``dtype``. None means the parameters' own dtype."""
    for parameter in parameters:
        wanted = dtype or parameter.dtype
        if parameter.requires_grad and parameter.grad_dtype != wanted:
            parameter.grad = None
            parameter.grad_dtype = wanted


def autocast(dtype: torch.dtype | None, device: torch.device) -> AbstractContextManager[object]:
    """Return the context of a forward pass. On CUDA, the config overrides a torch.autocast of the caller."""
    if dtype is not None:
        return torch.autocast(device.type, dtype=dtype)
    if device.type == "cuda" and torch.is_autocast_enabled("cuda"):
        return torch.autocast("cuda", enabled=False)
    return nullcontext()


def communication_dtypes(
    module: torch.nn.Module, kinds: Precision, names: tuple[str, ...] | None
) -> dict[torch.nn.Parameter, torch.dtype]:
    """Return the communication dtype of each parameter's gradient.

    With torch_autocast, this is the lower precision for parameters of modules that run in the lower precision.
    For all other parameters it is the parameter's own dtype.

    Args:
        module: The model.
        kinds: The dtypes of the training job.
        names: The qualified class names of the modules that run in the lower precision. None for Linear and the
            convolutions.
    """
    if kinds.autocast is None:
        return {parameter: communication_dtype(parameter, kinds) for parameter in module.parameters()}
    classes = _AUTOCAST_MODULES if names is None else tuple(_module_class(name) for name in names)
    dtypes = {parameter: parameter.dtype for parameter in module.parameters()}
    for child in module.modules():
        if type(child) in classes:
            dtypes.update(dict.fromkeys(child.parameters(recurse=False), kinds.autocast))
    return dtypes


def communication_dtype(parameter: torch.Tensor, kinds: Precision) -> torch.dtype:
    """Return the communication dtype of the gradient of ``parameter`` if torch_autocast is not used."""
    stays_fp32 = kinds.model is not None and parameter.dtype is torch.float32
    return kinds.fp32_communication if stays_fp32 else kinds.communication


def _module_class(name: str) -> type:
    package, _, attribute = name.rpartition(".")
    try:
        module_class = getattr(import_module(package), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"torch_autocast.lower_precision_safe_modules names {name!r}, which cannot be imported ({error}); "
            "expected qualified class names such as torch.nn.modules.linear.Linear"
        ) from None
    return module_class  # type: ignore[no-any-return]


def any_overflow(gradients: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return a uint8 tensor of one element: 1 if any element of ``gradients`` is infinite or NaN, else 0."""
    flag = torch.zeros(1, dtype=torch.uint8, device=device)
    for gradient in gradients:
        # aminmax copies 16-bit values to fp32, so they are processed one chunk at a time.
        size = gradient.numel() if gradient.dtype is torch.float32 else _CHUNK
        for chunk in gradient.reshape(-1).split(max(size, 1)):
            if chunk.numel():
                # If an element is NaN, both extremes are NaN. Testing every element takes 70 times as long and
                # needs additional memory.
                extremes = torch.stack(torch.aminmax(chunk))
                flag |= (~torch.isfinite(extremes).all()).to(torch.uint8)
    return flag


def agree_on_overflow(flag: torch.Tensor, *groups: DataParallelGroup) -> bool:
    """Return whether any rank of ``groups`` has an overflow. Issue one all_reduce MAX of one byte in each group."""
    for group in groups:
        group.all_reduce(flag, op=ReduceOp.MAX, why=_OVERFLOW)
    return bool(flag.item())

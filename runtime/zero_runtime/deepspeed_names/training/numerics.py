"""``deepspeed.runtime.utils``: norms, clipping, seeds, and moves of tensors between devices."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from zero_runtime.deepspeed_names.devices.accelerator import get_accelerator
from zero_runtime.deepspeed_names.training.tiling import bounds
from zero_runtime.errors import ConfigError, UnsupportedError, UsageError
from zero_runtime.pipeline.model.stage_partition import balanced
from zero_runtime.sharding.shards import shard_of


class DummyOptim:
    """An object that has param groups but is not an optimizer.

    Args:
        params: The tensors of the param group.
    """

    def __init__(self, params: Any) -> None:
        self.param_groups = [{"params": params}]


class noop_context:  # noqa: N801 - DeepSpeed's name
    """A context that does nothing."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exception: Any) -> None:
        pass


def noop_decorator(func: Any) -> Any:
    """Return ``func`` unchanged."""
    return func


def set_random_seed(seed: int) -> None:
    """Seed Python, NumPy if it is installed, and torch on all devices."""
    random.seed(seed)
    torch.manual_seed(seed)
    try:
        import numpy
    except ImportError:
        return
    numpy.random.seed(seed)


def count_used_parameters_in_backward(parameters: Iterable[torch.Tensor]) -> int:
    """Return the number of ``parameters`` that get a gradient in the current backward pass.

    This function must be called in a hook of the backward pass.

    Raises:
        UsageError: No backward pass is running.
    """
    if torch._C._current_graph_task_id() == -1:
        raise UsageError(
            "count_used_parameters_in_backward was called outside a backward pass; call it in a hook"
        )
    with torch.enable_grad():  # hooks run with grad mode disabled, and a leaf then has no node
        nodes = {
            torch.autograd.graph._get_grad_fn_or_grad_acc(each) for each in parameters if each.requires_grad
        }
    return sum(torch._C._will_engine_execute_node(node) for node in nodes if node is not None)


def ensure_directory_exists(filename: str) -> None:
    """Create the directory of a file."""
    Path(filename).parent.mkdir(parents=True, exist_ok=True)


def empty_cache() -> None:
    """Return cached memory to the device, and reset the memory peaks."""
    get_accelerator().empty_cache()
    get_accelerator().reset_peak_memory_stats()


def move_to_device(item: Any, device: Any, criterion_func: Callable[[Any], bool] | None = None) -> Any:
    """Return ``item`` with its tensors moved to ``device``, including tensors within lists, tuples and dicts.

    Args:
        item: A tensor, or an object that contains tensors.
        device: The target device.
        criterion_func: A function that selects the tensors to move (default: all). The data of the selected tensors is
            moved in place.
    """

    def move(tensor: torch.Tensor) -> torch.Tensor:
        if criterion_func is None:
            return tensor.to(device)
        if criterion_func(tensor):
            tensor.data = tensor.data.to(device)
        return tensor

    return _map(item, move)


def copy_to_device(item: Any, device: Any, criterion_func: Callable[[Any], bool]) -> Any:
    """Return ``item`` with each tensor that ``criterion_func`` selects replaced by a copy on ``device``."""
    return _map(item, lambda tensor: tensor.to(device) if criterion_func(tensor) else tensor)


def _map(item: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(item, torch.Tensor):
        return function(item)
    if isinstance(item, list):
        return [_map(each, function) for each in item]
    if isinstance(item, tuple):
        return tuple(_map(each, function) for each in item)
    if isinstance(item, dict):
        return {name: _map(each, function) for name, each in item.items()}
    return item


def has_inf_or_nan(x: torch.Tensor) -> torch.Tensor:
    """Return, as a tensor, whether any element is infinite or NaN."""
    return ~torch.isfinite(x).all()


def is_model_parallel_parameter(p: Any) -> bool:
    """Return whether a parameter is tensor-parallel. Marks that other libraries set also count."""
    return bool(getattr(p, "model_parallel", False) or getattr(p, "tensor_model_parallel", False))


def get_inactive_params(param_list: Iterable[Any]) -> list[Any]:
    """Return the released parameters of ``param_list``."""
    shards = ((each, shard_of(each)) for each in param_list)
    return [each for each, shard in shards if shard is not None and not shard.available]


def get_only_unique_item(items: Iterable[Any]) -> Any:
    """Return the value that is common to all ``items``.

    Raises:
        ConfigError: The items have different values, or there are no items.
    """
    distinct = set(items)
    if len(distinct) != 1:
        raise ConfigError(f"expected one value, found {sorted(map(repr, distinct))}")
    return distinct.pop()


def clip_grad_norm_(parameters: Any, max_norm: float, norm_type: float = 2, mpu: Any = None) -> torch.Tensor:
    """Clip gradients with torch's function. The engine itself clips gradients if the key gradient_clipping is set."""
    _refuse(mpu)
    return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)


def get_grad_norm(parameters: Any, norm_type: float = 2, mpu: Any = None) -> float:
    """Return the norm of the gradients of this rank; -1 if the norm is infinite or NaN."""
    tensors = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    return _norm([parameter.grad for parameter in tensors if parameter.grad is not None], norm_type, mpu)


def get_weight_norm(parameters: Any, norm_type: float = 2, mpu: Any = None) -> float:
    """Return the norm of the parameters of this rank; -1 if the norm is infinite or NaN."""
    tensors = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    return _norm([parameter.detach() for parameter in tensors], norm_type, mpu)


def _norm(tensors: Sequence[torch.Tensor], norm_type: float, mpu: Any) -> float:
    _refuse(mpu)
    if not tensors:
        return 0.0
    each = torch.stack([torch.linalg.vector_norm(tensor.float(), norm_type) for tensor in tensors])
    norm = float(torch.linalg.vector_norm(each, norm_type))
    return -1.0 if norm in (float("inf"), float("-inf")) or norm != norm else norm


def get_global_norm(norm_list: Iterable[float]) -> float:
    """Return the total norm, computed from the 2-norms of the tensors."""
    return float(sum(norm**2 for norm in norm_list) ** 0.5)


def get_global_norm_of_tensors(
    input_tensors: Sequence[torch.Tensor], norm_type: float = 2, mpu: Any = None, **others: Any
) -> torch.Tensor:
    """Return the norm of tensors of this rank; -1 if the norm is infinite or NaN."""
    return torch.tensor(_norm(list(input_tensors), norm_type, mpu))


def clip_tensors_by_global_norm(
    input_tensors: Sequence[torch.Tensor],
    max_norm: float = 1.0,
    global_norm: Any = None,
    mpu: Any = None,
    eps: float = 1e-6,
) -> Any:
    """Scale tensors in place so that their total norm is at most ``max_norm``, and return the norm before scaling."""
    norm = get_global_norm_of_tensors(input_tensors, mpu=mpu) if global_norm is None else global_norm
    factor = max_norm / (float(norm) + eps)
    if 0.0 < factor < 1.0:
        for tensor in input_tensors:
            tensor.mul_(factor)
    return norm


def partition_uniform(num_items: int, num_parts: int) -> list[int]:
    """Return the starts of ``num_parts`` nearly equal parts of ``num_items``, and the end of the last part."""
    if num_items <= num_parts:
        return [min(part, num_items) for part in range(num_parts + 1)]
    return bounds(num_items, num_parts)


def prefix_sum_inc(weights: Sequence[float]) -> list[float]:
    """Return the cumulative sums of the weights."""
    sums: list[float] = []
    for weight in weights:
        sums.append(weight + (sums[-1] if sums else 0))
    return sums


def partition_balanced(weights: Sequence[float], num_parts: int) -> list[int]:
    """Return the starts of ``num_parts`` parts of consecutive ``weights``, and the end of the last part.

    The parts are balanced in the same way as the stages of a pipeline.
    """
    if len(weights) <= num_parts:
        return partition_uniform(len(weights), num_parts)
    return balanced(weights, num_parts)


def call_to_str(base: str, *args: Any, **kwargs: Any) -> str:
    """Return a call as text.

    >>> call_to_str("load", 3, strict=True)
    'load(3, strict=True)'
    """
    arguments = [repr(each) for each in args] + [f"{name}={value!r}" for name, value in kwargs.items()]
    return f"{base}({', '.join(arguments)})"


def required_torch_version(min_version: Any = None, max_version: Any = None) -> bool:
    """Return whether torch's version (major.minor) is at least ``min_version`` and at most ``max_version``."""
    here = _version(torch.__version__)
    above = min_version is None or here >= _version(str(min_version))
    return above and (max_version is None or here <= _version(str(max_version)))


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(each) for each in re.findall(r"\d+", text)[:2])


def recursive_getattr(model: Any, module_name: str) -> Any:
    """Return the attribute of ``model`` with a dotted name."""
    value = model
    for name in module_name.split("."):
        value = getattr(value, name)
    return value


def recursive_setattr(model: Any, module_name: str, module: Any) -> None:
    """Set the attribute of ``model`` with a dotted name."""
    above, _, name = module_name.rpartition(".")
    setattr(recursive_getattr(model, above) if above else model, name, module)


def _refuse(mpu: Any) -> None:
    if mpu is not None:
        raise UnsupportedError("mpu (model parallelism) is not in this version; leave it out")

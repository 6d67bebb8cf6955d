"""Functions that read and change a parameter's fp32 values, gradient and optimizer state at every stage.

The names are those of ``deepspeed.utils``. *Full* values are assembled from the shards of all ranks. Every rank
must call such a function. If the stage shards the values, a call that reads them issues one all_reduce. *Local*
values are this rank's shard (1-D), and these functions do not communicate::

    engine.backward(loss)
    gradient = safe_get_full_grad(model.head.weight)        # after backward, before step

Gradients are the reduced gradients of the current step, multiplied by the loss scale.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import torch

from commprof import hooks
from zero_runtime.comm import DataParallelGroup
from zero_runtime.errors import UsageError
from zero_runtime.experts.expert_groups import ExpertRanks
from zero_runtime.experts.expert_parameters import group_of, is_expert
from zero_runtime.optimizer_step.interface import WrappedOptimizer
from zero_runtime.sharding.shards import shard_of

_ATTRIBUTE: Final = "zero_training"
_WHY: Final = hooks.tag("parameter_access")


class Training(NamedTuple):
    """The optimizer and ranks that train a parameter.

    Attributes:
        optimizer: A weak reference to the wrapper of the torch optimizer.
        group: The data-parallel ranks. For a parameter of an expert, the ranks that have this expert.
    """

    optimizer: weakref.ref[WrappedOptimizer]
    group: DataParallelGroup

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as None: a saved or copied parameter has no optimizer."""
        return _nobody, ()


def _nobody() -> None:
    return None


class _Range(NamedTuple):
    """A range of a parameter: the number of the first element, and a writable tensor of the values in the range."""

    start: int
    tensor: torch.Tensor


def remember(
    optimizer: WrappedOptimizer,
    group: DataParallelGroup,
    experts: Mapping[str, ExpertRanks] = MappingProxyType({}),
) -> None:
    """Attach the optimizer and the ranks to each parameter that the optimizer trains.

    Args:
        optimizer: The wrapper of the torch optimizer.
        group: The data-parallel ranks.
        experts: The ranks of each group of experts, by the name of the group.
    """
    reference = weakref.ref(optimizer)
    for parameter, _ in optimizer.trained().values():
        ranks = experts[group_of(parameter)].data if is_expert(parameter) else group
        setattr(parameter, _ATTRIBUTE, Training(reference, ranks))


# Full values.


def safe_get_full_fp32_param(param: torch.nn.Parameter) -> torch.Tensor | None:
    """Return the whole parameter, with the optimizer's fp32 values; None if no engine trains the parameter."""
    return _full(param, _masters)


def safe_get_full_optimizer_state(param: torch.nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """Return a whole tensor of the optimizer's state, such as ``exp_avg``.

    The result is None before the first step, or if no engine trains the parameter.
    """
    return _full(param, lambda parameter, optimizer: _states(parameter, optimizer, optim_state_key))


def safe_get_full_grad(param: torch.nn.Parameter) -> torch.Tensor | None:
    """Return the whole gradient, reduced over the ranks; None if the parameter has no gradient."""
    if param.grad is not None:
        return param.grad
    return _full(param, _gradients)


@torch.no_grad()
def safe_set_full_fp32_param(param: torch.nn.Parameter, value: torch.Tensor) -> None:
    """Set the whole parameter, in the optimizer and in the model. Every rank must pass the same ``value``."""
    _set_full(param, value, _masters)
    shard = shard_of(param)
    if shard is None:
        param.data.copy_(value.view(param.shape))
        return
    with shard.lent() as own:
        _write_shard(own, value.reshape(-1), shard.group.rank)
    shard.secondary = None
    if shard.available:
        param.data.copy_(value.view(shard.shape))


@torch.no_grad()
def safe_set_full_optimizer_state(
    param: torch.nn.Parameter, value: torch.Tensor, optim_state_key: str
) -> None:
    """Set a whole tensor of the optimizer's state."""
    _set_full(param, value, lambda parameter, optimizer: _states(parameter, optimizer, optim_state_key))


@torch.no_grad()
def safe_set_full_grad(param: torch.nn.Parameter, value: torch.Tensor) -> None:
    """Set the whole gradient of the current step."""
    if param.grad is not None:
        param.grad.copy_(value)
    else:
        _set_full(param, value, _gradients)


def safe_update_full_grad_vectorized(
    param_list: Sequence[torch.nn.Parameter],
    update_func: Callable[[torch.Tensor, torch.nn.Parameter], torch.Tensor],
) -> None:
    """Replace the gradient of each parameter with ``update_func(gradient, parameter)``."""
    for parameter in param_list:
        gradient = safe_get_full_grad(parameter)
        if gradient is not None:
            safe_set_full_grad(parameter, update_func(gradient, parameter))


# Local values.


def safe_get_local_fp32_param(param: torch.nn.Parameter) -> torch.Tensor | None:
    """Return this rank's elements of the optimizer's fp32 values, 1-D; None if the rank has no elements."""
    return _local(param, _masters)


def safe_get_local_optimizer_state(param: torch.nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """Return this rank's elements of a tensor of the optimizer's state."""
    return _local(param, lambda parameter, optimizer: _states(parameter, optimizer, optim_state_key))


def safe_get_local_grad(param: torch.nn.Parameter) -> torch.Tensor | None:
    """Return this rank's elements of the gradient."""
    return _local(param, _gradients)


@torch.no_grad()
def safe_set_local_fp32_param(param: torch.nn.Parameter, value: torch.Tensor) -> None:
    """Set this rank's elements of the parameter in the optimizer, and at stage 3 also in the model."""
    _set_local(param, value, _masters)
    shard = shard_of(param)
    if shard is not None:
        flat = value.reshape(-1)
        with shard.lent() as own:
            own.narrow(0, 0, flat.numel()).copy_(flat)
        shard.secondary = None


@torch.no_grad()
def safe_set_local_optimizer_state(
    param: torch.nn.Parameter, value: torch.Tensor, optim_state_key: str
) -> None:
    """Set this rank's elements of a tensor of the optimizer's state."""
    _set_local(param, value, lambda parameter, optimizer: _states(parameter, optimizer, optim_state_key))


@torch.no_grad()
def safe_set_local_grad(param: torch.nn.Parameter, value: torch.Tensor) -> None:
    """Set this rank's elements of the gradient."""
    _set_local(param, value, _gradients)


_RangesOf = Callable[[torch.nn.Parameter, WrappedOptimizer], Iterator[_Range]]


def _training_of(parameter: torch.nn.Parameter) -> tuple[WrappedOptimizer, DataParallelGroup] | None:
    training: Training | None = getattr(parameter, _ATTRIBUTE, None)
    optimizer = None if training is None else training.optimizer()
    return None if training is None or optimizer is None else (optimizer, training.group)


def _masters(parameter: torch.nn.Parameter, optimizer: WrappedOptimizer) -> Iterator[_Range]:
    for fragment in optimizer.fragments(parameter):
        if fragment.parameter is parameter:
            yield _Range(fragment.start, fragment.master)


def _states(parameter: torch.nn.Parameter, optimizer: WrappedOptimizer, key: str) -> Iterator[_Range]:
    for fragment in optimizer.fragments(parameter):
        if fragment.parameter is parameter:
            value = fragment.state.get(key, fragment.whole.get(key))
            if value is not None:
                yield _Range(fragment.start, value)


def _gradients(parameter: torch.nn.Parameter, optimizer: WrappedOptimizer) -> Iterator[_Range]:
    for gradient, master in zip(optimizer.reduced(), optimizer.masters_with_parts(), strict=True):
        for portion in master.parts:
            if portion.parameter is parameter:
                yield _Range(portion.start, gradient.reshape(-1).narrow(0, portion.offset, portion.numel))


@torch.no_grad()
def _full(parameter: torch.nn.Parameter, ranges: _RangesOf) -> torch.Tensor | None:
    training = _training_of(parameter)
    if training is None:
        return None
    optimizer, group = training
    shape, numel = _shape(parameter)
    if not optimizer.is_sharded:
        own = list(ranges(parameter, optimizer))
        return own[0].tensor.detach().clone().view(shape) if own else None
    # One extra element counts the ranks that have values, so that all ranks detect that no rank has any.
    full = torch.zeros(numel + 1, dtype=torch.float32, device=group.device)
    for start, tensor in ranges(parameter, optimizer):
        full.narrow(0, start, tensor.numel()).copy_(tensor.reshape(-1))
        full[-1] = 1.0
    group.all_reduce(full, why=_WHY)
    return full[:-1].view(shape) if full[-1].item() else None


def _set_full(parameter: torch.nn.Parameter, value: torch.Tensor, ranges: _RangesOf) -> None:
    training = _training_of(parameter)
    if training is None:
        raise UsageError("the parameter is trained by no engine, so there is nothing to set")
    shape, numel = _shape(parameter)
    if value.numel() != numel:
        raise UsageError(f"the value has shape {tuple(value.shape)}, and the parameter {tuple(shape)}")
    flat = value.detach().reshape(-1)
    for start, tensor in ranges(parameter, training[0]):
        tensor.copy_(flat.narrow(0, start, tensor.numel()).view(tensor.shape))


def _local(parameter: torch.nn.Parameter, ranges: _RangesOf) -> torch.Tensor | None:
    training = _training_of(parameter)
    tensors = (
        []
        if training is None
        else [
            element_range.tensor.detach().reshape(-1).clone()
            for element_range in ranges(parameter, training[0])
        ]
    )
    return None if not tensors else tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def _set_local(parameter: torch.nn.Parameter, value: torch.Tensor, ranges: _RangesOf) -> None:
    training = _training_of(parameter)
    if training is None:
        raise UsageError("the parameter is trained by no engine, so there is nothing to set")
    mine = sum(element_range.tensor.numel() for element_range in ranges(parameter, training[0]))
    if value.numel() < mine:
        raise UsageError(f"the value has {value.numel()} elements, and this rank has {mine} of the parameter")
    position, flat = 0, value.detach().reshape(-1)
    for _, tensor in ranges(parameter, training[0]):
        tensor.copy_(flat.narrow(0, position, tensor.numel()).view(tensor.shape))
        position += tensor.numel()


def _shape(parameter: torch.nn.Parameter) -> tuple[torch.Size, int]:
    shard = shard_of(parameter)
    return (parameter.shape, parameter.numel()) if shard is None else (shard.shape, shard.numel)


def _write_shard(own: torch.Tensor, flat: torch.Tensor, rank: int) -> None:
    start = min(rank * own.numel(), flat.numel())
    mine = flat.narrow(0, start, min(own.numel(), flat.numel() - start))
    own.narrow(0, 0, mine.numel()).copy_(mine)

"""Small checks of parameters, optimizers and leaf modules, with the names of ``deepspeed.runtime.zero.utils`` and
``deepspeed.utils``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch

from zero_runtime import comm
from zero_runtime.deepspeed_names.ranks import comm_functions
from zero_runtime.errors import ConfigError, UsageError
from zero_runtime.optimizers import Lamb, Lion, Muon, UncorrectedAdam
from zero_runtime.sharding.gather_schedule.leaves import is_leaf, set_z3_leaf_module
from zero_runtime.sharding.shards import shard_of
from zero_runtime.zero import GatheredParameters

ZERO_SUPPORTED_OPTIMIZERS: Final = [
    torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.SGD, Lamb, Lion, Muon, UncorrectedAdam,
]  # fmt: skip


def is_zero_param(parameter: Any) -> bool:
    """Return whether a parameter is sharded at stage 3."""
    return isinstance(parameter, torch.Tensor) and shard_of(parameter) is not None


def is_zero_supported_optimizer(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the class of an optimizer is in ``ZERO_SUPPORTED_OPTIMIZERS``.

    These optimizers are known to be correct on shards of parameters.
    """
    return type(optimizer) in ZERO_SUPPORTED_OPTIMIZERS


def get_lst_from_rank0(lst: Sequence[int]) -> list[int]:
    """Return the numbers of rank 0. The length of ``lst`` must be the same on all ranks."""
    numbers = torch.tensor(list(lst), dtype=torch.int64)
    on_device = numbers.cuda() if torch.cuda.is_available() else numbers
    comm_functions.broadcast(on_device, src=0)
    return [int(each) for each in on_device.tolist()]


def assert_ints_same_as_other_ranks(ints: Sequence[int]) -> None:
    """Check that numbers are equal to the numbers of rank 0.

    Raises:
        UsageError: The numbers differ.
    """
    first = get_lst_from_rank0(ints)
    if list(ints) != first:
        raise UsageError(
            f"rank {comm.get_rank()} has {list(ints)}, and rank 0 has {first}; they must be equal"
        )


def set_z3_leaf_modules_by_name(
    model: torch.nn.Module, module_names: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[torch.nn.Module], list[str]]:
    """Mark the modules with these full names as leaf modules, or with ``flag`` false remove the mark.

    Returns:
        (the modules, the names that no module has).
    """
    return _flag(model, module_names, flag, raise_if_not_found, lambda full, wanted: full == wanted)


def set_z3_leaf_modules_by_suffix(
    model: torch.nn.Module,
    module_name_suffixes: Sequence[str],
    flag: bool = True,
    raise_if_not_found: bool = True,
) -> tuple[list[torch.nn.Module], list[str]]:
    """Mark the modules whose full name ends with one of these suffixes, or with ``flag`` false remove the mark.

    Returns:
        (the modules, the suffixes that match no module).
    """
    return _flag(model, module_name_suffixes, flag, raise_if_not_found, str.endswith)


def _flag(
    model: torch.nn.Module,
    wanted: Sequence[str],
    flag: bool,
    raise_if_not_found: bool,
    fits: Callable[[str, str], bool],
) -> tuple[list[torch.nn.Module], list[str]]:
    flagged: list[torch.nn.Module] = []
    used: set[str] = set()
    for full, module in model.named_modules():
        matching = [each for each in wanted if fits(full, each)]
        if matching:
            used.update(matching)
            flagged.append(module)
            if is_leaf(module) != flag:
                set_z3_leaf_module(module, flag)
    missing = [each for each in wanted if each not in used]
    if missing and raise_if_not_found:
        raise ConfigError(f"no module of the model is called {', '.join(missing)}")
    return flagged, missing


@contextmanager
def unwrap_model_for_generation(model: Any) -> Iterator[Any]:
    """Enter a context in which all parameters of an engine's model are gathered. All ranks must enter the context."""
    module = getattr(model, "module", model)
    with GatheredParameters(list(module.parameters())):
        yield module


def clone_tensors_for_torch_save(item: Any, device: Any = "cpu") -> Any:
    """Return ``item`` with copies of its tensors, so that saving a view does not save the whole storage."""
    if isinstance(item, torch.Tensor):
        return item.detach().clone().to(device)
    if isinstance(item, list):
        return [clone_tensors_for_torch_save(each, device) for each in item]
    if isinstance(item, tuple):
        return tuple(clone_tensors_for_torch_save(each, device) for each in item)
    if isinstance(item, dict):
        return type(item)({name: clone_tensors_for_torch_save(each, device) for name, each in item.items()})
    return item

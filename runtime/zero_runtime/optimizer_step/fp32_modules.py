"""Modules and buffers of a 16-bit model that stay in fp32.

The keys ``fp16_override_modules`` and ``data_types.keep_in_fp32_modules`` select them. A pattern of
``fp16_override_modules`` is a glob (``*``, ``?``, ``[...]``). The glob must match one of these names entirely:
the qualified name of a module, the last part of that name, or the name of the module's class. A pattern with
the prefix ``re:`` is a regular expression that may match anywhere in the qualified name. A matching module
stays in fp32 with all its submodules: its inputs are cast to fp32, and its outputs are cast to the model's
dtype.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

from zero_runtime.errors import ConfigError

_REGULAR: Final = "re:"
# Containers are never called, so a hook on them would not run.
_CONTAINERS: Final = (torch.nn.ModuleList, torch.nn.ModuleDict)
# The casting hooks of modules. They are removed when a model is prepared again in another precision.
_BORDERS: Final[WeakKeyDictionary[torch.nn.Module, tuple[RemovableHandle, ...]]] = WeakKeyDictionary()
_REDUCED: Final = (torch.float16, torch.bfloat16)


def cast_floating(values: Any, dtype: torch.dtype) -> Any:
    """Return ``values`` with every floating-point tensor cast to ``dtype``, however deeply the tensor is nested."""

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return tree_map_only(torch.Tensor, cast, values)


def keep_in_fp32(
    module: torch.nn.Module, patterns: Sequence[str], dtype: torch.dtype
) -> frozenset[torch.nn.Parameter]:
    """Make the modules that match ``patterns`` compute in fp32 within a model of ``dtype``.

    Args:
        module: The model.
        patterns: The patterns of ``fp16_override_modules``.
        dtype: The dtype of the rest of the model. Outputs of the matching modules are cast to this dtype.

    Returns:
        The parameters that must not be cast.

    Raises:
        ConfigError: A pattern matches nothing, or a parameter is also used by a module that does not match.
    """
    for child in module.modules():
        for handle in _BORDERS.pop(child, ()):
            handle.remove()
    names = {name for pattern in patterns for name in _matching(module, pattern)}
    roots = {name for name in names if not any(_within(name, other) for other in names)}
    fp32_parameters = frozenset(
        parameter for name in roots for parameter in module.get_submodule(name).parameters()
    )
    for name, child in module.named_modules(remove_duplicate=False):
        if name in roots or any(_within(name, root) for root in roots):
            continue
        for parameter_name, parameter in child.named_parameters(recurse=False):
            if parameter in fp32_parameters:
                raise ConfigError(
                    f"fp16_override_modules {list(patterns)} keeps a parameter in fp32 that is also "
                    f"{parameter_name!r} of {name or 'the model'!r}, which is not in the list; list both modules"
                )
    for name in roots:
        for child in _called(module.get_submodule(name)):
            _BORDERS[child] = (
                child.register_forward_pre_hook(_widen, with_kwargs=True),
                child.register_forward_hook(partial(_narrow, dtype)),
            )
    return fp32_parameters


def _matching(module: torch.nn.Module, pattern: str) -> list[str]:
    matches = _matcher(pattern)
    names = [name for name, child in module.named_modules() if matches(name, type(child).__name__)]
    if not names:
        known = {type(child).__name__ for child in module.modules()}
        known |= {name for name, _ in module.named_modules() if name}
        near = get_close_matches(pattern, sorted(known), 1, 0.4)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(
            f"fp16_override_modules: {pattern!r} matches no module by name, last part of the name or class{hint}"
        )
    return names


def _matcher(pattern: str) -> Callable[[str, str], bool]:
    if pattern.startswith(_REGULAR):
        try:
            expression = re.compile(pattern.removeprefix(_REGULAR))
        except re.error as error:
            raise ConfigError(
                f"fp16_override_modules: {pattern!r} is not a regular expression ({error})"
            ) from None
        return lambda name, kind: expression.search(name) is not None
    return lambda name, kind: any(
        fnmatchcase(candidate, pattern) for candidate in (name, name.rpartition(".")[2], kind)
    )


def _within(name: str, other: str) -> bool:
    """Return whether module ``name`` is a submodule of module ``other``."""
    return name != other and (not other or name.startswith(other + "."))


def _called(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield ``module``, or the modules in it if it is a container."""
    if isinstance(module, _CONTAINERS):
        for child in module.children():
            yield from _called(child)
    else:
        yield module


def _widen(
    module: torch.nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return cast_floating(inputs, torch.float32), cast_floating(kwargs, torch.float32)


def _narrow(dtype: torch.dtype, module: torch.nn.Module, inputs: Any, outputs: Any) -> Any:
    return cast_floating(outputs, dtype)


def fp32_buffers(
    module: torch.nn.Module, patterns: Sequence[str] | None, dtype: torch.dtype
) -> list[torch.Tensor]:
    """Return the floating-point buffers that stay in fp32 in a model of ``dtype``.

    The patterns are those of DeepSpeed's ``keep_in_fp32_modules``. A pattern may match anywhere in a buffer's
    full name. A ``*`` in a pattern matches any characters.

    Args:
        module: The model.
        patterns: The list of patterns. None uses the lists of Hugging Face models:
            ``_keep_in_fp32_modules_strict`` and, for fp16, ``_keep_in_fp32_modules``.
        dtype: The dtype of the model. In an fp32 model, the result is empty.
    """
    if dtype not in _REDUCED:
        return []
    expressions = (
        _own_patterns(module, dtype) if patterns is None else [_any_characters(each) for each in patterns]
    )
    if not expressions:
        return []
    expression = re.compile("|".join(sorted(expressions)))
    return [
        buffer
        for name, buffer in module.named_buffers()
        if buffer.is_floating_point() and expression.search(name)
    ]


def _own_patterns(module: torch.nn.Module, dtype: torch.dtype) -> list[str]:
    attributes = ["_keep_in_fp32_modules_strict"]
    if dtype is torch.float16:
        attributes.append("_keep_in_fp32_modules")
    return [
        f"^{re.escape(name)}\\..*{_any_characters(each)}" if name else _any_characters(each)
        for name, child in module.named_modules()
        for attribute in attributes
        for each in getattr(child, attribute, None) or ()
    ]


def _any_characters(pattern: str) -> str:
    return pattern.replace("*", ".*")

"""A check that the arguments in a configuration fit the class that they are passed to."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import torch

from zero_runtime.errors import ConfigError


def check_arguments(
    block: str, kind: Callable[..., Any], arguments: Mapping[str, Any], reserved: Sequence[str] = ()
) -> None:
    """Refuse unknown arguments of ``kind``, values of the wrong type, and missing required arguments.

    Args:
        block: The block of the arguments in the configuration, such as ``optimizer.params``.
        kind: The class. Its first parameter is not configurable.
        arguments: The arguments by name.
        reserved: Further parameters of the class that are not configurable.

    Raises:
        ConfigError: An argument does not fit. The message names the key, the value and the parameters of the class.
    """
    _, *parameters = inspect.signature(kind).parameters.values()
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters):
        return
    defaults = {each.name: each.default for each in parameters if each.name not in reserved}
    name = kind.__name__
    takes = f"{name} takes {', '.join(defaults)}"
    for key, value in arguments.items():
        if key not in defaults:
            near = get_close_matches(key, defaults, 1)
            meant = f"; did you mean {near[0]!r}? {takes}" if near else f"; {takes}"
            raise ConfigError(f"{block}.{key} = {value!r} is not an argument of {name}{meant}")
        expected = _mismatch(defaults[key], value)
        if expected:
            raise ConfigError(f"{block}.{key} is {value!r}; {name} expects {expected}")
    for key, default in defaults.items():
        if default is inspect.Parameter.empty and key not in arguments:
            raise ConfigError(f"{block} lacks {key!r}, without which there is no {name}; {takes}")


def _mismatch(default: Any, value: Any) -> str | None:
    """Return the expected type if ``value`` cannot replace ``default``; None if ``value`` fits."""
    if value is None or default is None or default is inspect.Parameter.empty:
        return None
    if isinstance(default, bool):
        return None if isinstance(value, int) and value in (0, 1) else "true or false"
    if isinstance(default, int | float):
        # A list is accepted too: it contains one value for each param group, although the class declares one number.
        return None if _is_number(value) or _are_numbers(value) else "a number"
    if isinstance(default, tuple) and _are_numbers(default):
        fits = _are_numbers(value) and len(value) == len(default)
        return None if fits else f"{len(default)} numbers"
    if isinstance(default, str):
        return None if isinstance(value, str) else "a string"
    return None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | torch.Tensor) and not isinstance(value, bool)


def _are_numbers(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(_is_number(each) for each in value)

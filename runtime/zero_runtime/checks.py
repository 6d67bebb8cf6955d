"""Checks of single values in a configuration. Each takes the key's full name and the value, and returns the value to use.

All raise ConfigError with the name, the value and what was expected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from typing import Any

from zero_runtime.errors import ConfigError

Check = Callable[[str, Any], Any]


def boolean(name: str, value: Any) -> bool:
    """``value`` if it is a bool."""
    if isinstance(value, bool):
        return value
    raise ConfigError(f"{name} is {value!r}; expected true or false{_auto(value)}")


def integer(minimum: int = 0) -> Check:
    """A check for whole numbers of at least ``minimum``; 5e8 is one."""

    def check(name: str, value: Any) -> int:
        whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        if isinstance(value, bool) or not whole or value < minimum:
            raise ConfigError(
                f"{name} is {value!r}; expected a whole number of at least {minimum}{_auto(value)}"
            )
        return int(value)

    return check


def number(minimum: float | None = None) -> Check:
    """A check for finite numbers of at least ``minimum``."""

    def check(name: str, value: Any) -> float:
        good = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < float("inf")
        if not good or (minimum is not None and value < minimum):
            least = "" if minimum is None else f" of at least {minimum:g}"
            raise ConfigError(f"{name} is {value!r}; expected a number{least}{_auto(value)}")
        return float(value)

    return check


def positive(name: str, value: Any) -> float:
    """``value`` if it is a finite number above 0."""
    found = number(0.0)(name, value)
    if found == 0.0:
        raise ConfigError(f"{name} is {value!r}; expected a number above 0")
    return found


def text(name: str, value: Any) -> str:
    """``value`` if it is a string."""
    if isinstance(value, str):
        return value
    raise ConfigError(f"{name} is {value!r}; expected a string")


def choice(*values: str) -> Check:
    """A check for one of ``values``."""

    def check(name: str, value: Any) -> str:
        if value in values:
            return str(value)
        raise ConfigError(f"{name} is {value!r}; expected one of: {', '.join(values)}")

    return check


def choice_of_any_case(*values: str) -> Check:
    """A check for one of ``values``, however its letters are written."""

    def check(name: str, value: Any) -> str:
        found = [each for each in values if isinstance(value, str) and each.lower() == value.lower()]
        return choice(*values)(name, found[0] if found else value)

    return check


def strings(name: str, value: Any) -> tuple[str, ...]:
    """``value`` if it is a list of strings."""
    if isinstance(value, list | tuple) and all(isinstance(each, str) for each in value):
        return tuple(value)
    raise ConfigError(f"{name} is {value!r}; expected a list of strings")


def either(word: str, check: Check) -> Check:
    """``check``, with the one string ``word`` allowed besides."""
    return lambda name, value: word if value == word else check(name, value)


def mapping(name: str, value: Any) -> dict[str, Any]:
    """``value`` if it is a JSON object."""
    if isinstance(value, Mapping):
        return dict(value)
    raise ConfigError(f"{name} is {value!r}; expected an object {{...}}")


def anything(name: str, value: Any) -> Any:
    """``value`` as it is."""
    return value


def optional(check: Check) -> Check:
    """``check``, with null allowed."""
    return lambda name, value: None if value is None else check(name, value)


def _auto(value: Any) -> str:
    return " ('auto' is filled in by some launchers; write the value itself here)" if value == "auto" else ""


def block(*names: str) -> Check:
    """A check for an object, or null, that holds no other keys than ``names``."""

    def check(name: str, value: Any) -> dict[str, Any] | None:
        if value is None:
            return None
        found = mapping(name, value)
        for key in found:
            if key not in names:
                raise ConfigError(unknown_key(f"{name}.{key}", key, names, name))
        return found

    return check


def unknown_key(
    full: str, key: str, known: Iterable[str], block: str, elsewhere: Mapping[str, str] | None = None
) -> str:
    """What to say of key ``key`` (``full`` with its block), which is in no table.

    Args:
        full: its full name.
        key: its name within the block.
        known: the keys of the block.
        block: the name of the block, empty at the top.
        elsewhere: full names, by key, of the keys of other blocks.
    """
    known, elsewhere = list(known), elsewhere or {}
    prefix = f"{block}." if block else ""
    here = get_close_matches(key, known, 1, 0.6)
    if here:
        return f"unknown key {full!r}; did you mean {prefix + here[0]!r}?"
    there = get_close_matches(key, elsewhere, 1, 0.75)
    if there:
        return f"unknown key {full!r}; did you mean {elsewhere[there[0]]!r}?"
    nearest = get_close_matches(key, known, 1, 0.0)
    return f"unknown key {full!r}; the nearest known key there is {prefix + nearest[0]!r}"

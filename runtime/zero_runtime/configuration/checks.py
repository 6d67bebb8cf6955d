"""Checks of single values in a configuration. Each takes the key's full name and the value, and returns the value to use.

All raise ConfigError with the name, the value and what was expected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from difflib import SequenceMatcher
from functools import partial
from typing import Any, Final, NamedTuple

from zero_runtime.errors import ConfigError


class Check(NamedTuple):
    """A check, called with the key's full name and the value.

    Attributes:
        expected: what passes, for the documentation.
        function: the check itself.
        table: for an object with known keys: those.
    """

    expected: str
    function: Callable[[str, Any], Any]
    table: Mapping[str, Any] | None = None

    def __call__(self, name: str, value: Any) -> Any:
        """The value to use. Raises ConfigError."""
        return self.function(name, value)


def integer(minimum: int = 0) -> Check:
    """A check for whole numbers of at least ``minimum``; 5e8 is one."""

    def check(name: str, value: Any) -> int:
        whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        if isinstance(value, bool) or not whole or value < minimum:
            raise ConfigError(
                f"{name} is {value!r}; expected a whole number of at least {minimum}{_auto(value)}"
            )
        return int(value)

    return Check(f"int >= {minimum}" if minimum > -(2**63) else "int", check)


def number(minimum: float | None = None) -> Check:
    """A check for finite numbers of at least ``minimum``."""

    def check(name: str, value: Any) -> float:
        good = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < float("inf")
        if not good or (minimum is not None and value < minimum):
            least = "" if minimum is None else f" of at least {minimum:g}"
            raise ConfigError(f"{name} is {value!r}; expected a number{least}{_auto(value)}")
        return float(value)

    return Check("number" if minimum is None else f"number >= {minimum:g}", check)


def choice(*values: str) -> Check:
    """A check for one of ``values``."""

    def check(name: str, value: Any) -> str:
        if value in values:
            return str(value)
        raise ConfigError(f"{name} is {value!r}; expected one of: {', '.join(values)}")

    return Check(" or ".join(f"`{value}`" for value in values), check)


def choice_of_any_case(*values: str) -> Check:
    """A check for one of ``values``, however its letters are written."""

    def check(name: str, value: Any) -> str:
        found = [each for each in values if isinstance(value, str) and each.lower() == value.lower()]
        return str(choice(*values)(name, found[0] if found else value))

    return Check(choice(*values).expected, check)


def either(word: str, check: Check) -> Check:
    """``check``, with the one string ``word`` allowed besides."""
    return Check(
        f"`{word}` or {check.expected}",
        lambda name, value: word if value == word else check(name, value),
    )


def unlimited(check: Check) -> Check:
    """``check``, with infinity allowed besides: accelerate's number of steps that are never done."""
    return Check(
        f"{check.expected} or inf",
        lambda name, value: value if value == float("inf") else check(name, value),
    )


def optional(check: Check) -> Check:
    """``check``, with null allowed."""
    return Check(
        f"{check.expected} or null",
        lambda name, value: None if value is None else check(name, value),
        check.table,
    )


def _boolean(name: str, value: Any) -> bool:
    if isinstance(value, int) and value in (0, 1):  # also as numbers, which DeepSpeed takes too
        return bool(value)
    raise ConfigError(f"{name} is {value!r}; expected true or false{_auto(value)}")


def _positive(name: str, value: Any) -> float:
    found = float(number(0.0)(name, value))
    if found == 0.0:
        raise ConfigError(f"{name} is {value!r}; expected a number above 0")
    return found


def _fraction(name: str, value: Any) -> float:
    found = float(number()(name, value))
    if not 0.0 < found <= 1.0:
        raise ConfigError(f"{name} is {value!r}; expected a number above 0 and up to 1, such as 0.01 for 1 %")
    return found


def _text(name: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    raise ConfigError(f"{name} is {value!r}; expected a string")


def _strings(name: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, list | tuple) and all(isinstance(each, str) for each in value):
        return tuple(value)
    raise ConfigError(f"{name} is {value!r}; expected a list of strings")


def _string_or_strings(name: str, value: Any) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else _strings(name, value)


def _mapping(name: str, value: Any) -> dict[str, Any]:
    if isinstance(value, Mapping):
        return dict(value)
    raise ConfigError(f"{name} is {value!r}; expected an object {{...}}")


def _auto(value: Any) -> str:
    return " ('auto' is filled in by some launchers; write the value itself here)" if value == "auto" else ""


boolean: Final = Check("bool", _boolean)
positive: Final = Check("number > 0", _positive)
fraction: Final = Check("number > 0 and <= 1", _fraction)
text: Final = Check("string", _text)
strings: Final = Check("list of strings", _strings)
string_or_strings: Final = Check("string or list of strings", _string_or_strings)
mapping: Final = Check("object", _mapping)
anything: Final = Check("any", lambda name, value: value)


def unknown_key(
    full: str,
    key: str,
    known: Iterable[str],
    block: str,
    elsewhere: Mapping[str, str] | None = None,
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
    candidates = [(_likeness(key, each), prefix + each) for each in known]
    # A key of another block, written in this one, must be nearer than a slip of one letter within this one may be.
    candidates += [(_likeness(key, each) - 0.25, name) for each, name in elsewhere.items()]
    likeness, nearest = max(candidates, key=lambda candidate: candidate[0])
    if likeness >= 0.6:
        return f"unknown key {full!r}; did you mean {nearest!r}?"
    return f"unknown key {full!r}; the nearest known key there is {prefix + max(known, key=partial(_likeness, key))!r}"


def _likeness(one: str, other: str) -> float:
    return 1.15 if one == other else SequenceMatcher(None, one, other).ratio()

"""Reads one key of a DeepSpeed config and checks the type of its value. Errors name the key.

Values of other types are converted as pydantic does for DeepSpeed. ``"2"`` and ``true`` are accepted as integers.
``"on"``, 1 and 1.0 are accepted as true. ``"2.5"`` is accepted as a number. ``" on"`` is an error for a boolean, and
``"5e8"`` is an error for an integer. A key with the value ``"auto"`` counts as not set. zero_runtime implements the
same rules in ``configuration/reading``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any, Final

from commprof.requested.errors import RequestedError

DTYPES: Final[dict[str, str]] = {
    **dict.fromkeys(("fp32", "float32", "float", "torch.float32"), "float32"),
    **dict.fromkeys(("fp16", "float16", "half", "torch.float16"), "float16"),
    **dict.fromkeys(("bf16", "bfloat16", "torch.bfloat16"), "bfloat16"),
}


_AUTO: Final = "auto"
_AUTO_IS_A_VALUE: Final = ("topology", "stage3_gather_unit")
_WORDS: Final[dict[str, bool]] = {
    **dict.fromkeys(("1", "true", "t", "yes", "y", "on"), True),
    **dict.fromkeys(("0", "false", "f", "no", "n", "off"), False),
}
_DIGITS: Final = re.compile(r"[+-]?[0-9]+(_[0-9]+)*(\.0+)?")


def truth(value: Any) -> Any:
    """Return the boolean that ``value`` represents, or ``value`` itself if it represents none."""
    if isinstance(value, str):
        return _WORDS.get(value.lower(), value)
    return bool(value) if isinstance(value, int | float) and value in (0, 1) else value


def _whole(value: Any) -> Any:
    """Return the integer that ``value`` represents, or ``value`` itself if it represents none."""
    if isinstance(value, str) and _DIGITS.fullmatch(value.strip()):
        return int(value.strip().partition(".")[0].replace("_", ""))
    return int(value) if isinstance(value, bool) else value


def _real(value: Any) -> Any:
    """Return the number that ``value`` represents, or ``value`` itself if it represents none."""
    if not isinstance(value, str | bool):
        return value
    try:
        return float(value)
    except ValueError:
        return value


def set_keys(value: object) -> Mapping[str, Any]:
    """Return the object ``value`` without its ``auto`` keys, or an empty mapping if it is not an object."""
    if not isinstance(value, Mapping):
        return {}
    return {name: each for name, each in value.items() if each != _AUTO or name in _AUTO_IS_A_VALUE}


def nearest_key(key: str, known: Iterable[str]) -> str | None:
    """Return the dotted key in ``known`` whose last part is spelled most like the last part of ``key``, or None."""
    ends: dict[str, list[str]] = {}
    for name in sorted(known):
        ends.setdefault(name.rpartition(".")[2], []).append(name)
    near = get_close_matches(key.rpartition(".")[2], ends, 1, 0.8)
    return get_close_matches(key, ends[near[0]], 1, 0.0)[0] if near else None


def section(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return the object under ``key``, or an empty mapping if the key is not set."""
    value = config.get(key)
    if value is None or value == _AUTO:
        return {}
    if not isinstance(value, Mapping):
        raise wrong(key, value, "an object with keys of its own")
    return set_keys(value)


def flag(values: Mapping[str, Any], key: str, default: bool | None, *, is_checked: bool = True) -> bool:
    """Return the boolean under the last part of the dotted ``key``.

    Args:
        values: The keys of a block.
        key: The dotted name of the key, which includes the names of its blocks.
        default: The result if the key is not set. None means false, and that the key may also be null.
        is_checked: Whether DeepSpeed refuses other values. If not, Python's truth rules apply, so that 2 is true.
    """
    value = values.get(key.rpartition(".")[2], _AUTO)
    if value == _AUTO or (value is None and default is None):
        return bool(default)
    read = truth(value)
    if is_checked and not isinstance(read, bool):
        raise wrong(key, value, "true or false")
    return bool(read)


def number(values: Mapping[str, Any], key: str, default: float) -> float:
    """Return the number under ``key``, which must not be negative, or ``default`` if the key is not set."""
    value = _value(values, key)
    if value is None:
        return default
    read = _real(value)
    if not isinstance(read, int | float) or not read >= 0:
        raise wrong(key, value, "a number that is not negative")
    return float(read)


def count(values: Mapping[str, Any], key: str, default: int | None, *, least: int) -> int | None:
    """Return the integer under ``key``, which must be at least ``least``, or ``default`` if the key is not set.

    The number ``5e8`` is accepted as an integer.
    """
    value = _value(values, key)
    if value is None:
        return default
    read = _whole(value)
    is_integer = isinstance(read, int) or (isinstance(read, float) and read.is_integer())
    if not is_integer or read < least:
        raise wrong(key, value, f"a whole number, {least} or more")
    return int(read)


def choice(values: Mapping[str, Any], key: str, choices: tuple[str, ...]) -> str:
    """Return the value under ``key``, which must be in ``choices``, or the first choice if the key is not set."""
    value = _value(values, key)
    if value is None:
        return choices[0]
    if value not in choices:
        raise wrong(key, value, f"one of {', '.join(choices)}")
    return str(value)


def dtype(values: Mapping[str, Any], key: str) -> str | None:
    """Return the element type under ``key`` in torch's spelling, or None if the key is not set."""
    value = _value(values, key)
    if value is None:
        return None
    if not isinstance(value, str) or value.lower() not in DTYPES:
        raise wrong(key, value, "fp32, fp16 or bf16")
    return DTYPES[value.lower()]


def _value(values: Mapping[str, Any], key: str) -> Any:
    # The type is Any because this is a value of a JSON file, which the caller checks.
    value = values.get(key.rpartition(".")[2])
    return None if value == _AUTO else value


def wrong(key: str, value: object, wanted: str) -> RequestedError:
    """Return the error for a value that cannot be used."""
    return RequestedError(f"{key} is {value!r} in the config; expected {wanted}")

"""Reads one key of a DeepSpeed config and checks its type; errors name the key.

Values of other types are read as DeepSpeed reads them: ``"2"`` and ``true`` are numbers, ``"on"`` and 1 are true, and a key
whose value is ``"auto"`` is not set.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from math import isnan
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
    **dict.fromkeys(("true", "t", "yes", "y", "on"), True),
    **dict.fromkeys(("false", "f", "no", "n", "off"), False),
}


def plain(value: Any) -> Any:
    """The boolean or number that a string stands for; any other value as it is."""
    if not isinstance(value, str):
        return value
    word = value.strip().lower()
    if word in _WORDS:
        return _WORDS[word]
    try:
        return int(word)
    except ValueError:
        pass
    try:
        real = float(word)
    except ValueError:
        return value
    return value if isnan(real) else real


def plain_block(value: object) -> Mapping[str, Any]:
    """``value`` with plain values and without ``auto`` keys; empty where it is no object."""
    if not isinstance(value, Mapping):
        return {}
    return {name: plain(each) for name, each in value.items() if each != _AUTO or name in _AUTO_IS_A_VALUE}


def nearest_key(key: str, known: Iterable[str]) -> str | None:
    """The dotted key of ``known`` that ``key`` may stand for: its last part is spelled nearly the same."""
    ends: dict[str, list[str]] = {}
    for name in sorted(known):
        ends.setdefault(name.rpartition(".")[2], []).append(name)
    near = get_close_matches(key.rpartition(".")[2], ends, 1, 0.8)
    return get_close_matches(key, ends[near[0]], 1, 0.0)[0] if near else None


def section(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The object under ``key``; empty where it is not set."""
    value = config.get(key)
    if value is None or value == _AUTO:
        return {}
    if not isinstance(value, Mapping):
        raise wrong(key, value, "an object with keys of its own")
    return plain_block(value)


def flag(values: Mapping[str, Any], key: str, default: bool) -> bool:
    """True or false under the last part of the dotted ``key``."""
    value = _value(values, key)
    if value is None:
        return default
    if not isinstance(value, int) or value not in (0, 1):
        raise wrong(key, value, "true or false")
    return bool(value)


def number(values: Mapping[str, Any], key: str, default: float) -> float:
    """A number that is not negative."""
    value = _value(values, key)
    if value is None:
        return default
    if not isinstance(value, int | float) or value < 0:
        raise wrong(key, value, "a number that is not negative")
    return float(value)


def count(values: Mapping[str, Any], key: str, default: int | None, *, least: int) -> int | None:
    """A whole number of at least ``least``, also written as ``5e8``."""
    value = _value(values, key)
    if value is None:
        return default
    is_integer = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    if not is_integer or value < least:
        raise wrong(key, value, f"a whole number, {least} or more")
    return int(value)


def choice(values: Mapping[str, Any], key: str, choices: tuple[str, ...]) -> str:
    """One of ``choices``, the first where the key is not set."""
    value = _value(values, key)
    if value is None:
        return choices[0]
    if value not in choices:
        raise wrong(key, value, f"one of {', '.join(choices)}")
    return str(value)


def dtype(values: Mapping[str, Any], key: str) -> str | None:
    """An element type by any of its names, as torch spells it; None where the key is not set."""
    value = _value(values, key)
    if value is None:
        return None
    if not isinstance(value, str) or value.lower() not in DTYPES:
        raise wrong(key, value, "fp32, fp16 or bf16")
    return DTYPES[value.lower()]


def _value(values: Mapping[str, Any], key: str) -> Any:
    # Any: a value of a JSON file, which the caller checks.
    value = plain(values.get(key.rpartition(".")[2]))
    return None if value == _AUTO else value


def wrong(key: str, value: object, wanted: str) -> RequestedError:
    """The error for a value that cannot be used."""
    return RequestedError(f"{key} is {value!r} in the config; expected {wanted}")

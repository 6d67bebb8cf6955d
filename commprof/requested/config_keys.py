"""Reads one key of a DeepSpeed config and checks its type; errors name the key.

Values of other types are read as DeepSpeed reads them, by pydantic: ``"2"`` and ``true`` are whole numbers, ``"on"``, 1 and
1.0 are true, ``"2.5"`` is a number, and ``" on"`` or ``"5e8"`` for a whole number is an error. A key whose value is
``"auto"`` is not set. zero_runtime states the same rules in ``configuration/reading``.
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
    """``value`` as the boolean that it stands for; unchanged if it stands for none."""
    if isinstance(value, str):
        return _WORDS.get(value.lower(), value)
    return bool(value) if isinstance(value, int | float) and value in (0, 1) else value


def _whole(value: Any) -> Any:
    """``value`` as the whole number that it stands for; unchanged if it stands for none."""
    if isinstance(value, str) and _DIGITS.fullmatch(value.strip()):
        return int(value.strip().partition(".")[0].replace("_", ""))
    return int(value) if isinstance(value, bool) else value


def _real(value: Any) -> Any:
    """``value`` as the number that it stands for; unchanged if it stands for none."""
    if not isinstance(value, str | bool):
        return value
    try:
        return float(value)
    except ValueError:
        return value


def set_keys(value: object) -> Mapping[str, Any]:
    """The object ``value`` without ``auto`` keys; empty where it is no object."""
    if not isinstance(value, Mapping):
        return {}
    return {name: each for name, each in value.items() if each != _AUTO or name in _AUTO_IS_A_VALUE}


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
    return set_keys(value)


def flag(values: Mapping[str, Any], key: str, default: bool | None, *, is_checked: bool = True) -> bool:
    """True or false under the last part of the dotted ``key``.

    Args:
        values: the keys of a block.
        key: with the names of its blocks.
        default: where it is not set; None if the key may be null, too, which is false.
        is_checked: whether DeepSpeed refuses other values; otherwise they count by Python's rules, such as 2 as true.
    """
    value = values.get(key.rpartition(".")[2], _AUTO)
    if value == _AUTO or (value is None and default is None):
        return bool(default)
    read = truth(value)
    if is_checked and not isinstance(read, bool):
        raise wrong(key, value, "true or false")
    return bool(read)


def number(values: Mapping[str, Any], key: str, default: float) -> float:
    """A number that is not negative."""
    value = _value(values, key)
    if value is None:
        return default
    read = _real(value)
    if not isinstance(read, int | float) or not read >= 0:
        raise wrong(key, value, "a number that is not negative")
    return float(read)


def count(values: Mapping[str, Any], key: str, default: int | None, *, least: int) -> int | None:
    """A whole number of at least ``least``, also written as ``5e8``."""
    value = _value(values, key)
    if value is None:
        return default
    read = _whole(value)
    is_integer = isinstance(read, int) or (isinstance(read, float) and read.is_integer())
    if not is_integer or read < least:
        raise wrong(key, value, f"a whole number, {least} or more")
    return int(read)


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
    value = values.get(key.rpartition(".")[2])
    return None if value == _AUTO else value


def wrong(key: str, value: object, wanted: str) -> RequestedError:
    """The error for a value that cannot be used."""
    return RequestedError(f"{key} is {value!r} in the config; expected {wanted}")

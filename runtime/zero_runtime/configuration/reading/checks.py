"""Checks of single values in a configuration. A check takes the full name of a key and its value, and returns a value.

The returned value is the one to use. If the value is not valid, a check raises ConfigError with the name, the
value and the expected values.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from typing import Any, Final, NamedTuple

from zero_runtime.errors import ConfigError


def unchanged(value: Any) -> Any:
    """Return ``value`` unchanged."""
    return value


class Check(NamedTuple):
    """A check, which is called with the full name of a key and its value.

    Attributes:
        expected: A description of valid values, for the documentation.
        function: The function that checks a value.
        table: The keys of an object with known keys; None for any other value.
        coerce: A function that converts a value of another type in the same way as DeepSpeed. It returns the value
            unchanged if DeepSpeed does not convert it.
    """

    expected: str
    function: Callable[[str, Any], Any]
    table: Mapping[str, Any] | None = None
    coerce: Callable[[Any], Any] = unchanged

    def __call__(self, name: str, value: Any) -> Any:
        """Return the value to use. Raises ConfigError if ``value`` is not valid."""
        return self.function(name, value)


def integer(minimum: int = 0, maximum: int | None = None) -> Check:
    """Return a check for integers from ``minimum`` to ``maximum``. Floats with integer values, such as 5e8, pass."""

    def check(name: str, value: Any) -> int:
        is_whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        in_range = is_whole and value >= minimum and (maximum is None or value <= maximum)
        if isinstance(value, bool) or not in_range:
            most = "" if maximum is None else f" and at most {maximum}"
            raise ConfigError(
                f"{name} is {value!r}; expected a whole number of at least {minimum}{most}{_auto(value)}"
            )
        return int(value)

    return Check(f"int >= {minimum}" if minimum > -(2**63) else "int", check, coerce=_whole)


def number(minimum: float | None = None, maximum: float = sys.float_info.max) -> Check:
    """Return a check for numbers from ``minimum`` to ``maximum``. By default, infinity does not pass."""

    def check(name: str, value: Any) -> float:
        good = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= maximum
        if not good or (minimum is not None and value < minimum):
            least = "" if minimum is None else f" of at least {minimum:g}"
            raise ConfigError(f"{name} is {value!r}; expected a number{least}{_auto(value)}")
        return float(value)

    return Check("number" if minimum is None else f"number >= {minimum:g}", check, coerce=coerced_number)


def choice(*values: str) -> Check:
    """Return a check for one of ``values``."""

    def check(name: str, value: Any) -> str:
        if value in values:
            return str(value)
        raise ConfigError(f"{name} is {value!r}; expected one of: {', '.join(values)}")

    return Check(" or ".join(f"`{value}`" for value in values), check)


def choice_of_any_case(*values: str) -> Check:
    """Return a check for one of ``values`` in upper or lower case."""

    def check(name: str, value: Any) -> str:
        matches = [each for each in values if isinstance(value, str) and each.lower() == value.lower()]
        return str(choice(*values)(name, matches[0] if matches else value))

    return Check(choice(*values).expected, check)


def either(keyword: str, check: Check) -> Check:
    """Return a version of ``check`` that also accepts the string ``keyword``."""

    def checked(name: str, value: Any) -> Any:
        if value == keyword:
            return keyword
        try:
            return check(name, value)
        except ConfigError as error:
            raise ConfigError(f"{error}, or {keyword!r}") from None

    return Check(f"`{keyword}` or {check.expected}", checked, coerce=check.coerce)


def not_boolean(check: Check) -> Check:
    """Return a version of ``check`` that refuses true and false instead of converting them to 1 and 0."""
    return Check(
        check.expected,
        check.function,
        coerce=lambda value: value if isinstance(value, bool) else check.coerce(value),
    )


def unlimited(check: Check) -> Check:
    """Return a version of ``check`` that also accepts infinity.

    accelerate uses infinity for an interval that never elapses.
    """
    return Check(
        f"{check.expected} or inf",
        lambda name, value: value if value == float("inf") else check(name, value),
    )


def optional(check: Check) -> Check:
    """Return a version of ``check`` that also accepts null."""
    return Check(
        f"{check.expected} or null",
        lambda name, value: None if value is None else check(name, value),
        check.table,
        check.coerce,
    )


_WORDS: Final = {
    **dict.fromkeys(("1", "true", "t", "yes", "y", "on"), True),
    **dict.fromkeys(("0", "false", "f", "no", "n", "off"), False),
}
_DIGITS: Final = re.compile(r"[+-]?[0-9]+(_[0-9]+)*(\.0+)?")


def _truth(value: Any) -> Any:
    """Return ``value`` converted to a boolean like pydantic, or unchanged if pydantic does not convert it."""
    if isinstance(value, str):
        return _WORDS.get(value.lower(), value)
    if isinstance(value, int | float) and value in (0, 1):
        return bool(value)
    return value


def _whole(value: Any) -> Any:
    """Return ``value`` converted to an integer like pydantic, or unchanged if pydantic does not convert it."""
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, str) and _DIGITS.fullmatch(value.strip()):
        return int(value.strip().partition(".")[0].replace("_", ""))
    return value


def coerced_number(value: Any) -> Any:
    """Return ``value`` converted to a number like pydantic, or unchanged if pydantic does not convert it."""
    if isinstance(value, bool):
        return float(value)
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _boolean(name: str, value: Any) -> bool:
    if isinstance(value, int) and value in (0, 1):  # DeepSpeed also accepts 0 and 1
        return bool(value)
    raise ConfigError(f"{name} is {value!r}; expected true or false{_auto(value)}")


def _positive(name: str, value: Any) -> float:
    number_value = float(number(0.0)(name, value))
    if number_value == 0.0:
        raise ConfigError(f"{name} is {value!r}; expected a number above 0")
    return number_value


def _fraction(name: str, value: Any) -> float:
    number_value = float(number()(name, value))
    if not 0.0 < number_value <= 1.0:
        raise ConfigError(f"{name} is {value!r}; expected a number above 0 and up to 1")
    return number_value


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


boolean: Final = Check("bool", _boolean, coerce=_truth)
positive: Final = Check("number > 0", _positive, coerce=coerced_number)
fraction: Final = Check("number > 0 and <= 1", _fraction, coerce=coerced_number)
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
    """Return the error message for key ``key``, which is in no table.

    Args:
        full: The full name of the key.
        key: The name of the key within the block.
        known: The known keys of the block.
        block: The name of the block, which is empty for the top level.
        elsewhere: The full names of the keys of all other blocks, by key.
    """
    prefix = f"{block}." if block else ""
    known, elsewhere = list(known), elsewhere or {}
    reason = _KNOWN_OTHERWISE.get(key)
    if reason is not None:
        return f"unknown key {full!r}; {reason}"
    # The candidates are tried from the most to the least likely: a key of this block with a typo of one letter, a key
    # of another block, a key of another block with a typo, and less similar keys of this block.
    for names, likeness in ((known, 0.9), (elsewhere, 1.0), (elsewhere, 0.9), (known, 0.75)):
        near = get_close_matches(key.lower(), list(names), 1, likeness)
        if likeness < 0.9 and not near and len(key) > 4:
            # The key may be the beginning of a longer name.
            near = [name for name in names if name.startswith(key.lower())][:1]
        if near:
            meant = elsewhere[near[0]] if names is elsewhere else prefix + near[0]
            return f"unknown key {full!r}; did you mean {meant!r}?"
    if key.startswith(COMMENTS):
        return f"unknown key {full!r}; DeepSpeed takes comments at the top level, but not in this block; move it there"
    place = f"the block {block}" if block else "the top level"
    return f"unknown key {full!r}: {place} has no key of a similar name; docs/config.md lists all keys; remove it"


COMMENTS: Final = ("_", "#", "//", "$", "comment")  # prefixes of keys that people use for comments
_INFERENCE: Final = (
    "it belongs to the configuration of deepspeed.init_inference, which is not in this version; remove it"
)
# Keys of DeepSpeed that are in no table. They belong to its other configurations, or to versions before 0.19.
_KNOWN_OTHERWISE: Final[Mapping[str, str]] = {
    **dict.fromkeys(
        (
            "kernel_inject", "enable_cuda_graph", "use_triton", "triton_autotune", "triangular_masking", "quant", "base_dir",
            "set_empty_params", "save_mp_checkpoint_path", "checkpoint_config", "injection_policy", "return_tuple",
            "training_mp_size", "replace_method", "min_out_tokens", "transposed_mode", "ep_size", "ep_group", "ep_mp_group",
            "moe_type",
        ),
        _INFERENCE,
    ),
    **dict.fromkeys(
        ("moe", "moe_experts", "num_experts", "expert_parallel_size"),
        "experts (MoE) are made by deepspeed.moe.layer.MoE in the model, not by a key; remove it",
    ),
    "fp32_allreduce": 'a key of earlier versions of DeepSpeed; write "communication_data_type": "fp32"',
    "allgather_size": "a key of earlier versions of DeepSpeed; write zero_optimization.allgather_bucket_size",
    "checkpoint_in_cpu": "an argument of checkpointing.configure; write activation_checkpointing.cpu_checkpointing",
    "contiguous_checkpointing": "an argument of checkpointing.configure; write "
    "activation_checkpointing.contiguous_memory_optimization",
    "pld": "progressive layer drop has been removed from DeepSpeed; remove it",
}  # fmt: skip

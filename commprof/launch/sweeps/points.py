"""Plans a sweep: parses settings, builds their product, derives the config of each point, orders the runs. Pure."""

from __future__ import annotations

import copy
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from commprof.errors import UsageError
from commprof.launch.sweeps.config_file import find_slip

_PYTHON_WORDS: Final = {"True": "true", "False": "false", "None": "null"}
_MISSING: Final = object()


class Turn(NamedTuple):
    """One run of a sweep: a point and the number of the repetition, counted from 0."""

    number: int
    point: dict[str, Any]  # dotted key -> value
    repeat: int


class Mismatch(NamedTuple):
    """A key of the sweep whose requested value differs from the value that the engine used."""

    key: str
    asked: Any
    used: Any


def parse_setting(text: str) -> tuple[str, list[Any]]:
    """Parse ``key=v1,v2`` into a dotted key and its values. A value that is not JSON is text.

    >>> parse_setting("zero_optimization.reduce_scatter=true,false")
    ('zero_optimization.reduce_scatter', [True, False])

    Raises:
        UsageError: there is no key or no value, a value is empty or repeated, or a value has Python syntax.
    """
    key, equals, listed = text.partition("=")
    key = key.strip()
    if not equals or not key or not all(key.split(".")):
        raise UsageError(
            f"--set {text}: key=value1,value2 was expected, with dots between the levels of the key"
        )
    values = [_parse_value(key, word) for word in _split_values(listed)]
    for position, value in enumerate(values):
        if any(_same(value, other) for other in values[:position]):
            raise UsageError(
                f"--set {text}: the value {json.dumps(value)} occurs twice; --repeat N repeats runs"
            )
    return key, values


def _split_values(text: str) -> Iterator[str]:
    """Yield the parts of ``text`` between commas that are outside of brackets and quotes."""
    depth, quoted, word = 0, False, ""
    for position, letter in enumerate(text):
        if letter == '"' and text[position - 1 : position] != "\\":
            quoted = not quoted
        if not quoted:
            depth += (letter in "[{") - (letter in "]}")
        if letter == "," and not depth and not quoted:
            yield word.strip()
            word = ""
        else:
            word += letter
    yield word.strip()


def _parse_value(key: str, word: str) -> Any:
    if not word:
        raise UsageError(
            f"--set {key}: an empty value; write {key}=value1,value2 (and '\"\"' for empty text)"
        )
    if word in _PYTHON_WORDS:
        raise UsageError(
            f"--set {key}={word}: {word} is Python; JSON writes {_PYTHON_WORDS[word]}. For the text, write '\"{word}\"'"
        )
    if re.fullmatch(r"[+-]?\d+(_\d+)+(\.\d+)?", word):
        raise UsageError(f"--set {key}={word}: {word} is Python; JSON writes {word.replace('_', '')}")
    try:
        return json.loads(word, parse_float=_real)
    except json.JSONDecodeError as error:
        if word[0] in '[{"':
            slip = find_slip(word, error.pos)
            raise UsageError(f"--set {key}={word}: not JSON at column {slip.column}: {slip.what}") from None
        return word
    # The text is nested too deeply, or is an integer of more than 4,300 digits.
    except (RecursionError, ValueError) as error:
        raise UsageError(f"--set {key}={word[:40]} ...: no usable JSON: {error}") from None


def _real(text: str) -> int | float:
    """Return the value of a JSON number. 1e5 is an integer, because users write sizes in this form; 1.0 is a float."""
    value = float(text)
    return int(value) if "e" in text.lower() and value.is_integer() and abs(value) < 2**53 else value


def points(settings: Sequence[str]) -> list[dict[str, Any]]:
    """Return all combinations of the values of ``settings`` (texts of ``--set``). The last setting varies fastest.

    Raises:
        UsageError: as in :func:`parse_setting`, or a key is given twice or is within another key.
    """
    parsed = [parse_setting(text) for text in settings]
    keys = [key for key, _ in parsed]
    for first, second in itertools.combinations(keys, 2):
        if first == second:
            raise UsageError(f"--set {first} is given twice; list its values in one --set {first}=v1,v2")
        if f"{first}.".startswith(f"{second}.") or f"{second}.".startswith(f"{first}."):
            raise UsageError(f"--set {first} and --set {second}: one key is within the other")
    return [dict(zip(keys, values, strict=True)) for values in itertools.product(*(v for _, v in parsed))]


def derive(config: Mapping[str, Any], point: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of ``config`` in which the dotted keys of ``point`` are set. Missing objects are created.

    Raises:
        UsageError: a parent of a key is not an object in ``config``.
    """
    derived: dict[str, Any] = copy.deepcopy(dict(config))
    for key, value in point.items():
        *parents, last = key.split(".")
        place = derived
        for depth, parent in enumerate(parents):
            below = place.setdefault(parent, {})
            if not isinstance(below, dict):
                where = ".".join(parents[: depth + 1])
                raise UsageError(
                    f"--set {key}: {where} is {json.dumps(below)} in the config, which is not an object with keys"
                )
            place = below
        place[last] = value
    return derived


def turns(listed: Sequence[dict[str, Any]], repeats: int) -> list[Turn]:
    """Return the runs in order: all points once, then all points again.

    In this order, a drift in the speed of the machine affects all points.
    """
    return [
        Turn(number, point, repeat)
        for number, (repeat, point) in enumerate(itertools.product(range(repeats), listed))
    ]


def label(point: Mapping[str, Any]) -> str:
    """Return ``point`` as text: the last part of each key with its value, or the full keys if last parts are equal.

    >>> label({"zero_optimization.reduce_scatter": True, "train_batch_size": 8})
    'reduce_scatter=true train_batch_size=8'
    """
    short = [key.rpartition(".")[2] for key in point]
    names = short if len(set(short)) == len(short) else list(point)
    return " ".join(
        f"{name}={value if isinstance(value, str) else json.dumps(value)}"
        for name, value in zip(names, point.values(), strict=True)
    )


def mismatches(point: Mapping[str, Any], used: Mapping[str, Any]) -> list[Mismatch]:
    """Return the keys of ``point`` whose value differs in the config ``used`` of the engine.

    A key that ``used`` lacks is not a difference, and neither is a requested value ``auto``.
    """
    differences = []
    for key, asked in point.items():
        value = _look_up(used, key)
        if value is not _MISSING and asked != "auto" and not _same(value, asked):
            differences.append(Mismatch(key, asked, value))
    return differences


def _look_up(config: Mapping[str, Any], key: str) -> Any:
    place: Any = config
    for part in key.split("."):
        if not isinstance(place, Mapping) or part not in place:
            return _MISSING
        place = place[part]
    return place


def _same(left: Any, right: Any) -> bool:
    """Return whether two config values are equal: 5e8 equals 500000000, but true does not equal 1."""
    return isinstance(left, bool) == isinstance(right, bool) and bool(left == right)

"""Reads the JSON config of a script, with error messages that contain the line and the column.

Users write configs by hand and often use Python syntax. So the messages explain the usual mistakes: ``True``, comments,
trailing commas, ``500_000_000``, single quotes.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from commprof.errors import UsageError
from commprof.launch.user_program import CONFIG_ARGUMENTS, Program, find_argument

_WORDS = {"True": "true", "False": "false", "None": "null"}


class _DuplicateError(Exception):
    pass


class Slip(NamedTuple):
    """The position of an error in a JSON text, and its description."""

    line: int
    column: int
    what: str


class ConfigFile(NamedTuple):
    """The config file in the program's arguments. commprof only reads this file."""

    argument: str
    path: Path
    content: dict[str, Any] | None
    problem: str | None = None


def find_config(program: Program) -> ConfigFile | None:
    """Return the config file in the program's arguments, or None if there is none.

    The result is also None if the argument is clearly not a JSON file, such as a YAML file or a name.
    """
    argument = find_argument(program.arguments, CONFIG_ARGUMENTS)
    if argument is None:
        return None
    path = Path(argument.value)
    if not path.is_file():
        return None
    try:
        return ConfigFile(argument.name, path, read_config(path))
    except UsageError as error:
        return ConfigFile(argument.name, path, None, str(error)) if path.suffix == ".json" else None


def read_config(path: str | Path) -> dict[str, Any]:
    """Read the JSON object in file ``path``.

    Raises:
        UsageError: the file cannot be read, or is not a JSON object. The message contains the line, the column and the
            correction.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise UsageError(f"no such config file: {path}") from None
    except IsADirectoryError:
        raise UsageError(f"{path} is a directory, not a config file") from None
    except PermissionError:
        raise UsageError(f"no permission to read the config {path}") from None
    except UnicodeDecodeError:
        raise UsageError(f"the config {path} is not text, so it is not JSON") from None
    except OSError as error:
        raise UsageError(f"the config {path} cannot be read: {error.strerror}") from None
    return parse_config(text, str(path))


def parse_config(text: str, name: str) -> dict[str, Any]:
    """Parse the JSON object in ``text``. Error messages use ``name`` for the text.

    Raises:
        UsageError: as in :func:`read_config`.
    """
    try:
        config = json.loads(text, object_pairs_hook=_object, parse_constant=_constant)
    except json.JSONDecodeError as error:
        slip = find_slip(text, error.pos, complete=error.msg.startswith("Extra data"))
        raise UsageError(f"{name} is not JSON: line {slip.line}, column {slip.column}: {slip.what}") from None
    except _DuplicateError as error:
        raise UsageError(f"{name} is ambiguous: {error}; keep one of them") from None
    except RecursionError:
        raise UsageError(f"{name} is nested too deeply to be a config") from None
    except ValueError as error:  # Python reads no integer of more than 4,300 digits
        raise UsageError(f"{name} is no config: {error}") from None
    if not isinstance(config, dict):
        raise UsageError(f"{name} holds a JSON {_kind(config)}, and a config is an object: {{ ... }}")
    return config


def find_slip(text: str, position: int, complete: bool = False) -> Slip:
    """Return the mistake at ``position``, where the JSON decoder failed.

    ``complete`` means that a complete value precedes the position.
    """
    if complete:
        start, what = position, f"more text after the end of the value: {_beginning(text[position:])}"
    else:
        start, what = _recognise(text, position)
    line = text.count("\n", 0, start) + 1
    return Slip(line, start - (text.rfind("\n", 0, start) + 1) + 1, what)


def _recognise(text: str, position: int) -> tuple[int, str]:
    """Return the position of the mistake, which may be before ``position``, and its description."""
    rest = text[position:]
    if not text.strip():
        return 0, "the file is empty"
    for word, json_word in _WORDS.items():
        if re.match(rf"{word}\b", rest):
            return position, f"{word} is Python; JSON writes {json_word}"
    number = _number_with_underscores(text, position)
    if number is not None:
        return number
    if rest.startswith(("//", "/*", "#")):
        return position, "JSON has no comments; remove it"
    before = text[:position].rstrip()
    # Python 3.13 stops at the comma, and earlier versions at the bracket.
    comma = len(before) - 1 if before.endswith(",") else position
    if re.match(r",\s*[]}]", text[comma:]):
        return comma, "a comma before the closing bracket; remove it"
    if rest[:1] in ("}", "]") and before.endswith(":"):
        return position, "a value is missing after the colon"
    return position, _plain(text, position, before)


def _number_with_underscores(text: str, position: int) -> tuple[int, str] | None:
    start = position
    while start > 0 and re.match(r"[\w.+-]", text[start - 1]):
        start -= 1
    number = re.match(r"[+-]?\d+(?:_\d+)+(?:\.\d+)?", text[start:])
    if number is None:
        return None
    return start, f"{number.group()} is Python; JSON writes {number.group().replace('_', '')}"


def _plain(text: str, position: int, before: str) -> str:
    rest = text[position:]
    if not rest.strip():
        return "the text ends too early; a bracket or a quote is not closed"
    if rest.startswith("'"):
        return "a single quote; JSON puts text and keys in double quotes"
    word = re.match(r"[A-Za-z_][\w.]*", rest)
    if word and before.endswith(("{", ",", ":", "[")):
        return f"{word.group()} is not in quotes; JSON puts text and keys in double quotes"
    number = re.match(r"[+.]?\d[\w.]*", rest)
    if number and before.endswith((":", ",", "[")):
        return f"{number.group()} is not a JSON number; write it without + and with a digit before the point"
    if before.endswith(('"', "}", "]", "e", "l")) or before[-1:].isdigit():
        missing = "a colon or comma" if before.endswith('"') else "a comma"
        return f"{missing} is missing before {_beginning(rest)}"
    return f"unexpected {_beginning(rest)}"


def _beginning(text: str) -> str:
    return repr(text.splitlines()[0][:20])


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = dict(pairs)
    if len(keys) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise _DuplicateError(f"the key {twice!r} occurs twice in one object")
    return keys


def _constant(name: str) -> float:
    return float(name.replace("Infinity", "inf"))


def _kind(value: object) -> str:
    if value is None:
        return "null"
    return {list: "array", str: "string", bool: "boolean"}.get(type(value), "number")

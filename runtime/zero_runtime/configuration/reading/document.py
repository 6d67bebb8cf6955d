"""A reader of JSON configuration files, whose errors name the line and column.

As in DeepSpeed, Hjson is accepted, but with a warning. Hjson allows comments, superfluous commas and missing
quotes. Errors name other common mistakes: Python's True, False and None, 500_000_000, NaN, and a repeated key.
Lines and columns count from 1.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from pathlib import Path
from typing import Any, Final

from zero_runtime import log
from zero_runtime.configuration.reading import hjson
from zero_runtime.errors import ConfigError

_PYTHON: Final = {"True": "true", "False": "false", "None": "null"}
_TOKEN: Final = re.compile(
    r"""(?P<string>"(?:[^"\\]|\\.)*")
      | (?P<comment>//|\#|/\*)
      | (?P<python>\b(?:True|False|None)\b)
      | (?P<number>-?\d[\d_]*_[\d_.eE+-]*)
      | (?P<constant>\bNaN\b|-Infinity\b)
      | (?P<quote>')
      | (?P<comma>,(?=\s*[}\]]))""",
    re.VERBOSE | re.DOTALL,
)
# A key, any other string, or a brace.
_STRUCTURE: Final = re.compile(r"""(?P<key>"(?:[^"\\]|\\.)*")(?=\s*:)|"(?:[^"\\]|\\.)*"|[{}]""", re.DOTALL)


def load(path: str | Path) -> dict[str, Any]:
    """Read the configuration file at ``path``. Raises ConfigError with the file, line and column of an error."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"config file {path} does not exist; expected a JSON file, or a dict") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {path} cannot be read: {error}") from None
    return parse(text, str(path))


def decoded(text: str) -> dict[str, Any] | None:
    """Return the configuration whose URL-safe base64 encoding is ``text``; None if ``text`` is no such encoding.

    Raises:
        ConfigError: The decoded text begins with a brace but is not a JSON object.
    """
    try:
        content = base64.b64decode(text.encode("ascii"), altchars=b"-_", validate=True).decode()
    except (UnicodeError, binascii.Error):
        return None
    return parse(content, "config in base64") if content.lstrip().startswith("{") else None


def parse(text: str, name: str = "config") -> dict[str, Any]:
    """Return the JSON object in ``text``. Errors begin with ``name``, the line and the column."""
    slip = _first_slip(text)
    try:
        value = json.loads(text, parse_constant=_constant)
    except (json.JSONDecodeError, _ConstantError) as error:
        if isinstance(error, json.JSONDecodeError):
            position, what = error.pos, f"{error.msg[0].lower()}{error.msg[1:]}"
        else:
            position, what = len(text), f"{error.args[0]} is no JSON number"
        if slip is not None and slip[0] <= position:
            position, what = slip
        try:
            value = hjson.parse(text)
        except hjson.HjsonError as other:
            if "occurs twice" in other.what:
                position, what = other.position, other.what
        else:
            if isinstance(value, dict) and value:
                log.warning(f"{_place(text, position, name)}: not JSON, and read as Hjson: {what}")
                return value
        raise ConfigError(f"{_place(text, position, name)}: not JSON: {what}") from None
    repeated = _repeated_key(text)
    if repeated is not None:
        raise ConfigError(
            f"{_place(text, repeated[0], name)}: key {repeated[1]} occurs twice in one object; keep one of them"
        )
    if not isinstance(value, dict):
        raise ConfigError(
            f"{name}: expected a JSON object {{...}} at the top, found {type(value).__name__} {str(value)[:40]!r}"
        )
    return value


class _ConstantError(Exception):
    pass


def _repeated_key(text: str) -> tuple[int, str] | None:
    """Return the position and text of the first key that is repeated within its object; None if there is none.

    ``text`` must be valid JSON.
    """
    open_keys: list[set[str]] = []
    for match in _STRUCTURE.finditer(text):
        key = match.group("key")
        if key is not None:
            if key in open_keys[-1]:
                return match.start(), key
            open_keys[-1].add(key)
        elif match.group() == "{":
            open_keys.append(set())
        elif match.group() == "}":
            open_keys.pop()
    return None


def _constant(name: str) -> float:
    # Python writes accelerate's steps_per_print in this way. The checks of numbers refuse infinity.
    if name == "Infinity":
        return float("inf")
    raise _ConstantError(name)


def _first_slip(text: str) -> tuple[int, str] | None:
    """Return the position and description of the first common mistake that is not JSON; None if there is none."""
    for match in _TOKEN.finditer(text):
        kind, token = match.lastgroup, match.group()
        if kind == "string":
            continue
        return match.start(), {
            "comment": f"{token} begins a comment, and JSON has none; remove it",
            "python": f"{token} is Python; in JSON it is {_PYTHON.get(token, '')}",
            "number": f"{token} has underscores; in JSON it is {token.replace('_', '')}",
            "constant": f"{token} is no JSON number",
            "quote": "strings are written with double quotes, not with '",
            "comma": "a comma before the closing bracket; remove it",
        }[str(kind)]
    return None


def _place(text: str, position: int, name: str) -> str:
    line = text.count("\n", 0, position) + 1
    column = position - (text.rfind("\n", 0, position) + 1) + 1
    return f"{name}, line {line}, column {column}"

"""A reader of Hjson, which DeepSpeed accepts: JSON with comments and with optional quotes and commas.

A string without quotes extends to the end of its line. In this reader, an unquoted string with JSON
punctuation, or with a word or number of Python, is an error, because Hjson would read ``True,`` as a string of
five characters.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final, NamedTuple

_SPACE: Final = re.compile(r"(?:\s|#[^\n]*|//[^\n]*|/\*.*?\*/)*", re.DOTALL)
_SPACE_AND_COMMAS: Final = re.compile(r"(?:\s|,|#[^\n]*|//[^\n]*|/\*.*?\*/)*", re.DOTALL)
_KEY: Final = re.compile(r"""[^\s{}\[\],:"'#]+""")
_TRIPLE: Final = re.compile(r"'''(.*?)'''", re.DOTALL)
_QUOTED: Final = re.compile(r"""(["'])(?:[^\\\n]|\\.)*?\1""")
_LITERAL: Final = re.compile(
    r"(?:-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?|true|false|null)(?=\s*(?:$|[,\]}\n#]|//|/\*))"
)
_TEXT: Final = re.compile(r"[^\n]+")
_SLIP: Final = re.compile(r'[{}\[\]"]|^[,:\']|^(?:True|False|None|NaN|-?Infinity|-?\d[\d_.]*)\b')


class HjsonError(Exception):
    """A syntax error.

    Attributes:
        position: The position in the text, from 0.
        what: The description of the error.
    """

    def __init__(self, position: int, what: str) -> None:
        super().__init__(what)
        self.position, self.what = position, what


class _Read(NamedTuple):
    value: Any
    end: int


def parse(text: str) -> Any:
    """Return the value in ``text``. The outermost braces are optional. Raises HjsonError for a syntax error."""
    begin = _skip(text, 0)
    parsed = _value(text, begin) if text[begin : begin + 1] in ("{", "[") else _members(text, begin, "")
    end = _skip(text, parsed.end)
    if end != len(text):
        raise HjsonError(end, f"{text[end : end + 10]!r} follows the end of the configuration")
    return parsed.value


def _skip(text: str, at: int, commas: bool = False) -> int:
    match = (_SPACE_AND_COMMAS if commas else _SPACE).match(text, at)
    return at if match is None else match.end()


def _value(text: str, at: int) -> _Read:
    first = text[at : at + 1]
    if first == "{":
        return _members(text, at + 1, "}")
    if first == "[":
        return _elements(text, at + 1)
    if first in ('"', "'"):
        return _string(text, at)
    literal = _LITERAL.match(text, at)
    if literal is not None:
        return _Read(json.loads(literal.group()), literal.end())
    match = _TEXT.match(text, at)
    unquoted = "" if match is None else match.group().rstrip()
    if match is None or _SLIP.search(unquoted):
        raise HjsonError(at, f"expected a value, found {unquoted[:30]!r}")
    return _Read(unquoted, match.end())


def _string(text: str, at: int) -> _Read:
    triple = _TRIPLE.match(text, at)
    if triple is not None:
        return _Read(triple.group(1).strip("\n"), triple.end())
    quoted = _QUOTED.match(text, at)
    if quoted is None:
        raise HjsonError(at, "a string that does not end in its line")
    quoted_text = quoted.group()
    inner = (
        quoted_text[1:-1].replace("\\'", "'").replace('"', '\\"')
        if quoted_text[0] == "'"
        else quoted_text[1:-1]
    )
    try:
        return _Read(json.loads(f'"{inner}"'), quoted.end())
    except json.JSONDecodeError as error:
        raise HjsonError(at, f"no string of JSON: {error.msg}") from None


def _members(text: str, at: int, closing: str) -> _Read:
    values: dict[str, Any] = {}
    while True:
        at = _skip(text, at, commas=True)
        if text[at : at + 1] == closing:
            return _Read(values, at + len(closing))
        begin = at
        if text[at : at + 1] in ('"', "'"):
            key, at = _string(text, at)
        else:
            match = _KEY.match(text, at)
            if match is None:
                raise HjsonError(at, f"expected a key, found {text[at : at + 10]!r}")
            key, at = match.group(), match.end()
        at = _skip(text, at)
        if text[at : at + 1] != ":":
            raise HjsonError(at, f"expected a colon after the key {key!r}")
        if key in values:
            raise HjsonError(begin, f"key {json.dumps(key)} occurs twice in one object; keep one of them")
        values[key], at = _value(text, _skip(text, at + 1))


def _elements(text: str, at: int) -> _Read:
    values: list[Any] = []
    while True:
        at = _skip(text, at, commas=True)
        if text[at : at + 1] == "]":
            return _Read(values, at + 1)
        if at == len(text):
            raise HjsonError(at, "expected ] at the end of a list")
        value, at = _value(text, at)
        values.append(value)

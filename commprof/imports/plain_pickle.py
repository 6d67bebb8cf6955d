"""Reads pickles of plain data without running any code. torch writes its Flight Recorder dumps as such pickles.

Python's own reader imports and calls whatever a pickle names. This reader interprets only the instructions that build
numbers, strings, lists, tuples and dictionaries. At any other instruction it raises an error before the instruction
has an effect.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from typing import Any, Final

from commprof.errors import LogError

_MARK: Final = object()
_CONSTANTS: Final[dict[str, Any]] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
# Instructions whose argument is the value itself.
_VALUES: Final = frozenset(
    (
        "INT",
        "BININT",
        "BININT1",
        "BININT2",
        "LONG",
        "LONG1",
        "LONG4",
        "FLOAT",
        "BINFLOAT",
        "UNICODE",
        "BINUNICODE",
        "SHORT_BINUNICODE",
        "BINUNICODE8",
        "BINBYTES",
        "SHORT_BINBYTES",
        "BINBYTES8",
    )
)
_PUTS: Final = frozenset(("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"))
_GETS: Final = frozenset(("GET", "BINGET", "LONG_BINGET"))
_IGNORED: Final = frozenset(("PROTO", "FRAME"))


def read_plain_pickle(data: bytes) -> Any:
    """Return the value in the pickle ``data``.

    The value consists of numbers, strings, bytes, None, lists, tuples and dictionaries.

    Raises:
        LogError: ``data`` is not a pickle, is truncated, or requires anything except plain data. No code was run.
    """
    machine = _Machine()
    try:
        for operation, argument, position in pickletools.genops(data):
            if operation.name == "STOP":
                return machine.result()
            machine.follow(operation.name, argument, position or 0)
    except LogError:
        raise
    except (ValueError, IndexError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise LogError(f"the pickle is truncated or damaged: {str(error)[:200]}") from None
    raise LogError("the pickle is truncated: its end is missing")


class _Machine:
    """A machine that executes the instructions of a pickle, with its stack and its memo."""

    def __init__(self) -> None:
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self._builders: dict[str, Callable[[], None]] = {
            "MARK": lambda: self._stack.append(_MARK),
            "POP": lambda: self._drop(),
            "POP_MARK": lambda: self._since_mark().clear(),
            "EMPTY_LIST": lambda: self._stack.append([]),
            "EMPTY_TUPLE": lambda: self._stack.append(()),
            "EMPTY_DICT": lambda: self._stack.append({}),
            "LIST": lambda: self._stack.append(self._since_mark()),
            "TUPLE": lambda: self._stack.append(tuple(self._since_mark())),
            "TUPLE1": lambda: self._tuple(1),
            "TUPLE2": lambda: self._tuple(2),
            "TUPLE3": lambda: self._tuple(3),
            "DICT": lambda: self._stack.append(_pairs(self._since_mark())),
            "APPEND": lambda: self._extend([self._drop()]),
            "APPENDS": lambda: self._extend(self._since_mark()),
            "SETITEM": self._set_item,
            "SETITEMS": lambda: self._update(_pairs(self._since_mark())),
        }

    def follow(self, name: str, argument: Any, position: int) -> None:
        """Execute one instruction.

        Args:
            name: The name of the instruction in ``pickletools``.
            argument: The argument of the instruction; None if it has none.
            position: The position of the instruction in the pickle in bytes.

        Raises:
            LogError: The instruction does not build plain data.
        """
        if name in self._builders:
            self._builders[name]()
        elif name in _VALUES:
            self._stack.append(argument)
        elif name in _CONSTANTS:
            self._stack.append(_CONSTANTS[name])
        elif name in _PUTS:
            self._memo[len(self._memo) if argument is None else int(argument)] = self._stack[-1]
        elif name in _GETS:
            self._stack.append(self._memo[int(argument)])
        elif name not in _IGNORED:
            shown_argument = f" {str(argument)[:80]}" if argument is not None else ""
            raise LogError(
                f"byte {position} asks for more than plain data ({name}{shown_argument}), as code in a pickle does; "
                "nothing of it was run"
            )

    def result(self) -> Any:
        """Return the value that the pickle describes."""
        (value,) = self._stack
        if value is _MARK:
            raise ValueError("a mark is left")
        return value

    def _drop(self) -> Any:
        value = self._stack.pop()
        if value is _MARK:
            raise ValueError("found a mark where a value was expected")
        return value

    def _tuple(self, size: int) -> None:
        values = [self._drop() for _ in range(size)]
        self._stack.append(tuple(reversed(values)))

    def _since_mark(self) -> list[Any]:
        values: list[Any] = []
        while (value := self._stack.pop()) is not _MARK:
            values.append(value)
        values.reverse()
        return values

    def _extend(self, values: list[Any]) -> None:
        target = self._stack[-1]
        if not isinstance(target, list):
            raise TypeError("values are appended to an object that is not a list")
        target.extend(values)

    def _set_item(self) -> None:
        value, key = self._drop(), self._drop()
        self._update({key: value})

    def _update(self, items: dict[Any, Any]) -> None:
        target = self._stack[-1]
        if not isinstance(target, dict):
            raise TypeError("items are set on an object that is not a dictionary")
        target.update(items)


def _pairs(values: list[Any]) -> dict[Any, Any]:
    if len(values) % 2:
        raise ValueError("a key has no value")
    return dict(zip(values[::2], values[1::2], strict=True))

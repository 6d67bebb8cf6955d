"""Entries of the tables of DeepSpeed's names: the object behind a name, or the reason why there is none."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, NamedTuple, NoReturn

from zero_runtime.errors import MissingNameError, UnsupportedError

INSTEAD = "commprof run --engine deepspeed runs the script with DeepSpeed itself"


class Given(NamedTuple):
    """A name that works.

    Attributes:
        target: the object here: ``module:attribute``, or a module.
        note: how it differs from DeepSpeed's, if it does.
    """

    target: str
    note: str = ""


class Value(NamedTuple):
    """A name that is a plain value."""

    value: Any


class Live(NamedTuple):
    """A name whose value changes: it is read at each lookup.

    Attributes:
        target: the function that returns it: ``module:function``.
    """

    target: str


class Refused(NamedTuple):
    """A name that can be imported, and raises one clear error when used.

    Attributes:
        reason: why, and what to use instead.
    """

    reason: str


Name = Given | Value | Live | Refused


class Module(NamedTuple):
    """A module of DeepSpeed.

    Attributes:
        names: the names in it.
        refused: why importing it is an error; empty where it can be imported.
        main: the function that ``python -m`` runs, as ``module:attribute``.
    """

    names: Mapping[str, Name] = {}
    refused: str = ""
    main: str = ""


def names_from(module: str, *names: str, note: str = "", **renamed: str) -> dict[str, Name]:
    """Names provided by ``module``: under the same name, or renamed as ``theirs="ours"``."""
    pairs = {**{name: name for name in names}, **renamed}
    return {theirs: Given(f"{module}:{ours}", note) for theirs, ours in pairs.items()}


def values(**pairs: Any) -> dict[str, Name]:
    """Plain values."""
    return {name: Value(value) for name, value in pairs.items()}


def live(module: str, **names: str) -> dict[str, Name]:
    """Names whose value a function of ``module`` returns, as ``theirs="function"``."""
    return {theirs: Live(f"{module}:{function}") for theirs, function in names.items()}


def refused(reason: str, *names: str) -> dict[str, Name]:
    """Names that raise an error when used, all for one reason."""
    return {name: Refused(reason) for name in names}


def resolve(full_name: str, name: Name) -> Any:
    """The object behind ``full_name``, such as ``deepspeed.zero.Init``."""
    if isinstance(name, Value):
        return name.value
    if isinstance(name, Refused):
        return placeholder(full_name, name.reason)
    module, _, attribute = name.target.partition(":")
    target = import_module(module)
    value: Any = getattr(target, attribute) if attribute else target
    return value() if isinstance(name, Live) else value


class _Placeholder(type):
    """The metaclass of refused names: they may be imported, subclassed and used in isinstance, and no more."""

    refusal: str

    def __call__(cls, *arguments: Any, **options: Any) -> NoReturn:
        raise UnsupportedError(cls.refusal)


def placeholder(full_name: str, reason: str) -> type:
    """A class in place of ``full_name`` whose use raises an error with ``reason``."""
    text = f"{full_name} is not in this version: {reason}. Alternatively, {INSTEAD}"
    return _Placeholder(full_name.rpartition(".")[2], (), {"refusal": text, "__doc__": text})


def refuse_module(full_name: str, reason: str) -> MissingNameError:
    """The error of importing a refused module."""
    # Without its attribute ``name``: Python suppresses an error whose name is that of a from-import.
    return MissingNameError(
        f"{full_name} is not in this version of zero_runtime: {reason}. Alternatively, {INSTEAD}"
    )

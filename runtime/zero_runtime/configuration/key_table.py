"""Rows of the tables of configuration keys: what a key may be, what it means, and what becomes of it."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, NamedTuple

from zero_runtime.configuration.checks import Check, anything, mapping
from zero_runtime.errors import ConfigError, UnsupportedError


class Status(StrEnum):
    """What this version does with a key."""

    USED = "used"
    INERT = "inert"
    LATER = "later"
    WAITING = "waiting"
    REFUSED = "refused"


class Key(NamedTuple):
    """One key of one block.

    Attributes:
        check: what its value may be.
        default: the value where the key is absent.
        meaning: in a few words.
        status: what becomes of it.
        note: of an inert key: why; of one that is later or waiting: the part that will read it; of a refused one:
            the reason for which it is refused.
        instead: of one that is later: what to use in this version.
        stage_3_only: whether it acts at stage 3 only.
    """

    check: Check
    default: Any = None
    meaning: str = ""
    status: Status = Status.USED
    note: str = ""
    instead: str = ""
    stage_3_only: bool = False


Table = Mapping[str, Key]


def used(check: Check, default: Any, meaning: str) -> Key:
    """A key that acts."""
    return Key(check, default, meaning)


def stage_3(check: Check, default: Any, meaning: str) -> Key:
    """A key that acts at stage 3 only."""
    return Key(check, default, meaning, stage_3_only=True)


def inert(check: Check, default: Any, meaning: str, why: str) -> Key:
    """A key whose value is checked and changes nothing."""
    return Key(check, default, meaning, Status.INERT, why)


def later(check: Check, default: Any, meaning: str, feature: str, instead: str = "") -> Key:
    """A key that belongs to a part which is not in this version: nothing but what switches it off passes."""
    return Key(check, default, meaning, Status.LATER, feature, instead)


def waiting(check: Check, default: Any, meaning: str, feature: str) -> Key:
    """A key beside the one that switches such a part on, or their block: it is checked, and nobody reads it yet."""
    return Key(check, default, meaning, Status.WAITING, feature)


def refused(why: str, meaning: str) -> Key:
    """A key that is refused, whatever switches it on."""
    return Key(anything, None, meaning, Status.REFUSED, why)


def inside(table: Table) -> Check:
    """A check for an object with the keys of ``table``; its value is complete, with the defaults of what it leaves out."""
    return Check("object", lambda name, value: read(table, name, mapping(name, value)), table)


def read(table: Table, block: str, block_values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a block: what was given, checked, and defaults for the rest.

    Args:
        table: its keys.
        block: its full name; empty for the top level.
        block_values: what the configuration says; keys of ``table`` alone.

    Raises:
        ConfigError: a value of the wrong kind, or a key that is refused.
        UnsupportedError: a key of a part that is not in this version, with a value that switches it on.
    """
    values = {name: _default(key, _full(block, name)) for name, key in table.items()}
    for name, value in block_values.items():
        full, key = _full(block, name), table[name]
        if key.status is Status.REFUSED:
            _refuse(key, full, value)
            continue
        if key.status is Status.LATER:
            _refuse_later(key, full, value)
        values[name] = key.check(full, value) if value is not None or key.default is not None else None
    return values


def _full(block: str, name: str) -> str:
    return f"{block}.{name}" if block else name


def _default(key: Key, full: str) -> Any:
    return (
        read(key.check.table, full, {}) if key.check.table is not None and key.default == {} else key.default
    )


def _refuse(key: Key, full: str, value: Any) -> None:
    if value and not is_off(value):
        raise ConfigError(f"{full}: {key.note}")


def _refuse_later(key: Key, full: str, value: Any) -> None:
    is_asked_for = value == {} and key.default is None and key.check.table is not None  # a block of defaults
    if key.stage_3_only or value == key.default or is_off(value):
        return
    if value in (False, {}, None) and not is_asked_for:
        return
    instead = f"; {key.instead}" if key.instead else ""
    raise UnsupportedError(
        f"{full} = {value!r} is not in this version yet: it belongs to {key.note}, a part that is still to come"
        f"{instead}; remove the key"
    )


def is_off(value: Any) -> bool:
    """Whether a block says itself that it is not enabled."""
    return isinstance(value, Mapping) and value.get("enabled") is False

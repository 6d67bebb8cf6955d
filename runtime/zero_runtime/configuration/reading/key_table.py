"""The rows of the tables of configuration keys: check, default, meaning and status of each key."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, NamedTuple

from zero_runtime.configuration.reading.checks import Check, anything, mapping
from zero_runtime.errors import ConfigError, UnsupportedError


class Status(StrEnum):
    """How this version treats a key."""

    USED = "used"
    INERT = "inert"
    LATER = "later"
    WAITING = "waiting"
    REFUSED = "refused"


class Key(NamedTuple):
    """One key of one block.

    Attributes:
        check: of its value.
        default: the value if the key is absent.
        meaning: in a few words.
        status: how this version treats it.
        note: for an inert or a refused key, the reason; for a later or a waiting key, the feature that will read it.
        instead: for a later key, what to use in this version.
        stage_3_only: whether it has an effect only at stage 3.
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
    """A key that has an effect."""
    return Key(check, default, meaning)


def stage_3(check: Check, default: Any, meaning: str) -> Key:
    """A key that has an effect only at stage 3."""
    return Key(check, default, meaning, stage_3_only=True)


def inert(check: Check, default: Any, meaning: str, why: str) -> Key:
    """A key whose value is checked and has no effect."""
    return Key(check, default, meaning, Status.INERT, why)


def later(check: Check, default: Any, meaning: str, feature: str, instead: str = "") -> Key:
    """A key of a feature that this version does not have: only values that disable the feature are accepted."""
    return Key(check, default, meaning, Status.LATER, feature, instead)


def waiting(check: Check, default: Any, meaning: str, feature: str) -> Key:
    """Another key or the block of such a feature: it is checked and not used yet."""
    return Key(check, default, meaning, Status.WAITING, feature)


def refused(why: str, meaning: str) -> Key:
    """A key that is refused if it enables something."""
    return Key(anything, None, meaning, Status.REFUSED, why)


def inside(table: Table) -> Check:
    """A check for an object with the keys of ``table``; it returns a complete object with the defaults of absent keys."""
    return Check("object", lambda name, value: read(table, name, mapping(name, value)), table)


def read(table: Table, block: str, block_values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a block: checked values, and defaults for absent keys.

    Args:
        table: its keys.
        block: its full name; empty for the top level.
        block_values: the block in the configuration; it has only keys of ``table``.

    Raises:
        ConfigError: a value of the wrong kind, or a key that is refused.
        UnsupportedError: a key with a value that enables a feature that this version does not have.
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
        f"{full} = {value!r} is not in this version yet: it belongs to {key.note}, which is not implemented yet"
        f"{instead}; remove the key"
    )


def is_off(value: Any) -> bool:
    """Whether a block has ``enabled`` false."""
    return isinstance(value, Mapping) and value.get("enabled") is False

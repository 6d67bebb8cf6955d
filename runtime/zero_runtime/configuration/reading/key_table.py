"""The rows of the tables of configuration keys. A row has the check, default, meaning and status of one key."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, NamedTuple

from zero_runtime.configuration.reading.checks import Check, anything, mapping
from zero_runtime.errors import ConfigError, UnsupportedError


class Status(StrEnum):
    """The ways in which this version treats a key."""

    USED = "used"
    INERT = "inert"
    LATER = "later"
    WAITING = "waiting"
    REFUSED = "refused"


class Key(NamedTuple):
    """One key of one block.

    Attributes:
        check: The check of the value of the key.
        default: The value if the key is absent.
        meaning: A short description of the key.
        status: How this version treats the key.
        note: For an inert or a refused key, the reason. For a later or a waiting key, the feature that will use
            the key.
        instead: For a later key, the alternative in this version.
        stage_3_only: Whether the key has an effect only at stage 3.
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
    """Return the row of a key that has an effect."""
    return Key(check, default, meaning)


def stage_3(check: Check, default: Any, meaning: str) -> Key:
    """Return the row of a key that has an effect only at stage 3."""
    return Key(check, default, meaning, stage_3_only=True)


def inert(check: Check, default: Any, meaning: str, why: str) -> Key:
    """Return the row of a key whose value is checked but has no effect."""
    return Key(check, default, meaning, Status.INERT, why)


def later(check: Check, default: Any, meaning: str, feature: str, instead: str = "") -> Key:
    """Return the row of a key that enables a feature that this version does not have.

    Only values that disable the feature are accepted.
    """
    return Key(check, default, meaning, Status.LATER, feature, instead)


def waiting(check: Check, default: Any, meaning: str, feature: str) -> Key:
    """Return the row of a further key, or of the block, of a feature that this version does not have.

    The value is checked but not used yet.
    """
    return Key(check, default, meaning, Status.WAITING, feature)


def refused(why: str, meaning: str) -> Key:
    """Return the row of a key that is refused if its value enables something."""
    return Key(anything, None, meaning, Status.REFUSED, why)


def inside(table: Table) -> Check:
    """Return a check for an object with the keys of ``table``. The check adds the defaults of absent keys."""
    return Check("object", lambda name, value: read(table, name, mapping(name, value)), table)


def read(table: Table, block: str, block_values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a block: checked values, and defaults for absent keys.

    Args:
        table: The keys of the block.
        block: The full name of the block, which is empty for the top level.
        block_values: The block in the configuration. All its keys must be in ``table``.

    Raises:
        ConfigError: A value has the wrong type, or a key is refused.
        UnsupportedError: A value enables a feature that this version does not have.
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
    # An empty block enables the feature with its defaults.
    is_asked_for = value == {} and key.default is None and key.check.table is not None
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
    """Return whether ``value`` is a block in which ``enabled`` is false."""
    return isinstance(value, Mapping) and value.get("enabled") is False

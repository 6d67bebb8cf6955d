"""A budget file: the limits that ``commprof check`` compares a run with.

::

    only_requested = true                   # every collective is requested by the config or tagged by the program

    [step]                                  # limits of each step; [init]: before the first step; [run]: the whole run
    max_payload_bytes = 8_000_000
    max_wire_bytes = 8_000_000
    max_collectives = 12
    allowed_ops = ["all_gather", "all_reduce", "barrier"]

    [step.op.all_reduce]                    # the same limits for one operation
    max_collectives = 6

    [step.purpose.gradient_reduce]          # the same limits for one purpose; "untagged": calls without a purpose
    max_wire_bytes = 7_000_000
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final, NamedTuple

from commprof.errors import UsageError
from commprof.printable import command_line
from commprof.schema import OPS, PURPOSES

SCOPES: Final = ("step", "init", "run")
MEASURES: Final = ("max_payload_bytes", "max_wire_bytes", "max_collectives")
UNTAGGED: Final = "untagged"


class Limit(NamedTuple):
    """The largest allowed value of one measure in one scope, or of one operation or purpose in this scope."""

    scope: str
    op: str | None
    purpose: str | None
    measure: str
    most: int

    @property
    def key(self) -> str:
        """The dotted key of the limit in the budget file."""
        part = f".op.{self.op}" if self.op else f".purpose.{self.purpose}" if self.purpose else ""
        return f"{self.scope}{part}.{self.measure}"


class Budget(NamedTuple):
    """The limits of one budget file. ``allowed_ops`` has the allowed operations of the scopes that restrict them."""

    limits: tuple[Limit, ...]
    allowed_ops: Mapping[str, frozenset[str]]
    only_requested: bool


def read_budget(path: Path) -> Budget:
    """Read the budget in TOML file ``path``.

    Raises:
        UsageError: The file cannot be read, is not TOML, or has an invalid key or value.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read: {error.strerror}; --budget takes a TOML file. To write the tightest budget "
            f"that RUN meets: {command_line('check', 'RUN', '--write-budget', path)}"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not valid TOML: {error}") from None
    return parse_budget(content, str(path))


def parse_budget(content: Mapping[str, Any], name: str) -> Budget:
    """Parse ``content``, the content of file ``name``, as a budget.

    Raises:
        UsageError: A key or value is invalid.
    """
    _known(content, ("only_requested", *SCOPES), name, "")
    only = content.get("only_requested", False)
    if not isinstance(only, bool):
        raise UsageError(f"{name}: only_requested is {only!r}; expected true or false")
    limits: list[Limit] = []
    allowed: dict[str, frozenset[str]] = {}
    for scope in SCOPES:
        section = _section(content.get(scope, {}), name, scope)
        _known(section, (*MEASURES, "allowed_ops", "op", "purpose"), name, scope)
        limits += _limits(section, name, scope, None, None)
        if "allowed_ops" in section:
            allowed[scope] = _allowed(section["allowed_ops"], name, scope)
        limits += _of_parts(section, "op", OPS, name, scope)
        limits += _of_parts(section, "purpose", (*PURPOSES, UNTAGGED), name, scope)
    if not limits and not allowed and not only:
        raise UsageError(
            f"{name} limits nothing; give only_requested = true, or a limit in [step], [init] or [run]"
        )
    return Budget(tuple(limits), allowed, only)


def _of_parts(
    section: Mapping[str, Any], part: str, names: Iterable[str], file: str, scope: str
) -> list[Limit]:
    limits: list[Limit] = []
    sections = _section(section.get(part, {}), file, f"{scope}.{part}")
    _known(sections, tuple(names), file, f"{scope}.{part}")
    for name, values in sections.items():
        where = f"{scope}.{part}.{name}"
        values = _section(values, file, where)
        _known(values, MEASURES, file, where)
        op, purpose = (name, None) if part == "op" else (None, name)
        limits += _limits(values, file, scope, op, purpose)
    return limits


def _limits(
    section: Mapping[str, Any], file: str, scope: str, op: str | None, purpose: str | None
) -> list[Limit]:
    limits = []
    for measure in MEASURES:
        if measure in section:
            limit = Limit(scope, op, purpose, measure, 0)
            most = section[measure]
            if isinstance(most, bool) or not isinstance(most, int) or most < 0:
                raise UsageError(f"{file}: {limit.key} is {most!r}; expected a whole number, 0 or more")
            limits.append(limit._replace(most=most))
    return limits


def _allowed(value: Any, file: str, scope: str) -> frozenset[str]:
    if not isinstance(value, list) or not all(isinstance(op, str) for op in value):
        raise UsageError(f"{file}: {scope}.allowed_ops is {value!r}; expected a list of operations")
    _known(dict.fromkeys(value), OPS, file, f"{scope}.allowed_ops")
    return frozenset(value)


def _section(value: Any, file: str, key: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise UsageError(f"{file}: {key} is {value!r}; expected a table, as in [{key}]")
    return value


def _known(section: Mapping[str, Any], names: tuple[str, ...], file: str, where: str) -> None:
    for key in section:
        if key not in names:
            near = get_close_matches(key, names, n=1, cutoff=0.5)
            hint = f"did you mean {str(near[0])!r}? " if near else ""
            place = f" in [{where}]" if where else ""
            raise UsageError(f"{file}: unknown key {key!r}{place}: {hint}expected one of {', '.join(names)}")

"""Listings of the names: for ``--list``, and for docs/deepspeed-names.md."""

from __future__ import annotations

from typing import NamedTuple

from zero_runtime.deepspeed_names.distribution import FOLLOWED
from zero_runtime.deepspeed_names.tables.names import Given, Module, Name, Refused
from zero_runtime.deepspeed_names.tables.table import MODULES


class Counts(NamedTuple):
    """Numbers of names and modules.

    Attributes:
        works: that are something.
        differs: of these, with a note on how they differ.
        refused: that are an error where they are used.
        modules: that can be imported.
        refused_modules: that cannot.
    """

    works: int
    differs: int
    refused: int
    modules: int
    refused_modules: int


def counts() -> Counts:
    """The numbers over all modules; a name of several modules counts in each of them."""
    rows = [row for module in MODULES.values() for row in module.names.values()]
    provided = [row for row in rows if not isinstance(row, Refused)]
    return Counts(
        len(provided),
        sum(1 for row in provided if isinstance(row, Given) and row.note),
        len(rows) - len(provided),
        sum(1 for module in MODULES.values() if not module.refused),
        sum(1 for module in MODULES.values() if module.refused),
    )


def table_text() -> str:
    """Every name, one line each."""
    lines = []
    for inner, module in MODULES.items():
        full = _full(inner)
        if module.refused:
            lines.append(f"{full}: refused: {module.refused}")
        lines += [f"{full}.{name}: {_status(row)}" for name, row in sorted(module.names.items())]
    return "\n".join(lines)


def page() -> str:
    """``docs/deepspeed-names.md`` from its first table on."""
    total = counts()
    lines = [
        f"The tables contain the names of DeepSpeed {FOLLOWED} and some names of earlier versions.",
        f"{total.works} names work. For {total.differs} of them, a table below lists a difference from",
        f"DeepSpeed. Another {total.refused} names can be imported, but raise an error when they are used.",
        f"{total.modules} modules can be imported. Importing one of {total.refused_modules} other modules",
        "raises an error that says what to use instead.",
        "",
        "## What works",
        "",
        "| module | names |",
        "|---|---|",
    ]
    where: dict[str, list[str]] = {}
    for inner, module in MODULES.items():
        names = [f"`{name}`" for name, row in sorted(module.names.items()) if not isinstance(row, Refused)]
        if names:
            where.setdefault(", ".join(names), []).append(f"`{_full(inner)}`")
    lines += [f"| {', '.join(modules)} | {names} |" for names, modules in where.items()]
    lines += ["", "## What differs from DeepSpeed", "", "| name | how |", "|---|---|"]
    notes: dict[str, list[str]] = {}
    for inner, module in MODULES.items():
        for name, row in sorted(module.names.items()):
            if isinstance(row, Given) and row.note:
                notes.setdefault(row.note, []).append(f"`{_full(inner)}.{name}`")
    lines += [f"| {', '.join(names)} | {note} |" for note, names in notes.items()]
    lines += ["", "## What is refused", "", "| name | why, and what to use instead |", "|---|---|"]
    reasons: dict[str, list[str]] = {}
    for inner, module in MODULES.items():
        if module.refused:
            reasons.setdefault(module.refused, []).append(f"`{_full(inner)}` (the whole module)")
        for name, row in sorted(module.names.items()):
            if isinstance(row, Refused):
                reasons.setdefault(row.reason, []).append(f"`{_full(inner)}.{name}`")
    lines += [f"| {', '.join(names)} | {reason} |" for reason, names in reasons.items()]
    return "\n".join(lines)


def importable() -> list[tuple[str, Module]]:
    """The modules that can be imported, by their full names."""
    return [(_full(inner), module) for inner, module in MODULES.items() if not module.refused]


def _full(inner: str) -> str:
    return f"deepspeed.{inner}" if inner else "deepspeed"


def _status(row: Name) -> str:
    if isinstance(row, Refused):
        return f"refused: {row.reason}"
    return f"works: {row.note}" if isinstance(row, Given) and row.note else "works"

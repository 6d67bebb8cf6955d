"""The relations, their inputs, and the SQL statement that evaluates one.

A relation is a file ``<name>.sql`` in this folder. The comments in its head describe the relation, its ``grain`` (what
one row is) and its ``inputs``: tables of the schema (:data:`commprof.schema.TABLES`), :data:`MADE`, or other relations.
An input ``alias=name`` has the name ``alias`` in the text. An input ``alias=name(input=other)`` is an instance of a
relation in which ``other`` replaces one input. A text with ``{by}`` is evaluated for the requested columns, and fewer
columns are cheaper. A relation may have a line ``requested`` with the columns that it requests of such inputs. In this
line, ``by`` means the columns that are requested of the relation itself.

The texts use only SQL that DuckDB and Spark share: no QUALIFY, no lists, no lateral joins, and no functions that only
one engine has.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Final, NamedTuple

MADE: Final = {  # what Python makes of the tables: what it is, and what one row is
    "arrivals": (
        "The time when each rank arrived at each collective and message, converted to one clock for all "
        "ranks. The relation also contains the time that the other ranks waited for the last rank. See "
        "[clocks](clocks.md).",
        "one row per record that can be matched with records of other ranks",
    ),
    "bucket_groups": (
        "The ranks that reduce gradient buckets together. Groups that share a rank count as one group, "
        "because a bucket may be reduced along several axes, one after another.",
        "one row per attempt and rank, for ranks that have a record with a bucket number",
    ),
    "exposure_of_purposes": (
        "Exposed and overlapped communication time of each training step, separately for each purpose. "
        "The times are means over the ranks. See [times](times.md).",
        "one row per attempt, step and purpose",
    ),
    "exposure_of_steps": (
        "Exposed and overlapped communication time of each training step. The times are means over the "
        "ranks. See [times](times.md).",
        "one row per attempt and step",
    ),
    "group_members": (
        "The ranks of each group that issued an all_to_all with recorded splits. Each row also contains "
        "the position of the rank in the group.",
        "one row per value of group_ranks and rank",
    ),
    "process_exposure": (
        "Exposed and overlapped communication time of each process. See [times](times.md).",
        "one row per process, training step and purpose. The column step is -1 before the first step. It "
        "is null between steps and after the last step",
    ),
    "ranks_of_groups": (
        "The ranks of each group that issued at least one operation. Each row also contains the position "
        "of the rank in the group.",
        "one row per value of group_ranks and rank",
    ),
    "transfers": (
        "The duration of each collective and message, from the time when the operation could begin until "
        "its end. The time that ranks waited for late ranks is excluded.",
        "one row per collective or message with a payload and at least two ranks",
    ),
}
KEYS: Final = ("attempt", "pg", "group_ranks", "group_size", "op", "backend", "call_bytes")
SPAN: Final = "span"  # follows from the other columns
_OF_PAIRS: Final = ("sender", "receiver")
_BY: Final = "by"
_HEAD: Final = re.compile(r"-- ?(.*)")
_INPUT: Final = re.compile(r"(?:(\w+)=)?(\w+)(?:\((\w+)=(\w+)\))?")


class Input(NamedTuple):
    """An input of a relation.

    Attributes:
        alias: The name under which the SQL text uses the input.
        name: The table or relation.
        replaced: For an instance, the pair (input, other): the input that is replaced, and its replacement.
    """

    alias: str
    name: str
    replaced: tuple[str, str] | None = None


class Relation(NamedTuple):
    """A relation.

    Attributes:
        name: The name.
        title: The description at the start of the head of the file, before ``grain`` or ``inputs``.
        notes: The description that follows these fields in the head.
        grain: What one row is.
        inputs: The inputs.
        sql: The SQL text.
        requested: The columns that the relation requests of relations with ``{by}``, if its head contains
            them.
    """

    name: str
    title: str
    notes: str
    grain: str
    inputs: tuple[Input, ...]
    sql: str
    requested: tuple[str, ...] = ()


@cache
def names() -> tuple[str, ...]:
    """Return the names of all relations, in order."""
    files = (resources.files("commprof.analysis") / "relations").iterdir()
    return tuple(sorted(file.name.removesuffix(".sql") for file in files if file.name.endswith(".sql")))


@cache
def relation(name: str) -> Relation:
    """Return the relation ``name``.

    Raises:
        KeyError: There is no relation with this name.
    """
    if name not in names():
        raise KeyError(name)
    text = (resources.files("commprof.analysis") / "relations" / f"{name}.sql").read_text("utf-8")
    lines = text.splitlines()
    length = next(place for place, line in enumerate(lines) if not line.startswith("--"))
    fields: dict[str, list[str]] = {"title": []}
    current = "title"
    for line in lines[:length]:
        content = _HEAD.fullmatch(line).group(1)  # type: ignore[union-attr] # every line of the head matches
        label, colon, rest = content.partition(": ")
        if colon and label in ("grain", "inputs", "requested"):
            current, content = label, rest
        elif not content.startswith("  ") and current in ("grain", "inputs", "requested"):
            current = "notes"
        elif not content and current == "title":
            continue
        fields.setdefault(current, []).append(content.strip())
    return Relation(
        name,
        " ".join(fields["title"]),
        "\n".join(fields.get("notes", [])).strip(),
        " ".join(fields["grain"]),
        tuple(map(_input, _split(" ".join(fields["inputs"])))),
        "\n".join(lines[length:]),
        tuple(_split(" ".join(fields["requested"]))) if "requested" in fields else (),
    )


def _split(inputs: str) -> list[str]:
    return [part.strip() for part in inputs.split(",")]


def _input(text: str) -> Input:
    match = _INPUT.fullmatch(text)
    if match is None:
        raise ValueError(
            f"{text!r} is no input of a relation; expected name, alias=name or alias=name(input=other)"
        )
    alias, name, replaced, other = match.groups()
    return Input(alias or name, name, (replaced, other) if replaced else None)


def requested(name: str, by: Sequence[str]) -> Sequence[str]:
    """Return the columns by which relation ``name`` is evaluated: its own ``requested`` columns, else ``by``."""
    own = relation(name)
    inputs = (requested(each.name, ()) for each in own.inputs if each.name in names())
    if own.requested[:1] == (_BY,):
        return tuple(dict.fromkeys((*by, *own.requested[1:])))
    return own.requested or next(filter(None, inputs), by)


def tables_of(name: str) -> tuple[str, ...]:
    """Return the tables from which relation ``name`` is evaluated: tables of the schema, and of :data:`MADE`."""
    return tuple(_tables(name, {}))


def _tables(name: str, replaced: dict[str, tuple[str, ...]]) -> dict[str, None]:
    table_names: dict[str, None] = {}
    of_alias: dict[str, tuple[str, ...]] = {}
    for each in relation(name).inputs:
        if each.alias in replaced:
            below = replaced[each.alias]
        elif each.name not in names():
            below = (each.name,)
        else:
            inner = {}
            if each.replaced is not None:
                alias, other = each.replaced
                inner[alias] = of_alias[other] if other in of_alias else tables_of(other)
            below = tuple(_tables(each.name, inner))
        of_alias[each.alias] = below
        table_names |= dict.fromkeys(below)
    return table_names


def statement(
    name: str,
    by: Sequence[str] = (),
    select: str = "select * from {name}",
    known: Mapping[str, str] | None = None,
) -> str:
    """Return one SQL statement over the tables :func:`tables_of` that evaluates relation ``name``.

    Args:
        by: The columns that are requested of relations with ``{by}``.
        select: The query over the relation.
        known: The relations that were already evaluated by these columns, with the name of the table of each.
    """
    known = known or {}
    texts = {step: f"select * from {table}" for step, table in known.items()} | steps(name, by, known)
    chain = ",\n".join(f"{step} as (\n{text}\n)" for step, text in texts.items())
    return f"with {chain}\n{select.format(name=name)}"


def steps(name: str, by: Sequence[str] = (), known: Collection[str] = ()) -> dict[str, str]:
    """Return the SQL text of each relation that ``name`` needs, in order, with ``name`` last.

    A text uses tables of :func:`tables_of` and earlier relations.

    Args:
        by: The columns that are requested of relations with ``{by}``.
        known: The relations that were already evaluated. These relations have no text, and inputs that only
            they use have none either.
    """
    return dict(_steps(name, tuple(by), frozenset(known)))


@cache
def _steps(name: str, by: tuple[str, ...], known: frozenset[str]) -> Mapping[str, str]:
    texts: dict[str, str] = {}
    _add(name, name, {}, texts, _clauses(requested(name, by)) | _clauses_of_pairs(by))
    needed = {name}
    for step in reversed(texts):
        if step in needed and step not in known:
            needed |= {other for other in texts if re.search(rf"\b{other}\b", texts[step])}
    return {step: text for step, text in texts.items() if step in needed and step not in known}


def _add(
    alias: str, name: str, renamed: dict[str, str], steps: dict[str, str], clauses: dict[str, str]
) -> None:
    """Add the inputs of ``name`` to ``steps``, and then ``name`` as ``alias``."""
    if alias in steps:
        return
    own = relation(name)
    opening: list[str] = []
    for each in own.inputs:
        source = renamed.get(each.alias)
        if source is None and each.name in names():
            replaced = dict([each.replaced]) if each.replaced else {}
            for other in replaced.values():
                if other in names():
                    _add(other, other, {}, steps, clauses)
            _add(each.alias, each.name, replaced, steps, clauses)
            continue
        source = source or each.name
        if source != each.alias:
            opening.append(f"{each.alias} as (select * from {source})")
    text = own.sql.format(**clauses) if "{" in own.sql else own.sql
    if opening:
        head = ", ".join(opening)
        text = (
            f"with {head},\n{text.removeprefix('with ')}"
            if text.startswith("with ")
            else f"with {head}\n{text}"
        )
    steps[alias] = text


def _clauses(by: Sequence[str]) -> dict[str, str]:
    """Return the texts for the columns ``by``: lists with a comma after each column, and conditions of a join."""
    columns = [name for name in dict.fromkeys((*KEYS, *by)) if name != SPAN]
    of_records = [name for name in columns if name not in _OF_PAIRS]
    return {
        "by": "".join(f"{name}, " for name in of_records),
        "by_of_c": "".join(f"c.{name}, " for name in of_records),
        "by_and_pairs": "".join(f"{name}, " for name in (*of_records, *_OF_PAIRS)),
        "requested": "".join(f"{name}, " for name in by),
        "same_in_d_and_a": " and ".join(f"d.{name} is not distinct from a.{name}" for name in of_records),
    }


def _clauses_of_pairs(by: Sequence[str]) -> dict[str, str]:
    """Return the texts for the relation matrix.

    They list the columns ``by`` and attempt, and these columns together with the columns of a flow.
    """
    asked = [name for name in dict.fromkeys((*by, "attempt")) if name not in _OF_PAIRS]
    flow = dict.fromkeys((*asked, "op", "group_ranks", "group_size", "root", *_OF_PAIRS, "backend"))
    return {
        "flow": "".join(f"{name}, " for name in flow),
        "asked_of_f": "".join(f"f.{name}, " for name in asked),
        "asked_of_p": "".join(f"p.{name}, " for name in asked),
    }

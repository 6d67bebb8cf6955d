"""Converts the state of the page Records to text, and provides the rows that its grid requests. Draws nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from commprof.analysis import api
from commprof.schema import Column
from commprof_dash.address import Query

FILTER: Final = "filter"
SORT: Final = "sort"
STEP: Final = "step"
COLUMN: Final = "column"
COLUMNS: Final[dict[str, Column]] = api.describe_columns("records")
SHOWN_FIRST: Final = (
    "begin_ns",
    "rank",
    "step",
    "phase",
    "op",
    "purpose",
    "bucket",
    "payload_bytes",
    "exposed_ns",
    "group_ranks",
)
# The columns with times that are shown and filtered relative to the first record of the run.
SINCE_BEGIN: Final = ("begin_ns", "end_ns")
_BETWEEN: Final = ".."

# The names of the tests in the grid and in the library.
TESTS: Final[dict[str, str]] = {
    "equals": "=",
    "notEqual": "!=",
    "lessThan": "<",
    "lessThanOrEqual": "<=",
    "greaterThan": ">",
    "greaterThanOrEqual": ">=",
    "inRange": "between",
    "contains": "contains",
    "notContains": "not contains",
    "startsWith": "starts with",
    "endsWith": "ends with",
    "blank": "is null",
    "notBlank": "is not null",
}
_GRID_TESTS: Final = {name: grid for grid, name in TESTS.items()}


class Asked(NamedTuple):
    """The state of the grid: its conditions as text (``column:test:value``), its order, its columns."""

    filters: tuple[str, ...] = ()
    sort: str | None = None
    columns: tuple[str, ...] = SHOWN_FIRST


def asked_in(query: Query, steps: Sequence[int] = ()) -> Asked:
    """Return the state of the grid that an address describes. Invalid parts are ignored.

    An address without filters selects the step that it names, or else the steps after the first of ``steps``. An
    address with an empty filter selects all records.

    Args:
        steps: The training steps of the run.
    """
    filters = tuple(text[:500] for text in query.get(FILTER, ()) if _split(text) is not None)
    if FILTER not in query:
        named = next((text for text in query.get(STEP, ()) if text.isdecimal() and int(text) in steps), None)
        if named is not None:
            filters = (f"step:=:{int(named)}",)
        elif len(steps) > 1:
            filters = (after_first(steps),)
    sort = next(iter(query.get(SORT, ())), "")
    columns = tuple(name for name in query.get(COLUMN, ()) if name in COLUMNS) or SHOWN_FIRST
    return Asked(filters, sort if sort.removeprefix("-") in COLUMNS else None, columns)


def after_first(steps: Sequence[int]) -> str:
    """Return the filter that leaves out the first of ``steps``."""
    return f"step:>=:{steps[1]}"


def filters_of(texts: Iterable[str], begin_ns: int) -> list[api.Filter]:
    """Return the conditions in ``texts``, for a run that began at ``begin_ns``."""
    filters = []
    for text in texts:
        fields = _split(text)
        if fields is None:
            continue
        name, test, value = fields
        values: list[Any] = value.split(_BETWEEN) if test == "between" else [value]
        if name in SINCE_BEGIN:
            values = [_later(one, begin_ns) for one in values]
        filters.append(api.Filter(name, test, values if test == "between" else values[0]))
    return filters


def _later(value: str, begin_ns: int) -> Any:
    try:
        return int(float(value)) + begin_ns
    except (ValueError, OverflowError):
        return value  # the library reports that this is not a number


def _split(text: str) -> tuple[str, str, str] | None:
    name, _, rest = text.partition(":")
    test, _, value = rest.partition(":")
    return (name, test, value) if name in COLUMNS and test in _GRID_TESTS else None


def filter_texts(model: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Return the grid's filter model as text."""
    texts = []
    for name, one in (model or {}).items():
        test = TESTS.get(str(one.get("type")))
        if name not in COLUMNS or test is None:
            continue
        value = "" if one.get("filter") is None else _plain(one["filter"])
        if test == "between":
            value += _BETWEEN + _plain(one.get("filterTo"))
        texts.append(f"{name}:{test}:{value}")
    return tuple(texts)


def _plain(value: Any) -> str:
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def filter_model(texts: Iterable[str]) -> dict[str, Any]:
    """Return the grid's filter model from the conditions in ``texts``, which is the inverse of :func:`filter_texts`."""
    model: dict[str, Any] = {}
    for text in texts:
        fields = _split(text)
        if fields is None:
            continue
        name, test, value = fields
        kind = "number" if is_number(COLUMNS[name]) else "text"
        first, _, last = value.partition(_BETWEEN) if test == "between" else (value, "", "")
        model[name] = {"filterType": kind, "type": _GRID_TESTS[test]}
        if test not in ("is null", "is not null"):
            model[name]["filter"] = _grid_value(first, kind)
        if test == "between":
            model[name]["filterTo"] = _grid_value(last, kind)
    return model


def _grid_value(text: str, kind: str) -> Any:
    if kind == "text":
        return text
    try:
        return int(text)
    except ValueError:
        return None


def sort_text(model: Sequence[Mapping[str, str]] | None) -> str | None:
    """Return the grid's sort model as text; None for the order of time."""
    if not model or model[0].get("colId") not in COLUMNS:
        return None
    return ("-" if model[0].get("sort") == "desc" else "") + model[0]["colId"]


def is_number(column: Column) -> bool:
    """Return whether the values of ``column`` are compared as numbers."""
    return column.type.startswith(("int", "float"))

"""Selects the runs that the page Compare shows if the address names none, and the runs that it offers.

The choices are sweeps, the runs of a program, and all runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import pandas as pd

from commprof.analysis import api
from commprof_dash.data import Runs
from commprof_dash.pages.runs.data import sweep_of

OF: Final = "of"  # the key of a choice in the address
MOST_RUNS: Final = 24  # the largest number of runs of a program or of all runs; the newest are used
_MOST_READ: Final = 60  # the largest number of runs whose model is read
_UNREADABLE: Final = "unreadable"
_PROGRAM: Final = "program:"

_Row: TypeAlias = Mapping[str, Any]


class Choice(NamedTuple):
    """Runs to compare.

    Attributes:
        key: The key of the choice in the address.
        text: The common property of the runs.
        names: The names of the runs, the oldest first, which is the order of the settings in a sweep.
    """

    key: str
    text: str
    names: tuple[str, ...]


def choices(runs: Runs, about: Sequence[str] = (), key: str = "") -> list[Choice]:
    """Return the choices, the default first.

    The default is the sweep of the newest run if it has several settings, or else the runs of its program and
    model. A run is as new as its sweep, so that two sweeps that run at the same time do not alternate.

    Args:
        about: The runs whose sweep and program come first, instead of those of the newest run.
        key: The key of a choice that the address names. This choice comes first if it exists.
    """
    rows: Any = runs.listing().to_dict("records")
    listed: list[_Row] = [row for row in rows if row["state"] != _UNREADABLE]
    if not listed:
        return []
    members: dict[str, list[_Row]] = {}
    for row in listed:
        if (name := sweep_of(row)) is not None:
            members.setdefault(name, []).append(row)
    begun = {name: min(map(_started, rows)) for name, rows in members.items()}
    named = next((row for row in listed if row["name"] in about), None)
    nearest = named or max(listed, key=lambda row: begun.get(sweep_of(row) or "", _started(row)))
    sweeps = [
        Choice(f"sweep:{name}", f"sweep {name}", _oldest_first(members[name]))
        for name in sorted(members, key=lambda name: (name != sweep_of(nearest), -begun[name]))
        if len({row["setting"] for row in members[name]}) > 1
    ]
    program = _program(runs, listed, nearest)
    is_of_sweep = bool(sweeps) and str(nearest["name"]) in sweeps[0].names
    ordered = [*sweeps[:1], program, *sweeps[1:]] if is_of_sweep else [program, *sweeps]
    ordered.append(Choice("all", "all runs", _oldest_first(listed[:MOST_RUNS])))
    if key.startswith(_PROGRAM) and key != program.key:
        ordered += [_program(runs, listed, row) for row in listed if f"{_PROGRAM}{row['name']}" == key]
    ordered.sort(key=lambda choice: choice.key != key)  # a stable sort keeps the order of the other choices
    different: dict[tuple[str, ...], Choice] = {}
    for choice in ordered:
        different.setdefault(choice.names, choice)
    return list(different.values())


def _program(runs: Runs, listed: Sequence[_Row], of: _Row) -> Choice:
    """Return the newest runs with the program, the number of ranks and the parameters of ``of``."""
    size = _parameters(runs, of)
    same = [row for row in listed if (row["script"], row["world_size"]) == (of["script"], of["world_size"])]
    mine = [row for row in same[:_MOST_READ] if row is of or _parameters(runs, row) == size][:MOST_RUNS]
    script = of["script"] if isinstance(of["script"], str) else "one program"
    ranks: str = "" if pd.isna(of["world_size"]) else f", {int(of['world_size']):,} ranks"
    model = "" if size is None else f", {size:,} parameters"
    return Choice(f"{_PROGRAM}{of['name']}", f"{script}{ranks}{model}", _oldest_first(mine))


def _parameters(runs: Runs, row: _Row) -> int | None:
    try:
        numel: int | None = runs.of_run("model numel", str(row["name"]), api.model_numel)
    except Exception:  # The page of the run describes the damage.
        return None
    return numel


def _started(row: _Row) -> float:
    started = row["started_realtime_ns"]
    return 0.0 if started is None or pd.isna(started) else float(started)


def _oldest_first(rows: Sequence[_Row]) -> tuple[str, ...]:
    return tuple(str(row["name"]) for row in reversed(rows))

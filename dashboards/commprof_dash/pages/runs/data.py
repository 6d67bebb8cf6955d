"""Provides the rows of the table of runs.

Some values are in the listing. Others require the records of a run, and are read later.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

import pandas as pd

from commprof.analysis import api
from commprof_dash import address
from commprof_dash.data import Runs
from commprof_dash.measures import format_count

# Runs with at most this number of records are read in this process. Larger runs take seconds in another
# process.
_MOST_RECORDS: Final = 200_000
_MOST_KNOWN: Final = 20_000  # the largest number of cached facts, which have about 200 bytes each
_UNREADABLE: Final = "unreadable"
_VERDICTS: Final = {"unknown": "cannot tell"}

Row = dict[str, Any]


class Facts(NamedTuple):
    """Values that are computed from the records of a run; None: not known."""

    step_ns: float | None
    exposed_share: float | None
    bytes_per_step: float | None
    verdict: str | None


NOTHING: Final = Facts(None, None, None, None)


def facts_of(path: Path) -> Facts:
    """Return the facts of one run. The numbers are those of the page Compare and of ``commprof report``."""
    setting = api.compare([path]).iloc[0]
    exposure = api.exposure_per_step(path)
    together = exposure[exposure["purpose"] == "all"]
    sent = setting["executed_wire_bytes_per_step"]
    state = str(api.verify(path).state.value)
    return Facts(
        _number(setting["step_time_ns"]),
        _number(together["exposed_share"].iloc[0]) if len(together) else None,
        _number(setting["wire_bytes_per_step"] if pd.isna(sent) else sent),
        _VERDICTS.get(state, state),
    )


def _number(value: Any) -> float | None:
    return None if value is None or pd.isna(value) else float(value)


class KnownFacts:
    """A cache of the facts that were read, by run and state of its files."""

    def __init__(self) -> None:
        self._facts: OrderedDict[str, Facts] = OrderedDict()

    def of(self, path: str) -> Facts | None:
        """Return the facts of the run at ``path``; None if they were not read since the files of the run changed."""
        return self._facts.get(api.fingerprint(Path(path)).key)

    def read(self, runs: Runs, row: Mapping[str, Any]) -> Facts | None:
        """Return the facts of a listed run; None while another process reads them."""
        key = api.fingerprint(Path(row["path"])).key
        known = self._facts.get(key)
        if known is None:
            known = self._read(runs, row)
            if known is not None:
                self._facts[key] = known
                if len(self._facts) > _MOST_KNOWN:
                    self._facts.popitem(last=False)
        return known

    def _read(self, runs: Runs, row: Mapping[str, Any]) -> Facts | None:
        if row["state"] == _UNREADABLE or not (row["records"] or row["summed"]):
            return NOTHING
        ask = runs.run_beside if row["records"] > _MOST_RECORDS else runs.of_run
        try:
            facts: Facts | None = ask("run-facts", str(row["name"]), facts_of)
        except Exception:  # a run that cannot be evaluated still has a row in the table
            return NOTHING
        return facts


def read_some(
    runs: Runs, known: KnownFacts, names: Sequence[str], seconds: float
) -> tuple[list[str], list[str]]:
    """Read the facts of ``names`` for about ``seconds`` seconds.

    Returns:
        The names of the runs that were read, and of those that were not.
    """
    listed: dict[str, Any] = {str(row["name"]): row for row in runs.listing().to_dict("records")}
    done: list[str] = []
    waiting: list[str] = []
    until = time.monotonic() + seconds
    for number, name in enumerate(names):
        if number and time.monotonic() > until:
            waiting += names[number:]
            break
        if name not in listed or known.read(runs, listed[name]) is not None:
            done.append(name)
        else:
            waiting.append(name)
    return done, waiting


def sweep_of(row: Mapping[str, Any]) -> str | None:
    """Return the sweep of a listed run, which is the common directory of its runs; None for a run without a sweep."""
    if not isinstance(row.get("sweep"), str):
        return None
    folder = str(row["name"]).rpartition("/")[0]
    return folder or str(row["sweep"])


def table_rows(listing: pd.DataFrame, known: KnownFacts) -> list[Row]:
    """Return the rows of the grid, newest first. The row of a sweep is followed by the rows of its runs."""
    rows: list[Row] = []
    sweeps: dict[str, list[Row]] = {}
    records = listing.to_dict("records")
    for record in records:
        row = _run_row({str(key): value for key, value in record.items()}, known)
        rows.append(row)
        if row["sweep"] is not None:
            sweeps.setdefault(row["sweep"], []).append(row)
    several = {name: members for name, members in sweeps.items() if len(members) > 1}
    for row in rows:
        if row["sweep"] not in several:
            row["sweep"] = None
    placed: list[Row] = []
    for row in rows:
        if row["sweep"] is not None and several[row["sweep"]][0] is row:
            placed.append(_sweep_row(row["sweep"], several[row["sweep"]]))
        placed.append(row)
    return placed


def _run_row(row: Mapping[str, Any], known: KnownFacts) -> Row:
    broken = row["state"] == _UNREADABLE
    facts = NOTHING if broken else known.of(str(row["path"]))
    return {
        "id": f"run:{row['name']}",
        "name": str(row["name"]),
        "href": None if broken else address.link("/overview", run=str(row["name"])),
        "sweep": sweep_of(row),
        "members": None,
        "state": str(row["state"]),
        "note": row["note"] if isinstance(row["note"], str) else None,
        "setting": _text(row["setting"]),
        "script": _text(row["script"]),
        **_measured(facts),
        **_values("duration", _number(row["wall_ns"]), 1e9, api.format_ns),
        **_values("ranks", _number(row["world_size"]), 1, format_count),
        **_values("steps", _number(row["steps"]), 1, format_count),
        **_values("records", _number(row["records"]), 1, format_count),
        **_values("dropped", _number(row["lost"]), 1, format_count),
        **_values("unseen", _number(row["unseen"]), 1, format_count),
        "started": _number(row["started_realtime_ns"]),
        "started_text": _moment(row["started_realtime_ns"], "%b %d, %H:%M"),
        "started_whole": _moment(row["started_realtime_ns"], "%Y-%m-%d %H:%M:%S"),
    }


def _measured(facts: Facts | None) -> Row:
    shown = NOTHING if facts is None else facts
    missing = "..." if facts is None else "-"
    share = None if shown.exposed_share is None else 100 * shown.exposed_share
    return {
        **_values("step_time", shown.step_ns, 1e6, api.format_ns, missing),
        **_values("exposed", share, 1, "{:.1f} %".format, missing),
        **_values("sent", shown.bytes_per_step, 2**20, api.format_bytes, missing),
        "verdict": shown.verdict or missing,
    }


def _values(name: str, value: float | None, unit: float, write: Any, missing: str = "-") -> Row:
    """Return a value in ``unit``, for sorting and filtering, and its text."""
    return {
        name: None if value is None else value / unit,
        f"{name}_text": missing if value is None else write(value),
    }


def _sweep_row(name: str, members: Sequence[Row]) -> Row:
    """Return the row of a sweep. Each number is a range over the runs."""
    settings = {row["setting"] for row in members}
    states = pd.Series([row["state"] for row in members]).value_counts()
    verdicts = sorted({row["verdict"] for row in members})
    row: Row = {
        "id": f"sweep:{name}",
        "name": name,
        "href": None,
        "sweep": None,
        "members": [row["name"] for row in members if row["state"] != _UNREADABLE],
        "state": ", ".join(f"{count} {state}" for state, count in states.items()),
        "note": None,
        "setting": f"{len(settings)} setting" + ("s" if len(settings) != 1 else ""),
        "script": ", ".join(sorted({row["script"] for row in members})),
        "verdict": verdicts[0] if len(verdicts) == 1 else ", ".join(v for v in verdicts if v != "..."),
        "started": members[0]["started"],
        "started_text": members[0]["started_text"],
        "started_whole": members[0]["started_whole"],
    }
    for column in (
        "step_time",
        "exposed",
        "sent",
        "duration",
        "ranks",
        "steps",
        "records",
        "dropped",
        "unseen",
    ):
        row |= _range(column, members)
    return row


def _range(column: str, members: Iterable[Row]) -> Row:
    known = sorted(
        ((row[column], row[f"{column}_text"]) for row in members if row[column] is not None),
        key=lambda pair: pair[0],
    )
    if not known:
        return {column: None, f"{column}_text": next(iter(members))[f"{column}_text"]}
    low, high = known[0], known[-1]
    return {column: low[0], f"{column}_text": range_text(low[1], high[1])}


def range_text(low: str, high: str) -> str:
    """Return a range as text: ``19.1 to 23.4 ms`` for values of the same unit, else ``980 us to 1.20 ms``.

    Return one value if the two texts are equal.
    """
    if low == high:
        return low
    number, _, unit = low.partition(" ")
    return f"{number if unit and high.endswith(f' {unit}') else low} to {high}"


def _text(value: Any) -> str:
    return value if isinstance(value, str) and value else "-"


def _moment(realtime_ns: Any, form: str) -> str:
    if realtime_ns is None or pd.isna(realtime_ns) or not realtime_ns:
        return "-"
    try:
        return datetime.fromtimestamp(int(realtime_ns) / 1e9).astimezone().strftime(form)
    except (OverflowError, OSError, ValueError):
        return "-"

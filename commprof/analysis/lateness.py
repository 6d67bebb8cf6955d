"""How late each rank comes, what made it wait, and which collectives were the worst: arrivals, summed up in three ways."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import pandas as pd

from commprof.align.arrivals import CAUSES
from commprof.analysis.detailed_answers import LATE_COLLECTIVES, LATENESS, WAITING_CAUSES
from commprof.analysis.frames import from_rows

_QUANTILES: Final = {"p5_ns": 0.05, "p25_ns": 0.25, "median_ns": 0.5, "p75_ns": 0.75, "p95_ns": 0.95}
_TIME_OF: Final = dict(zip(CAUSES, ("waiting_ns", "launch_ns", "transfer_ns"), strict=True))


class Straggling(NamedTuple):
    """Who comes late, in four tables: see :func:`commprof.analysis.api.straggling`."""

    ranks: pd.DataFrame
    lateness: pd.DataFrame
    causes: pd.DataFrame
    collectives: pd.DataFrame


def lateness(arrived: pd.DataFrame) -> pd.DataFrame:
    """How late each rank comes after the first one: quantiles over the collectives of several ranks that can be compared."""
    known = _comparable(arrived)
    groups = known.groupby("rank")["lateness_ns"]
    found = {name: groups.quantile(share) for name, share in _QUANTILES.items()}
    errors = known.groupby("rank")["lateness_error_ns"].median()
    highest, counts = groups.max(), groups.size()
    rows = [
        {
            "rank": int(rank),
            "collectives": int(counts[rank]),
            **{name: round(float(values[rank])) for name, values in found.items()},
            "highest_ns": int(highest[rank]),
            "error_ns": round(float(errors[rank])),
        }
        for rank in sorted(set(known["rank"]))
    ]
    return from_rows(rows, LATENESS.columns)


def causes(arrived: pd.DataFrame) -> pd.DataFrame:
    """What each rank waited for, where that is beyond the error of the clocks: one row per rank and cause."""
    known = _comparable(arrived)
    all_of = known.groupby("rank").size()
    rows = []
    for cause, column in _TIME_OF.items():
        part = known[(known["cause"] == cause).fillna(False)].groupby("rank")[column]
        counts, times = part.size(), part.sum()
        rows += [
            {
                "rank": int(rank),
                "cause": cause,
                "collectives": int(counts.get(rank, 0)),
                "of_collectives": int(all_of[rank]),
                "time_ns": int(times.get(rank, 0)),
            }
            for rank in all_of.index
        ]
    rows.sort(key=lambda row: (row["rank"], CAUSES.index(str(row["cause"]))))
    return from_rows(rows, WAITING_CAUSES.columns)


def late_collectives(arrived: pd.DataFrame, limit: int) -> pd.DataFrame:
    """The collectives and messages whose ranks came furthest apart, one row each, the worst first."""
    known = _comparable(arrived)
    spreads = known.groupby("collective")["lateness_ns"].max().sort_values(ascending=False, kind="stable")
    kept = known[known["collective"].isin(set(spreads.index[:limit]))].reset_index(drop=True)
    times = kept[list(_TIME_OF.values())]
    whole = times.fillna(0).astype("int64")
    by = kept.assign(
        lateness_ns=kept["lateness_ns"].astype("int64"),
        longest=whole.max(axis=1),
        end_ns=kept["arrived_ns"].astype("int64") + whole.sum(axis=1),
    ).groupby("collective")
    last = kept.loc[by["lateness_ns"].idxmax().to_numpy()].reset_index(drop=True)
    found = last[
        [name for name in LATE_COLLECTIVES.names if name in last and name not in set(_TIME_OF.values())]
    ].assign(
        spread_ns=last["lateness_ns"],
        error_ns=last["lateness_error_ns"],
        last_rank=last["rank"].where(last["is_last"].notna()),
        certain=last["certain"].fillna(False).astype(bool),
        cause=kept.loc[by["longest"].idxmax().to_numpy(), "cause"].to_numpy(),
        begin_ns=by["arrived_ns"].min().to_numpy(),
        end_ns=by["end_ns"].max().to_numpy(),
        **{name: by[name].max().to_numpy() for name in _TIME_OF.values()},
    )
    found = found.sort_values(["spread_ns", "begin_ns"], ascending=[False, True], kind="stable")
    rows: list[dict[Any, Any]] = found.to_dict("records")
    return from_rows(
        ({str(name): None if pd.isna(value) else value for name, value in row.items()} for row in rows),
        LATE_COLLECTIVES.columns,
    )


def _comparable(arrived: pd.DataFrame) -> pd.DataFrame:
    return arrived[(arrived["members"] > 1) & arrived["lateness_ns"].notna()]

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
    rows = []
    for rank in sorted(set(known["rank"])):
        of_rank = known[known["rank"] == rank]
        for cause, column in _TIME_OF.items():
            part = of_rank[of_rank["cause"] == cause]
            rows.append(
                {
                    "rank": int(rank),
                    "cause": cause,
                    "collectives": len(part),
                    "of_collectives": len(of_rank),
                    "time_ns": int(part[column].fillna(0).sum()),
                }
            )
    return from_rows(rows, WAITING_CAUSES.columns)


def late_collectives(arrived: pd.DataFrame, limit: int) -> pd.DataFrame:
    """The collectives and messages whose ranks came furthest apart, one row each, the worst first."""
    known = _comparable(arrived)
    spreads = known.groupby("collective")["lateness_ns"].max().sort_values(ascending=False, kind="stable")
    kept = known[known["collective"].isin(set(spreads.index[:limit]))]
    rows = [_collective(part) for _, part in kept.groupby("collective")]
    rows.sort(key=lambda row: (-row["spread_ns"], row["begin_ns"]))
    return from_rows(rows, LATE_COLLECTIVES.columns)


def _comparable(arrived: pd.DataFrame) -> pd.DataFrame:
    return arrived[(arrived["members"] > 1) & arrived["lateness_ns"].notna()]


def _collective(part: pd.DataFrame) -> dict[str, Any]:
    last = part.iloc[int(part["lateness_ns"].astype("int64").to_numpy().argmax())]
    times = {name: _largest(part[name]) for name in _TIME_OF.values()}
    ends = part["arrived_ns"].astype("int64") + sum(
        part[name].fillna(0).astype("int64") for name in _TIME_OF.values()
    )
    longest = part.iloc[
        int(part[list(_TIME_OF.values())].fillna(0).max(axis=1).astype("int64").to_numpy().argmax())
    ]
    return {
        **{name: _plain(last[name]) for name in ("attempt", "step", "op", "purpose", "pg", "group_ranks")},
        "pg_seq": _plain(last["pg_seq"]),
        "members": int(last["members"]),
        "spread_ns": int(last["lateness_ns"]),
        "error_ns": int(last["lateness_error_ns"]),
        "last_rank": None if pd.isna(last["is_last"]) else int(last["rank"]),
        "certain": bool(last["certain"]) if not pd.isna(last["certain"]) else False,
        **{name: _plain(last[name]) for name in ("pid", "seq", "lead_ns", "others_waited_ns")},
        **times,
        "cause": _plain(longest["cause"]),
        "begin_ns": int(part["arrived_ns"].min()),
        "end_ns": int(ends.max()),
    }


def _largest(values: pd.Series[Any]) -> int | None:
    return None if values.isna().all() else int(values.max())


def _plain(value: Any) -> Any:
    return None if pd.isna(value) else value

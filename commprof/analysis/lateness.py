"""How late each rank comes, what made it wait, and which collectives were the worst: arrivals, summed up in three ways."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from commprof.align.arrivals import CAUSES
from commprof.analysis.answers import ARRIVALS
from commprof.analysis.detailed_answers import LATE_COLLECTIVES, LATENESS, WAITING_CAUSES
from commprof.analysis.engine import ask
from commprof.analysis.frames import from_arrow, from_rows
from commprof.trace.reader import Scan

_MEASURED: Final = ("p5_ns", "p25_ns", "median_ns", "p75_ns", "p95_ns", "error_ns")
_TIME_OF: Final = dict(zip(CAUSES, ("waiting_ns", "launch_ns", "transfer_ns"), strict=True))


def lateness(arrived: pa.Table | Scan) -> pd.DataFrame:
    """How late each rank comes after the first one (``queries/lateness.sql``)."""
    found = ask("lateness", {"arrivals": arrived})
    for name in _MEASURED:
        whole = np.rint(found[name].to_numpy()).astype(np.int64)
        found = found.set_column(found.column_names.index(name), name, pa.array(whole))
    return from_arrow(found, LATENESS.columns)


def causes(arrived: pa.Table | Scan) -> pd.DataFrame:
    """What each rank waited for (``queries/waiting_causes.sql``): one row per rank and cause, also of those it has not."""
    counted = ask("waiting_causes", {"arrivals": arrived}).to_pylist()
    of_rank: dict[int, int] = {}
    for row in counted:
        of_rank[row["rank"]] = of_rank.get(row["rank"], 0) + row["collectives"]
    known = {(row["rank"], row["cause"]): row for row in counted}
    rows = [
        {
            "rank": rank,
            "cause": cause,
            "collectives": known.get((rank, cause), {}).get("collectives", 0),
            "of_collectives": of_rank[rank],
            "time_ns": known.get((rank, cause), {}).get("time_ns", 0),
        }
        for rank in sorted(of_rank)
        for cause in CAUSES
    ]
    return from_rows(rows, WAITING_CAUSES.columns)


def worst(arrived: pa.Table, limit: int) -> pa.Table:
    """The rows of the ``limit`` collectives and messages whose ranks came furthest apart; of equal ones the first."""
    comparable = pc.and_(pc.greater(arrived["members"], 1), pc.is_valid(arrived["lateness_ns"]))
    # Only two columns of all rows are looked at: to copy the others takes longer than everything else.
    spreads = (
        arrived.select(["collective", "lateness_ns"])
        .filter(comparable)
        .group_by("collective")
        .aggregate([("lateness_ns", "max")])
    )
    order = [("lateness_ns_max", "descending"), ("collective", "ascending")]
    if limit < len(spreads):
        spreads = spreads.take(pc.select_k_unstable(spreads, limit, order))
    return arrived.take(
        pc.indices_nonzero(pc.and_(comparable, pc.is_in(arrived["collective"], spreads["collective"])))
    )


def late_collectives(arrived: pa.Table, limit: int) -> pd.DataFrame:
    """The collectives and messages whose ranks came furthest apart, one row each, the worst first."""
    kept = from_arrow(worst(arrived, limit), ARRIVALS.columns)
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

"""The individual collectives with the largest arrival skew."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from commprof.align.ranks.rank_arrivals import CAUSES
from commprof.align.sequences.row_groups import Groups
from commprof.analysis.columns.answers import ARRIVALS
from commprof.analysis.columns.detailed_answers import LATE_COLLECTIVES
from commprof.analysis.columns.frames import from_arrow, from_rows

_NO_TIME: Final = -(1 << 62)
_TIME_OF: Final = dict(zip(CAUSES, ("waiting_ns", "launch_ns", "transfer_ns"), strict=True))


def worst(arrived: pa.Table, limit: int) -> pa.Table:
    """Return the rows of the ``limit`` collectives and messages with the largest arrival skew.

    Among collectives with the same skew, the earliest are returned. The rows of ``arrived`` must be in the
    order of their collectives.
    """
    comparable = (arrived["members"].to_numpy() > 1) & arrived["lateness_ns"].is_valid().to_numpy()
    groups = Groups(arrived["collective"].to_numpy())
    spread = groups.reduced(
        np.maximum, np.where(comparable, pc.fill_null(arrived["lateness_ns"], _NO_TIME).to_numpy(), _NO_TIME)
    )
    began = groups.reduced(np.minimum, pc.fill_null(arrived["arrived_ns"], -_NO_TIME).to_numpy())
    chosen = np.zeros(len(spread), bool)
    chosen[np.lexsort((began, -spread))[:limit]] = True
    return arrived.take(pa.array(np.flatnonzero(groups.spread(chosen) & comparable)))


def late_collectives(arrived: pa.Table, limit: int) -> pd.DataFrame:
    """Return the collectives and messages with the largest arrival skew, one row each, largest first."""
    worst_arrivals = from_arrow(worst(arrived, limit), ARRIVALS.columns)
    times = worst_arrivals[list(_TIME_OF.values())]
    times_ns = times.fillna(0).astype("int64")
    by = worst_arrivals.assign(
        lateness_ns=worst_arrivals["lateness_ns"].astype("int64"),
        longest=times_ns.max(axis=1),
        end_ns=worst_arrivals["arrived_ns"].astype("int64") + times_ns.sum(axis=1),
    ).groupby("collective")
    last = worst_arrivals.loc[by["lateness_ns"].idxmax().to_numpy()].reset_index(drop=True)
    answer = last[
        [name for name in LATE_COLLECTIVES.names if name in last and name not in set(_TIME_OF.values())]
    ].assign(
        spread_ns=last["lateness_ns"],
        error_ns=last["lateness_error_ns"],
        last_rank=last["rank"].where(last["is_last"].notna()),
        certain=last["certain"].fillna(False).astype(bool),
        cause=worst_arrivals.loc[by["longest"].idxmax().to_numpy(), "cause"].to_numpy(),
        begin_ns=by["arrived_ns"].min().to_numpy(),
        end_ns=by["end_ns"].max().to_numpy(),
        **{name: by[name].max().to_numpy() for name in _TIME_OF.values()},
    )
    answer = answer.sort_values(["spread_ns", "begin_ns"], ascending=[False, True], kind="stable")
    rows: list[dict[Any, Any]] = answer.to_dict("records")
    return from_rows(
        ({str(name): None if pd.isna(value) else value for name, value in row.items()} for row in rows),
        LATE_COLLECTIVES.columns,
    )

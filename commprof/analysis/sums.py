"""What most questions about a run begin with: its operations added up, and how long its steps stood still.

Each is worked out once for an opened run and kept with it; where the run's index is there and holds, it is read from that.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from commprof.analysis import steps, traffic
from commprof.analysis.index import index_if_there
from commprof.analysis.index_sums import HELD_COLUMNS, MEASURES, OPERATIONS, STOOD_STILL
from commprof.trace.reader import Run

__all__ = ["HELD_COLUMNS", "operations", "stood_still"]


def operations(run: Run, columns: Sequence[str]) -> pa.Table:
    """The operations of ``run``, added up by ``columns`` at least: rows of it are sums, and sums of them hold."""
    wanted = tuple(dict.fromkeys(columns))
    for (name, *held), table in list(run.kept.items()):
        if name == OPERATIONS and set(wanted) <= set(held):
            return table
    index = index_if_there(run.path) if set(wanted) <= set(HELD_COLUMNS) else None
    if index is not None:
        by = ", ".join((*wanted, "wire_ranks"))
        sums = ", ".join(f"cast(sum({name}) as {kind}) as {name}" for name, kind in MEASURES.items())
        found = index.ask(f"select {by}, {sums} from {OPERATIONS} group by {by}")
    else:
        found = traffic.operations(run.scan("collectives"), run.table("aggregates"), wanted)
    run.kept[OPERATIONS, *wanted] = found
    return found


def stood_still(run: Run) -> pa.Table:
    """For how long the ranks of each step of ``run`` stood still for collectives together."""
    key = (STOOD_STILL,)
    if key not in run.kept:
        index = index_if_there(run.path)
        if index is not None:
            run.kept[key] = index.ask(f"select * from {STOOD_STILL}")
        else:
            run.kept[key] = steps.stood_still(run.table("steps"), run.scan("collectives"))
    return run.kept[key]

"""Records the collectives of forked ranks, and the counts of torch for comparison."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

from support.ranks import device, run_ranks


def record(run: Path, world: int, body: Any, *args: Any, **options: Any) -> tuple[Any, list[dict[str, Any]]]:
    """Run ``body(rank, world, *args)`` on recorded ranks.

    Returns:
        The opened run, and one mapping per rank: the result of ``body``, the increase of the sequence number of the
        group during the recording, and the names of the operations that the Flight Recorder saw in this time.
    """
    from commprof.trace.finaliser import finalise
    from commprof.trace.reader import open_run

    outcomes = run_ranks(world, recorded, str(run), body, args, options)
    finalise(run)
    return open_run(run), outcomes


def recorded(rank: int, world: int, run: str, body: Any, args: Any, options: Any) -> dict[str, Any]:
    """Run ``body`` on one rank with the recorder attached, and return the results that :func:`record` describes."""
    import torch.distributed as dist

    import commprof

    group = dist.group.WORLD
    flights = len(flight_names())
    number = group._get_sequence_number_for_group()
    commprof.attach(run, **options)
    try:
        result = body(rank, world, *args)
    finally:
        commprof.detach()
    return {
        "result": result,
        "number": group._get_sequence_number_for_group() - number,
        "flights": flight_names()[flights:],
    }


def flight_names() -> list[str]:
    """Return the operation names in torch's Flight Recorder, oldest first, without the name of the backend."""
    from torch._C import _distributed_c10d

    dump = _distributed_c10d._dump_fr_trace if device() == "cpu" else _distributed_c10d._dump_nccl_trace
    entries = pickle.loads(dump()).get("entries", [])  # safe, because torch created this dump in this process
    return [entry["profiling_name"].rpartition(":")[2] for entry in entries]


def calls(run: Any, rank: int, *columns: str) -> list[Any]:
    """Return the values of ``columns`` of each collective of ``rank``, in the order of issue."""
    table = run.table("collectives").to_pylist()
    rows = sorted((row for row in table if row["rank"] == rank), key=lambda row: row["seq"])
    if len(columns) == 1:
        return [row[columns[0]] for row in rows]
    return [tuple(row[column] for column in columns) for row in rows]

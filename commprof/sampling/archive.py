"""Reads the last calls of each rank from the tables of a finalized run."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from commprof.errors import MissingExtraError
from commprof.sampling.calls import WINDOW, Call, GroupFacts, RankCalls, What
from commprof.schema import COLLECTIVES, UNKNOWN_SPLITS, Layer, Status, parse_ranks
from commprof.trace.directory import COLLECTIVES_DIRECTORY

_COLUMNS: Final = (
    *(name for name in What._fields),
    "rank",
    "attempt",
    "pid",
    "seq",
    "pg_seq",
    "call_site",
    "purpose",
    "module",
    "step",
    "thread",
    "layer",
    "status",
    "issue_ns",
    "return_ns",
    "wait_begin_ns",
    "wait_end_ns",
    "device_end_ns",
)
_TIMES: Final = ("return_ns", "wait_begin_ns", "wait_end_ns", "device_end_ns")


def read_archive(run: Path) -> tuple[list[RankCalls], dict[int, str]]:
    """Return the last calls of each rank in the last attempt, and the missing files by rank.

    If a rank has several processes, the calls are those of the process that issued a call last. The second result
    contains a sentence about the missing file for each rank whose records are missing.

    Raises:
        TraceError: the run cannot be read.
        MissingExtraError: the packages that read tables are not installed.
    """
    try:
        import pyarrow.compute as pc

        from commprof.trace.reader import open_run
    except ImportError:
        raise MissingExtraError("pyarrow", "analysis", "to read a run that has ended") from None
    opened = open_run(run)
    table = opened.table("collectives").select(list(_COLUMNS))
    groups = _groups(opened.table("groups").to_pylist())
    attempt = max((entry["attempt"] for entry in opened.manifest.ranks), default=0)
    calls_of_rank: dict[int, RankCalls] = {}
    gone: dict[int, str] = {}
    for entry in opened.manifest.ranks:
        rank, pid = entry["rank"], entry["pid"]
        if entry["attempt"] != attempt:
            continue
        file = f"{COLLECTIVES_DIRECTORY}/{entry.get('file')}.parquet"
        if file in opened.health.gone:
            gone[rank] = f"{file} is missing"
            continue
        mine = table.filter(
            (pc.field("rank") == rank) & (pc.field("attempt") == attempt) & (pc.field("pid") == pid)
        )
        mine = mine.sort_by("seq")
        rows = mine.slice(max(0, len(mine) - WINDOW)).to_pylist()
        last = rows[-1]["issue_ns"] if rows else 0
        if (
            rank in calls_of_rank
            and calls_of_rank[rank].calls
            and calls_of_rank[rank].calls[-1].issue_ns > last
        ):
            continue
        calls_of_rank[rank] = RankCalls(
            rank=rank,
            attempt=attempt,
            pid=pid,
            host=entry.get("host"),
            world_size=entry.get("world_size"),
            calls=[_call(row, opened.manifest.schema_version) for row in rows],
            total=len(mine),
            ended=bool(entry.get("ended")),
            groups=groups.get((rank, attempt, pid), {}),
        )
    return [calls_of_rank[rank] for rank in sorted(calls_of_rank)], gone


def _call(row: dict[str, Any], version: int) -> Call:
    what = What(**{name: row[name] for name in What._fields})
    if row["layer"] == Layer.IMPORTED or version < COLLECTIVES.column("input_splits").since:
        what = what._replace(input_splits=UNKNOWN_SPLITS, output_splits=UNKNOWN_SPLITS)
    times = {name: row[name] or 0 for name in _TIMES}
    if times["wait_begin_ns"] == times["return_ns"]:
        times["wait_begin_ns"] = 0
    return Call(
        what=what,
        pg_seq=row["pg_seq"],
        site=row["call_site"],
        purpose=row["purpose"],
        step=row["step"],
        thread=row["thread"],
        layer=row["layer"],
        raised=row["status"] == Status.RAISED,
        module=row["module"],
        issue_ns=row["issue_ns"],
        **times,
    )


def _groups(rows: list[dict[str, Any]]) -> dict[tuple[int, int, int], dict[str, GroupFacts]]:
    facts_by_process: dict[tuple[int, int, int], dict[str, GroupFacts]] = {}
    for row in rows:
        facts = GroupFacts(row["pg"], row["group_desc"], parse_ranks(row["group_ranks"]))
        facts_by_process.setdefault((row["rank"], row["attempt"], row["pid"]), {})[facts.pg] = facts
    return facts_by_process

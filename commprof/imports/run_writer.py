"""Writes the result of an importer as a run directory, which every other command reads like any other run."""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, Final, TypeAlias

from commprof.imports.recording import NO_STEP, STATED_COLUMNS, Collective, Imported, ImportedRank
from commprof.schema import GROUPS, Layer, Phase, Status, format_ranks
from commprof.trace.directory import COLLECTIVES_DIRECTORY
from commprof.trace.manifest import COMPLETE, Manifest, create_run, describe_process, write_manifest
from commprof.trace.rank_files.layout import RankFile
from commprof.trace.tables import table_from_rows, write_parquet, write_table

_ATTEMPT: Final = 0
_GROUP_COLUMNS: Final = tuple(name for name in STATED_COLUMNS if name in GROUPS.names)
_Group: TypeAlias = tuple[str, tuple[int, ...]]
_Shared: TypeAlias = tuple[str, tuple[int, ...], Hashable]


def write_run(out: Path, imported: Imported, files: Sequence[Path], force: bool = False) -> Path:
    """Write ``imported`` as run directory ``out``, and return ``out``.

    Args:
        out: The path of the run directory.
        imported: The result of an importer.
        files: The files that the importer read. Their names become a note of the run.
        force: Whether to replace a run that is already in ``out``.

    Raises:
        UsageError: ``out`` is not empty and cannot be replaced.
        TraceError: ``out`` cannot be written to.
    """
    description = {**describe_process(), "environment": {}, "python": "", "platform": ""}
    known = [each.issue_ns for rank in imported.ranks for each in rank.collectives]
    # Without wall-clock times in the files, the time of the import is the only date that is known.
    begin = min(known, default=0) if imported.realtime else 0
    notes = [f"imported from {imported.tool}: {', '.join(file.name for file in files)}", *imported.notes]
    manifest = Manifest(
        script=None,
        started_realtime_ns=begin or time.time_ns(),
        world_size=imported.world_size,
        hosts=sorted({rank.host for rank in imported.ranks if rank.host}),
        state=COMPLETE,
        notes=notes,
        **description,
    )
    create_run(out, manifest, force)
    pids = _numbered(imported.ranks)
    numbers = _shared_numbers(imported.ranks)
    groups: list[dict[str, Any]] = []
    algorithms: list[dict[str, Any]] = []
    steps: list[dict[str, Any]] = []
    flight: list[dict[str, Any]] = []
    for rank, pid in zip(imported.ranks, pids, strict=True):
        same = {"rank": rank.rank, "attempt": _ATTEMPT, "pid": pid}
        ordered = sorted(rank.collectives, key=attrgetter("issue_ns"))
        rows = [{**same, "seq": seq, **row} for seq, row in enumerate(_rows(ordered, numbers))]
        algorithms += [
            {
                **same,
                "seq": seq,
                "algorithm": each.algorithm,
                "protocol": each.protocol,
                "channels": each.channels,
            }
            for seq, each in enumerate(ordered)
            if each.algorithm is not None
        ]
        identity = RankFile(rank.rank, _ATTEMPT, pid, 1)
        file = out / COLLECTIVES_DIRECTORY / f"{identity.stem}.parquet"
        write_parquet(file, table_from_rows("collectives", rows))
        manifest.ranks.append(_entry(identity, rank, imported.world_size, ordered))
        groups += _groups(same, ordered)
        steps += [
            {**same, "step": step, "begin_ns": start, "end_ns": end, "micro_steps": 1}
            for step, start, end in rank.steps
        ]
        flight += [{**same, **row} for row in rank.flight]
    sides = {"groups": groups, "steps": steps, "flight": flight, "nccl_algorithms": algorithms}
    for name, side in sides.items():
        if side:
            write_table(out, name, table_from_rows(name, side))
    manifest.tables = sorted(name for name, side in sides.items() if side)
    write_manifest(out, manifest)
    return out


def _numbered(ranks: Sequence[ImportedRank]) -> list[int]:
    """Return a process id for each rank.

    If the tool does not record all process ids, or two ranks have the same one, the ids are numbers from 1.
    """
    pids = [rank.pid for rank in ranks]
    return pids if all(pids) and len(set(pids)) == len(pids) else list(range(1, len(ranks) + 1))


def _shared_numbers(ranks: Iterable[ImportedRank]) -> dict[_Shared, int]:
    """Return the number in its group for each collective that has an identity.

    The collectives of a group are ordered by their lowest sequence number, then by their earliest issue, on any rank.
    """
    first: dict[_Shared, tuple[int, int]] = {}
    for each in (each for rank in ranks for each in rank.collectives):
        if each.identity is not None:
            order = each.pg_seq or 0, each.issue_ns
            key = _shared(each)
            first[key] = min(first.get(key, order), order)
    counted: dict[_Group, int] = {}
    numbers = {}
    for key in sorted(first, key=lambda key: (first[key], key[0], str(key[2]))):
        numbers[key] = counted.get(key[:2], 0)
        counted[key[:2]] = numbers[key] + 1
    return numbers


def _shared(each: Collective) -> _Shared:
    return each.pg, tuple(each.group_ranks), each.identity


def _rows(collectives: Iterable[Collective], numbers: Mapping[_Shared, int]) -> Iterator[dict[str, Any]]:
    counted: dict[tuple[str, bool], int] = {}
    for each in collectives:
        key = each.pg, each.is_p2p
        if each.identity is not None:
            number = numbers[_shared(each)]
        else:
            number = counted.get(key, 0) if each.pg_seq is None else each.pg_seq
        counted[key] = number + 1
        yield {
            **_stated(each, STATED_COLUMNS),
            "pg_seq": number,
            "micro_step": 0,
            "phase": Phase.OTHER.value if each.step != NO_STEP else Phase.INIT.value,
            "captured": False,
            "layer": Layer.IMPORTED.value,
            "status": (Status.OK if each.finished else Status.INCOMPLETE).value,
        }


def _stated(each: Collective, columns: Iterable[str]) -> dict[str, Any]:
    """Return the values of ``columns`` of a collective in the form of the tables."""
    values = {name: getattr(each, name) for name in columns}
    return {**values, "group_ranks": format_ranks(tuple(each.group_ranks))}


def _groups(same: Mapping[str, Any], collectives: Iterable[Collective]) -> list[dict[str, Any]]:
    first = {each.pg: each for each in reversed(list(collectives))}
    return [
        {
            **same,
            **_stated(each, _GROUP_COLUMNS),
            "unseen": 0,
        }
        for _, each in sorted(first.items())
    ]


def _entry(
    identity: RankFile, rank: ImportedRank, world_size: int | None, collectives: Sequence[Collective]
) -> dict[str, Any]:
    return {
        "rank": rank.rank,
        "attempt": _ATTEMPT,
        "pid": identity.pid,
        "file": identity.stem,
        "host": rank.host,
        "world_size": world_size or 0,
        "records": len(collectives),
        "lost": rank.dropped,
        "torn": 0,
        "unseen": 0,
        "raised": 0,
        "incomplete": sum(not each.finished for each in collectives),
        "faults": 0,
        "recorder_ns": None,
        "stopped_reason": None,
        "ended": True,
    }

"""Logs of NCCL's Inspector plugin: JSON objects, one for each finished operation, in files of one process each.

The plugin knows communicators, not process groups, and says neither root nor element type. Unless told otherwise it leaves
out operations below 8,192 bytes, those without a kernel time, and what its ring of 1,024 operations lost between two dumps.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from commprof.imports.recording import Collective, Imported, ImportedRank
from commprof.schema import Op

TOOL: Final = "NCCL Inspector"

_OPERATIONS: Final[dict[str, Op]] = {
    "allreduce": Op.ALL_REDUCE,
    "reduce": Op.REDUCE,
    "broadcast": Op.BROADCAST,
    "allgather": Op.ALL_GATHER,
    "reducescatter": Op.REDUCE_SCATTER,
    "alltoall": Op.ALL_TO_ALL,
    "gather": Op.GATHER,
    "scatter": Op.SCATTER,
    "send": Op.SEND,
    "recv": Op.RECV,
}
# NCCL is called with the count of one rank's part for these, so the whole operation is that times the ranks.
_PARTS: Final = frozenset((Op.ALL_GATHER, Op.REDUCE_SCATTER, Op.ALL_TO_ALL, Op.GATHER, Op.SCATTER))


class _Process(NamedTuple):
    host: str
    pid: int


def objects_of(text: str) -> Iterator[Any]:
    """The JSON objects that follow one another in ``text``; a line that holds none is skipped."""
    decoder = json.JSONDecoder()
    place = 0
    while (place := text.find("{", place)) >= 0:
        try:
            value, place = decoder.raw_decode(text, place)
        except (ValueError, RecursionError):
            end = text.find("\n", place)
            if end < 0:
                return
            place = end + 1
            continue
        yield value


def is_entry(value: Any) -> bool:
    """Whether ``value`` is an operation as the Inspector writes it."""
    return (
        isinstance(value, dict)
        and isinstance(value.get("header"), dict)
        and isinstance(value.get("metadata"), dict)
        and any(isinstance(value.get(kind), dict) for kind in ("coll_perf", "p2p_perf"))
    )


def read_logs(logs: Sequence[tuple[Path, Sequence[Mapping[str, Any]]]]) -> Imported:
    """The logs of a job's processes as one recording; times are CLOCK_REALTIME, where nothing better is said of the dump."""
    entries: dict[_Process, list[Mapping[str, Any]]] = {}
    for path, found in logs:
        for entry in found:
            about = entry["metadata"]
            process = _Process(str(about.get("hostname") or path.stem), _whole(about.get("pid")))
            entries.setdefault(process, []).append(entry)
    ranks = _ranks_of(entries)
    imported = Imported(TOOL, [])
    counts = {"unknown": 0, "dumped": 0}
    for process, rank in sorted(ranks.items(), key=lambda item: item[1]):
        one = ImportedRank(rank, process.host, process.pid)
        for entry in entries[process]:
            collective = _collective(entry, counts)
            if collective is not None:
                one.collectives.append(collective)
        imported.ranks.append(one)
    sizes = [_whole(entry["header"].get("n_ranks")) for found in entries.values() for entry in found]
    imported.world_size = max([*sizes, len(ranks)], default=0) or None
    imported.notes = list(_notes(counts, _is_world(entries, ranks)))
    return imported


def _ranks_of(entries: Mapping[_Process, Iterable[Mapping[str, Any]]]) -> dict[_Process, int]:
    """The rank of each process within the largest communicator that it is in; numbers in order where two would share one."""
    found: dict[_Process, tuple[int, int]] = {}
    for process, its in entries.items():
        sizes = [(_whole(each["header"].get("n_ranks")), _whole(each["header"].get("rank"))) for each in its]
        found[process] = max(sizes, key=lambda size: size[0])
    ranks = {process: rank for process, (_, rank) in found.items()}
    if len(set(ranks.values())) == len(ranks):
        return ranks
    return {process: number for number, process in enumerate(sorted(ranks))}


def _is_world(entries: Mapping[_Process, Iterable[Mapping[str, Any]]], ranks: Mapping[_Process, int]) -> bool:
    """Whether one communicator holds every process, so that ranks within it are ranks of the job."""
    largest = {
        max(
            ((_whole(e["header"].get("n_ranks")), str(e["header"].get("id"))) for e in its),
            key=lambda each: each[0],
        )
        for its in entries.values()
    }
    return len(largest) == 1


def _collective(entry: Mapping[str, Any], counts: dict[str, int]) -> Collective | None:
    header, about = entry["header"], entry["metadata"]
    is_p2p = isinstance(entry.get("p2p_perf"), dict)
    said = entry["p2p_perf"] if is_p2p else entry["coll_perf"]
    kind = "p2p" if is_p2p else "coll"
    name = str(said.get(kind, ""))
    op = _OPERATIONS.get(name.lower())
    if op is None:
        counts["unknown"] += 1
        return None
    size = _whole(header.get("n_ranks"))
    rank = _whole(header.get("rank"))
    part = _whole(said.get(f"{kind}_msg_size_bytes"))
    payload = part * size if op in _PARTS else part
    micros = _whole(said.get(f"{kind}_exec_time_us"))
    begin, end = _times(said, kind)
    if begin == 0:
        counts["dumped"] += 1
        end = _whole(about.get("dump_timestamp_us")) * 1000
        begin = end - micros * 1000
    on_device = str(said.get(f"{kind}_timing_source", "kernel_gpu")) == "kernel_gpu" and micros > 0
    return Collective(
        op=op,
        method=name,
        pg=f"comm {header.get('id')}",
        pg_seq=max(0, _whole(said.get(f"{kind}_sn"))),
        group_size=size,
        group_ranks=tuple(range(size)) if 0 < size < 1_000_000 else (),
        group_desc=None if header.get("comm_name") in (None, "", "unknown") else str(header["comm_name"]),
        group_rank=rank,
        issue_ns=begin,
        device_begin_ns=begin if on_device else None,
        device_end_ns=begin + micros * 1000 if on_device else None,
        payload_bytes=payload,
        input_bytes=0 if op is Op.RECV else part if op in (Op.ALL_GATHER, Op.GATHER) else payload,
        output_bytes=0 if op is Op.SEND else part if op in (Op.REDUCE_SCATTER, Op.SCATTER) else payload,
        backend="nccl",
        device="cuda",
        peer=_whole(said.get("p2p_peer")) if is_p2p else -1,
        is_p2p=is_p2p,
    )


def _times(said: Mapping[str, Any], kind: str) -> tuple[int, int]:
    """Begin and end, where the log is verbose; microseconds as the plugin writes them, made nanoseconds."""
    trace = said.get("event_trace_ts")
    if not isinstance(trace, dict):
        return 0, 0
    return _whole(trace.get(f"{kind}_start_ts")) * 1000, _whole(trace.get(f"{kind}_stop_ts")) * 1000


def _notes(counts: Mapping[str, int], is_world: bool) -> Iterator[str]:
    yield (
        "the Inspector leaves out operations below NCCL_INSPECTOR_DUMP_MIN_SIZE_BYTES (8192 by default), those without a "
        "kernel time, and what its ring lost between two dumps; it says neither root nor element type"
    )
    yield "groups are NCCL's communicators; their ranks are numbered within each"
    if not is_world:
        yield "no communicator holds all processes, so the ranks are those within the largest one, or numbers in order"
    if counts["dumped"]:
        yield (
            f"{counts['dumped']} operations have no begin of their own (NCCL_INSPECTOR_DUMP_VERBOSE was off): their times "
            "are that of the dump, less what the operation took"
        )
    if counts["unknown"]:
        yield f"{counts['unknown']} operations have names that commprof does not know and were left out"


def _whole(value: Any) -> int:
    try:
        return int(value)
    except (TypeError, ValueError, OverflowError):
        return 0

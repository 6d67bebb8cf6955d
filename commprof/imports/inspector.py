"""Imports logs of NCCL's Inspector plugin: one JSON object per finished operation, and one file per process.

The plugin logs communicators instead of process groups, and neither root nor element type. By default it omits
operations below 8,192 bytes and operations without a kernel time. If more than 1,024 operations end between two dumps,
its ring buffer drops the oldest. From format version 4.1 on the plugin reports the number of dropped operations. NCCL
numbers the collectives of a communicator by operation: the first AllReduce and the first AllGather are both number 0.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from commprof.errors import LogError
from commprof.imports.inspector_log import InspectorLog, whole_number
from commprof.imports.recording import Collective, Imported, ImportedRank
from commprof.nccl.inspected import InspectedCollective, Member
from commprof.schema import Op

TOOL: Final = "NCCL Inspector"

_OPERATIONS: Final[dict[str, Op]] = {
    "allreduce": Op.ALL_REDUCE,
    "reduce": Op.REDUCE,
    "broadcast": Op.BROADCAST,
    "allgather": Op.ALL_GATHER,
    "reducescatter": Op.REDUCE_SCATTER,
    "alltoall": Op.ALL_TO_ALL,
    "all2all": Op.ALL_TO_ALL,  # the plugin's own spelling
    "gather": Op.GATHER,
    "scatter": Op.SCATTER,
    "send": Op.SEND,
    "recv": Op.RECV,
}
# NCCL receives the count of one rank's part for these operations. The size of the whole operation is the size of the
# part times the number of ranks.
_PARTS: Final = frozenset((Op.ALL_GATHER, Op.REDUCE_SCATTER, Op.ALL_TO_ALL, Op.GATHER, Op.SCATTER))
_MAJOR: Final = "v4."
_NEWEST: Final = "v4.4"
_MOST_RANKS: Final = 1_000_000
_UNKNOWN: Final = ("", "unknown")


class _Process(NamedTuple):
    host: str
    pid: int


class _Ranks(NamedTuple):
    """The ranks of a job.

    Attributes:
        of_process: The global rank of each process.
        of_comm: The global ranks of the members of each communicator; empty if the file of a member is missing.
        are_of_job: Whether one communicator contains all processes, so that its ranks are the ranks of the job.
    """

    of_process: Mapping[_Process, int]
    of_comm: Mapping[str, tuple[int, ...]]
    are_of_job: bool


def read_logs(logs: Sequence[tuple[Path, InspectorLog]]) -> Imported:
    """Return the logs of the processes of a job as one recording.

    Times are CLOCK_REALTIME. They are derived from the time of the dump if the log has no other times.

    Raises:
        LogError: The version of a log is not supported.
    """
    for path, log in logs:
        _check_version(path, log)
    entries: dict[_Process, list[Mapping[str, Any]]] = {}
    incomplete: Counter[str] = Counter()
    for path, log in logs:
        for entry in log.entries:
            missing = _missing_key(entry)
            if missing is not None:
                incomplete[missing] += 1
                continue
            entries.setdefault(_process_of(entry["metadata"], path), []).append(entry)
    ranks = _ranks_of(entries)
    imported = Imported(TOOL, [])
    unknown: Counter[str] = Counter()
    undated = 0
    for process, rank in sorted(ranks.of_process.items(), key=lambda item: item[1]):
        one = ImportedRank(rank, process.host, process.pid)
        for entry in entries[process]:
            collective = _collective(entry, ranks)
            if collective is None:
                unknown[_name_of(entry)] += 1
            else:
                one.collectives.append(collective)
        undated += _date(one.collectives, entries[process])
        one.dropped = sum(sum(count) for count in _dropped(logs, process).values())
        imported.ranks.append(one)
    sizes = [entry["header"]["n_ranks"] for of_rank in entries.values() for entry in of_rank]
    imported.world_size = max([*sizes, len(ranks.of_process)], default=0) or None
    imported.notes = [
        *_notes(logs, ranks, undated),
        *_left_out(logs, incomplete, unknown),
    ]
    return imported


def collectives_of(logs: Sequence[tuple[Path, InspectorLog]]) -> list[InspectedCollective]:
    """Return the collectives of the logs with NCCL's numbers. Entries that lack a required key are left out.

    Raises:
        LogError: The version of a log is not supported.
    """
    for path, log in logs:
        _check_version(path, log)
    collectives = []
    for path, entry in ((path, entry) for path, log in logs for entry in log.entries):
        if _kind(entry) != "coll" or _missing_key(entry) is not None:
            continue
        header, performance, op = (
            entry["header"],
            entry["coll_perf"],
            _OPERATIONS.get(_name_of(entry).lower()),
        )
        if op is not None:
            size, part = int(header["n_ranks"]), int(performance["coll_msg_size_bytes"])
            algorithm, protocol = (_text(performance.get(f"coll_{what}")) for what in ("algo", "proto"))
            member = Member(*_process_of(entry["metadata"], path), str(header["id"]), int(header["rank"]))
            payload = part * size if op in _PARTS else part
            channels = _kernels(performance)[1] or None
            number = int(performance["coll_sn"])
            collectives.append(
                InspectedCollective(member, size, op, number, part, payload, algorithm, protocol, channels)
            )
    return collectives


def dropped_collectives(logs: Sequence[tuple[Path, InspectorLog]]) -> dict[Member, int]:
    """Return the number of collectives that the plugin reports as dropped, for each rank of a communicator."""
    return {
        Member(
            origin.host or path.stem, whole_number(origin.pid), origin.comm, whole_number(origin.comm_rank)
        ): count[0]
        for path, log in logs
        for origin, count in log.dropped.items()
    }


def remarks(logs: Sequence[tuple[Path, InspectorLog]]) -> list[str]:
    """Return sentences on the operations that the plugin dropped, and on the parts of the files that are unreadable."""
    return [*_losses(logs), *_left_out(logs, {}, {})]


def _check_version(path: Path, log: InspectorLog) -> None:
    wrong = sorted(version for version in log.versions if version and not version.startswith(_MAJOR))
    if wrong:
        raise LogError(
            f"{path} is version {', '.join(wrong)} of the Inspector's format, and commprof reads v4.0 to {_NEWEST}; update "
            "commprof, or record with the plugin of an NCCL that writes one of these"
        )


def _missing_key(entry: Mapping[str, Any]) -> str | None:
    """Return the first required key that is missing or invalid in ``entry``; None if there is no such key."""
    header, kind = entry["header"], _kind(entry)
    performance = entry[f"{kind}_perf"]
    if not isinstance(performance, dict):
        return f"{kind}_perf"
    if not header.get("id"):
        return "id"
    for where, names in (
        (header, ("rank", "n_ranks")),
        (performance, (f"{kind}_sn", f"{kind}_msg_size_bytes", *(["p2p_peer"] if kind == "p2p" else []))),
    ):
        for name in names:
            value = where.get(name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                return name
    if header["rank"] >= header["n_ranks"]:
        return "rank"
    return None if isinstance(performance.get(kind), str) else kind


def _kind(entry: Mapping[str, Any]) -> str:
    return "p2p" if "p2p_perf" in entry else "coll"


def _name_of(entry: Mapping[str, Any]) -> str:
    kind = _kind(entry)
    return str(entry[f"{kind}_perf"][kind])


def _process_of(metadata: Mapping[str, Any], path: Path) -> _Process:
    return _Process(str(metadata.get("hostname") or path.stem), whole_number(metadata.get("pid")))


def _ranks_of(entries: Mapping[_Process, Sequence[Mapping[str, Any]]]) -> _Ranks:
    """Determine the ranks of the processes and of the members of each communicator.

    The rank of a process is its rank in the largest communicator that it belongs to. If two processes would have the
    same rank, all processes are numbered in the order of host and pid instead.

    Raises:
        LogError: A process has several ranks in one communicator.
    """
    largest: dict[_Process, Mapping[str, Any]] = {
        process: max((entry["header"] for entry in its), key=lambda header: int(header["n_ranks"]))
        for process, its in entries.items()
    }
    ranks = {process: int(header["rank"]) for process, header in largest.items()}
    are_of_job = len({str(header["id"]) for header in largest.values()}) == 1
    if len(set(ranks.values())) < len(ranks):
        ranks = {process: number for number, process in enumerate(sorted(ranks))}
        are_of_job = False
    sizes: dict[str, int] = {}
    members: dict[str, dict[int, int]] = defaultdict(dict)
    for process, its in entries.items():
        own: dict[str, int] = {}
        for header in (entry["header"] for entry in its):
            comm, rank = str(header["id"]), int(header["rank"])
            if own.setdefault(comm, rank) != rank:
                raise LogError(
                    f"process {process.pid} of host {process.host or '?'} is rank {own[comm]} and rank {rank} of "
                    f"communicator {comm}; commprof reads jobs with one rank per process"
                )
            sizes[comm] = int(header["n_ranks"])
            members[comm][rank] = ranks[process]
    of_comm = {
        comm: tuple(its[rank] for rank in range(sizes[comm])) if len(its) == sizes[comm] else ()
        for comm, its in members.items()
    }
    if are_of_job:
        comm = str(next(iter(largest.values()))["id"])
        of_comm[comm] = tuple(range(sizes[comm])) if sizes[comm] < _MOST_RANKS else ()
    return _Ranks(ranks, of_comm, are_of_job)


def _collective(entry: Mapping[str, Any], ranks: _Ranks) -> Collective | None:
    header, kind = entry["header"], _kind(entry)
    performance, name = entry[f"{kind}_perf"], _name_of(entry)
    op = _OPERATIONS.get(name.lower())
    if op is None:
        return None
    comm, size, rank = str(header["id"]), int(header["n_ranks"]), int(header["rank"])
    members = ranks.of_comm[comm]
    part = int(performance[f"{kind}_msg_size_bytes"])
    payload = part * size if op in _PARTS else part
    is_p2p = kind == "p2p"
    begin, channels = _kernels(performance)
    algorithm, protocol = (_text(performance.get(f"coll_{what}")) for what in ("algo", "proto"))
    return Collective(
        op=op,
        backend_method=name,
        pg=f"comm {comm}",
        pg_seq=None,
        identity=None if is_p2p else (op, int(performance["coll_sn"])),
        group_size=size,
        group_ranks=members,
        group_desc=_text(header.get("comm_name")),
        group_rank=rank,
        issue_ns=_event(performance, f"{kind}_start_ts") * 1000,
        device_begin_ns=begin * 1000 or None,
        payload_bytes=payload,
        input_bytes=0 if op is Op.RECV else part if op in (Op.ALL_GATHER, Op.GATHER) else payload,
        output_bytes=0 if op is Op.SEND else part if op in (Op.REDUCE_SCATTER, Op.SCATTER) else payload,
        backend="nccl",
        device="cuda",
        peer=members[performance["p2p_peer"]] if is_p2p and performance["p2p_peer"] < len(members) else -1,
        is_p2p=is_p2p,
        algorithm=algorithm,
        protocol=protocol,
        channels=channels or None,
    )


def _text(value: Any) -> str | None:
    """Return a name as text; None if the plugin did not know the name."""
    return None if value is None or str(value) in _UNKNOWN else str(value)


def _event(performance: Mapping[str, Any], name: str) -> int:
    trace = performance.get("event_trace_ts")
    return whole_number(trace.get(name)) if isinstance(trace, dict) else 0


def _kernels(performance: Mapping[str, Any]) -> tuple[int, int]:
    """Return the begin of the first kernel of a verbose entry in microseconds, and the number of channels.

    A value is 0 if the entry does not contain it.
    """
    trace = performance.get("event_trace_ts")
    channels = trace.get("kernel_events") if isinstance(trace, dict) else None
    if not isinstance(channels, list):
        return 0, 0
    begins = [whole_number(each.get("kernel_start_ts")) for each in channels if isinstance(each, dict)]
    return min((begin for begin in begins if begin), default=0), len(channels)


def _date(collectives: Sequence[Collective], entries: Sequence[Mapping[str, Any]]) -> int:
    """Set the times of every operation, and return the number of operations whose begin is not in the log.

    The begin of such an operation is the time of the dump minus the duration of the operation. It is never later than
    the begin of the next operation in the log of the same kind (collective or message) and communicator.
    """
    known = [entry for entry in entries if _name_of(entry).lower() in _OPERATIONS]
    undated = 0
    next_begin: dict[tuple[str, bool], int] = {}
    for collective, entry in reversed(list(zip(collectives, known, strict=True))):
        kind = _kind(entry)
        performance = entry[f"{kind}_perf"]
        took = whole_number(performance.get(f"{kind}_exec_time_us")) * 1000
        ring = collective.pg, collective.is_p2p
        if not collective.issue_ns:
            undated += 1
            begin = whole_number(entry["metadata"].get("dump_timestamp_us")) * 1000 - took
            collective.issue_ns = min(begin, next_begin.get(ring, begin))
        next_begin[ring] = collective.issue_ns
        if str(performance.get(f"{kind}_timing_source", "kernel_gpu")) == "kernel_gpu" and took:
            begin = max(collective.device_begin_ns or 0, collective.issue_ns)
            collective.device_begin_ns, collective.device_end_ns = begin, begin + took
        else:
            collective.device_begin_ns = None
    return undated


def _dropped(logs: Sequence[tuple[Path, InspectorLog]], process: _Process | None) -> dict[Any, Any]:
    """Return the numbers of dropped operations by origin, for one process, or for all processes if it is None."""
    return {
        origin: count
        for path, log in logs
        for origin, count in log.dropped.items()
        if process is None or (origin.host or path.stem, whole_number(origin.pid)) == process
    }


def _losses(logs: Sequence[tuple[Path, InspectorLog]]) -> Iterator[str]:
    dropped = _dropped(logs, None).values()
    collectives, messages = (sum(each[kind] for each in dropped) for kind in (0, 1))
    if collectives or messages:
        yield (
            f"{collectives + messages:,} events dropped by the inspector ({collectives:,} collectives, {messages:,} "
            "messages), so they are not missing from the job: its ring was full; raise NCCL_INSPECTOR_DUMP_COLL_RING_SIZE "
            "and NCCL_INSPECTOR_DUMP_P2P_RING_SIZE, or lower NCCL_INSPECTOR_DUMP_THREAD_INTERVAL_MICROSECONDS"
        )
    uncounted = any("v4.0" in log.versions for _, log in logs)
    gaps = _gaps(logs) if uncounted else 0
    if gaps:
        yield (
            f"v4.0 of the format does not count what it drops: {gaps:,} sequence numbers between those in the logs are "
            "missing, dropped or left out for their size"
        )
    newer = sorted({version for _, log in logs for version in log.versions if _is_newer(version)})
    if newer:
        yield (
            f"version {', '.join(newer)} of the format is newer than those that commprof reads (v4.0 to {_NEWEST}): "
            "its new fields are ignored"
        )


def _notes(logs: Sequence[tuple[Path, InspectorLog]], ranks: _Ranks, undated: int) -> Iterator[str]:
    yield from _losses(logs)
    if any(messages for _, messages in _dropped(logs, None).values()):
        yield "messages are paired by their order, so after a dropped message the pairs may be wrong"
    yield (
        "the Inspector leaves out operations below NCCL_INSPECTOR_DUMP_MIN_SIZE_BYTES (8192 by default) and those without a "
        "kernel time; it logs neither root nor element type"
    )
    yield "groups are NCCL's communicators; group_rank is the rank in the communicator"
    if not ranks.are_of_job:
        yield (
            "no communicator contains all processes, so the rank of a process is its rank in its largest "
            "communicator, or its number in the order of host and pid"
        )
    if undated:
        yield (
            f"{undated} operations have no begin time (NCCL_INSPECTOR_DUMP_VERBOSE was off): their begin "
            "is the time of the dump minus their duration"
        )


def _left_out(
    logs: Sequence[tuple[Path, InspectorLog]], incomplete: Mapping[str, int], unknown: Mapping[str, int]
) -> Iterator[str]:
    """Yield sentences on the parts of the files that were left out."""
    for name, count in sorted(incomplete.items()):
        yield f"{count} operations lack {name}, or have no number there, and were left out"
    if unknown:
        names = ", ".join(f"{count} {name}" for name, count in sorted(unknown.items()))
        yield (
            f"{sum(unknown.values())} operations have names that commprof does not know and were left out: {names} (the "
            "plugin writes Invalid for operations that it does not recognize)"
        )
    for what, attribute in (
        (
            "operations that a dump announces are not in the files: they are cut, or mixed with other output",
            "absent",
        ),
        ("operations lack the dump record that names their communicator, and were left out", "orphans"),
        ("records of the Inspector are incomplete and were left out", "damaged"),
    ):
        count = sum(getattr(log, attribute) for _, log in logs)
        if count:
            yield f"{count:,} {what}"


def _gaps(logs: Sequence[tuple[Path, InspectorLog]]) -> int:
    """Return the number of missing sequence numbers.

    A number is missing if it is between the first and the last number of its operation, communicator and process.
    """
    numbers: dict[tuple[Any, ...], set[int]] = defaultdict(set)
    for _, log in logs:
        for entry in log.entries:
            if _kind(entry) == "coll" and _missing_key(entry) is None:
                about = entry["metadata"]
                key = (about.get("hostname"), about.get("pid"), entry["header"]["id"], _name_of(entry))
                numbers[key].add(entry["coll_perf"]["coll_sn"])
    return sum(max(seen) - min(seen) + 1 - len(seen) for seen in numbers.values())


def _is_newer(version: str) -> bool:
    minor = version.removeprefix(_MAJOR)
    return version.startswith(_MAJOR) and (
        not minor.isdigit() or int(minor) > int(_NEWEST.removeprefix(_MAJOR))
    )

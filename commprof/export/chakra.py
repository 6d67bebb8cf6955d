"""A run as MLCommons Chakra execution traces, one per rank, which ASTRA-sim and other simulators replay.

A rank is a chain of what its program did: compute for as long as it issued and awaited nothing, then an operation. Compute
after a wait depends on the operation that was waited for; an operation depends on the compute before its issue. Source of
the format: schema/protobuf/et_def.proto of mlcommons/chakra (version 0.0.4), and the attributes that its feeder reads.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from commprof.analysis.api import AnyRun, Run
from commprof.errors import UsageError
from commprof.export.chakra_messages import GlobalMetadata, Node, delimited
from commprof.export.files import ExportedFile, Progress, Sink, staged
from commprof.export.one_clock import Operations, operations
from commprof.export.provenance import PROVENANCE, provenance
from commprof.export.tables import opened_runs
from commprof.schema import Op, parse_ranks

GROUPS: Final = "comm_groups.json"
VERSION: Final = "0.0.4"

_COMPUTE, _SEND, _RECV, _COLLECTIVE = 4, 5, 6, 7  # NodeType
_COLLECTIVES: Final[dict[str, int]] = {  # CollectiveCommType
    Op.ALL_REDUCE: 0,
    Op.REDUCE: 1,
    Op.ALL_GATHER: 2,
    Op.GATHER: 3,
    Op.SCATTER: 4,
    Op.BROADCAST: 5,
    Op.ALL_TO_ALL: 6,
    Op.REDUCE_SCATTER: 7,
    Op.BARRIER: 9,
}
Group = tuple[str, str]


def export_chakra(
    run: AnyRun, out: Path | str, force: bool = False, progress: Progress | None = None
) -> list[ExportedFile]:
    """Write ``trace.<rank>.et`` for each rank, ``comm_groups.json`` and ``provenance.json`` into ``out``.

    ``comm_groups.json`` names the global ranks of each group by the number that the traces use, as ASTRA-sim's
    ``--comm-group-configuration`` takes it. The size of an operation is what a rank hands in: the buffer, and of an
    all_gather its part.

    Raises:
        UsageError: the job was restarted, or no rank recorded anything; ``out`` is in use.
        TraceError: the run cannot be read, or ``out`` cannot be written to.
    """
    (opened,) = opened_runs(run)
    found = operations(opened)
    by_rank = _by_rank(opened, found)
    names = [f"trace.{rank}.et" for rank in by_rank]
    with staged(Path(out), [*names, GROUPS, PROVENANCE], force, progress) as staging:
        groups = _Groups(found.rows)
        for rank, rows in by_rank.items():
            staging.write(
                f"trace.{rank}.et",
                partial(_write, rank, rows, groups),
                len(rows),
            )
        staging.write_text(GROUPS, json.dumps(groups.members(), indent=1) + "\n")
        staging.write_text(PROVENANCE, json.dumps(provenance([opened], staging.files), indent=2) + "\n")
    return staging.files


def _by_rank(run: Run, found: Operations) -> dict[int, list[dict[str, Any]]]:
    by_rank: dict[int, list[dict[str, Any]]] = {}
    processes: dict[int, tuple[int, int]] = {}
    for row in found.rows:
        process = row["attempt"], row["pid"]
        if processes.setdefault(row["rank"], process) != process:
            raise UsageError(
                f"{run.path} has several processes of rank {row['rank']} (the job was restarted); a Chakra trace is that of "
                "one process per rank. Export it as csv or perfetto"
            )
        by_rank.setdefault(row["rank"], []).append(row)
    if not by_rank:
        raise UsageError(f"{run.path} holds no collectives: there is nothing to replay")
    return by_rank


class _Groups:
    """A number for each process group of the job; equal on all its members."""

    def __init__(self, rows: Sequence[Mapping[str, Any]]) -> None:
        every = sorted({(str(row["pg"]), str(row["group_ranks"])) for row in rows})
        self._numbers: dict[Group, int] = {group: number for number, group in enumerate(every)}

    def number(self, row: Mapping[str, Any]) -> str:
        return str(self._numbers[str(row["pg"]), str(row["group_ranks"])])

    def members(self) -> dict[str, list[int]]:
        return {str(number): list(parse_ranks(ranks)) for (_, ranks), number in self._numbers.items()}


def _write(rank: int, rows: Sequence[Mapping[str, Any]], groups: _Groups, sink: Sink) -> None:
    metadata = GlobalMetadata(version=VERSION)
    _attribute(metadata, "rank", int64_val=rank)
    sink.write(delimited(metadata))
    for node in nodes_of(rows, groups.number):
        sink.write(delimited(node))


def nodes_of(
    rows: Sequence[Mapping[str, Any]], group_number: Callable[[Mapping[str, Any]], str]
) -> Iterator[Any]:
    """The nodes of one rank: its records in order of issue, and the compute between the moments of its host.

    Two things end a stretch of compute: an issue, and the beginning of a wait; the next one begins when the wait ends.
    Durations are whole microseconds, and what the rounding leaves is carried on, so that the chain is as long as the run.
    """
    moments = sorted(_moments(rows))
    base = host_ns = moments[0].time_ns if moments else 0
    compute_id, carried = 0, 0
    last: list[int] = []  # what the next node of the chain depends on
    for moment in moments:
        duration, carried = divmod(max(0, moment.time_ns - host_ns) + carried, 1000)
        yield _compute(compute_id, (host_ns - base) // 1000, duration, last)
        last, host_ns = [compute_id], max(host_ns, moment.resumes_ns)
        compute_id += 2
        operation = 2 * moment.place + 1
        if moment.kind == _ISSUED:
            yield _operation(operation, rows[moment.place], base, group_number, last)
        else:
            last = [*last, operation]


_ISSUED, _AWAITED = 0, 1


class _Moment(NamedTuple):
    """When the host issued or awaited the operation in row ``place``, and when it went on."""

    time_ns: int
    kind: int
    place: int
    resumes_ns: int


def _moments(rows: Sequence[Mapping[str, Any]]) -> Iterator[_Moment]:
    for place, row in enumerate(rows):
        issue = row["issue_ns"]
        yield _Moment(issue, _ISSUED, place, issue)
        begin = row["wait_begin_ns"] if row["is_async"] else issue
        end = row["wait_end_ns"] if row["is_async"] or row["wait_end_ns"] is not None else row["return_ns"]
        if begin is not None and end is not None:
            yield _Moment(max(begin, issue), _AWAITED, place, max(end, issue))


def _compute(number: int, begin: int, duration: int, after: Sequence[int]) -> Any:
    node = Node(
        id=number,
        name="compute",
        type=_COMPUTE,
        data_deps=after,
        start_time_micros=begin,
        duration_micros=duration,
    )
    _attribute(node, "is_cpu_op", bool_val=False)
    _attribute(node, "num_ops", int64_val=0)
    _attribute(node, "tensor_size", uint64_val=0)
    return node


def _operation(
    number: int,
    row: Mapping[str, Any],
    base: int,
    group_number: Callable[[Mapping[str, Any]], str],
    after: Sequence[int],
) -> Any:
    op = row["op"]
    kind = {Op.SEND: _SEND, Op.RECV: _RECV}.get(op, _COLLECTIVE)
    ends = [row[name] for name in ("return_ns", "wait_end_ns", "device_end_ns") if row[name] is not None]
    node = Node(
        id=number,
        name=f"{op} {row['pg']}/{row['pg_seq']}",
        type=kind,
        data_deps=after,
        start_time_micros=(row["issue_ns"] - base) // 1000,
        duration_micros=max(0, max(ends, default=row["issue_ns"]) - row["issue_ns"]) // 1000,
    )
    _attribute(node, "is_cpu_op", bool_val=False)
    _attribute(node, "comm_size", int64_val=comm_size(row))
    _attribute(node, "pg_name", string_val=group_number(row))
    _attribute(node, "group_desc", string_val=row["group_desc"] or "")
    if kind == _COLLECTIVE:
        _attribute(node, "comm_type", int64_val=_COLLECTIVES[op])
        if row["peer"] >= 0:
            _attribute(node, "root", int32_val=row["peer"])
    else:
        source, destination = (row["rank"], row["peer"]) if kind == _SEND else (row["peer"], row["rank"])
        _attribute(node, "comm_src", int32_val=source)
        _attribute(node, "comm_dst", int32_val=destination)
        _attribute(node, "comm_tag", int32_val=int(group_number(row)))
    for name in ("step", "bucket"):
        if row[name] is not None:
            _attribute(node, name, int64_val=row[name])
    for name in ("purpose", "phase", "module", "intended_op", "dtype"):
        if row[name] is not None:
            _attribute(node, name, string_val=row[name])
    return node


def comm_size(row: Mapping[str, Any]) -> int:
    """Bytes that a rank hands in: its part of an all_gather or gather, the whole buffer of everything else."""
    if row["op"] in (Op.ALL_GATHER, Op.GATHER) and row["group_size"]:
        return int(row["payload_bytes"]) // int(row["group_size"])
    return int(row["payload_bytes"])


def _attribute(message: Any, name: str, **value: Any) -> None:
    message.attr.add(name=name, **value)

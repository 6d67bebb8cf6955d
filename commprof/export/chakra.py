"""Exports a run as MLCommons Chakra execution traces, one per rank, which ASTRA-sim and other simulators replay.

The trace of a rank is a chain of operations with compute nodes between them. A compute node is time in which the
program neither issues a collective nor waits for one. Compute after a wait depends on the operation that the program
waited for. An operation depends on the compute before its issue. Source of the format:
schema/protobuf/et_def.proto of mlcommons/chakra (version 0.0.4), and the attributes that the feeder of Chakra reads.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from commprof.align.ranks.collectives import has_raised
from commprof.analysis.api import AnyRun, Run
from commprof.errors import TraceError, UsageError
from commprof.export.chakra_messages import GlobalMetadata, Node, delimited
from commprof.export.export_tables import opened_runs
from commprof.export.files import ExportedFile, Progress, Sink, Staging, staged
from commprof.export.one_clock import OneClock, RankRows
from commprof.export.provenance import PROVENANCE, provenance_text
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
_NEEDED: Final = (
    "rank",
    "op",
    "pg",
    "pg_seq",
    "group_desc",
    "group_ranks",
    "group_size",
    "payload_bytes",
    "peer",
    "is_async",
    "issue_ns",
    "return_ns",
    "wait_begin_ns",
    "wait_end_ns",
    "device_end_ns",
    "step",
    "bucket",
    "purpose",
    "phase",
    "module",
    "intended_op",
    "dtype",
    "padding_bytes",
    "input_splits",
    "output_splits",
)
_ROWS_AT_A_TIME: Final = 10_000
_PARTS_HELD: Final = 4
_NODES_AT_A_TIME: Final = 1000
_TOLD_EVERY: Final = 20_000
Group = tuple[str, str]


def export_chakra(
    run: AnyRun, out: Path | str, force: bool = False, progress: Progress | None = None
) -> list[ExportedFile]:
    """Write ``trace.<rank>.et`` for each rank, ``comm_groups.json`` and ``provenance.json`` into ``out``.

    ``comm_groups.json`` maps the number that the traces use for a group to the global ranks of the group. ASTRA-sim
    accepts this file with ``--comm-group-configuration``. The size of an operation is the input size of one rank in
    bytes: the whole buffer, or the shard for an all_gather or a gather.

    Raises:
        UsageError: The job was restarted, no rank recorded anything, or ``out`` is in use.
        TraceError: The run cannot be read, or ``out`` cannot be written to.
    """
    (opened,) = opened_runs(run)
    timed = OneClock(opened, _NEEDED)
    ranks = _one_process_each(opened, timed)
    groups = _Groups(timed.groups)
    names = [f"trace.{rank}.et" for rank in ranks]
    # An earlier export may have written traces of more ranks. A simulator would read them as ranks of this run.
    stale = [file.name for file in Path(out).glob("trace.*.et") if file.stem.partition(".")[2].isdecimal()]
    with staged(Path(out), [*names, *stale, GROUPS, PROVENANCE], force, progress) as staging:
        for rank in timed.ranks():
            name = f"trace.{rank.rank}.et"
            staging.write(name, partial(_write, rank, groups, partial(_tell, staging, name)), len(rank.table))
        staging.write_text(GROUPS, json.dumps(groups.members(), indent=1) + "\n")
        staging.write_text(PROVENANCE, provenance_text([opened], staging.files))
    return staging.files


def _tell(staging: Staging, name: str, records: int) -> None:
    staging.tell(f"{name}: {records:,} records")


def _one_process_each(run: Run, timed: OneClock) -> list[int]:
    """Return the ranks of the run, and check that each rank has only one process.

    Raises:
        UsageError: The job was restarted, or the run has no collectives.
    """
    ranks = sorted(rank for rank, _, _ in timed.processes)
    twice = [rank for rank, after in pairwise(ranks) if rank == after]
    if twice:
        raise UsageError(
            f"{run.path} has several processes of rank {twice[0]} (the job was restarted); a Chakra trace has only "
            "one process per rank. Export the run as csv or perfetto"
        )
    if not ranks:
        if len(run.table("aggregates")):
            raise UsageError(
                f"{run.path} holds sums per step, no single collectives (--aggregate), so there is nothing to replay"
            )
        raise UsageError(f"{run.path} holds no collectives: there is nothing to replay")
    return ranks


class _Groups:
    """Numbers the process groups of the job. All ranks of a group use the same number."""

    def __init__(self, groups: Collection[Group]) -> None:
        self._numbers: dict[Group, int] = {group: number for number, group in enumerate(sorted(groups))}

    def number(self, row: Mapping[str, Any]) -> str:
        return str(self._numbers[str(row["pg"]), str(row["group_ranks"])])

    def members(self) -> dict[str, list[int]]:
        return {str(number): list(parse_ranks(ranks)) for (_, ranks), number in self._numbers.items()}


def _write(rank: RankRows, groups: _Groups, tell: Callable[[int], None], sink: Sink) -> None:
    metadata = GlobalMetadata(version=VERSION)
    _attribute(metadata, "rank", int64_val=rank.rank)
    sink.write(delimited(metadata))
    # Calls that raised an exception are left out, because no other rank would answer them in a replay.
    issued = rank.table.filter(pc.invert(has_raised(rank.table)))
    nodes = nodes_of(issued, groups.number, tell)
    while bundle := list(islice(nodes, _NODES_AT_A_TIME)):
        sink.write(b"".join(map(delimited, bundle)))


def nodes_of(
    records: pa.Table, group_number: Callable[[Mapping[str, Any]], str], tell: Callable[[int], None]
) -> Iterator[Any]:
    """Yield the nodes of one rank: its records in order of issue, and the compute between the events of the host.

    An issue or the begin of a wait ends an interval of compute. The next interval begins at the issue or at the end
    of the wait. Durations are integral microseconds. Rounding errors are carried over, so that the chain is as long
    as the run.

    Args:
        records: The records of the rank.
        group_number: A function that returns the number of the group of a record.
        tell: A function that is called with the number of issued operations so far.
    """
    rows = _Rows(records)
    base = host_ns = None
    compute_id, carried, issued = 0, 0, 0
    last: list[int] = []  # the dependencies of the next node of the chain
    for time_ns, kind, place, resumes_ns in _moments(records):
        if base is None or host_ns is None:
            base = host_ns = time_ns
        duration, carried = divmod(max(0, time_ns - host_ns) + carried, 1000)
        yield _compute(compute_id, (host_ns - base) // 1000, duration, last)
        last, host_ns = [compute_id], max(host_ns, resumes_ns)
        compute_id += 2
        operation = 2 * place + 1
        if kind == _ISSUED:
            yield _operation(operation, rows[place], base, group_number, last)
            issued += 1
            if not issued % _TOLD_EVERY:
                tell(issued)
        else:
            last = [*last, operation]


_ISSUED, _AWAITED = 0, 1


class _Rows:
    """The records of a rank as Python values.

    Only a few batches are converted and cached at a time, because the records are accessed almost in order.
    """

    def __init__(self, records: pa.Table) -> None:
        self._records = records
        self._batches: dict[int, list[dict[str, Any]]] = {}

    def __getitem__(self, place: int) -> dict[str, Any]:
        part, row = divmod(place, _ROWS_AT_A_TIME)
        if part not in self._batches:
            if len(self._batches) >= _PARTS_HELD:
                del self._batches[next(iter(self._batches))]
            self._batches[part] = self._records.slice(part * _ROWS_AT_A_TIME, _ROWS_AT_A_TIME).to_pylist()
        return self._batches[part][row]


def _moments(records: pa.Table) -> Iterator[tuple[int, int, int, int]]:
    """Yield the issues and waits of the host in order of time.

    Yields:
        The begin in ns, the kind (issue or wait), the row of the operation, and the end in ns.
    """
    count = len(records)
    issue = records["issue_ns"].to_numpy()
    wait_end = records["wait_end_ns"]
    begin = pc.if_else(records["is_async"], records["wait_begin_ns"], records["issue_ns"])
    end = pc.if_else(pc.or_(records["is_async"], pc.is_valid(wait_end)), wait_end, records["return_ns"])
    known = pc.and_(pc.is_valid(begin), pc.is_valid(end)).to_numpy(zero_copy_only=False)
    begin, end = (pc.fill_null(each, 0).to_numpy() for each in (begin, end))
    waits = np.flatnonzero(known)
    times = np.concatenate([issue, np.maximum(begin[waits], issue[waits])])
    kinds = np.repeat(np.array([_ISSUED, _AWAITED], np.int8), [count, len(waits)])
    places = np.concatenate([np.arange(count), waits])
    resumes = np.concatenate([issue, np.maximum(end[waits], issue[waits])])
    order = np.lexsort((resumes, places, kinds, times))
    for first in range(0, len(order), _ROWS_AT_A_TIME):
        some = order[first : first + _ROWS_AT_A_TIME]
        yield from zip(
            times[some].tolist(),
            kinds[some].tolist(),
            places[some].tolist(),
            resumes[some].tolist(),
            strict=True,
        )


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
        if op not in _COLLECTIVES:
            raise TraceError(
                f"{op!r} is not an operation of this version of commprof; install the version that recorded it"
            )
        _attribute(node, "comm_type", int64_val=_COLLECTIVES[op])
        if row["peer"] >= 0:
            _attribute(node, "root", int32_val=row["peer"])
    else:
        source, destination = (row["rank"], row["peer"]) if kind == _SEND else (row["peer"], row["rank"])
        _attribute(node, "comm_src", int32_val=source)
        _attribute(node, "comm_dst", int32_val=destination)
        _attribute(node, "comm_tag", int32_val=int(group_number(row)))
    for name in ("step", "bucket", "padding_bytes"):
        if row[name] is not None:
            _attribute(node, name, int64_val=row[name])
    for name in ("purpose", "phase", "module", "intended_op", "dtype", "input_splits", "output_splits"):
        if row[name] is not None:
            _attribute(node, name, string_val=row[name])
    return node


def comm_size(row: Mapping[str, Any]) -> int:
    """Return the input bytes of one rank: its shard for an all_gather or gather, the whole buffer otherwise."""
    if row["op"] in (Op.ALL_GATHER, Op.GATHER) and row["group_size"]:
        return int(row["payload_bytes"]) // int(row["group_size"])
    return int(row["payload_bytes"])


def _attribute(message: Any, name: str, **value: Any) -> None:
    message.attr.add(name=name, **value)

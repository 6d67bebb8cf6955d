"""Exports a run as Chrome trace JSON, which Perfetto and chrome://tracing open.

Ranks are processes of the trace, and process groups are threads. An arrow connects the slices of one collective across
its ranks, and a send with its recv. Slices of one group that overlap are on separate threads, because a thread of a
trace can show only nested slices.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np

from commprof.align.ranks.collectives import in_order
from commprof.analysis.api import AnyRun, Run
from commprof.export.export_tables import opened_runs
from commprof.export.files import ExportedFile, Progress, Sink, staged
from commprof.export.one_clock import NO_PARTNER, Numbers, OneClock, RankRows, end_of
from commprof.export.provenance import PROVENANCE, provenance_text, strict_json
from commprof.schema import Op, parse_splits, wire_bytes
from commprof.version import __version__

TRACE: Final = "trace.json"
_STEPS_THREAD: Final = 0
_SHOWN: Final = (
    "seq",
    "step",
    "micro_step",
    "phase",
    "purpose",
    "intended_op",
    "bucket",
    "bucket_bytes",
    "owner",
    "parameters",
    "module",
    "payload_bytes",
    "padding_bytes",
    "input_bytes",
    "output_bytes",
    "input_splits",
    "output_splits",
    "dtype",
    "sizes",
    "reduce_op",
    "peer",
    "pg",
    "pg_seq",
    "group_ranks",
    "is_async",
    "api",
    "backend",
    "device",
    "call_site",
    "thread",
    "layer",
    "status",
    "exposed_ns",
)
_NEEDED: Final = (
    *_SHOWN,
    "rank",
    "attempt",
    "pid",
    "op",
    "group_desc",
    "group_size",
    "group_rank",
    "issue_ns",
    "return_ns",
    "wait_end_ns",
    "device_begin_ns",
    "device_end_ns",
)
_EVENTS_AT_A_TIME: Final = 500
_TOLD_EVERY: Final = 20_000
Lane = tuple[Any, ...]


def export_perfetto(
    run: AnyRun, out: Path | str, force: bool = False, progress: Progress | None = None
) -> list[ExportedFile]:
    """Write ``trace.json`` and ``provenance.json`` into ``out``.

    Times are microseconds since the first step or record, on the clock of rank 0's host.

    Raises:
        UsageError: ``out`` is not a directory, or is not empty and ``force`` is off.
        TraceError: The run cannot be read, or ``out`` cannot be written to.
    """
    (opened,) = opened_runs(run)
    with staged(Path(out), [TRACE, PROVENANCE], force, progress) as staging:
        timed = OneClock(opened, _NEEDED)
        staging.write(TRACE, lambda sink: _write(sink, timed, staging.tell))
        staging.write_text(PROVENANCE, provenance_text([opened], staging.files))
    return staging.files


def _write(sink: Sink, timed: OneClock, tell: Progress) -> None:
    """Write the trace in batches with one event per line, so that only a few events are in memory as text."""
    sink.write(b'{"displayTimeUnit": "ns",\n"otherData": ')
    about = {
        "run": timed.run.path.name,
        "exported_by": f"commprof {__version__}",
        "unknown_clocks": timed.unknown_clocks,
        "notes": list(timed.run.health.notes),
    }
    sink.write(json.dumps(about).encode("utf-8"))
    sink.write(b',\n"traceEvents": [')
    first = True
    for events in _bundles(trace_events(timed, tell)):
        text = ",\n".join(json.dumps(event, separators=(",", ":")) for event in events)
        sink.write(("\n" if first else ",\n").encode("utf-8") + text.encode("utf-8"))
        first = False
    sink.write(b"\n]}\n")


def _bundles(events: Iterator[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Yield the events in batches, because hashing and writing single events takes longer."""
    while bundle := list(islice(events, _EVENTS_AT_A_TIME)):
        yield bundle


def trace_events(timed: OneClock, tell: Progress) -> Iterator[dict[str, Any]]:
    """Yield the events of the trace.

    The events are the names of processes and threads, the steps, a slice for each operation and for each time on the
    device, and the arrows.

    Args:
        timed: The records of the run on one clock.
        tell: A function that is called with the progress as text.
    """
    steps = timed.run.table("steps").to_pylist()
    shift_of = {
        key: timed.shift_at(key, step["begin_ns"])
        for step in steps
        for key in [(step["rank"], step["attempt"], step["pid"])]
    }
    begins = [step["begin_ns"] + shift_of[step["rank"], step["attempt"], step["pid"]] for step in steps]
    base = min([*begins, *([] if timed.begin_ns is None else [timed.begin_ns])], default=0)
    processes = _processes(timed.processes | set(shift_of))
    yield from _names(timed.run, processes)
    yield from _steps(steps, processes, shift_of, base)
    lanes = _Lanes(processes)
    placed: list[_Placed] = []
    written = 0
    for rank in timed.ranks():
        begin_ns = rank.table["issue_ns"].to_numpy() + rank.shift_ns - base
        where = _Placed(rank, begin_ns, *(np.zeros(len(begin_ns), np.int32) for _ in range(2)))
        placed.append(where)
        shifts = rank.shift_ns.tolist()
        for place, row in enumerate(rank.rows()):
            process, shift = processes[row["rank"], row["attempt"], row["pid"]], shifts[place] - base
            begin, end = row["issue_ns"] + shift, end_of(row) + shift
            thread, title = lanes.take(process, row, begin, end, on_device=False)
            yield from title
            yield _slice(row, process, thread, begin, end, row["op"])
            where.process[place], where.thread[place] = process, thread
            if row["device_begin_ns"] is not None and row["device_end_ns"] is not None:
                begin, end = row["device_begin_ns"] + shift, row["device_end_ns"] + shift
                thread, title = lanes.take(process, row, begin, end, on_device=True)
                yield from title
                yield _slice(row, process, thread, begin, end, f"{row['op']} (device)")
            written += 1
            if not written % _TOLD_EVERY:
                tell(f"{TRACE}: {written:,} records")
        where.forget_rows()
    yield from _arrows(placed)


def _processes(identities: Collection[tuple[int, int, int]]) -> dict[tuple[int, int, int], int]:
    """Return a number for each process of the job: its rank, or a running number if two processes have one rank."""
    every = sorted(identities)
    ranks = [rank for rank, _, _ in every]
    if len(set(ranks)) == len(ranks):
        return {process: process[0] for process in every}
    return {process: number for number, process in enumerate(every)}


def _names(run: Run, processes: Mapping[tuple[int, int, int], int]) -> Iterator[dict[str, Any]]:
    hosts = {(each["rank"], each["attempt"], each["pid"]): each.get("host") for each in run.manifest.ranks}
    for (rank, attempt, pid), number in processes.items():
        host = hosts.get((rank, attempt, pid))
        title = (
            f"rank {rank}"
            + (f", attempt {attempt}" if attempt else "")
            + (f" ({host}, pid {pid})" if host else f" (pid {pid})")
        )
        yield {"ph": "M", "name": "process_name", "pid": number, "args": {"name": title}}
        yield {"ph": "M", "name": "process_sort_index", "pid": number, "args": {"sort_index": number}}
        yield {
            "ph": "M",
            "name": "thread_name",
            "pid": number,
            "tid": _STEPS_THREAD,
            "args": {"name": "steps"},
        }


def _steps(
    steps: Sequence[Mapping[str, Any]],
    processes: Mapping[tuple[int, int, int], int],
    shifts: Mapping[tuple[int, int, int], int],
    base: int,
) -> Iterator[dict[str, Any]]:
    for row in steps:
        key = row["rank"], row["attempt"], row["pid"]
        if row["end_ns"] is not None:
            begin, end = (row[name] + shifts.get(key, 0) - base for name in ("begin_ns", "end_ns"))
            arguments = {
                name: strict_json(row[name])
                for name in ("step", "micro_steps", "loss", "grad_norm")
                if row[name] is not None
            }
            yield {
                "ph": "X",
                "name": f"step {row['step']}",
                "cat": "step",
                "pid": processes[key],
                "tid": _STEPS_THREAD,
                "ts": begin / 1000,
                "dur": max(0, end - begin) / 1000,
                "args": arguments,
            }


def _wire_bytes(row: Mapping[str, Any]) -> float | None:
    """Return the wire bytes of a record; None if they are unknown.

    For an all_to_all with splits, they are the bytes that the rank sends to other ranks. Otherwise, they are the
    modelled average over the ranks.
    """
    if row["op"] != Op.ALL_TO_ALL or row["input_splits"] is None:
        return wire_bytes(row["op"], row["payload_bytes"], row["group_size"])
    splits = parse_splits(row["input_splits"], row["group_size"])
    return None if splits is None else float(sum(splits) - splits[row["group_rank"]])


def _slice(
    row: Mapping[str, Any], process: int, thread: int, begin: int, end: int, name: str
) -> dict[str, Any]:
    arguments = {column: row[column] for column in _SHOWN if row[column] is not None}
    arguments["wire_bytes"] = _wire_bytes(row)
    return {
        "ph": "X",
        "name": name,
        "cat": row["purpose"] or "collective",
        "pid": process,
        "tid": thread,
        "ts": begin / 1000,
        "dur": (end - begin) / 1000,
        "args": arguments,
    }


class _Lanes:
    """Assigns slices to threads of the trace.

    Each process and group has as many threads as slices overlap. Slices of the host and of the device are on separate
    threads.
    """

    def __init__(self, processes: Mapping[Any, int]) -> None:
        self._next = dict.fromkeys(processes.values(), _STEPS_THREAD + 1)
        self._free: dict[Lane, list[tuple[int, int]]] = {}  # heap of (end of the last slice in ns, thread)

    def take(
        self, process: int, row: Mapping[str, Any], begin: int, end: int, on_device: bool
    ) -> tuple[int, list[dict[str, Any]]]:
        """Return the thread for a slice, and the events that name the thread if it is new.

        Call this method for the slices in order of their begin.
        """
        key = process, row["pg"], row["group_ranks"], on_device
        lanes = self._free.setdefault(key, [])
        if lanes and lanes[0][0] <= begin:
            _, thread = heapq.heapreplace(lanes, (end, lanes[0][1]))
            return thread, []
        thread = self._next[process]
        self._next[process] += 1
        heapq.heappush(lanes, (end, thread))
        group = row["group_desc"] if row["group_desc"] not in (None, "undefined") else f"group {row['pg']}"
        title = f"{group} ({row['group_ranks']})" + (" on the device" if on_device else "")
        title += f" #{len(lanes)}" if len(lanes) > 1 else ""
        about = {"pid": process, "tid": thread, "ph": "M"}
        return thread, [
            {**about, "name": "thread_name", "args": {"name": title}},
            {**about, "name": "thread_sort_index", "args": {"sort_index": thread}},
        ]


class _Placed:
    """The process, thread and collective of the slices of one rank, as arrays with one element per record."""

    def __init__(self, rank: RankRows, begin: Numbers, process: Any, thread: Any) -> None:
        self.begin, self.process, self.thread = begin, process, thread
        self.stream = rank.stream.astype(np.int32)
        self.number, self.repetition = rank.number, rank.repetition.astype(np.int32)

    def forget_rows(self) -> None:
        """Drop all elements except for records that can have partners on other ranks."""
        some = self.stream != NO_PARTNER
        for name in ("begin", "process", "thread", "stream", "number", "repetition"):
            setattr(self, name, getattr(self, name)[some])


def _arrows(placed: Sequence[_Placed]) -> Iterator[dict[str, Any]]:
    """Yield the events of the arrows.

    The arrow of a collective begins at the slice that begins first and passes through the slices of the other ranks.
    """
    names = ("begin", "process", "thread", "stream", "number", "repetition")
    every = {
        name: np.concatenate([getattr(each, name) for each in placed] or [np.zeros(0, np.int64)])
        for name in names
    }
    keys = [every[name] for name in ("stream", "number", "repetition")]
    by_begin = np.lexsort((every["thread"], every["process"], every["begin"]))
    order, starts = in_order([key[by_begin].astype(np.int64) for key in keys])
    order = by_begin[order]
    ends = np.append(starts[1:], len(order)) if len(order) else starts
    for number, (first, last) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        if last - first < 2:
            continue
        for place in range(first, last):
            row = order[place]
            kind = "s" if place == first else "f" if place == last - 1 else "t"
            event = {
                "ph": kind,
                "id": number,
                "name": "same",
                "cat": "collective",
                "pid": int(every["process"][row]),
                "tid": int(every["thread"][row]),
                "ts": int(every["begin"][row]) / 1000,
            }
            yield {**event, "bp": "e"} if kind == "f" else event

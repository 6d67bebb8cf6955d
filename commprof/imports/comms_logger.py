"""Imports logs of DeepSpeed's comms logger: its printed lines, its printed summary, or its data as JSON.

The comms logger never resets its timer (DeepSpeed 0.7 to 0.19). The latency that it logs for a call is therefore the
running sum of all calls of that name. Counts and sizes are right. If the order of the calls is known, the differences
of these sums are the latencies. Printed lines are in the order of the calls. In raw data, one timer serves all sizes of
a name, so ascending sums are in the order of the calls. The summary has sums of sums, from which latencies cannot be
computed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

from commprof.imports.flight_recorder import rank_of
from commprof.imports.recording import Collective, Imported, ImportedRank
from commprof.schema import Op

TOOL: Final = "DeepSpeed's comms logger"

_LINE: Final = re.compile(
    r"comm op: (?P<name>.+?) \| time \(ms\): (?P<time>-?[\d.]+) \| msg size: (?P<size>[\d.]+) ?(?P<unit>[KMGTPEZY]?B) "
    r"\| algbw \(Gbps\): ?(?P<algbw>[\d.]+) \| busbw \(Gbps\): ?(?P<busbw>[\d.]+)"
)
_MOMENT: Final = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),(\d{3})")
_SUMMARY_HEAD: Final = re.compile(r"Comm\. Op\s+Message Size\s+Count\s+Total Latency\(ms\)")
_SUMMARY_ROW: Final = re.compile(
    r"^\s{4,}(?P<size>[\d.]+) ?(?P<unit>[KMGTPEZY]?B)\s+(?P<count>\d+)\s+[\d.]+\s+[\d.]+"
)
_UNITS: Final = {
    unit: 1024**power for power, unit in enumerate(("B", "KB", "MB", "GB", "TB", "PB", "EB", "ZB", "YB"))
}
# The keys are the names that the logger uses. A program can set another log_name. Such a call is imported only if the
# text before " | " is one of these names.
_OPERATIONS: Final[dict[str, Op]] = {
    "all_reduce": Op.ALL_REDUCE,
    "all_reduce_coalesced": Op.ALL_REDUCE,
    "inference_all_reduce": Op.ALL_REDUCE,
    "all_gather": Op.ALL_GATHER,
    "all_gather_into_tensor": Op.ALL_GATHER,
    "all_gather_base": Op.ALL_GATHER,
    "allgather_fn": Op.ALL_GATHER,
    "reduce_scatter": Op.REDUCE_SCATTER,
    "reduce_scatter_tensor": Op.REDUCE_SCATTER,
    "reduce_scatter_base": Op.REDUCE_SCATTER,
    "reduce_scatter_fn": Op.REDUCE_SCATTER,
    "all_to_all": Op.ALL_TO_ALL,
    "all_to_all_single": Op.ALL_TO_ALL,
    "broadcast": Op.BROADCAST,
    "reduce": Op.REDUCE,
    "gather": Op.GATHER,
    "scatter": Op.SCATTER,
    "send": Op.SEND,
    "isend": Op.SEND,
    "recv": Op.RECV,
    "irecv": Op.RECV,
    "barrier": Op.BARRIER,
    "log_summary_barrier": Op.BARRIER,
    "monitored_barrier": Op.BARRIER,
}
# For these operations the logger logs the bytes of one rank's part.
_PARTS: Final = frozenset((Op.ALL_GATHER, Op.GATHER, Op.SCATTER))
_SUM_TOLERANCE_MS: Final = 0.011  # the logger prints two decimals
_MOST_CALLS: Final = 10_000_000


class LoggedCall(NamedTuple):
    """One call in a log. ``sum_ms`` is the running sum that the logger prints as the latency; None if unknown."""

    name: str
    size: int  # bytes
    sum_ms: float | None
    time_ns: int | None = None  # when it was logged, CLOCK_REALTIME in the local time zone


class _Log(NamedTuple):
    """The content of one file."""

    calls: Sequence[LoggedCall]  # in order of issue, if the order is known
    ordered: bool
    world_size: int | None
    approximate: bool  # sizes were printed with three digits

    @property
    def has_sums(self) -> bool:
        """Whether a call of the log has a running sum, which a summary lacks."""
        return any(call.sum_ms is not None for call in self.calls)


def parse_text(text: str) -> _Log | None:
    """Return the calls in the output of a program; None if it contains neither lines nor a summary of the logger."""
    matches = [(match, _moment(line)) for line in text.splitlines() if (match := _LINE.search(line))]
    if matches:
        calls = [
            LoggedCall(match["name"], _bytes(match["size"], match["unit"]), float(match["time"]), moment)
            for match, moment in matches
        ]
        ratios = [(float(match["algbw"]), float(match["busbw"])) for match, _ in matches]
        return _Log(calls, True, _world_size(ratios), True)
    if _SUMMARY_HEAD.search(text):
        return _Log(list(_summary_calls(text)), False, None, True)
    return None


def parse_json(value: Any) -> _Log | None:
    """Return the calls in data of the logger that was stored as JSON; None if ``value`` is something else.

    The data is the result of ``get_raw_data()``, or of ``log_summary(return_dict=True)`` for the summary.
    """
    if not isinstance(value, dict) or not value:
        return None
    if isinstance(value.get("summary"), dict) and isinstance(value.get("metadata"), dict):
        world = value["metadata"].get("world_size")
        calls = [
            LoggedCall(name, int(size), None)
            for name, sizes in value["summary"].items()
            for size, row in sizes.items()
            for _ in range(min(_MOST_CALLS, int(row["count"])))
        ]
        return _Log(calls, False, world if isinstance(world, int) else None, False)
    if not all(
        isinstance(sizes, dict) and sizes and all(map(_is_raw, sizes.values())) for sizes in value.values()
    ):
        return None
    calls, ratios = [], []
    for name, sizes in value.items():
        # One timer serves all sizes of a name, so its sums in ascending order are the calls in order of issue.
        merged = sorted((float(total), int(size)) for size, row in sizes.items() for total in row[1])
        is_sum = all(sorted(row[1]) == row[1] for row in sizes.values())
        calls += [LoggedCall(name, size, total if is_sum else None) for total, size in merged]
        ratios += [pair for row in sizes.values() for pair in zip(row[2], row[3], strict=False)]
    return _Log(calls, False, _world_size(ratios), False)


def _is_raw(row: Any) -> bool:
    return (
        isinstance(row, list)
        and len(row) == 4
        and isinstance(row[0], int)
        and all(isinstance(values, list) and len(values) == row[0] for values in row[1:])
        and all(isinstance(number, int | float) for values in row[1:] for number in values)
    )


def latencies(sums: Sequence[float | None]) -> list[float] | None:
    """Return the latency in ms of each call of one name, computed from the running sums in order of issue.

    The result is None if a value is unknown or if the values are not running sums.

    >>> latencies([2.0, 5.0, 6.5])
    [2.0, 3.0, 1.5]
    >>> latencies([2.0, 1.0]) is None
    True
    """
    if any(total is None for total in sums):
        return None
    known = [float(total) for total in sums if total is not None]
    steps = [after - before for before, after in zip([0.0, *known], known, strict=False)]
    if any(step < -_SUM_TOLERANCE_MS for step in steps):
        return None
    return [max(0.0, step) for step in steps]


def read_logs(logs: Sequence[tuple[Path, _Log]]) -> Imported:
    """Return the logs of a job as one recording. There is one log per rank, or only the output of rank 0."""
    imported = Imported(TOOL, [], realtime=False)
    ranks = [0] if len(logs) == 1 else [rank_of(path, {}) for path, _ in logs]
    imported.world_size = next((log.world_size for _, log in logs if log.world_size), None)
    refused: set[str] = set()
    unknown: dict[str, int] = {}
    for rank, (_, log) in zip(ranks, logs, strict=True):
        one = ImportedRank(rank)
        one.collectives = list(_collectives(rank, log, imported.world_size, refused, unknown))
        imported.ranks.append(one)
    imported.ranks.sort(key=lambda each: each.rank)
    imported.realtime = any(call.time_ns is not None for _, log in logs for call in log.calls)
    imported.notes = list(_notes([log for _, log in logs], imported.world_size, refused, unknown))
    return imported


def _collectives(
    rank: int, log: _Log, world: int | None, refused: set[str], unknown: dict[str, int]
) -> Iterator[Collective]:
    by_name: dict[str, list[float | None]] = {}
    for call in log.calls:
        by_name.setdefault(call.name, []).append(call.sum_ms)
    known = {name: latencies(sums) for name, sums in by_name.items()}
    refused.update(name for name, latencies_ms in known.items() if latencies_ms is None)
    taken = {name: iter(latencies_ms) for name, latencies_ms in known.items() if latencies_ms is not None}
    clock = 0
    for call in log.calls:
        latency = next(taken[call.name]) if call.name in taken else None
        took = 0 if latency is None else round(latency * 1e6)
        op = _OPERATIONS.get(call.name.partition(" | ")[0].strip().lstrip("_"))
        if op is None:
            unknown[call.name] = unknown.get(call.name, 0) + 1
            continue
        begin = clock if call.time_ns is None else call.time_ns - took
        clock = max(clock + 1, begin + took)
        yield _collective(op, call, rank, world or 0, begin, begin + took if latency is not None else None)


def _collective(op: Op, call: LoggedCall, rank: int, world: int, begin: int, end: int | None) -> Collective:
    payload = call.size * world if op in _PARTS else call.size
    payload = 0 if op is Op.BARRIER else payload
    part = payload // world if world else 0
    ranks = tuple(range(world))
    return Collective(
        op=op,
        backend_method=call.name,
        pg="?",
        pg_seq=None,
        group_size=world,
        group_ranks=ranks,
        group_rank=rank if rank in ranks else -1,
        issue_ns=begin,
        return_ns=end,
        payload_bytes=payload,
        input_bytes=0 if op is Op.RECV else part if op in (Op.ALL_GATHER, Op.GATHER) else payload,
        output_bytes=0 if op is Op.SEND else part if op in (Op.REDUCE_SCATTER, Op.SCATTER) else payload,
        is_p2p=op in (Op.SEND, Op.RECV),
        is_async=False,
    )


def _summary_calls(text: str) -> Iterator[LoggedCall]:
    """Yield the calls of the last summary in ``text``: for each row as many calls as its count."""
    begin = [match.end() for match in _SUMMARY_HEAD.finditer(text)][-1]
    name = ""
    for line in text[begin:].splitlines()[1:]:
        row = _SUMMARY_ROW.match(line)
        if row is not None:
            size = _bytes(row["size"], row["unit"])
            for _ in range(min(_MOST_CALLS, int(row["count"]))):
                yield LoggedCall(name, size, None)
        elif line.strip() and not line[0].isspace():
            if line.startswith("___"):
                return  # the section on stragglers that follows repeats the same calls
            name = line.strip()


def _world_size(bandwidths: Iterable[tuple[float, float]]) -> int | None:
    """Return the world size, derived from pairs of algorithm and bus bandwidth; None if it cannot be derived.

    If the two bandwidths differ, bus bandwidth / algorithm bandwidth is (n - 1) / n for n ranks. Source: DeepSpeed's
    calc_bw_log, which uses the world size for every group.
    """
    best = max(((alg, bus) for alg, bus in bandwidths if alg > 0 and 0 <= bus < alg * 0.9999), default=None)
    if best is None:
        return None
    size = 1 / (1 - best[1] / best[0])
    return round(size) if abs(size - round(size)) < 0.05 * size and round(size) > 1 else None


def _bytes(number: str, unit: str) -> int:
    return round(float(number) * int(_UNITS[unit]))


def _moment(line: str) -> int | None:
    match = _MOMENT.search(line)
    if match is None:
        return None
    try:
        moment = datetime.strptime(match[1], "%Y-%m-%d %H:%M:%S").astimezone()
    except ValueError:
        return None
    return int(moment.timestamp()) * 1_000_000_000 + int(match[2]) * 1_000_000


def _notes(
    logs: Sequence[_Log], world: int | None, refused: set[str], unknown: Mapping[str, int]
) -> Iterator[str]:
    if any(each.sum_ms is not None for log in logs for each in log.calls):
        yield (
            "as the latency of a call, the comms logger writes the running sum of all calls of that name; the "
            "differences were "
            "imported, but not its bandwidths, which are computed from those sums"
        )
    if not any(log.ordered or log.has_sums for log in logs):
        yield "a summary has only sums of sums: latencies cannot be computed from it; counts and sizes are right"
    elif refused:
        yield (
            f"no latency is imported for {', '.join(sorted(refused)[:8])}: its numbers are not the "
            "running sums of one timer"
        )
    if len(logs) == 1:
        yield "the log has one rank only; the other ranks are missing"
    yield "the log does not name the group: all ranks are assumed, which is too many for a subgroup"
    if world is None:
        yield "the world size cannot be derived from the log: there are no wire bytes, and gathers count as 0 bytes"
    if any(log.approximate for log in logs):
        yield "sizes were printed with three digits and are exact to three digits only"
    if not any(log.ordered for log in logs):
        yield "the order of calls with different names is not in the log, and times begin at 0"
    for name, count in sorted(unknown.items())[:8]:
        yield f"{count} calls logged as {name[:60]!r} are no operation that commprof knows and were left out"

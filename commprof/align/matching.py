"""The records of a run beside the lines of an NCCL log: which belong together, which have no partner, and why.

Communicators are tied to process groups first (:mod:`commprof.align.pairing`), then within one process and group the
lines are aligned with what the records should leave (:mod:`commprof.align.expectation`): by order, operation, bytes and
root. A line that was lost, or one too many, shows as exactly that and shifts nothing else. opCount takes no part: it is
no sequence number in any version.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from commprof.align.expectation import PLAIN_DIALECT, Expected
from commprof.align.match_rows import MatchRows
from commprof.align.pairing import Pairing, pair_communicators, pair_processes
from commprof.align.sequences import common_pairs
from commprof.align.streams import (
    GroupKey,
    LineStream,
    RecordStream,
    RunProcess,
    line_streams,
    record_streams,
)


class RecordedRun(Protocol):
    """What an alignment reads of a run."""

    @property
    def manifest(self) -> Any:
        """Has ``ranks``: one mapping per rank file, with rank, attempt, pid and host."""

    def table(self, name: str) -> pa.Table:
        """A table of the schema, by name."""


class CommunicatorMatch(NamedTuple):
    """How one communicator of the log fared. ``basis`` says what ties it to the group; ``reason`` why nothing does."""

    host: str
    pid: int
    comm: str
    comm_epoch: int
    comm_id: str | None
    nranks: int | None
    kind: str
    rank: int | None
    pg: str | None
    group_ranks: str | None
    matched: int
    missing: int
    extra: int
    basis: str | None
    reason: str | None


@dataclass(frozen=True, slots=True)
class MatchReport:
    """The result of an alignment. Counts are lines: a record that leaves several lines counts once for each.

    Attributes:
        matches: table ``matches``: one row per pair, and one per record or line without a partner.
        communicators: the same by communicator, in the order of the log. A record of a group without communicator
            is missing in the total, and in none of these.
        matched, missing, extra: rows of ``matches`` by state.
        torn: torn lines of the log; they are nobody's partner, and no extras.
        unclear: records, counted in ``missing``, that do not determine the lines they leave.
        notes: sentences for the reader.
    """

    matches: pa.Table
    communicators: tuple[CommunicatorMatch, ...]
    matched: int
    missing: int
    extra: int
    torn: int
    unclear: int
    notes: tuple[str, ...]


def align(run: RecordedRun, ops: pa.Table) -> MatchReport:
    """Align the records of ``run`` with the operation lines of its NCCL logs.

    Args:
        run: a run, as ``commprof.trace.reader.open_run`` returns it.
        ops: table ``nccl_ops`` of :func:`commprof.nccl.parser.parse_logs`.
    """
    collectives = run.table("collectives")
    streams = record_streams(collectives)
    lines = line_streams(ops)
    _distrust_small_worlds(lines, streams.values(), run.manifest.world_size)
    processes = pair_processes(lines, {process for process, _ in streams}, _hosts(run.manifest.ranks))
    pairing = pair_communicators(lines, streams, processes)
    rows = MatchRows(collectives, ops)
    outcomes = _align_groups(streams, lines, pairing, rows)
    for number, reason in sorted(pairing.reasons.items()):
        for row in lines[number].rows:
            rows.add_extra(row, reason)
        outcomes[number] = Counter(extra=len(lines[number].rows))
    matches = rows.table()
    states = Counter(matches["state"].to_pylist())
    torn = ops.filter(pc.equal(ops["state"], "torn")).num_rows
    return MatchReport(
        matches,
        tuple(_communicator(number, line, pairing, outcomes[number]) for number, line in enumerate(lines)),
        states["matched"],
        states["missing"],
        states["extra"],
        torn,
        rows.unclear,
        _notes(streams, states, torn, rows.unclear),
    )


def _distrust_small_worlds(
    lines: Sequence[LineStream], streams: Iterable[RecordStream], world_size: int | None
) -> None:
    """Forget the global ranks of a log whose largest communicator is smaller than the job.

    The log alone cannot know that: where only sub-groups communicate, the largest looks like the world.
    """
    if world_size is None:
        world_size = max((stream.group_size for stream in streams), default=0)
    if max((line.nranks or 0 for line in lines), default=0) != world_size:
        for line in lines:
            line.global_rank = None


def _hosts(ranks: Sequence[Mapping[str, Any]]) -> dict[RunProcess, str]:
    """The host of each process, where the manifest has it."""
    return {
        RunProcess(entry["rank"], entry["attempt"], entry["pid"]): entry["host"]
        for entry in ranks
        if entry.get("host") and {"rank", "attempt", "pid"} <= set(entry)
    }


def _align_groups(
    streams: Mapping[tuple[RunProcess, GroupKey], RecordStream],
    lines: Sequence[LineStream],
    pairing: Pairing,
    rows: MatchRows,
) -> dict[int, Counter[str]]:
    """Align every process and group that has records; returns the outcome by communicator."""
    members: dict[tuple[RunProcess, GroupKey], list[int]] = {}
    for number in sorted(pairing.groups, key=lambda n: lines[n].first):
        members.setdefault(pairing.groups[number], []).append(number)
    outcomes: dict[int, Counter[str]] = {number: Counter() for number in range(len(lines))}
    todo = dict(streams)
    for process, group in [key for key in members if key[1].peer is not None]:
        whole = (process, group._replace(peer=None))
        pair = todo[whole].messages_with(group.peer if group.peer is not None else -1)
        todo[process, group] = pair
        todo[whole] = todo[whole].without(set(pair.records))
    heard = {process for process, _ in members}
    for key, stream in todo.items():
        numbers = members.get(key, [])
        reason = _no_communicator(stream, key[0] in heard) if not numbers else None
        _align_group(stream, [lines[n] for n in numbers], [outcomes[n] for n in numbers], rows, reason)
    return outcomes


def _no_communicator(stream: RecordStream, heard: bool) -> str:
    process = stream.process
    if not heard:
        return f"the log has no operation of rank {process.rank} (process {process.pid})"
    return f"no communicator of the log fits group {stream.group.pg} (ranks {stream.group.group_ranks})"


def _align_group(
    stream: RecordStream,
    lines: Sequence[LineStream],
    outcomes: Sequence[Counter[str]],
    rows: MatchRows,
    reason: str | None,
) -> None:
    """Align one stream of records with its communicators: usually one, more when it was created anew."""
    dialect_source = max(lines, key=lambda line: len(line.rows), default=None)
    dialect = PLAIN_DIALECT if dialect_source is None else dialect_source.dialect(stream.calls)
    expected, parts, unclear = stream.expect(dialect)
    printed = [line for communicator in lines for line in communicator.printed]
    owners = [(row, n) for n, communicator in enumerate(lines) for row in communicator.rows]
    codes: dict[Expected, int] = {}
    pairs = common_pairs(_encode(expected, codes), _encode(printed, codes))
    partner = dict(pairs)
    owner = 0
    for position, part in enumerate(parts):
        if position in partner:
            row, owner = owners[partner[position]]
            rows.add_matched(part, row)
            outcomes[owner]["matched"] += 1
        else:
            rows.add_missing(part, expected[position].op, reason)
            if outcomes:
                outcomes[owner]["missing"] += 1
    for record in unclear:
        rows.add_unclear(record)
        if outcomes:
            outcomes[0]["missing"] += 1
    found = set(partner.values())
    for position, (row, owner) in enumerate(owners):
        if position not in found:
            rows.add_extra(
                row, f"no record of group {stream.group.pg} (ranks {stream.group.group_ranks}) fits here"
            )
            outcomes[owner]["extra"] += 1


def _encode(lines: Sequence[Expected], codes: dict[Expected, int]) -> list[int]:
    return [codes.setdefault(line, len(codes)) for line in lines]


def _communicator(
    number: int, line: LineStream, pairing: Pairing, outcome: Counter[str]
) -> CommunicatorMatch:
    process, group = pairing.groups.get(number, (None, None))
    return CommunicatorMatch(
        line.process.host,
        line.process.pid,
        line.comm,
        line.comm_epoch,
        line.comm_id,
        line.nranks,
        line.kind,
        None if process is None else process.rank,
        None if group is None else group.pg,
        None if group is None else group.group_ranks,
        outcome["matched"],
        outcome["missing"],
        outcome["extra"],
        pairing.basis.get(number),
        pairing.reasons.get(number),
    )


def _notes(
    streams: Mapping[tuple[RunProcess, GroupKey], RecordStream], states: Counter[str], torn: int, unclear: int
) -> tuple[str, ...]:
    notes = []
    foreign = {stream.backend for stream in streams.values()} - {"nccl", None}
    if foreign and states["matched"]:
        names = ", ".join(sorted(str(backend) for backend in foreign))
        notes.append(
            f"The run used {names}, which NCCL never sees: the lines that match come from a generated log, or from "
            "another run of the same program."
        )
    elif foreign:
        names = ", ".join(sorted(str(backend) for backend in foreign))
        notes.append(f"The run used {names}: its collectives leave no line in an NCCL log.")
    if not states["matched"] and streams and states["extra"]:
        notes.append("Nothing matches: the log is of another run, or of other processes of this one.")
    if torn:
        notes.append(f"{torn} lines are torn; each may be the line of a record that is counted as missing.")
    if unclear:
        notes.append(f"{unclear} of the missing records do not determine the lines that they leave.")
    return tuple(notes)

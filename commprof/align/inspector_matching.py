"""Match the records of a run with the logs of NCCL's Inspector, by number instead of by order.

NCCL counts the collectives of a communicator by operation. The counts are equal on all ranks, whether the
collectives are logged or not. The nth line that the records of a group leave for an operation
(:mod:`commprof.align.expected_lines`) therefore belongs to number n of its communicator. An operation that
the plugin dropped does not shift the other operations. Messages are not compared, because the plugin numbers
messages separately, from the time when it was loaded.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from commprof.align.alignment_streams import GroupKey, RecordStream, RunProcess, Vocabulary, record_streams
from commprof.align.expected_lines import PLAIN_DIALECT
from commprof.nccl.inspected import InspectedCollective, Member
from commprof.schema import Op, Status, parse_ranks

# The plugin does not log operations below this size, unless NCCL_INSPECTOR_DUMP_MIN_SIZE_BYTES sets another size.
USUAL_LEAST_BYTES: Final = 8192
_MESSAGES: Final = (Op.SEND, Op.RECV)
_PARTS: Final = (Op.ALL_GATHER, Op.REDUCE_SCATTER)
STATES: Final = ("matched", "missing", "dropped", "too_small", "extra")


@dataclass(slots=True)
class MemberAlignment:
    """The alignment of one rank of one communicator.

    Attributes:
        member, comm_size: The rank of the communicator and the number of its ranks, from the log.
        rank, pg, group_ranks: The rank and group, from the run. None without a match.
        reason: The reason why there is no match.
        matched: The number of collectives of the log that have a record.
        missing: The number of lines of records that are not in the log, without lines that the plugin reports
            as dropped.
        dropped: The number of lines that the plugin reports as dropped.
        too_small: The number of lines below the smallest size that the plugin logs.
        extra: The number of collectives of the log without a record.
    """

    member: Member
    comm_size: int
    rank: int | None = None
    pg: str | None = None
    group_ranks: str | None = None
    reason: str | None = None
    matched: int = 0
    missing: int = 0
    dropped: int = 0
    too_small: int = 0
    extra: int = 0


@dataclass(slots=True)
class InspectedAlignment:
    """The result of the alignment.

    It has one entry per rank of a communicator, and rows of the table ``nccl_algorithms``.
    """

    members: list[MemberAlignment]
    algorithms: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def total(self, state: str) -> int:
        """Return the total for ``state``, which is one of :data:`STATES`."""
        return sum(getattr(each, state) for each in self.members)


class _Line(NamedTuple):
    """The expected entry of a record in the log.

    It contains the payload in bytes and the row of the record.
    """

    payload_bytes: int
    record: int


_Lines = Mapping[str, Sequence[_Line]]


def align_inspected(
    collectives: pa.Table,
    ranks: Iterable[Mapping[str, Any]],
    operations: Iterable[InspectedCollective],
    dropped: Mapping[Member, int],
) -> InspectedAlignment:
    """Match communicators with groups, and collectives of the logs with records.

    Args:
        collectives: The table ``collectives`` of the run.
        ranks: The entries of the manifest of the run: rank, attempt, pid, host.
        operations: The collectives of all logs.
        dropped: The number of collectives that the plugin reports as dropped, by rank of a communicator.
    """
    vocabulary = Vocabulary()
    streams = record_streams(collectives, vocabulary)
    processes = _processes(ranks)
    logged: dict[Member, list[InspectedCollective]] = defaultdict(list)
    for each in operations:
        logged[each.member].append(each)
    least = min([USUAL_LEAST_BYTES, *(each.part_bytes for its in logged.values() for each in its)])
    owners = {member: _owner(member, processes) for member in logged}
    members: dict[str, dict[int, int]] = defaultdict(dict)
    for member, owner in owners.items():
        if owner is not None:
            members[member.comm][member.comm_rank] = owner.rank
    unnumbered = set(_unnumbered(collectives))
    result = InspectedAlignment([])
    for member, its in sorted(logged.items()):
        one = MemberAlignment(member, its[0].comm_size)
        result.members.append(one)
        owner = owners[member]
        one.rank = None if owner is None else owner.rank
        stream = _choose(one, owner, its, streams, vocabulary, members[member.comm])
        if stream is not None and unnumbered & set(stream.records.tolist()):
            one.reason = "the group has collectives that raised or were captured in a CUDA graph, whose number is not known"
            stream = None
        if stream is None:
            one.extra = len(its)
            continue
        one.pg, one.group_ranks = stream.group.pg, stream.group.group_ranks
        lines = _lines_of(stream, vocabulary)
        _count(one, its, lines, dropped.get(member, 0), least)
        result.algorithms += _choices(collectives, its, lines)
    result.notes = list(_notes(result, owners, processes, streams))
    return result


def _processes(ranks: Iterable[Mapping[str, Any]]) -> dict[tuple[str, int], RunProcess]:
    """Return the processes of the run by host and process id."""
    return {
        (str(each.get("host") or ""), each["pid"]): RunProcess(each["rank"], each["attempt"], each["pid"])
        for each in ranks
        if {"rank", "attempt", "pid"} <= set(each)
    }


def _owner(member: Member, processes: Mapping[tuple[str, int], RunProcess]) -> RunProcess | None:
    """Return the process of the run that wrote the log.

    The process is found by host and process id, or by a process id that only one process without a recorded
    host has.
    """
    exact = processes.get((member.host, member.pid))
    if exact is not None:
        return exact
    alike = [process for (host, pid), process in processes.items() if pid == member.pid and not host]
    return alike[0] if len(alike) == 1 else None


def _choose(
    one: MemberAlignment,
    owner: RunProcess | None,
    its: Sequence[InspectedCollective],
    streams: Mapping[tuple[RunProcess, GroupKey], RecordStream],
    vocabulary: Vocabulary,
    members: Mapping[int, int],
) -> RecordStream | None:
    """Return the group that the communicator serves.

    If no group or several groups match, the result is None, and ``one.reason`` contains the reason.
    """
    if owner is None:
        one.reason = "no process of the run has this host and process id"
        return None
    candidates = [
        stream
        for (process, _), stream in streams.items()
        if process == owner
        and (stream.group_size, stream.group_rank) == (one.comm_size, one.member.comm_rank)
        and _holds(stream.group.group_ranks, members)
    ]
    if not candidates:
        one.reason = "the rank is in no group of this size and with these members"
        return None
    fitting = [
        stream for stream in candidates if _first_difference(its, _lines_of(stream, vocabulary)) is None
    ]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        names = ", ".join(stream.group.pg for stream in fitting)
        one.reason = (
            f"the groups {names} issued the same operations, so it is not known to which of them the communicator "
            "belongs"
        )
    else:
        difference = _first_difference(its, _lines_of(candidates[0], vocabulary))
        one.reason = f"its operations are not those of group {candidates[0].group.pg}: {difference}"
    return None


def _holds(group_ranks: str, members: Mapping[int, int]) -> bool:
    """Return whether the group has these ranks at these positions."""
    ranks = parse_ranks(group_ranks)
    return all(place < len(ranks) and ranks[place] == rank for place, rank in members.items())


def _lines_of(stream: RecordStream, vocabulary: Vocabulary) -> _Lines:
    """Return the lines that the records of a group leave, by operation, in the order in which NCCL numbers them."""
    expected = stream.expect(vocabulary, PLAIN_DIALECT)
    lines: dict[str, list[_Line]] = defaultdict(list)
    for code, record in zip(expected.codes.tolist(), expected.records.tolist(), strict=True):
        line = vocabulary.lines[code]
        if line.op not in _MESSAGES and line.message_bytes:  # NCCL discards empty operations before numbering
            lines[line.op].append(_Line(line.message_bytes, record))
    return lines


def _first_difference(its: Sequence[InspectedCollective], lines: _Lines) -> str | None:
    """Return the first contradiction between the log and the records, or None if there is none."""
    for each in sorted(its, key=lambda one: (one.number, one.op)):
        of_op = lines.get(each.op, ())
        if each.number >= len(of_op):
            return (
                f"{each.op} number {each.number} of {each.payload_bytes:,} bytes has no record: the group has only "
                f"{len(of_op)} {each.op} records"
            )
        if of_op[each.number].payload_bytes != each.payload_bytes:
            return (
                f"{each.op} number {each.number} has {each.payload_bytes:,} bytes in the log and "
                f"{of_op[each.number].payload_bytes:,} bytes in its record"
            )
    return None


def _count(
    one: MemberAlignment, its: Sequence[InspectedCollective], lines: _Lines, dropped: int, least: int
) -> None:
    seen = {(each.op, each.number) for each in its}
    one.matched = len(seen)
    for op, of_op in lines.items():
        for number, line in enumerate(of_op):
            if (op, number) not in seen:
                part = line.payload_bytes // one.comm_size if op in _PARTS else line.payload_bytes
                one.too_small += part < least
                one.missing += part >= least
    one.dropped = min(dropped, one.missing)
    one.missing -= one.dropped


def _choices(
    collectives: pa.Table, its: Iterable[InspectedCollective], lines: _Lines
) -> list[dict[str, Any]]:
    """Return rows of ``nccl_algorithms``. A record whose lines contain different algorithms has no row."""
    chosen: dict[int, set[tuple[str, str | None, int | None]]] = defaultdict(set)
    for each in its:
        if each.algorithm is not None:
            choice = each.algorithm, each.protocol, each.channels
            chosen[lines[each.op][each.number].record].add(choice)
    single = {record: next(iter(choices)) for record, choices in chosen.items() if len(choices) == 1}
    keys = (
        collectives.select(["rank", "attempt", "pid", "seq"]).take(pa.array(single, pa.int64())).to_pylist()
    )
    names = ("algorithm", "protocol", "channels")
    return [
        key | dict(zip(names, choice, strict=True)) for key, choice in zip(keys, single.values(), strict=True)
    ]


def _unnumbered(collectives: pa.Table) -> list[int]:
    """Return rows of collectives for which NCCL's counts are not known."""
    raised = pc.equal(collectives["status"], Status.RAISED)
    places: list[int] = pc.indices_nonzero(pc.or_(collectives["captured"], raised)).to_pylist()
    return places


def _notes(
    result: InspectedAlignment,
    owners: Mapping[Member, RunProcess | None],
    processes: Mapping[tuple[str, int], RunProcess],
    streams: Iterable[tuple[RunProcess, GroupKey]],
) -> Iterable[str]:
    heard = {owner for owner in owners.values() if owner is not None}
    silent = sorted({process.rank for process in processes.values()} - {process.rank for process in heard})
    if silent:
        yield f"no log has operations of rank(s) {', '.join(map(str, silent))}"
    tied = {(owners[each.member], each.pg) for each in result.members if each.pg is not None}
    alone = sorted(
        {group.pg for process, group in streams if process in heard and (process, group.pg) not in tied}
    )
    if alone and tied:
        yield (
            f"group(s) {', '.join(alone)} have no communicator in the logs: their messages may be below "
            "the plugin's smallest size, or point-to-point only, or their communicator was not matched for the "
            "reason that is given with it"
        )

"""Which process of a log is which process of the run, and which communicator is which process group.

A communicator fits a group when its rank and size are those of the process in the group. Where several groups fit (a
default group and a data-parallel group with equal ranks are different communicators), what both did and the order of
their first use decide. A communicator that no rank or size ties to one group is left alone when nothing it did agrees.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from commprof.align.streams import GroupKey, LineStream, LogProcess, RecordStream, RunProcess

Streams = Mapping[tuple[RunProcess, GroupKey], RecordStream]


def pair_processes(
    lines: Sequence[LineStream],
    processes: Collection[RunProcess],
    hosts: Mapping[RunProcess, str],
) -> dict[LogProcess, list[RunProcess]]:
    """The processes of the run that each process of the log may be, usually one.

    By process id (and host, where the run recorded it), unless the rank that the log knows contradicts it; else by
    that rank. A process of the log that holds several ranks is told apart by communicator, not here.
    """
    ranks: dict[LogProcess, set[int]] = {}
    for stream in lines:
        known = ranks.setdefault(stream.process, set())
        if stream.global_rank is not None:
            known.add(stream.global_rank)
    paired = {}
    for process, known in ranks.items():
        same_pid = [
            candidate
            for candidate in processes
            if candidate.pid == process.pid
            and (not known or candidate.rank in known)
            and _same_host(hosts.get(candidate), process.host)
        ]
        if len(same_pid) != 1 and len(known) < 2:
            # Recorded without host, in another pid namespace, or in a log whose host names were edited.
            same_pid = same_pid or [
                c for c in processes if c.pid == process.pid and (not known or c.rank in known)
            ]
        paired[process] = same_pid or [c for c in processes if c.rank in known]
    return paired


def _same_host(recorded: str | None, printed: str) -> bool:
    """NCCL prints the host up to its first dot."""
    return recorded is None or recorded.partition(".")[0] == printed.partition(".")[0]


class Pairing(NamedTuple):
    """Which stream of records each communicator belongs to, by position in the list of communicators."""

    groups: dict[int, tuple[RunProcess, GroupKey]]
    basis: dict[int, str]
    reasons: dict[int, str]


class _Family(NamedTuple):
    """Communicators that must belong to the same group: those with one commId, else a single one."""

    members: tuple[int, ...]
    candidates: dict[GroupKey, int]  # agreement with each group that fits


def pair_communicators(
    lines: Sequence[LineStream], streams: Streams, processes: Mapping[LogProcess, list[RunProcess]]
) -> Pairing:
    """Assign communicators to groups: first one to one, then what is left to the group it continues."""
    by_process: dict[RunProcess, list[RecordStream]] = {}
    for (process, _), stream in streams.items():
        by_process.setdefault(process, []).append(stream)
    fits: dict[int, dict[GroupKey, RecordStream]] = {}
    pairing = Pairing({}, {}, {})
    for number, line in enumerate(lines):
        candidates = [c for c in processes.get(line.process, []) if line.global_rank in (None, c.rank)]
        if len(candidates) != 1:
            pairing.reasons[number] = _no_process(line, len(candidates))
            continue
        fits[number] = _fitting(line, by_process.get(candidates[0], []))
        if not fits[number]:
            pairing.reasons[number] = (
                f"no group of rank {candidates[0].rank} has {line.nranks} ranks and this process as number {line.rank}"
            )
    families = _families(lines, {number: groups for number, groups in fits.items() if groups})
    _assign(lines, fits, families, pairing)
    return pairing


def _no_process(line: LineStream, candidates: int) -> str:
    if candidates:
        return f"{candidates} processes of the run may have written it, and nothing tells them apart"
    return f"the run has no process {line.process.pid} on {line.process.host}, and the log does not tell its rank"


def _fitting(line: LineStream, streams: Sequence[RecordStream]) -> dict[GroupKey, RecordStream]:
    """The streams of one process that ``line`` may belong to by size and rank."""
    found = {
        stream.group: stream
        for stream in streams
        if line.nranks in (None, stream.group_size) and line.rank in (None, stream.group_rank)
    }
    if line.nranks == 2 and line.only_messages:
        for stream in streams:
            if stream.group_size == 2:
                continue
            for peer in {call.peer for call in stream.calls if call.op in ("send", "recv")}:
                pair = stream.messages_with(peer)
                if line.rank in (None, pair.group_rank):
                    found[pair.group] = pair
    return found


def _families(lines: Sequence[LineStream], fits: Mapping[int, dict[GroupKey, RecordStream]]) -> list[_Family]:
    """Communicators that belong together, with the groups that fit all of them and how well."""
    members: dict[tuple[object, ...], list[int]] = {}
    uses: Counter[tuple[object, ...]] = Counter()
    for number in fits:
        line = lines[number]
        if line.comm_id is None:
            members["single", number] = [number]
            continue
        # A split with the same colour repeats its commId: the n-th use on one rank is the n-th on all.
        use = (line.process, line.rank, line.comm_id)
        members.setdefault(("id", line.comm_id, uses[use]), []).append(number)
        uses[use] += 1
    families = []
    for numbers in members.values():
        common = set.intersection(*(set(fits[number]) for number in numbers)) or set()
        scores = dict.fromkeys(common, 0)
        if len(members) > 1 or len(common) > 1 or any(lines[number].rank is None for number in numbers):
            for group in common:
                scores[group] = sum(_agreement(lines[number], fits[number][group]) for number in numbers)
        families.append(_Family(tuple(numbers), scores))
    return families


def _agreement(line: LineStream, stream: RecordStream) -> int:
    """How many lines of the communicator could be records of the stream, order aside."""
    expected = Counter(stream.expect(line.dialect(stream.calls))[0])
    return (expected & Counter(line.printed)).total()


def _assign(
    lines: Sequence[LineStream],
    fits: Mapping[int, dict[GroupKey, RecordStream]],
    families: Sequence[_Family],
    pairing: Pairing,
) -> None:
    first_use = {
        group: index
        for index, group in enumerate(dict.fromkeys(g for f in families for g in _in_order(f, fits)))
    }
    proposals = sorted(
        (-score, number, first_use[group], group)
        for number, family in enumerate(families)
        for group, score in family.candidates.items()
    )
    placed: set[int] = set()
    taken: set[tuple[RunProcess, GroupKey]] = set()
    for again in (False, True):
        for score, number, _, group in proposals:
            family = families[number]
            keys = {(fits[member][group].process, group) for member in family.members}
            certain = all(lines[member].rank is not None for member in family.members)
            if number in placed or (not again and keys & taken) or (score == 0 and (again or not certain)):
                continue
            placed.add(number)
            taken |= keys
            for member in family.members:
                pairing.groups[member] = (fits[member][group].process, group)
                pairing.basis[member] = _basis(certain, len(family.candidates), again)
    for number, family in enumerate(families):
        if number not in placed:
            for member in family.members:
                pairing.reasons[member] = "nothing that went through it agrees with a group of the run"


def _in_order(family: _Family, fits: Mapping[int, dict[GroupKey, RecordStream]]) -> list[GroupKey]:
    """The candidates of a family by first use in the run."""
    first = fits[family.members[0]]
    return sorted(family.candidates, key=lambda group: first[group].records[:1])


def _basis(certain: bool, candidates: int, again: bool) -> str:
    words = ["rank and size" if certain else "operations"]
    if candidates > 1 and certain:
        words.append("operations and order of first use")
    if again:
        words.append("continues a group that had a communicator before")
    return ", ".join(words)

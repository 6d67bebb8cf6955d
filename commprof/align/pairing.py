"""Pair the communicators of a log with the process groups of the run, with a confidence.

Torch's own line names the group of an address. Without this line, a communicator fits a group if its rank and
size match the process in the group, on every rank that shares a commId. Several groups can fit: a default
group and a data-parallel group with equal ranks have different communicators. Then the operations of
communicator and group decide, and after them the order of first use. If several candidates remain, none is
chosen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

import numpy as np

from commprof.align.alignment_streams import (
    GroupKey,
    LineStream,
    LogProcess,
    RecordStream,
    RunProcess,
    Vocabulary,
)
from commprof.align.expected_lines import Dialect
from commprof.align.sequences.edits import Codes, common_prefix, common_suffix

Streams = Mapping[tuple[RunProcess, GroupKey], RecordStream]
Confidence = Literal["certain", "likely", "none"]
TWO_GROUPS: Final = (
    "groups {groups} have equal ranks and issued the same operations: nothing distinguishes "
    "their communicators"
)


@dataclass(slots=True)
class Pairing:
    """The stream of records to which each communicator belongs, by position in the list of communicators.

    Attributes:
        streams: The stream of records.
        confidence, basis: How certain the pairing is, and its evidence.
        reasons: The reason why there is no pairing.
        undecided: The candidate streams of communicators whose group could not be decided.
    """

    streams: dict[int, RecordStream] = field(default_factory=dict)
    confidence: dict[int, Confidence] = field(default_factory=dict)
    basis: dict[int, str] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    undecided: dict[int, tuple[RecordStream, ...]] = field(default_factory=dict)


class _Family(NamedTuple):
    """Communicators that must belong to one group.

    They share one commId or one family of the log. A communicator with neither is a family of its own.
    """

    members: tuple[int, ...]
    # For each group, the number of lines that it could have left, and the number of lines in order at either end.
    agreement: dict[GroupKey, tuple[int, int]]
    named: bool  # torch's line names the group of the family


def pair_communicators(
    lines: Sequence[LineStream],
    streams: Streams,
    processes: Mapping[LogProcess, list[RunProcess]],
    vocabulary: Vocabulary,
) -> Pairing:
    """Assign communicators to groups.

    First, each group gets at most one communicator. Each remaining communicator is then assigned to the group
    that it continues.
    """
    by_process: dict[RunProcess, list[RecordStream]] = {}
    for (process, _), stream in streams.items():
        by_process.setdefault(process, []).append(stream)
    fits: dict[int, dict[GroupKey, RecordStream]] = {}
    pairing = Pairing()
    for number, line in enumerate(lines):
        candidates = [c for c in processes.get(line.process, []) if line.global_rank in (None, c.rank)]
        if len(candidates) != 1:
            pairing.reasons[number] = _no_process(line, len(candidates))
            continue
        groups = _fitting(line, by_process.get(candidates[0], []), vocabulary)
        if groups:
            fits[number] = groups
        else:
            pairing.reasons[number] = (
                f"no group of rank {candidates[0].rank} has {line.nranks} ranks with this process as rank "
                f"{line.rank} of the group"
            )
    _Assignment(lines, fits, vocabulary, pairing).decide()
    return pairing


def _no_process(line: LineStream, candidates: int) -> str:
    if candidates:
        return f"{candidates} processes of the run may have written it, and they cannot be distinguished"
    return f"the run has no process {line.process.pid} on {line.process.host}, and the log does not have its rank"


def _fitting(
    line: LineStream, streams: Sequence[RecordStream], vocabulary: Vocabulary
) -> dict[GroupKey, RecordStream]:
    """Return the streams of one process to which ``line`` may belong.

    Torch's line decides if it names the group, and otherwise size and rank decide.
    """
    sized = [
        stream
        for stream in streams
        if line.nranks in (None, stream.group_size) and line.rank in (None, stream.group_rank)
    ]
    named = [stream for stream in sized if line.pg is not None and stream.group.pg == line.pg]
    fitting = {stream.group: stream for stream in named or sized}
    if line.nranks not in (None, 1, 2) or not line.only_messages(vocabulary):
        return fitting
    for stream in streams:
        for peer in stream.peers(vocabulary):
            pair = stream.messages_with(vocabulary, peer)
            if line.nranks not in (None, pair.group_size) or line.rank not in (None, pair.group_rank):
                continue
            if stream.group_size == pair.group_size and len(pair.records) == len(stream.records):
                continue  # a group of two ranks that sent only these messages is the same stream
            fitting[pair.group] = pair
            if stream.group_size == pair.group_size:
                fitting.pop(stream.group, None)
    return fitting


class _Assignment:
    """The choice of a group for each family of communicators."""

    def __init__(
        self,
        lines: Sequence[LineStream],
        fits: Mapping[int, dict[GroupKey, RecordStream]],
        vocabulary: Vocabulary,
        pairing: Pairing,
    ) -> None:
        self._lines, self._fits = lines, fits
        self._vocabulary, self._pairing = vocabulary, pairing
        self._expected: dict[tuple[RunProcess, GroupKey, Dialect], Codes] = {}
        self._families = [self._family(members) for members in self._members()]
        self._group_of: dict[int, GroupKey] = {}
        self._again: set[int] = set()
        # The number of communicators of a group in a process.
        self._users: Counter[tuple[RunProcess, GroupKey]] = Counter()

    def decide(self) -> None:
        self._place()
        tied = self._tied()
        self._users.update(
            (self._fits[member][group].process, group)
            for number, group in self._group_of.items()
            for member in self._families[number].members
        )
        for number, family in enumerate(self._families):
            group = self._group_of.get(number)
            for member in family.members:
                if number in tied:
                    self._leave_open(member, tied[number])
                elif group is None:
                    self._pairing.reasons[member] = "none of its operations matches a group of the run"
                else:
                    self._settle(number, member, group)

    def _members(self) -> list[tuple[int, ...]]:
        members: dict[tuple[object, ...], list[int]] = {}
        uses: Counter[tuple[object, ...]] = Counter()
        for number in self._fits:
            line = self._lines[number]
            if line.comm_id is None:
                key = ("single", number) if line.family is None else ("family", line.family)
                members.setdefault(key, []).append(number)
                continue
            # A split with the same color repeats its commId. The n-th use on one rank is the n-th use on all ranks.
            use = (line.process, line.rank, line.comm_id)
            members.setdefault(("id", line.comm_id, uses[use]), []).append(number)
            uses[use] += 1
        return [tuple(numbers) for numbers in members.values()]

    def _family(self, members: tuple[int, ...]) -> _Family:
        common = set.intersection(*(set(self._fits[number]) for number in members))
        agreement = {}
        for group in common:
            each = [self._agreement(number, self._fits[number][group]) for number in members]
            agreement[group] = sum(score for score, _ in each), sum(ends for _, ends in each)
        named = all(
            self._lines[number].pg is not None and all(group.pg == self._lines[number].pg for group in common)
            for number in members
        )
        return _Family(members, agreement, named and len(common) == 1)

    def _agreement(self, number: int, stream: RecordStream) -> tuple[int, int]:
        """Return how many lines could be records of the stream, and how many are in order at either end."""
        line = self._lines[number]
        dialect = line.dialect(self._vocabulary, np.unique(stream.calls).tolist())
        key = (stream.process, stream.group, dialect)
        if key not in self._expected:
            self._expected[key] = stream.expect(self._vocabulary, dialect).codes
        expected, size = self._expected[key], len(self._vocabulary.lines)
        counts = np.minimum(
            np.bincount(expected, minlength=size), np.bincount(line.codes, minlength=size)
        ).sum()
        ends = common_prefix(expected, line.codes) + common_suffix(expected, line.codes)
        return int(counts), ends

    def _place(self) -> None:
        """Give each family the group with the best agreement.

        Groups with equal agreement are assigned in the order of first use.
        """
        first_use = {group: rank for rank, group in enumerate(self._groups_by_use())}
        proposals = [
            (agreement, number, group)
            for number, family in enumerate(self._families)
            for group, agreement in family.agreement.items()
        ]
        proposals.sort(key=lambda p: (-p[0][0], -p[0][1], p[1], first_use[p[2]]))
        taken: set[tuple[RunProcess, GroupKey]] = set()
        for again in (False, True):
            for (score, _), number, group in proposals:
                family = self._families[number]
                keys = {(self._fits[member][group].process, group) for member in family.members}
                ranked = all(self._lines[member].rank is not None for member in family.members)
                useless = score == 0 and (again or not (ranked or family.named))
                if number in self._group_of or (not again and keys & taken) or useless:
                    continue
                self._group_of[number] = group
                if again:
                    self._again.add(number)
                taken |= keys

    def _groups_by_use(self) -> list[GroupKey]:
        first: dict[GroupKey, int] = {}
        for fitting in self._fits.values():
            for group, stream in fitting.items():
                use = int(stream.records[0]) if len(stream.records) else -1
                first[group] = min(use, first.get(group, use))
        return sorted(first, key=lambda group: (first[group], group.pg, group.group_ranks))

    def _tied(self) -> dict[int, tuple[GroupKey, ...]]:
        """Return families that could equally swap their groups, or serve a group without a communicator in the log.

        If the order of use fits swapped groups better, the groups are swapped.
        """
        tied: dict[int, tuple[GroupKey, ...]] = {}
        owner_of = {group: number for number, group in self._group_of.items() if number not in self._again}
        for number, group in list(self._group_of.items()):
            family = self._families[number]
            if number in self._again or family.named:
                continue
            for other, agreement in family.agreement.items():
                if other == group or agreement != family.agreement[group] or not agreement[0]:
                    continue
                holder = owner_of.get(other)
                if holder is None:
                    tied[number] = (group, other)
                    continue
                back = self._families[holder].agreement
                if holder > number and not self._families[holder].named and back.get(group) == back[other]:
                    own, traded = self._order(number, holder, group, other)
                    if own == traded:
                        tied[number] = tied[holder] = (group, other)
                    elif traded > own:
                        self._group_of[number], self._group_of[holder] = other, group
                        owner_of[group], owner_of[other] = holder, number
                        break
        return tied

    def _order(self, number: int, holder: int, group: GroupKey, other: GroupKey) -> tuple[int, int]:
        """Return how well the order of use, at both ends, fits the assignment and the swapped assignment."""
        own = traded = 0
        by_process = {self._lines[member].process: member for member in self._families[holder].members}
        for member in self._families[number].members:
            partner = by_process.get(self._lines[member].process)
            if partner is None:
                continue
            recorded = _labels(*(self._fits[member][key].records for key in (group, other)))
            printed = _labels(self._lines[member].rows, self._lines[partner].rows)
            if len(recorded) and len(printed) and len(recorded) == len(printed):
                own += int((recorded == printed).sum())
                traded += int((recorded != printed).sum())
            else:
                own += common_prefix(recorded, printed) + common_suffix(recorded, printed)
                traded += common_prefix(1 - recorded, printed) + common_suffix(1 - recorded, printed)
        return own, traded

    def _settle(self, number: int, member: int, group: GroupKey) -> None:
        family, line = self._families[number], self._lines[member]
        users = self._users[self._fits[member][group].process, group]
        confidence, basis = self._confidence(family, line, users)
        self._pairing.streams[member] = self._fits[member][group]
        self._pairing.confidence[member] = confidence
        if number in self._again:
            basis += ", continues a group that had a communicator before"
        self._pairing.basis[member] = basis

    def _confidence(self, family: _Family, line: LineStream, users: int) -> tuple[Confidence, str]:
        """Return the confidence of a pairing and its evidence.

        Args:
            users: The number of communicators that were assigned to this group in this process.
        """
        if family.named:
            return "certain", "torch's line names the group"
        if line.rank is None:
            return "likely", "operations"
        if len(family.agreement) > 1:
            return "likely", "rank and size, operations and order of first use"
        score = next(iter(family.agreement.values()))[0]
        everybody = len({self._lines[member].process for member in family.members})
        if score and users == 1 and (everybody == line.nranks or line.global_rank is not None):
            return "certain", "rank and size, on all ranks" if everybody == line.nranks else "rank and size"
        return "likely", "rank and size"

    def _leave_open(self, member: int, groups: tuple[GroupKey, ...]) -> None:
        names = " and ".join(sorted({group.pg for group in groups}))
        self._pairing.reasons[member] = TWO_GROUPS.format(groups=names)
        self._pairing.undecided[member] = tuple(self._fits[member][group] for group in groups)


def _labels(first: Codes, second: Codes) -> Codes:
    """Return 0 and 1 for the elements of two ascending lists, in their common order."""
    places = np.concatenate((first, second))
    labels = np.repeat(np.array([0, 1]), (len(first), len(second)))
    return labels[np.argsort(places, kind="stable")]

"""Compare what the ranks of a group issued, and find the first collective in which they differ.

The functions are pure and use only the standard library.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from difflib import SequenceMatcher
from functools import lru_cache
from math import inf
from typing import Any, Final, NamedTuple, TypeAlias

from commprof.schema import Op

# Operation, payload bytes, root, element type, reduction. None means that the property is not known or may differ.
Agreed: TypeAlias = tuple[str, int | None, int | None, str | None, str | None]

_ROOTED: Final = frozenset({Op.BROADCAST, Op.REDUCE, Op.GATHER, Op.SCATTER})
_REDUCING: Final = frozenset({Op.ALL_REDUCE, Op.REDUCE, Op.REDUCE_SCATTER})
# The payload of these operations depends on the chunk of each rank. gloo needs chunks of equal size, and other backends
# do not.
_BY_PARTS: Final = frozenset({Op.GATHER, Op.SCATTER})
_GLOO: Final = "gloo"
# These types may contain arbitrary bytes, so another rank may use any element type for the same data.
_BYTE_TYPES: Final = frozenset({"uint8", "int8", "bool"})


class IssuedCall(NamedTuple):
    """One collective as a rank issued it.

    ``number`` is its position among the collectives of the group that did not raise, from 0.
    """

    number: int
    op: str
    payload_bytes: int
    dtype: str | None
    reduce_op: str | None
    root: int  # global rank; -1 for none
    backend: str | None = None
    step: int = -1
    after_step: int | None = None
    module: str | None = None
    purpose: str | None = None
    call_site: str | None = None
    input_bytes: int | None = None
    output_bytes: int | None = None
    input_splits: str | None = None
    output_splits: str | None = None

    @property
    def agreed(self) -> Agreed:
        """The properties that the calls of the other ranks of the group must also have."""
        return agreed(self.op, self.payload_bytes, self.dtype, self.reduce_op, self.root, self.backend)

    def as_dict(self) -> dict[str, Any]:
        """Return the call under the names of the schema's columns."""
        named = self._asdict()
        return {"pg_seq": named.pop("number"), "peer": named.pop("root"), **named}


def call_of(row: Mapping[str, Any], number: int) -> IssuedCall:
    """Return the call of a row with some columns of ``collectives``.

    Args:
        number: The number of the call among the calls of its group.
    """
    names = (name for name in IssuedCall._fields if name in row)
    return IssuedCall(number=number, root=row["peer"], **{name: row[name] for name in names})


class Conduct(NamedTuple):
    """What some ranks did at the first difference.

    ``call`` is the call that they issued. If they ``skipped`` the call that the others issued, ``call`` is
    their next call, or None if there is none.
    """

    ranks: tuple[int, ...]
    call: IssuedCall | None
    skipped: bool = False

    @property
    def text(self) -> str:
        """A clause such as ``rank 1 issued all_reduce #5 (400 bytes, float32, SUM) at train.py:8 step``."""
        who = ranks_text(self.ranks)
        if not self.skipped and self.call is not None:
            return f"{who} issued {call_text(self.call)}"
        if self.call is None:
            return f"{who} did not, and issued nothing more in the group"
        return f"{who} did not, and issued {call_text(self.call)} next"


class Difference(NamedTuple):
    """The first place at which the ranks of a group issued different collectives, or two ranks unequal messages.

    ``head`` is the kind of difference as a clause. If ``head`` is None, the ranks issued different
    collectives.
    """

    pg: str
    group_ranks: str
    conducts: tuple[Conduct, ...]
    head: str | None = None

    @property
    def call(self) -> IssuedCall:
        """The call that the first ranks issued."""
        return next(each.call for each in self.conducts if each.call is not None)

    @property
    def sentence(self) -> str:
        """The difference as a clause."""
        head = self.head or (
            f"the ranks of group {self.pg} ({self.group_ranks}) did not issue the same {when_text(self.call)}"
        )
        return f"{head}: {'; '.join(each.text for each in self.conducts)}"

    def as_dict(self) -> dict[str, Any]:
        """Return the difference as JSON values."""
        return {
            "pg": self.pg,
            "group_ranks": self.group_ranks,
            "pg_seq": self.call.number,
            "step": self.call.step,
            "ranks": [
                {
                    "ranks": list(each.ranks),
                    "skipped": each.skipped,
                    "call": None if each.call is None else each.call.as_dict(),
                }
                for each in self.conducts
            ],
            "sentence": self.sentence,
        }


@lru_cache(maxsize=1 << 14)
def agreed(
    op: str, payload_bytes: int, dtype: str | None, reduce_op: str | None, root: int, backend: str | None
) -> Agreed:
    """Return the properties of one collective on which all ranks of a group must agree.

    The chunks of an all_to_all may have any size, and so may the chunks of a gather or scatter if the backend
    is not gloo. An element type of bytes matches any other type, except in a reduction.
    """
    reduces = op in _REDUCING
    free = op == Op.ALL_TO_ALL or (op in _BY_PARTS and backend != _GLOO)
    return (
        op,
        None if free else payload_bytes,
        root if op in _ROOTED and root >= 0 else None,
        dtype if reduces or dtype not in _BYTE_TYPES else None,
        reduce_op if reduces else None,
    )


def conflict(first: Agreed, second: Agreed) -> bool:
    """Return whether two ranks cannot have issued the same collective. An unknown property is not a conflict."""
    return any(
        mine is not None and theirs is not None and mine != theirs
        for mine, theirs in zip(first, second, strict=True)
    )


def first_difference(
    pg: str,
    group_ranks: str,
    sequences: Mapping[int, Sequence[IssuedCall]],
    *,
    ended: Collection[int] = (),
    gaps: bool = False,
) -> Difference | None:
    """Return the first place at which the ranks differ, or None if they do not differ.

    A rank that only stopped earlier does not count as a difference.

    Args:
        sequences: The calls of each rank in the group, in order of number.
        ended: The ranks whose last call here was certainly their last call in the group.
        gaps: Whether records of a rank may be missing.
    """
    number = _first_number(sequences, ended, gaps)
    return None if number is None else difference_from(pg, group_ranks, sequences, number)


def unshifted(differences: Iterable[Difference], sequences: Iterable[Difference]) -> list[Difference]:
    """Return the ``differences`` that precede the difference of their group in ``sequences``.

    After this difference, equal numbers no longer refer to the same call.
    """
    ends = {(each.pg, each.group_ranks): each.call.number for each in sequences}
    return [each for each in differences if each.call.number < ends.get((each.pg, each.group_ranks), inf)]


def difference_from(
    pg: str, group_ranks: str, sequences: Mapping[int, Sequence[IssuedCall]], number: int
) -> Difference:
    """Return the place at which ranks that certainly differ at ``number`` first differed.

    If a rank skips one of many equal collectives, the numbers show the difference only later. Steps and call
    sites show where the difference began.
    """
    reference = reference_of({rank: [call.agreed for call in calls] for rank, calls in sequences.items()})
    mine = sequences[reference]
    turns = {
        rank: turn
        for rank, theirs in sequences.items()
        if rank != reference and (turn := _first_turn(mine, theirs)) is not None
    }
    places = [_place_of(mine, turn) for turn in turns.values()]
    if places and min(places) <= number:
        first = min(places)
        there = {rank: turn for rank, turn in turns.items() if _place_of(mine, turn) == first}
        return Difference(pg, group_ranks, _at_turns(sequences, mine, there))
    calls_at = {rank: _at(theirs, number) for rank, theirs in sequences.items()}
    conducts = {
        rank: (call or _after(sequences[rank], number), call is None) for rank, call in calls_at.items()
    }
    return Difference(pg, group_ranks, _together(conducts))


def _first_number(
    sequences: Mapping[int, Sequence[IssuedCall]], ended: Collection[int], gaps: bool
) -> int | None:
    by_number: dict[int, dict[int, Agreed]] = {}
    for rank, calls in sequences.items():
        for call in calls:
            by_number.setdefault(call.number, {})[rank] = call.agreed
    last = {rank: calls[-1].number if calls else -1 for rank, calls in sequences.items()}
    for number, agreed_by_rank in sorted(by_number.items()):
        kinds = set(agreed_by_rank.values())
        if len(kinds) > 1 and any(conflict(one, other) for one in kinds for other in kinds):
            return number
        missing = [rank for rank in sequences if rank not in agreed_by_rank]
        if any(rank in ended if last[rank] < number else not gaps for rank in missing):
            return number
    return None


def reference_of(sequences: Mapping[int, Sequence[Hashable]]) -> int:
    """Return a rank of the largest set of ranks with equal sequences.

    Among equally large sets, the set with the lowest rank is chosen.
    """
    same: dict[tuple[Hashable, ...], list[int]] = {}
    for rank in sorted(sequences):
        same.setdefault(tuple(sequences[rank]), []).append(rank)
    return max(same.values(), key=lambda ranks: (len(ranks), -ranks[0]))[0]


class _Turn(NamedTuple):
    """The place where a rank departs from the reference.

    It contains both positions, and whether each of the two issued a call there that the other did not issue.
    """

    mine: int
    theirs: int
    mine_issued: bool
    theirs_issued: bool


def _first_turn(mine: Sequence[IssuedCall], theirs: Sequence[IssuedCall]) -> _Turn | None:
    keys = [[(c.agreed, c.step, c.module, c.call_site) for c in calls] for calls in (mine, theirs)]
    end = min(len(mine), len(theirs))
    for tag, i1, i2, j1, j2 in SequenceMatcher(None, keys[0], keys[1], autojunk=False).get_opcodes():
        # One of the two ranks stopped earlier.
        if tag == "equal" or (tag != "replace" and max(i1, j1) >= end):
            continue
        ours, others = mine[i1:i2], theirs[j1:j2]
        for place, (a, b) in enumerate(zip(ours, others, strict=False)):
            if conflict(a.agreed, b.agreed):
                return _Turn(i1 + place, j1 + place, True, True)
        if len(ours) != len(others) and (i2 < len(mine) or j2 < len(theirs)):
            both = min(len(ours), len(others))
            return _Turn(i1 + both, j1 + both, len(ours) > both, len(others) > both)
        # The same collective from different call sites is not a difference: these branches send the same data.
    return None


def _place_of(mine: Sequence[IssuedCall], turn: _Turn) -> int:
    return mine[turn.mine].number if turn.mine < len(mine) else mine[-1].number + 1


def _at_turns(
    sequences: Mapping[int, Sequence[IssuedCall]], mine: Sequence[IssuedCall], turns: Mapping[int, _Turn]
) -> tuple[Conduct, ...]:
    """Return what each rank did at the place where the ranks in ``turns`` depart from the reference."""
    one = next(iter(turns.values()))
    issued = any(turn.mine_issued for turn in turns.values())
    here = _nth(mine, one.mine), not issued
    conducts = {}
    for rank, theirs in sequences.items():
        turn = turns.get(rank)
        conducts[rank] = here if turn is None else (_nth(theirs, turn.theirs), not turn.theirs_issued)
    return _together(conducts)


def _nth(calls: Sequence[IssuedCall], place: int) -> IssuedCall | None:
    return calls[place] if place < len(calls) else None


def _at(calls: Sequence[IssuedCall], number: int) -> IssuedCall | None:
    return next((call for call in calls if call.number == number), None)


def _after(calls: Sequence[IssuedCall], number: int) -> IssuedCall | None:
    return next((call for call in calls if call.number > number), None)


def _together(conducts: Mapping[int, tuple[IssuedCall | None, bool]]) -> tuple[Conduct, ...]:
    """Return the conducts, with ranks that did the same in one conduct.

    Ranks that issued a call come first, and larger sets come before smaller sets.
    """
    same: dict[tuple[Agreed | None, bool], list[int]] = {}
    for rank in sorted(conducts):
        call, skipped = conducts[rank]
        same.setdefault((None if call is None else call.agreed, skipped), []).append(rank)
    ordered = sorted(same.items(), key=lambda item: (item[0][1], -len(item[1]), item[1]))
    return tuple(Conduct(tuple(ranks), conducts[ranks[0]][0], skipped) for (_, skipped), ranks in ordered)


def call_text(call: IssuedCall) -> str:
    """Return ``all_reduce #5 (400 bytes, float32, SUM) for module blocks.1 at train.py:8 step``, for example."""
    side = {Op.SEND.value: " to", Op.RECV.value: " from"}.get(call.op)
    other = "" if side is None else f"{side} rank {call.root}"
    return f"{call.op} #{call.number}{other}{_details(call)}{_place_text(call.module, call.call_site)}"


def _details(call: IssuedCall) -> str:
    if call.op == Op.BARRIER:
        return ""
    details = [f"{call.payload_bytes:,} bytes", call.dtype, call.reduce_op]
    details.append(f"root {call.root}" if call.op in _ROOTED and call.root >= 0 else None)
    return f" ({', '.join(text for text in details if text)})"


def _place_text(module: str | None, call_site: str | None) -> str:
    """Return the place in the model and in the program, if it is known."""
    of_module = f" for module {module}" if module else ""
    return of_module + (f" at {call_site}" if call_site else "")


def when_text(call: IssuedCall) -> str:
    """Return ``in step 3``, ``before the first step`` or ``after step 3``."""
    if call.step >= 0:
        return f"in step {call.step}"
    return "before the first step" if call.after_step is None else f"after step {call.after_step}"


def ranks_text(ranks: Sequence[int]) -> str:
    """Return ``rank 1``, ``ranks 0, 2, 3`` or ``ranks 0-6, 9``: four or more consecutive ranks are a range.

    >>> ranks_text([1]), ranks_text([0, 2, 3]), ranks_text([0, 1, 2, 3, 5])
    ('rank 1', 'ranks 0, 2, 3', 'ranks 0-3, 5')
    """
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    ranges = [
        text
        for run in runs
        for text in ([f"{run[0]}-{run[-1]}"] if len(run) > 3 else [str(rank) for rank in run])
    ]
    return f"rank{'' if len(set(ranks)) == 1 else 's'} {', '.join(ranges)}"

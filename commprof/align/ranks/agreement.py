"""Compares what the ranks of a group issued: the first collective on which they differ. Pure, standard library only."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from difflib import SequenceMatcher
from functools import lru_cache
from math import inf
from typing import Any, Final, NamedTuple, TypeAlias

from commprof.schema import Op

# Operation, payload bytes, root, element type, reduction. None: not known, or free to differ.
Agreed: TypeAlias = tuple[str, int | None, int | None, str | None, str | None]

_ROOTED: Final = frozenset({Op.BROADCAST, Op.REDUCE, Op.GATHER, Op.SCATTER})
_REDUCING: Final = frozenset({Op.ALL_REDUCE, Op.REDUCE, Op.REDUCE_SCATTER})
# A rank's own chunk decides their payload. gloo needs chunks of equal size, other backends do not.
_BY_PARTS: Final = frozenset({Op.GATHER, Op.SCATTER})
_GLOO: Final = "gloo"
# Bytes of any content: another rank may use any element type for them.
_BYTE_TYPES: Final = frozenset({"uint8", "int8", "bool"})


class IssuedCall(NamedTuple):
    """One collective as a rank issued it.

    ``number``: its position among those of the group that did not raise, from 0.
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
        """What the other ranks of the group must have issued with it."""
        return agreed(self.op, self.payload_bytes, self.dtype, self.reduce_op, self.root, self.backend)

    def as_dict(self) -> dict[str, Any]:
        """The call under the names of the schema's columns."""
        named = self._asdict()
        return {"pg_seq": named.pop("number"), "peer": named.pop("root"), **named}


def call_of(row: Mapping[str, Any], number: int) -> IssuedCall:
    """The call of a row of some columns of ``collectives``, with the ``number`` that it has among the calls of its group."""
    names = (name for name in IssuedCall._fields if name in row)
    return IssuedCall(number=number, root=row["peer"], **{name: row[name] for name in names})


class Conduct(NamedTuple):
    """What some ranks did at the first difference.

    ``call``: what they issued. Where they ``skipped`` what the others issued, it is their next call, None for none.
    """

    ranks: tuple[int, ...]
    call: IssuedCall | None
    skipped: bool = False

    @property
    def text(self) -> str:
        """``rank 1 issued all_reduce #5 (400 bytes, float32, SUM) at train.py:8 step``."""
        who = ranks_text(self.ranks)
        if not self.skipped and self.call is not None:
            return f"{who} issued {call_text(self.call)}"
        if self.call is None:
            return f"{who} did not, and issued nothing more in the group"
        return f"{who} did not, and issued {call_text(self.call)} next"


class Difference(NamedTuple):
    """The first place at which the ranks of a group issued different collectives, or two ranks unequal messages.

    ``head``: the kind of difference as a clause; None: the ranks did not issue the same.
    """

    pg: str
    group_ranks: str
    conducts: tuple[Conduct, ...]
    head: str | None = None

    @property
    def call(self) -> IssuedCall:
        """What the first ranks issued."""
        return next(each.call for each in self.conducts if each.call is not None)

    @property
    def sentence(self) -> str:
        """The difference as a clause."""
        head = self.head or (
            f"the ranks of group {self.pg} ({self.group_ranks}) did not issue the same {when_text(self.call)}"
        )
        return f"{head}: {'; '.join(each.text for each in self.conducts)}"

    def as_dict(self) -> dict[str, Any]:
        """The difference as JSON values."""
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
    """The properties of one collective on which all ranks of a group must agree.

    Chunks of an all_to_all may have any size, and so may those of a gather or scatter where the backend is not gloo. An
    element type of bytes matches any other, except in a reduction.
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
    """Whether two ranks cannot have issued the same collective. An unknown property is no conflict."""
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
    """The first place at which the ranks differ; None where they do not.

    A rank that merely stopped earlier is no difference.

    Args:
        sequences: the calls of each rank in the group, in order of number.
        ended: ranks whose last call here was certainly their last in the group.
        gaps: records of a rank may be missing.
    """
    number = _first_number(sequences, ended, gaps)
    return None if number is None else difference_from(pg, group_ranks, sequences, number)


def unshifted(differences: Iterable[Difference], sequences: Iterable[Difference]) -> list[Difference]:
    """``differences`` before that of their group in ``sequences``. After it, equal numbers no longer mean the same call."""
    ends = {(each.pg, each.group_ranks): each.call.number for each in sequences}
    return [each for each in differences if each.call.number < ends.get((each.pg, each.group_ranks), inf)]


def difference_from(
    pg: str, group_ranks: str, sequences: Mapping[int, Sequence[IssuedCall]], number: int
) -> Difference:
    """The place at which ranks that certainly differ at ``number`` did so first.

    Where a rank skips one of many equal collectives, numbers show it later: steps and call sites show where it began.
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
    """One of the largest set of ranks with equal sequences; among equally large ones that with the lowest rank."""
    same: dict[tuple[Hashable, ...], list[int]] = {}
    for rank in sorted(sequences):
        same.setdefault(tuple(sequences[rank]), []).append(rank)
    return max(same.values(), key=lambda ranks: (len(ranks), -ranks[0]))[0]


class _Turn(NamedTuple):
    """Where a rank departs from the reference: both positions, and whether each issued there what the other did not."""

    mine: int
    theirs: int
    mine_issued: bool
    theirs_issued: bool


def _first_turn(mine: Sequence[IssuedCall], theirs: Sequence[IssuedCall]) -> _Turn | None:
    keys = [[(c.agreed, c.step, c.module, c.call_site) for c in calls] for calls in (mine, theirs)]
    end = min(len(mine), len(theirs))
    for tag, i1, i2, j1, j2 in SequenceMatcher(None, keys[0], keys[1], autojunk=False).get_opcodes():
        if tag == "equal" or (tag != "replace" and max(i1, j1) >= end):  # one stopped earlier
            continue
        ours, others = mine[i1:i2], theirs[j1:j2]
        for place, (a, b) in enumerate(zip(ours, others, strict=False)):
            if conflict(a.agreed, b.agreed):
                return _Turn(i1 + place, j1 + place, True, True)
        if len(ours) != len(others) and (i2 < len(mine) or j2 < len(theirs)):
            both = min(len(ours), len(others))
            return _Turn(i1 + both, j1 + both, len(ours) > both, len(others) > both)
        # The same collective from another call site: branches that send the same.
    return None


def _place_of(mine: Sequence[IssuedCall], turn: _Turn) -> int:
    return mine[turn.mine].number if turn.mine < len(mine) else mine[-1].number + 1


def _at_turns(
    sequences: Mapping[int, Sequence[IssuedCall]], mine: Sequence[IssuedCall], turns: Mapping[int, _Turn]
) -> tuple[Conduct, ...]:
    """What each rank did where those of ``turns`` depart from the reference."""
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
    """Ranks that did the same, those that issued something first, the larger set first."""
    same: dict[tuple[Agreed | None, bool], list[int]] = {}
    for rank in sorted(conducts):
        call, skipped = conducts[rank]
        same.setdefault((None if call is None else call.agreed, skipped), []).append(rank)
    ordered = sorted(same.items(), key=lambda item: (item[0][1], -len(item[1]), item[1]))
    return tuple(Conduct(tuple(ranks), conducts[ranks[0]][0], skipped) for (_, skipped), ranks in ordered)


def call_text(call: IssuedCall) -> str:
    """``all_reduce #5 (400 bytes, float32, SUM) for module blocks.1 at train.py:8 step``."""
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
    """Where in the model and in the program, as far as it is known."""
    of_module = f" for module {module}" if module else ""
    return of_module + (f" at {call_site}" if call_site else "")


def when_text(call: IssuedCall) -> str:
    """``in step 3``, ``before the first step`` or ``after step 3``."""
    if call.step >= 0:
        return f"in step {call.step}"
    return "before the first step" if call.after_step is None else f"after step {call.after_step}"


def ranks_text(ranks: Sequence[int]) -> str:
    """``rank 1``, ``ranks 0, 2, 3``, ``ranks 0-6, 9``: four or more consecutive ranks as a range.

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

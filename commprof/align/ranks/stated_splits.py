"""Compare the sizes that sender and receiver specify for an all_to_all.

The functions are pure and use only the standard library.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from commprof.align.ranks.agreement import Conduct, Difference, IssuedCall, when_text
from commprof.schema import Op, parse_ranks, parse_splits

# Bytes for each rank of the group, in the order of the group, or None if they are not known.
_Sizes: TypeAlias = tuple[int, ...] | None


def first_unequal_split(
    pg: str, group_ranks: str, calls: Mapping[int, Mapping[int, IssuedCall]]
) -> Difference | None:
    """Return the first all_to_all in which a rank sends a different size than its receiver expects, or None.

    If a split or the record of a rank is missing, its sizes are not compared.

    Args:
        calls: For each number in the group, the call that each rank issued under this number.
    """
    members = parse_ranks(group_ranks)
    for number in sorted(calls):
        of_ranks = {rank: call for rank, call in calls[number].items() if call.op == Op.ALL_TO_ALL}
        sent = [_sizes(of_ranks.get(rank), len(members), is_input=True) for rank in members]
        expected = [_sizes(of_ranks.get(rank), len(members), is_input=False) for rank in members]
        if None not in expected and sent == list(zip(*(sizes or () for sizes in expected), strict=True)):
            continue
        for sender, of_sender in enumerate(sent):
            for receiver, of_receiver in enumerate(expected):
                if of_sender is None or of_receiver is None:
                    continue
                if of_sender[receiver] != of_receiver[sender]:
                    return _difference(
                        (pg, group_ranks),
                        (of_ranks[members[sender]], of_ranks[members[receiver]]),
                        (members[sender], members[receiver]),
                        (of_sender[receiver], of_receiver[sender]),
                    )
    return None


def _sizes(call: IssuedCall | None, ranks: int, *, is_input: bool) -> _Sizes:
    if call is None:
        return None
    text, size = (
        (call.input_splits, call.input_bytes) if is_input else (call.output_splits, call.output_bytes)
    )
    if text is not None:
        return parse_splits(text, ranks)
    return None if size is None or size % ranks else (size // ranks,) * ranks


def _difference(
    group: tuple[str, str],
    calls: tuple[IssuedCall, IssuedCall],
    ranks: tuple[int, int],
    sizes: tuple[int, int],
) -> Difference:
    (pg, group_ranks), (call, theirs), (sender, receiver) = group, calls, ranks
    where = f"in all_to_all #{call.number} of group {pg} ({group_ranks}) {when_text(call)}"
    if sender == receiver:
        head = f"{where}, rank {sender} gives {sizes[0]:,} bytes to itself and expects {sizes[1]:,}"
        return Difference(pg, group_ranks, (Conduct((sender,), call),), head)
    head = f"{where}, rank {sender} sends {sizes[0]:,} bytes to rank {receiver}, which expects {sizes[1]:,}"
    return Difference(pg, group_ranks, (Conduct((sender,), call), Conduct((receiver,), theirs)), head)

"""Messages from rank to rank of which only one end is recorded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import pyarrow as pa

from commprof.ledger.issue import StepKey, step_list
from commprof.ledger.lookup import combinations, numbers_of, where
from commprof.schema import Op

COLUMNS: Final = ("attempt", "pg", "group_ranks", "step", "rank", "peer", "op", "payload_bytes")


class _Pair(NamedTuple):
    """Two ranks, of which one sends the other messages in a group."""

    attempt: int
    group_ranks: str
    pg: str
    source: int
    target: int


class _Sum(NamedTuple):
    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody calls on a sum
    payload_bytes: int


_NONE: Final = _Sum(0, 0)


class Ends:
    """What ranks sent each other and received, summed up of records that are added part by part."""

    def __init__(self) -> None:
        self._ranks: set[tuple[int, int]] = set()  # attempt, rank
        self._from_any: set[tuple[int, int]] = set()
        self._sums: dict[_Pair, dict[int, dict[str, _Sum]]] = defaultdict(lambda: defaultdict(dict))

    def add(self, part: pa.Table) -> None:
        """Take in some records: their columns :data:`COLUMNS`."""
        self._ranks |= {key for key, _ in combinations(part, ["attempt", "rank"])}
        rows = part.filter(pa.array(where(part, ["op"], lambda op: op in (Op.SEND, Op.RECV))))
        sizes, _ = numbers_of(rows, "payload_bytes")
        for key, places in combinations(rows, COLUMNS[:-1]):
            attempt, pg, group_ranks, step, rank, peer, op = key
            if peer < 0:
                self._from_any.add((attempt, rank))
                continue
            source, target = (rank, peer) if op == Op.SEND else (peer, rank)
            here = self._sums[_Pair(attempt, group_ranks, pg, source, target)][step]
            before = here.get(op, _NONE)
            here[op] = _Sum(before.count + len(places), before.payload_bytes + int(sizes[places].sum()))

    def lone(self) -> list[str]:
        """Pairs of ranks of which one received something else than the other sent, as clauses.

        Pairs of which one left no records are left out, and ranks that receive from whoever sends.
        """
        found = []
        for pair, steps in sorted(self._sums.items()):
            ends = {(pair.attempt, pair.source), (pair.attempt, pair.target)}
            if not ends <= self._ranks or ends & self._from_any or pair.source == pair.target:
                continue
            if _total(steps, Op.SEND) != _total(steps, Op.RECV):
                found.append(_clause(pair, steps))
        return found


def _total(steps: Mapping[int, Mapping[str, _Sum]], op: str) -> _Sum:
    sums = [sent.get(op, _NONE) for sent in steps.values()]
    return _Sum(sum(each.count for each in sums), sum(each.payload_bytes for each in sums))


def _clause(pair: _Pair, steps: Mapping[int, Mapping[str, Any]]) -> str:
    at = next(step for step in sorted(steps) if steps[step].get(Op.SEND) != steps[step].get(Op.RECV))
    sent, received = (steps[at].get(op, _NONE) for op in (Op.SEND, Op.RECV))
    when = step_list([StepKey(pair.attempt, max(at, -1))])
    return (
        f"rank {pair.source} sent rank {pair.target} {sent.count:,} messages ({sent.payload_bytes:,} bytes) in group "
        f"{pair.pg} ({pair.group_ranks}), and {received.count:,} ({received.payload_bytes:,} bytes) were received "
        f"({when[0].lower()}{when[1:]})"
    )

"""Finds point-to-point messages that were recorded at only one of their two ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from difflib import SequenceMatcher
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from commprof.align.ranks.agreement import Conduct, Difference, IssuedCall, call_of
from commprof.align.ranks.collectives import has_raised
from commprof.ledger.records.issued import StepKey, step_list
from commprof.ledger.records.row_index import combinations, numbers_of, where
from commprof.ledger.requests.request import RecordedRun, last_attempt
from commprof.schema import Op

_KEY: Final = ("attempt", "pg", "group_ranks", "step", "rank", "peer", "op")
COLUMNS: Final = (*_KEY, "payload_bytes", "pg_seq")
_SHOWN: Final = (
    *COLUMNS,
    "dtype",
    "reduce_op",
    "backend",
    "after_step",
    "module",
    "purpose",
    "call_site",
)
_NEAR: Final = 256  # number of messages of a step that are compared


class _Pair(NamedTuple):
    """A sender and a receiver of messages in a group."""

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
    """The messages that ranks sent to each other and received, as counts and bytes. Records are added in parts."""

    def __init__(self) -> None:
        self._ranks: set[tuple[int, int]] = set()  # attempt, rank
        self._from_any: set[tuple[int, int]] = set()
        self._sums: dict[_Pair, dict[int, dict[str, _Sum]]] = defaultdict(lambda: defaultdict(dict))

    def add(self, part: pa.Table) -> None:
        """Add the records in ``part``, with the columns :data:`COLUMNS`."""
        self._ranks |= {key for key, _ in combinations(part, ["attempt", "rank"])}
        rows = _messages_in(part)
        sizes, _ = numbers_of(rows, "payload_bytes")
        for key, places in combinations(rows, _KEY):
            attempt, pg, group_ranks, step, rank, peer, op = key
            if peer < 0:
                self._from_any.add((attempt, rank))
                continue
            source, target = (rank, peer) if op == Op.SEND else (peer, rank)
            here = self._sums[_Pair(attempt, group_ranks, pg, source, target)][step]
            before = here.get(op, _NONE)
            here[op] = _Sum(before.count + len(places), before.payload_bytes + int(sizes[places].sum()))

    def lone(self, run: RecordedRun) -> list[Difference]:
        """Return the first unmatched message of each pair of ranks whose sent and received messages differ.

        Pairs with a rank that has no records are left out, and so are ranks that receive from any rank. Attempts before
        the last one are left out, too, because they were stopped with messages in flight.

        Args:
            run: The run whose records were added.
        """
        first_steps, last = {}, last_attempt(run)
        for pair, steps in sorted(self._sums.items()):
            if pair.attempt < last:
                continue
            ends = {(pair.attempt, pair.source), (pair.attempt, pair.target)}
            if not ends <= self._ranks or ends & self._from_any or pair.source == pair.target:
                continue
            if _total(steps, Op.SEND) != _total(steps, Op.RECV):
                first_steps[pair] = _first_uneven(steps)
        return [
            Difference(pair.pg, pair.group_ranks, _conducts(pair, messages), _clause(pair, self._sums[pair]))
            for pair, messages in (_messages(run, first_steps).items() if first_steps else ())
        ]


def _messages_in(part: pa.Table) -> pa.Table:
    """Return the sends and receives of ``part`` that did not raise."""
    rows = part.filter(pa.array(where(part, ["op"], lambda op: op in (Op.SEND, Op.RECV))))
    return rows.filter(pc.invert(has_raised(rows)))


def _total(steps: Mapping[int, Mapping[str, _Sum]], op: str) -> _Sum:
    sums = [sent.get(op, _NONE) for sent in steps.values()]
    return _Sum(sum(each.count for each in sums), sum(each.payload_bytes for each in sums))


def _first_uneven(steps: Mapping[int, Mapping[str, _Sum]]) -> int:
    return next(step for step in sorted(steps) if steps[step].get(Op.SEND) != steps[step].get(Op.RECV))


def _clause(pair: _Pair, steps: Mapping[int, Mapping[str, _Sum]]) -> str:
    at = _first_uneven(steps)
    sent, received = (steps[at].get(op, _NONE) for op in (Op.SEND, Op.RECV))
    when = step_list([StepKey(pair.attempt, max(at, -1))])
    return (
        f"rank {pair.source} sent rank {pair.target} {sent.count:,} messages ({sent.payload_bytes:,} bytes) in group "
        f"{pair.pg} ({pair.group_ranks}), and {received.count:,} ({received.payload_bytes:,} bytes) were received "
        f"({when[0].lower()}{when[1:]})"
    )


def _messages(run: RecordedRun, steps: Mapping[_Pair, int]) -> dict[_Pair, dict[str, pa.Table]]:
    """Return the sent and the received messages of each pair in the step given in ``steps``, in order."""
    tables_of_pair: dict[_Pair, dict[str, list[pa.Table]]] = defaultdict(lambda: {Op.SEND: [], Op.RECV: []})
    for part in run.parts("collectives", _SHOWN):
        rows = _messages_in(part)
        for key, places in combinations(rows, _KEY):
            attempt, pg, group_ranks, step, rank, peer, op = key
            source, target = (rank, peer) if op == Op.SEND else (peer, rank)
            pair = _Pair(attempt, group_ranks, pg, source, target)
            if steps.get(pair) == step:
                tables_of_pair[pair][op].append(rows.take(pa.array(places)))
    return {
        pair: {op: pa.concat_tables(tables) for op, tables in tables_of_pair[pair].items() if tables}
        for pair in steps
    }


def _conducts(pair: _Pair, messages: Mapping[str, pa.Table]) -> tuple[Conduct, ...]:
    """Return the calls of both ranks at the first message that only one rank has, or whose sizes differ."""
    sizes = [
        numbers_of(messages[op], "payload_bytes")[0] if op in messages else np.zeros(0, np.int64)
        for op in (Op.SEND, Op.RECV)
    ]
    both = min(map(len, sizes))
    apart = np.flatnonzero(sizes[0][:both] != sizes[1][:both])
    begin = int(apart[0]) if len(apart) else both
    sent, received = (
        _calls(messages[op].slice(begin, _NEAR)) if op in messages else [] for op in (Op.SEND, Op.RECV)
    )
    near = [[call.payload_bytes for call in ends] for ends in (sent, received)]
    tag, i, _, j, _ = SequenceMatcher(None, near[0], near[1], autojunk=False).get_opcodes()[0]
    return tuple(
        Conduct((rank,), ends[place] if place < len(ends) else None, skipped=tag == absent)
        for rank, ends, place, absent in (
            (pair.source, sent, i, "insert"),
            (pair.target, received, j, "delete"),
        )
    )


def _calls(rows: pa.Table) -> list[IssuedCall]:
    return [call_of(row, row["pg_seq"]) for row in rows.to_pylist()]

"""The operations of each step, with all values that determine their bytes between hosts.

They are needed for the comparison with the counters of each host.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from commprof.align.ranks.collectives import has_raised
from commprof.align.sequences.group_ids import numbered
from commprof.ledger.records.backends import Call, known, sent_by_rank
from commprof.ledger.records.issued import Executed, Issued
from commprof.ledger.records.precount import COLUMNS as OF_PRECOUNT
from commprof.ledger.records.precount import GROUP, Survey, by_last_step
from commprof.ledger.records.readings import BEFORE_ALL, StepReadings
from commprof.ledger.records.readings import COLUMNS as OF_READINGS
from commprof.ledger.records.row_index import Flags, combinations, where
from commprof.schema import OPS, Op, parse_ranks, parse_splits

_P2P: Final = frozenset({Op.SEND, Op.RECV})
_UNEVEN_BUT_ON_GLOO: Final = frozenset({Op.ALL_GATHER, Op.REDUCE_SCATTER})
_OF_RECORD: Final = (
    "step",
    "after_step",
    "op",
    "backend",
    "group_ranks",
    "group_size",
    "payload_bytes",
    "peer",
    "rank",
)
_SIZES: Final = ("input_bytes", "output_bytes", "input_splits", "output_splits")
COLUMNS: Final = tuple(dict.fromkeys((*OF_PRECOUNT, *_OF_RECORD, *_SIZES, *OF_READINGS)))


class Sending(NamedTuple):
    """A collective or message between ``members``, the global ranks of its group in order."""

    call: Call
    members: tuple[int, ...]


class Sums(NamedTuple):
    """Aggregated messages within steps, and outside of steps by the step before."""

    in_steps: Issued
    outside: Issued


class Sendings:
    """The number of times each :class:`Sending` was sent in each step, including the time outside of steps after it."""

    def __init__(self) -> None:
        self._steps: dict[int, Counter[Sending]] = defaultdict(Counter)
        self._outside: dict[int, Counter[Sending]] = defaultdict(Counter)

    def add(self, step: int, sending: Sending, count: int, is_outside: bool = False) -> None:
        """Add ``count`` times ``sending`` in ``step``, or outside of steps after ``step``."""
        self._steps[step][sending] += count
        if is_outside:
            self._outside[step][sending] += count

    def between(self, steps: tuple[int, int] | None) -> Mapping[Sending, int]:
        """Return the operations between the readings of both ``steps``, or of the whole run if ``steps`` is None.

        The reading of a step is taken before the next step begins.
        """
        return _between(self._steps, steps)

    def outside(self, steps: tuple[int, int] | None) -> Mapping[Sending, int]:
        """Return the part of :meth:`between` outside of steps: evaluations, checkpoints, and after the last step."""
        return _between(self._outside, steps)


def _between(sent: Mapping[int, Counter[Sending]], steps: tuple[int, int] | None) -> Counter[Sending]:
    together: Counter[Sending] = Counter()
    for step, counts in sent.items():
        if steps is None or steps[0] < step <= steps[1]:
            together.update(counts)
    return together


def sendings(
    tables: Iterable[pa.Table],
    survey: Survey,
    executed_ops: Executed,
    sums: Sums,
    readings: StepReadings,
) -> Sendings:
    """Return the operations up to the reading of each step.

    Args:
        tables: The records, with at least the columns :data:`COLUMNS`. Records between steps count for the step before,
            because the reading of this step is taken later. Calls that raised sent no bytes.
        survey: The survey of the same records.
        executed_ops: A function that returns the executed operation of each record, null if not known.
        sums: Aggregated messages, without roots, receivers and splits.
        readings: The counter readings at steps. The times of a record determine the readings before and after it.
    """
    sent = Sendings()
    members: list[pa.Table] = []
    for part in map(by_last_step, tables):
        place = part.column_names.index("step")
        part = part.set_column(place, "step", pa.array(readings.steps(part)))
        part = part.filter(pc.invert(has_raised(part)))
        is_uneven = where(part, ["op", "backend"], _may_be_uneven) | _has_chunks(part)
        members.append(
            part.filter(pa.array(is_uneven)).select(
                [*dict.fromkeys((*GROUP, "pg_seq", *_OF_RECORD, *_SIZES))]
            )
        )
        rows = part.filter(pa.array(survey.counts(part) & ~is_uneven))
        rows = rows.select(list(_OF_RECORD)).append_column("executed_op", executed_ops(rows))
        for key, places in combinations(rows, rows.column_names):
            _add(sent, dict(zip(rows.column_names, key, strict=True)), len(places))
    if members:
        _add_uneven(sent, pa.concat_tables(members))
    for is_outside, summed in ((False, sums.in_steps), (True, sums.outside)):
        for key, messages in summed.items():
            step = key.step if key.attempt == readings.last else BEFORE_ALL
            for message, count in messages.items():
                call = Call(message.backend, message.op, message.payload_bytes, message.group_size)
                sent.add(step, Sending(call, parse_ranks(message.group_ranks)), count, is_outside)
    return sent


def _may_be_uneven(op: str, backend: str | None) -> bool:
    """Return whether the ranks of a collective may send or receive different amounts."""
    return op == Op.ALL_TO_ALL or (op in _UNEVEN_BUT_ON_GLOO and not known(backend))


def _has_chunks(part: pa.Table) -> Flags:
    """Return which records are reduce_scatters whose ranks keep chunks of different sizes."""
    splits = part["input_splits"]
    if splits.null_count == len(part):
        return np.zeros(len(part), bool)
    has_splits: Flags = splits.is_valid().to_numpy()
    return where(part, ["op"], lambda op: op == Op.REDUCE_SCATTER) & has_splits


def _add(sent: Sendings, row: Mapping[str, Any], count: int) -> None:
    members = parse_ranks(row["group_ranks"])
    place = {rank: position for position, rank in enumerate(members)}
    peer, own = place.get(row["peer"]), place.get(row["rank"])
    call = Call(row["backend"], _ran(row), row["payload_bytes"], row["group_size"])
    if row["op"] in _P2P:
        sender, receiver = (own, peer) if row["op"] == Op.SEND else (peer, own)
        call = call._replace(sender=sender, receiver=receiver)
    else:
        call = call._replace(root=peer)
    sent.add(row["step"], Sending(call, members), count, row["after_step"] is not None)


def _ran(row: Mapping[str, Any]) -> str:
    """Return the executed operation if it is a single collective, and the issued operation otherwise.

    The algorithms of gloo are modeled in :mod:`backends`.
    """
    ran = row["executed_op"]
    return str(ran if ran in OPS and ran not in _P2P and row["op"] not in _P2P else row["op"])


def _add_uneven(sent: Sendings, rows: pa.Table) -> None:
    """Add collectives whose ranks may send and receive different amounts, from the records of all their ranks."""
    codes, _ = numbered(rows.select([*GROUP, "pg_seq"]))
    order = np.lexsort((rows["rank"].to_numpy(), codes))
    starts = np.flatnonzero(np.diff(codes[order], prepend=-1))
    records = rows.take(pa.array(order)).to_pylist()
    for begin, end in pairwise([*starts.tolist(), len(records)]):
        ranks = records[begin:end]
        first = ranks[0]
        has_all_ranks = len(ranks) == first["group_size"]
        inputs, outputs, *splits = (
            tuple(one[name] for one in ranks) if has_all_ranks else () for name in _SIZES
        )
        size = round(sum(one["payload_bytes"] for one in ranks) / len(ranks))
        call = Call(first["backend"], first["op"], size, first["group_size"], inputs=inputs, outputs=outputs)
        if call.op == Op.ALL_TO_ALL and has_all_ranks:
            call = call._replace(sent_to=sent_by_rank(inputs, outputs, *splits))
        elif call.op == Op.REDUCE_SCATTER and first["input_splits"] is not None:
            call = call._replace(chunks=parse_splits(first["input_splits"], call.group_size) or ())
        sending = Sending(call, parse_ranks(first["group_ranks"]))
        sent.add(first["step"], sending, 1, first["after_step"] is not None)

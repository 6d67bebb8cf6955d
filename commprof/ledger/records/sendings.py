"""The operations of each step, with all values that their bytes depend on, for the comparison with the counters of each
host."""

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
    """Aggregated messages, in the steps and outside of them, by the last step before."""

    in_steps: Issued
    outside: Issued


class Sendings:
    """How often each :class:`Sending` was sent in each step, and outside of the steps after it."""

    def __init__(self) -> None:
        self._steps: dict[int, Counter[Sending]] = defaultdict(Counter)
        self._outside: dict[int, Counter[Sending]] = defaultdict(Counter)

    def add(self, step: int, sending: Sending, count: int, is_outside: bool = False) -> None:
        """``count`` times ``sending`` in ``step``, or outside of the steps after it."""
        self._steps[step][sending] += count
        if is_outside:
            self._outside[step][sending] += count

    def between(self, steps: tuple[int, int] | None) -> Mapping[Sending, int]:
        """What was sent between the readings of both ``steps``, each before the next begins; None: in the whole run."""
        return _between(self._steps, steps)

    def outside(self, steps: tuple[int, int] | None) -> Mapping[Sending, int]:
        """What of that is outside of the steps: evaluations, checkpoints, and what follows the last step."""
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
    """What was sent until the reading of each step.

    Args:
        tables: the records, with :data:`COLUMNS` at least. Records between steps count to the step before them:
            the reading of that step comes later. Calls that raised sent no bytes.
        survey: of the same records.
        readings: of the counters at steps: the times of a record decide between which of them it is.
        executed_ops: says what the backend ran for each record, null where that is not known.
        sums: aggregated messages, without roots, receivers and splits.
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
    """Whether the ranks of a collective may send or receive different amounts."""
    return op == Op.ALL_TO_ALL or (op in _UNEVEN_BUT_ON_GLOO and not known(backend))


def _has_chunks(part: pa.Table) -> Flags:
    """Records of collectives whose ranks keep chunks of different sizes."""
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
    """What the backend ran, where it is one collective; gloo's own algorithms are in :mod:`backends`."""
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

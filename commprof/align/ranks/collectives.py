"""Numbers each collective and message, equally in the records of all its ranks. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from commprof.align.sequences.group_ids import numbered

COLUMNS: Final = (
    "attempt",
    "pg",
    "group_ranks",
    "op",
    "is_p2p",
    "peer",
    "rank",
    "pg_seq",
    "issue_ns",
    "seq",
)
Numbers = npt.NDArray[np.int64]
_FITS: Final = 1 << 62
_DENSE: Final = 8  # positions per row; above, sorting is faster than placing each row


def has_raised(collectives: pa.Table) -> pa.ChunkedArray:
    """Which of the rows are calls that raised: they have no number in their group."""
    return pc.less(pc.fill_null(collectives["pg_seq"], 0), 0)


def matchable(collectives: pa.Table) -> pa.Table:
    """The rows that can have partners.

    A recv from any source names no peer, a captured call did not run, and a call that raised reached no other rank.
    """
    nameless = pc.and_(collectives["is_p2p"], pc.less(collectives["peer"], 0))
    left_out = pc.or_(pc.or_(nameless, collectives["captured"]), has_raised(collectives))
    return collectives.filter(pc.invert(left_out)) if pc.any(left_out).as_py() else collectives


class Streams(NamedTuple):
    """The streams that rows belong to: the collectives of one operation in a group, or the messages of one rank to another.

    ``codes``: of each row. ``names``: of each code, whatever the rows. ``number``: of each row in its stream, by
    the row alone.
    """

    codes: Numbers
    names: list[tuple[Any, ...]]
    number: Numbers
    is_send: npt.NDArray[np.bool_]


def streams_of(rows: pa.Table) -> Streams:
    """The streams of ``rows`` (columns :data:`COLUMNS`), none of them captured or without a named peer."""
    is_p2p = rows["is_p2p"].to_numpy(zero_copy_only=False)
    rank, peer = (rows[name].to_numpy().astype(np.int64) for name in ("rank", "peer"))
    is_send = is_p2p & pc.equal(rows["op"], "send").to_numpy(zero_copy_only=False)
    named = rows.select(["attempt", "pg", "group_ranks"]).append_column("op", _what(rows["op"], is_p2p))
    if is_p2p.any():
        sender = np.where(is_p2p, np.where(is_send, rank, peer), -1)
        receiver = np.where(is_p2p, np.where(is_send, peer, rank), -1)
        named = named.append_column("sender", pa.array(sender)).append_column("receiver", pa.array(receiver))
    codes, first = numbered(named)
    names = [tuple(str(value) for value in row.values()) for row in named.take(pa.array(first)).to_pylist()]
    if not is_p2p.any():
        names = [(*name, "-1", "-1") for name in names]
    return Streams(codes, names, np.where(is_p2p, 0, rows["pg_seq"].to_numpy()).astype(np.int64), is_send)


def occurrences(rows: pa.Table, streams: Streams) -> Numbers:
    """How often each of ``rows`` was issued before by its rank, under the same number in the same stream."""
    keys = (
        streams.codes,
        streams.is_send.astype(np.int64),
        rows["rank"].to_numpy().astype(np.int64),
        streams.number,
    )
    return repetitions(keys, rows)


class Together(NamedTuple):
    """Rows in the order of their collective and rank: ``order`` of the rows, and in that order the number of each."""

    order: Numbers
    collective: Numbers


def together(rows: pa.Table) -> Together:
    """``rows`` in order of collective or message, each of which has a number from 0, and of rank.

    The members of a collective share attempt, group (name and ranks), operation and number in the group. A name may
    be reused when its group is destroyed, and the numbers then restart: the nth record of a rank with one number
    goes with the nth of the others. A send and a recv are one message when each is the nth of that sender to that receiver
    in the group. ``rows`` has the columns :data:`COLUMNS`, none of them captured or without a named peer.
    """
    if not len(rows):
        return Together(np.zeros(0, np.int64), np.zeros(0, np.int64))
    streams, rank = streams_of(rows), rows["rank"].to_numpy().astype(np.int64)
    if not streams.is_send.any():
        order, starts = in_order((streams.codes, streams.number, rank))
        if len(starts) == len(order):  # no number occurs twice, so this order is final
            is_new = _changes(streams.codes[order]) | _changes(streams.number[order])
            return Together(order, np.cumsum(is_new))
    collective = _codes(streams.codes, streams.number, occurrences(rows, streams))
    order, _ = in_order((collective, rank))
    return Together(order, collective[order])


def same_collective(rows: pa.Table) -> Numbers:
    """The number of each row's collective or message: see :func:`together`."""
    order, collective = together(rows)
    numbers = np.empty(len(rows), np.int64)
    numbers[order] = collective
    return numbers


def _changes(values: Numbers) -> npt.NDArray[np.bool_]:
    """Where a value differs from the one before it."""
    differs = np.zeros(len(values), bool)
    np.not_equal(values[1:], values[:-1], out=differs[1:])
    return differs


def _what(op: pa.ChunkedArray, is_p2p: npt.NDArray[np.bool_]) -> pa.ChunkedArray:
    """The operation of a collective; one value for all messages."""
    if not is_p2p.any():
        return op
    return pc.if_else(pa.array(is_p2p), pa.scalar("message"), op.cast(pa.string()))


def repetitions(keys: Sequence[Numbers], rows: pa.Table) -> Numbers:
    """How many of ``rows`` (columns issue_ns and seq) with equal ``keys`` were issued before each of them."""
    issue, seq = rows["issue_ns"].to_numpy(), rows["seq"].to_numpy()
    order, starts = in_order(keys)
    lengths = np.diff(np.append(starts, len(order)))
    occurrence = np.zeros(len(order), np.int64)
    several = np.repeat(lengths > 1, lengths)
    if several.any():  # the others are the only ones of their keys
        some = order[several]
        place = np.repeat(np.arange(len(lengths)), lengths)[several]
        some = some[np.lexsort((seq[some], issue[some], place))]
        occurrence[some] = np.arange(len(some)) - np.repeat(*_first_of_each(lengths[lengths > 1]))
    return occurrence


def _first_of_each(lengths: Numbers) -> tuple[Numbers, Numbers]:
    """Where each of the segments of ``lengths`` begins, and its length."""
    return np.cumsum(lengths) - lengths, lengths


def _codes(*keys: Numbers) -> Numbers:
    """A number for each distinct combination of ``keys``, in their order."""
    order, starts = in_order(keys)
    is_new = np.zeros(len(order), np.int64)
    is_new[starts[1:]] = 1
    codes = np.empty(len(order), np.int64)
    codes[order] = np.cumsum(is_new)
    return codes


def in_order(keys: Sequence[Numbers]) -> tuple[Numbers, Numbers]:
    """The rows in order of ``keys``, the first of which counts most, equal ones in their order; and where new ones begin.

    The keys become one number where they fit into it, which sorts far faster than several keys.
    """
    if not len(keys[0]):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    one, bound = np.zeros(len(keys[0]), np.int64), 1
    for key in keys:
        low = int(key.min())
        width = int(key.max()) - low + 1
        bound *= width
        if bound >= _FITS:
            order = np.lexsort(tuple(reversed(keys)))
            return order, _starts([key[order] for key in keys])
        one = one * width + (key - low)
    if bound <= _DENSE * len(one):
        place = np.full(bound, -1, np.int64)
        place[one] = np.arange(len(one))
        order = place[place >= 0]
        if len(order) == len(one):  # no two are equal: each has its own position, and no sorting is needed
            return order, np.arange(len(one))
    order = np.argsort(one, kind="stable")
    return order, _starts([one[order]])


def _starts(keys: list[Numbers]) -> Numbers:
    """Where a new combination begins in sorted ``keys``."""
    differs = np.zeros(len(keys[0]), bool)
    differs[0] = True
    for key in keys:
        differs[1:] |= key[1:] != key[:-1]
    return np.flatnonzero(differs)

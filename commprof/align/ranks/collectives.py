"""Number each collective and message, so that the records of all its ranks have the same number. Pure."""

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
_DENSE: Final = 8  # positions per row; above this, sorting is faster than placing each row


def has_raised(collectives: pa.Table) -> pa.ChunkedArray:
    """Return which rows are calls that raised. These calls have no number in their group."""
    return pc.less(pc.fill_null(collectives["pg_seq"], 0), 0)


def matchable(collectives: pa.Table) -> pa.Table:
    """Return the rows that can be matched with records of other ranks.

    Three kinds of rows cannot be matched. A recv from any source names no peer, a captured call did not run,
    and a call that raised did not reach another rank.
    """
    nameless = pc.and_(collectives["is_p2p"], pc.less(collectives["peer"], 0))
    left_out = pc.or_(pc.or_(nameless, collectives["captured"]), has_raised(collectives))
    return collectives.filter(pc.invert(left_out)) if pc.any(left_out).as_py() else collectives


class Streams(NamedTuple):
    """The streams to which rows belong.

    A stream is the collectives of one operation in a group, or the messages of one rank to another rank.

    Attributes:
        codes: The number of the stream of each row.
        names: The name of the stream of each code, which does not depend on the other rows.
        number: The number of each row in its stream, which depends only on the row.
        is_send: Whether each row is a send.
    """

    codes: Numbers
    names: list[tuple[Any, ...]]
    number: Numbers
    is_send: npt.NDArray[np.bool_]


def streams_of(rows: pa.Table) -> Streams:
    """Return the streams of ``rows`` (columns :data:`COLUMNS`).

    No row may be captured or lack a named peer.
    """
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
    """Return how often the rank of each row had already issued the same number in the same stream."""
    keys = (
        streams.codes,
        streams.is_send.astype(np.int64),
        rows["rank"].to_numpy().astype(np.int64),
        streams.number,
    )
    return repetitions(keys, rows)


class Together(NamedTuple):
    """Rows in the order of their collective and rank.

    ``order`` contains the rows in this order, and ``collective`` contains the number of the collective of
    each row in this order.
    """

    order: Numbers
    collective: Numbers


def together(rows: pa.Table) -> Together:
    """Return ``rows`` in order of collective or message, which are numbered from 0, and of rank.

    The records of a collective have the same attempt, group (name and ranks), operation and number in the
    group. A group name may be reused after its group is destroyed, and the numbers then restart. The nth
    record of a rank with a number therefore matches the nth record of the other ranks with this number. A
    send and a recv are one message if both are the nth of this sender to this receiver in the group.

    Args:
        rows: The records, with the columns :data:`COLUMNS`. No row may be captured or lack a named peer.
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
    """Return the number of the collective or message of each row: see :func:`together`."""
    order, collective = together(rows)
    numbers = np.empty(len(rows), np.int64)
    numbers[order] = collective
    return numbers


def _changes(values: Numbers) -> npt.NDArray[np.bool_]:
    """Return where a value differs from the previous value."""
    differs = np.zeros(len(values), bool)
    np.not_equal(values[1:], values[:-1], out=differs[1:])
    return differs


def _what(op: pa.ChunkedArray, is_p2p: npt.NDArray[np.bool_]) -> pa.ChunkedArray:
    """Return the operation of collectives, with one value for all messages."""
    if not is_p2p.any():
        return op
    return pc.if_else(pa.array(is_p2p), pa.scalar("message"), op.cast(pa.string()))


def repetitions(keys: Sequence[Numbers], rows: pa.Table) -> Numbers:
    """Return how many rows with equal ``keys`` were issued before each of ``rows``.

    Args:
        rows: The records, with the columns issue_ns and seq.
    """
    issue, seq = rows["issue_ns"].to_numpy(), rows["seq"].to_numpy()
    order, starts = in_order(keys)
    lengths = np.diff(np.append(starts, len(order)))
    occurrence = np.zeros(len(order), np.int64)
    several = np.repeat(lengths > 1, lengths)
    if several.any():  # all other rows have unique keys
        some = order[several]
        place = np.repeat(np.arange(len(lengths)), lengths)[several]
        some = some[np.lexsort((seq[some], issue[some], place))]
        occurrence[some] = np.arange(len(some)) - np.repeat(*_first_of_each(lengths[lengths > 1]))
    return occurrence


def _first_of_each(lengths: Numbers) -> tuple[Numbers, Numbers]:
    """Return the begin of each of the segments of ``lengths``, and its length."""
    return np.cumsum(lengths) - lengths, lengths


def _codes(*keys: Numbers) -> Numbers:
    """Return a number for each distinct combination of ``keys``, in the order of the combinations."""
    order, starts = in_order(keys)
    is_new = np.zeros(len(order), np.int64)
    is_new[starts[1:]] = 1
    codes = np.empty(len(order), np.int64)
    codes[order] = np.cumsum(is_new)
    return codes


def in_order(keys: Sequence[Numbers]) -> tuple[Numbers, Numbers]:
    """Return the rows in order of ``keys``, and the positions at which new combinations begin.

    The first key is the most significant, and rows with equal keys stay in their order. The keys are combined
    into one number if they fit into it, because one number is sorted far faster than several keys.
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
        if len(order) == len(one):  # no two rows are equal, so no sorting is needed
            return order, np.arange(len(one))
    order = np.argsort(one, kind="stable")
    return order, _starts([one[order]])


def _starts(keys: list[Numbers]) -> Numbers:
    """Return where a new combination begins in sorted ``keys``."""
    differs = np.zeros(len(keys[0]), bool)
    differs[0] = True
    for key in keys:
        differs[1:] |= key[1:] != key[:-1]
    return np.flatnonzero(differs)

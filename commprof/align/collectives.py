"""The same collective, and the same message, across ranks: a number for each, equal in all records of it. Pure."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from commprof.align.distinct import distinct_rows

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


def matchable(collectives: pa.Table) -> pa.Table:
    """The rows that can have partners: a recv from any source names none, and a captured call was not run then."""
    nameless = pc.and_(collectives["is_p2p"], pc.less(collectives["peer"], 0))
    return collectives.filter(pc.invert(pc.or_(nameless, collectives["captured"])))


def same_collective(rows: pa.Table) -> Numbers:
    """A number for each row, counted from 0, equal in the records of one collective or message.

    The members of a collective share attempt, group (name and ranks), operation and number in the group. A name may
    be given again when its group is destroyed, and the numbers then begin anew: the nth record of a rank with one number
    goes with the nth of the others. A send and a recv are one message when each is the nth of that sender to that receiver
    in the group. ``rows`` has the columns :data:`COLUMNS`, none of them captured or without a named peer.
    """
    if not len(rows):
        return np.zeros(0, np.int64)
    is_p2p = rows["is_p2p"].to_numpy(zero_copy_only=False)
    rank, peer = (rows[name].to_numpy().astype(np.int64) for name in ("rank", "peer"))
    is_send = is_p2p & pc.equal(rows["op"], "send").to_numpy(zero_copy_only=False)
    sender = np.where(is_p2p, np.where(is_send, rank, peer), -1)
    receiver = np.where(is_p2p, np.where(is_send, peer, rank), -1)
    what = pc.if_else(rows["is_p2p"], pa.scalar("message"), rows["op"])
    named = rows.select(["attempt", "pg", "group_ranks"]).append_column("what", what)
    streams, _ = distinct_rows(
        named.append_column("sender", pa.array(sender)).append_column("receiver", pa.array(receiver)),
        ("attempt", "pg", "group_ranks", "what", "sender", "receiver"),
    )
    number = np.where(is_p2p, 0, rows["pg_seq"].to_numpy())
    issue, seq = rows["issue_ns"].to_numpy(), rows["seq"].to_numpy()
    repetition = _occurrence((streams, is_send.astype(np.int64), rank, number), issue, seq)
    return _codes(streams, number, repetition)


def _occurrence(keys: tuple[Numbers, ...], issue: Numbers, seq: Numbers) -> Numbers:
    """How many rows with equal ``keys`` were issued before each row."""
    order = np.lexsort((seq, issue, *reversed(keys)))
    starts = _starts([key[order] for key in keys])
    lengths = np.diff(np.append(starts, len(order)))
    occurrence = np.empty(len(order), np.int64)
    occurrence[order] = np.arange(len(order)) - np.repeat(starts, lengths)
    return occurrence


def _codes(*keys: Numbers) -> Numbers:
    """A number for each distinct combination of ``keys``, in their order."""
    order = np.lexsort(tuple(reversed(keys)))
    is_new = np.zeros(len(order), np.int64)
    is_new[_starts([key[order] for key in keys])[1:]] = 1
    codes = np.empty(len(order), np.int64)
    codes[order] = np.cumsum(is_new)
    return codes


def _starts(keys: list[Numbers]) -> Numbers:
    """Where a new combination begins in sorted ``keys``."""
    differs = np.zeros(len(keys[0]), bool)
    differs[0] = True
    for key in keys:
        differs[1:] |= key[1:] != key[:-1]
    return np.flatnonzero(differs)

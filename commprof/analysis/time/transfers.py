"""Compute the durations of collectives and messages, from the time when data could flow to the end.

The functions are pure. The times of the ranks of a collective count from the first arrival, on one clock
(lateness_ns). Waiting for a straggler is not part of the transfer. The transfer therefore begins when the
last of the ranks that it needs has arrived (on a device: has begun)::

    all_reduce, reduce_scatter, all_gather, all_to_all   all ranks;                end: the last rank has its result
    reduce, gather                                       all ranks;                end: the root has the result
    broadcast, scatter                                   the root and a receiver;  end: the receiver has the data;
                                                                                   the longest transfer counts
    messages                                             sender and receiver;      end: the receiver has the data

The end of a record comes from the best available source. The sources are the device, the backend (sampled), a
wait that blocked, or the return of a synchronous call on the CPU, which includes the transfer. For a GPU, the
times of the host do not show the end.

This is not computed in SQL. Arrivals are in the order of their collectives, so one pass over each column is
enough.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from commprof.align.ranks.rank_arrivals import REAL_WAIT_NS
from commprof.align.sequences.row_groups import Flags, Groups
from commprof.analysis.columns.dictionary_encoding import among, ranked
from commprof.schema import Op, Status

ALSO: Final = (  # columns of the records that the times need
    "backend",
    "dtype",
    "payload_bytes",
    "status",
    "device",
    "is_async",
    "issue_ns",
    "return_ns",
    "wait_begin_ns",
    "wait_end_ns",
    "device_begin_ns",
    "device_end_ns",
)
_NEEDED: Final = (
    "attempt",
    "collective",
    "step",
    "op",
    "purpose",
    "pg",
    "group_ranks",
    "group_size",
    "is_p2p",
    "rank",
    "peer",
    "lateness_ns",
    "lateness_error_ns",
    *ALSO,
)
_ONE_TO_ALL: Final = (Op.BROADCAST, Op.SCATTER)
_ALL_TO_ONE: Final = (Op.REDUCE, Op.GATHER)
_SOURCES: Final = ("device", "host", "sampled", "wait")
_NO_SOURCE, _DEVICE, _HOST, _SAMPLED, _WAIT = range(-1, 4)
_UNKNOWN: Final = -(1 << 62)  # earlier than any time

Numbers = npt.NDArray[np.int64]


def timed(arrived: pa.Table) -> pa.Table:
    """Return one row per collective or message that has a payload and at least two ranks.

    The columns are the first columns of ``answers.BANDWIDTH_TIMES``.

    Args:
        arrived: The arrivals, see ``arrivals.aligned``, with the columns :data:`ALSO` and all records of each
            collective.
    """
    rows = _among_several(arrived.select(_NEEDED))
    groups = Groups(_numbers(rows, "attempt"), _numbers(rows, "collective"))
    is_message, size = _flags(rows["is_p2p"]), _numbers(rows, "group_size")
    is_whole = groups.lengths == groups.reduced(np.maximum, np.where(is_message, 2, size))
    is_whole &= groups.reduced(np.logical_and, _known(rows, "lateness_ns"))
    time, source = _took(rows, groups, is_message)
    known = is_whole & (time != _UNKNOWN)

    first = pa.array(groups.starts)
    attempt, op, pg, group_ranks = (rows[name].take(first) for name in ("attempt", "op", "pg", "group_ranks"))
    op = pc.if_else(pa.array(is_message[groups.starts]), pa.scalar(Op.SEND), op.cast(pa.string()))
    payload = _numbers(rows, "payload_bytes")
    largest = groups.reduced(np.maximum, payload)
    mean = groups.reduced(np.add, payload.astype(np.float64)) / groups.lengths
    of_each = pc.equal(op, Op.ALL_TO_ALL).to_numpy()
    error = groups.reduced(np.maximum, _numbers(rows, "lateness_error_ns", _UNKNOWN))
    times = pa.table(
        {
            "attempt": attempt,
            "step": pa.array(groups.reduced(np.maximum, _numbers(rows, "step")), pa.int32()),
            "op": op,
            "purpose": _last_text(rows["purpose"], groups),
            "backend": _last_text(rows["backend"], groups),
            "pg": pg,
            "group_ranks": group_ranks,
            "group_size": pa.array(groups.reduced(np.maximum, size), pa.int32()),
            "dtype": _last_text(rows["dtype"], groups),
            "payload_bytes": pa.array(np.where(of_each, np.floor(mean + 0.5).astype(np.int64), largest)),
            "error_ns": pa.array(error, mask=error == _UNKNOWN),
            "time_ns": pa.array(time, mask=~known),
            "time_source": pa.DictionaryArray.from_arrays(
                pa.array(source, pa.int32(), mask=~known), pa.array(_SOURCES)
            ),
        }
    )
    with_payload = np.flatnonzero(largest > 0)
    return times.take(pa.array(with_payload[np.argsort(attempt.to_numpy()[with_payload], kind="stable")]))


def _among_several(rows: pa.Table) -> pa.Table:
    fits = ~among(rows["op"], [Op.BARRIER]) & (_numbers(rows, "group_size") > 1)
    return rows if fits.all() else rows.filter(pa.array(fits))


def _took(rows: pa.Table, groups: Groups, is_message: Flags) -> tuple[Numbers, Numbers]:
    """Return the time of each collective, which is unknown without a source, and its source."""
    arrival, issue, begin = (_numbers(rows, name) for name in ("lateness_ns", "issue_ns", "device_begin_ns"))
    ready = arrival + np.where(_known(rows, "device_begin_ns"), np.maximum(begin - issue, 0), 0)
    is_root = np.where(
        is_message, among(rows["op"], [Op.RECV]), _numbers(rows, "rank") == _numbers(rows, "peer")
    )
    one_to_all = among(rows["op"], _ONE_TO_ALL)
    all_to_one = is_message | among(rows["op"], _ALL_TO_ONE)
    root_ready = groups.largest(np.where(is_root, ready, _UNKNOWN))
    could_begin = np.where(one_to_all, np.maximum(ready, root_ready), groups.largest(ready))
    source, end = _end(rows)
    counts = (source != _NO_SOURCE) & np.where(one_to_all, ~is_root, is_root | ~all_to_one)
    took = np.where(counts, arrival + end - issue - could_begin, _UNKNOWN)
    longest = groups.reduced(np.maximum, took)
    time_source = np.where(took == groups.spread(longest), source, _NO_SOURCE)
    return longest, groups.reduced(np.maximum, time_source)


def _end(rows: pa.Table) -> tuple[Numbers, Numbers]:
    """Return the source of the end of each record, and the time of the end."""
    device_ended, waited, returned = (
        _known(rows, name) for name in ("device_end_ns", "wait_end_ns", "return_ns")
    )
    wait_end, is_async = _numbers(rows, "wait_end_ns"), _flags(rows["is_async"])
    really_waited = (
        waited & _known(rows, "wait_begin_ns") & (wait_end - _numbers(rows, "wait_begin_ns") > REAL_WAIT_NS)
    )
    is_cpu = among(rows["device"], ["cpu"])
    on_cpu = is_cpu | (~_known(rows, "device") & among(rows["backend"], ["gloo"]))
    source = np.select(
        [
            ~among(rows["status"], [Status.OK]),
            device_ended & is_cpu,
            device_ended,
            ~on_cpu,
            is_async & really_waited,
            ~is_async & (waited | returned),
        ],
        [_NO_SOURCE, _SAMPLED, _DEVICE, _NO_SOURCE, _WAIT, _HOST],
        _NO_SOURCE,
    )
    end = np.where(waited, wait_end, _numbers(rows, "return_ns"))
    return source, np.where(device_ended, _numbers(rows, "device_end_ns"), end)


def _last_text(column: pa.ChunkedArray, groups: Groups) -> pa.Array:
    """Return for each group the last of the texts of its rows, in sorted order."""
    texts = ranked(column)
    last_codes = groups.reduced(np.maximum, pc.fill_null(texts.indices, -1).to_numpy())
    return pa.DictionaryArray.from_arrays(pa.array(last_codes, mask=last_codes < 0), texts.dictionary)


def _numbers(rows: pa.Table, name: str, unknown: int = 0) -> Numbers:
    numbers: Numbers = pc.fill_null(rows[name], unknown).to_numpy().astype(np.int64, copy=False)
    return numbers


def _known(rows: pa.Table, name: str) -> Flags:
    return _flags(rows[name].is_valid())


def _flags(column: pa.ChunkedArray) -> Flags:
    flags: Flags = column.to_numpy()
    return flags
